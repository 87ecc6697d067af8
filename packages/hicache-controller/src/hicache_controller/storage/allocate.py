"""Blocks for a file before it is written: one call to the file system instead of one for each folio."""

from __future__ import annotations

import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def allocate(file: int, size: int) -> None:
    """Allocate ``size`` bytes of a new file, where the file system can; elsewhere writing does it.

    ``os.posix_fallocate`` would write into every block where the file system cannot.

    Raises
    ------
    OSError
        Where the file system can, but has no room or fails.
    """
    if _libc.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return
    code = ctypes.get_errno()
    if code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code))
