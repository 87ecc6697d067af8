"""Whether a file is in the page cache, without reading it."""

from __future__ import annotations

import ctypes
import os

from .page_file import opened

_CACHESTAT = 451  # the number of the system call on every architecture; Linux has it since 6.5
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Too short a call to give the GIL up for.
_libc = ctypes.PyDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


def is_cached(path: str) -> bool:
    """Return whether all of a file is in the page cache; False where there is no file, or the kernel does not say."""
    whole, found = _Range(0, 0), _Statistics()
    try:
        with opened(path) as file:
            pages = -(-os.fstat(file).st_size // _PAGE)
            failed = _libc.syscall(_CACHESTAT, file, ctypes.byref(whole), ctypes.byref(found), 0)
    except OSError:
        return False
    return not failed and found.cached >= pages
