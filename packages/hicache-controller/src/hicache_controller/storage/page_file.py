"""One page as a file: the payload, then a footer that says what it is and proves that it is whole.

The footer is 128 bytes, integers little-endian: magic ``HICACHEP``, uint32 format version, uint32 footer length, uint64
payload length, uint8 key length, uint8 parent length, 6 zero bytes, key padded to 32 bytes, parent padded to 32 bytes,
16 bytes of the pool's fingerprint, 16 bytes XXH3-128 of everything before. The payload comes first so that it lies on
the blocks of the file system, which makes writes faster.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import xxhash

from .base import MAX_KEY_BYTES

MAGIC = b"HICACHEP"
VERSION = 1
FOOTER_BYTES = 128

_FIELDS = struct.Struct("<8sIIQBB6x32s32s16s")
_CHECKSUM_BYTES = 16
_MOST_VIEWS = 1000  # below the 1,024 that Linux takes in one call


class Outcome(StrEnum):
    """What reading a page came to; every one but ``HIT`` is a miss. The values name the counters."""

    HIT = "hits"
    MISSING = "misses"
    DAMAGED = "damaged"
    FOREIGN = "foreign"
    OLD_FORMAT = "old_format"
    WRONG_OWNER = "wrong_owner"


class PageRead(NamedTuple):
    """Outcome of a read, and when the file was last touched (nanoseconds since the epoch)."""

    outcome: Outcome
    touched: int = 0


def write_page(path: str, views: Sequence[memoryview], *, key: bytes, parent: bytes | None, fingerprint: bytes) -> None:
    """Write a new file of mode 0600.

    Raises
    ------
    OSError
        Where the file exists or cannot be written in full; a partial file is removed where that is possible.
    """
    size = sum(view.nbytes for view in views)
    footer = _footer(size, key, parent, fingerprint)
    footer += _checksum(views, footer)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _whole(os.pwritev, file, [*views, memoryview(footer)])
    except BaseException:
        os.close(file)
        os.unlink(path)
        raise
    os.close(file)


def read_page(path: str, views: Sequence[memoryview], *, key: bytes, fingerprint: bytes, owner: int) -> PageRead:
    """Read a page into ``views`` and check it.

    Parameters
    ----------
    path, key, fingerprint
        The file, and what it must say it is.
    views
        Where the payload goes; undefined unless the outcome is a hit.
    owner
        User id the file must belong to.

    Raises
    ------
    OSError
        Where reading fails for another reason than that the file is missing.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return PageRead(Outcome.MISSING)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return PageRead(Outcome.FOREIGN)
        if status.st_uid != owner:
            return PageRead(Outcome.WRONG_OWNER)
        size = sum(view.nbytes for view in views)
        if status.st_size != size + FOOTER_BYTES:
            return PageRead(_why_another_size(file, status.st_size))
        footer = bytearray(FOOTER_BYTES)
        if _whole(os.preadv, file, [*views, memoryview(footer)]) != status.st_size:
            return PageRead(Outcome.DAMAGED)
    finally:
        os.close(file)
    head = bytes(footer[:-_CHECKSUM_BYTES])
    magic, version = struct.unpack_from("<8sI", head)
    if magic != MAGIC:
        return PageRead(Outcome.DAMAGED)
    if version != VERSION:
        return PageRead(Outcome.OLD_FORMAT)
    if _checksum(views, head) != footer[-_CHECKSUM_BYTES:]:
        return PageRead(Outcome.DAMAGED)
    found = _FIELDS.unpack_from(head)
    if (found[6][: found[4]], found[8], found[3]) != (key, fingerprint, size):
        return PageRead(Outcome.FOREIGN)
    return PageRead(Outcome.HIT, status.st_mtime_ns)


def read_parent(path: str, size: int) -> bytes | None:
    """Return the parent that a page's footer names, or None where it has none or the footer is not one.

    Raises
    ------
    OSError
        Where the file cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        footer = os.pread(file, FOOTER_BYTES, max(size - FOOTER_BYTES, 0))
    finally:
        os.close(file)
    if len(footer) != FOOTER_BYTES or not footer.startswith(MAGIC):
        return None
    parent_length: int = footer[25]
    return footer[64 : 64 + parent_length] if 0 < parent_length <= MAX_KEY_BYTES else None


def _footer(size: int, key: bytes, parent: bytes | None, fingerprint: bytes) -> bytes:
    before = parent or b""
    return _FIELDS.pack(MAGIC, VERSION, FOOTER_BYTES, size, len(key), len(before), key, before, fingerprint)


def _checksum(views: Sequence[memoryview], footer: bytes) -> bytes:
    checksum = xxhash.xxh3_128()
    for view in views:
        checksum.update(view)
    checksum.update(footer)
    return checksum.digest()


def _why_another_size(file: int, size: int) -> Outcome:
    footer = os.pread(file, FOOTER_BYTES, max(size - FOOTER_BYTES, 0))
    whole = len(footer) == FOOTER_BYTES and footer.startswith(MAGIC)
    if not whole:
        return Outcome.DAMAGED
    (version,) = struct.unpack_from("<I", footer, len(MAGIC))
    return Outcome.FOREIGN if version == VERSION else Outcome.OLD_FORMAT


def _whole(move, file: int, views: list[memoryview]) -> int:  # type: ignore[no-untyped-def]
    """Call ``preadv`` or ``pwritev`` until all bytes have moved or the file ends; return the bytes moved."""
    total = 0
    while views:
        moved = move(file, views[:_MOST_VIEWS], total)
        if moved == 0:
            break
        total += moved
        while views and moved >= views[0].nbytes:
            moved -= views[0].nbytes
            views.pop(0)
        if moved:
            views[0] = views[0].cast("B")[moved:]
    return total
