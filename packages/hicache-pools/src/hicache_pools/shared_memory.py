"""Memory that other processes can attach to by name, and that the kernel frees with the last of them."""

from __future__ import annotations

import os
import re
import secrets
from typing import NamedTuple

_NAME = re.compile(r"hicache-(\d+)-(\d+)-([0-9a-f]+)")


class SharedFile(NamedTuple):
    """An open anonymous memory file.

    Attributes
    ----------
    descriptor
        File descriptor, the caller's to close; the name works as long as the creating process has it open.
    name
        What other processes of the same user attach with.
    nbytes
        Size.
    """

    descriptor: int
    name: str
    nbytes: int


def create_shared_file(nbytes: int, *, huge_pages: bool = False) -> SharedFile:
    """Create an anonymous memory file of ``nbytes`` bytes; not limited by the size of ``/dev/shm``.

    Nothing is left when the processes that use it are killed.
    """
    token = secrets.token_hex(8)
    flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if huge_pages else 0)
    descriptor = os.memfd_create(f"hicache-{token}", flags)
    try:
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return SharedFile(descriptor, f"hicache-{os.getpid()}-{descriptor}-{token}", nbytes)


def open_shared_file(name: str) -> SharedFile:
    """Open the memory file that another process (or this one) created.

    Raises
    ------
    ValueError
        ``name`` is not such a name.
    FileNotFoundError
        The process that created it is gone or has closed it.
    PermissionError
        It belongs to another user.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"name is {name!r}; accepted is the shared_name of a host buffer, hicache-<pid>-<fd>-<token>")
    process, number, token = match.groups()
    path = f"/proc/{process}/fd/{number}"
    gone = FileNotFoundError(f"shared host memory {name!r} is gone: process {process} has closed it or has ended")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise gone from None
    # Process and descriptor numbers are used again; the token is not.
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:hicache-{token} "):
        os.close(descriptor)
        raise gone
    return SharedFile(descriptor, name, os.fstat(descriptor).st_size)
