"""Finds XXH3-128 in the C library inside ``xxhash``, for compiled code that sums up while it reads."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import struct
import sys

import xxhash

from hicache_kernels.files import Checksum

logger = logging.getLogger(__name__)

_HALVES = struct.Struct(">qq")


class _Digest(ctypes.Structure):
    _fields_ = [("low", ctypes.c_int64), ("high", ctypes.c_int64)]


@functools.cache
def xxh3_checksum() -> Checksum | None:
    """Return the addresses of XXH3-128's functions; None where this build of ``xxhash`` does not show them."""
    try:
        library = ctypes.PyDLL(sys.modules["xxhash._xxhash"].__file__)
        # The one that looks at the CPU is there on x86-64 only, and twice as fast.
        fast = getattr(library, "XXH3_128bits_update_dispatch", None)
        functions = (
            library.XXH3_createState,
            library.XXH3_128bits_reset,
            library.XXH3_128bits_update if fast is None else fast,
            library.XXH3_128bits_digest,
            library.XXH3_freeState,
        )
    except (AttributeError, KeyError, OSError, TypeError):
        return None
    found = Checksum(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))
    if not all(found) or not _works(found):
        return None
    if fast is None and platform.machine() == "x86_64":
        logger.warning("xxhash %s lacks the checksum for this CPU, so files are summed up slowly", xxhash.VERSION)
    return found


def digest_of(low: int, high: int) -> bytes:
    """Return the 16 bytes that ``xxhash`` gives for these halves, signed numbers of 64 bits."""
    return _HALVES.pack(high, low)


def _works(checksum: Checksum) -> bool:
    """Return whether the functions do what ``xxhash`` does."""
    pointer = ctypes.c_void_p
    create = ctypes.PYFUNCTYPE(pointer)(checksum.create)
    reset, release = (ctypes.PYFUNCTYPE(ctypes.c_int, pointer)(f) for f in (checksum.reset, checksum.release))
    update = ctypes.PYFUNCTYPE(ctypes.c_int, pointer, ctypes.c_char_p, ctypes.c_size_t)(checksum.update)
    digest = ctypes.PYFUNCTYPE(_Digest, pointer)(checksum.digest)
    state = create()
    if state is None:
        return False
    reset(state)
    parts = [os.urandom(size) for size in (7, 1000, 300)]
    for part in parts:
        update(state, part, len(part))
    found = digest(state)
    release(state)
    return digest_of(found.low, found.high) == xxhash.xxh3_128_digest(b"".join(parts))
