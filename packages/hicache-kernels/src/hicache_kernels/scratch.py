"""Directories that a build works in, removed with it, or by the next build where it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .trusted_files import check_status

_PREFIX = "hicache-kernels-scratch-"


@contextlib.contextmanager
def scratch_directory(parent: Path | None = None, prefix: str = _PREFIX) -> Iterator[Path]:
    """Make a directory for one build, and remove it afterwards; first those that builders left which were killed.

    A builder holds a lock of its directory, so a directory that can be locked is not in use any more.

    Parameters
    ----------
    parent
        Where to make it; the temporary directory by default.
    prefix
        Start of its name, which nothing else in ``parent`` has.

    Raises
    ------
    OSError
        Where it cannot be made.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    for remains in place.glob(f"{prefix}*"):
        _remove_if_unused(remains)
    while True:
        directory = Path(tempfile.mkdtemp(dir=place, prefix=prefix))
        descriptor = _locked(directory)
        if descriptor is not None:
            break
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(descriptor)


def _locked(directory: Path) -> int | None:
    """Lock a directory by a descriptor; None where another process has its lock, or has just removed it."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system without locks
        return descriptor
    if not directory.exists():
        os.close(descriptor)
        return None
    return descriptor


def _remove_if_unused(directory: Path) -> None:
    with contextlib.suppress(OSError):
        check_status(directory, os.lstat(directory))
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)
