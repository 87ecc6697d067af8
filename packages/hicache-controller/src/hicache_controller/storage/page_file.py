"""One page as a file: the payload, then a footer that says what it is and proves that it is whole.

The footer is 192 bytes, integers little-endian: key padded to 64 bytes, magic ``HICACHEP``, uint32 format version,
uint32 footer length, uint64 payload length, uint8 key length, uint8 parent length, 6 zero bytes, parent padded to 64
bytes, 16 bytes of the pool's fingerprint, 16 bytes XXH3-128 of everything before. The payload comes first so that it
lies on the blocks of the file system, which makes writes faster. Magic and version begin 128 bytes before the end in
every version; in version 1 nothing came before them, and key and parent, of 32 bytes each, followed the zero bytes.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import xxhash

from .allocate import allocate
from .base import MAX_KEY_BYTES

MAGIC = b"HICACHEP"
VERSION = 2
FIELDS = struct.Struct("<64s8sIIQBB6x64s16s")
UNCHECKED_BYTES = 16  # the checksum itself
FOOTER_BYTES = FIELDS.size + UNCHECKED_BYTES

_FROM_MAGIC_BYTES = 128
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_PIECE_BYTES = 1 << 20
_FIRST_READ = 4 << 10
_READ_AHEAD_FROM = 64 << 10
_ALLOCATE_FROM = 64 << 10
_MAX_VIEWS = 1000  # Linux accepts at most 1,024 in one call


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


def write_page(
    path: str,
    views: Sequence[memoryview],
    *,
    key: bytes,
    parent: bytes | None,
    fingerprint: bytes,
    touched: int | None = None,
    over: bool = False,
) -> None:
    """Write a page into a file of mode 0600, a new one or ``over`` a file that is no longer needed.

    Writing over a file saves making and removing inodes and blocks, which some file systems do slowly when files come
    and go all the time. Who still reads the old page meanwhile finds that its checksum or its key is wrong.

    Parameters
    ----------
    path, views, key, parent, fingerprint
        The file, the payload, and what the footer says.
    touched
        Time of the file, in nanoseconds since the epoch; that of writing with None.
    over
        Whether the file is there.

    Raises
    ------
    OSError
        Where a new file exists or the page cannot be written in full; the file is removed, the one to write over too.
    """
    size = sum(view.nbytes for view in views)
    file = _open_over(path, size + FOOTER_BYTES) if over else None
    try:
        if file is None:
            file = new_file(path)
            if size >= _ALLOCATE_FROM:
                allocate(file, size + FOOTER_BYTES)
        checksum, offset = xxhash.xxh3_128(), 0
        *first, last = pieces(views) or [[]]
        for piece in first:
            _update(checksum, piece)
            offset += _whole(os.pwritev, file, piece, offset)
        head = footer_head(MAGIC, size=size, key=key, parent=parent, fingerprint=fingerprint)
        _update(checksum, [*last, memoryview(head)])
        _whole(os.pwritev, file, [*last, memoryview(head + checksum.digest())], offset)
        if touched is not None:
            os.utime(file, ns=(touched, touched))
    except BaseException:
        if file is not None:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise
    os.close(file)


def new_file(path: str) -> int:
    """Make a file of mode 0600, whatever the umask, and open it.

    Raises
    ------
    OSError
        Where there is one, or it cannot be made.
    """
    file = os.open(path, _NEW_FILE, 0o600)
    try:
        if stat.S_IMODE(os.fstat(file).st_mode) != 0o600:
            os.fchmod(file, 0o600)
    except BaseException:
        os.close(file)
        os.unlink(path)
        raise
    return file


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
        outcome = _read_open(file, status, views, key, fingerprint, owner)
    finally:
        os.close(file)
    if outcome is not Outcome.HIT and not _is(path, status):
        return PageRead(Outcome.MISSING)  # evicted while it was read, and written over perhaps
    return PageRead(outcome, status.st_mtime_ns)


def _read_open(
    file: int, status: os.stat_result, views: Sequence[memoryview], key: bytes, fingerprint: bytes, owner: int
) -> Outcome:
    if not stat.S_ISREG(status.st_mode):
        return Outcome.FOREIGN
    if status.st_uid != owner:
        return Outcome.WRONG_OWNER
    size = sum(view.nbytes for view in views)
    if status.st_size != size + FOOTER_BYTES:
        return _why_another_size(file, status.st_size)
    checksum, offset, footer = xxhash.xxh3_128(), 0, bytearray(FOOTER_BYTES)
    read = _read_ahead if size >= _READ_AHEAD_FROM else os.preadv
    *first, last = pieces(views) or [[]]
    for piece in first:
        offset += _whole(read, file, piece, offset)
        _update(checksum, piece)
    offset += _whole(read, file, [*last, memoryview(footer)], offset)
    if offset != status.st_size:
        return Outcome.DAMAGED
    _update(checksum, [*last, memoryview(footer)[:-UNCHECKED_BYTES]])
    return outcome_of(bytes(footer), checksum.digest(), size, key, fingerprint)


def footer_head(magic: bytes, *, size: int, key: bytes, parent: bytes | None, fingerprint: bytes) -> bytes:
    """Return a footer without its checksum; ``size`` is that of the payload."""
    before = parent or b""
    return FIELDS.pack(key, magic, VERSION, FOOTER_BYTES, size, len(key), len(before), before, fingerprint)


def outcome_of(
    footer: bytes, digest: bytes, size: int, key: bytes, fingerprint: bytes, magic: bytes = MAGIC
) -> Outcome:
    """Return what a page is that was read in full.

    Parameters
    ----------
    footer
        The last 192 bytes of the file.
    digest
        XXH3-128 of all but the last 16.
    size, key, fingerprint
        Bytes of the payload, and what the footer must say.
    magic
        What footers of this storage have.
    """
    key_field, found, version, _, bytes_, key_length, _, _, fingerprint_field = FIELDS.unpack_from(footer)
    if found != magic:
        return Outcome.DAMAGED
    if version != VERSION:
        return Outcome.OLD_FORMAT
    if digest != footer[-UNCHECKED_BYTES:]:
        return Outcome.DAMAGED
    if (key_field[:key_length], fingerprint_field, bytes_) != (key, fingerprint, size):
        return Outcome.FOREIGN
    return Outcome.HIT


def _is(path: str, status: os.stat_result) -> bool:
    try:
        now = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (status.st_dev, status.st_ino)


class PageHead(NamedTuple):
    """What the footer of a file says: its format version and the page's parent; None where there is none."""

    version: int | None = None
    parent: bytes | None = None


def read_head(path: str, size: int) -> PageHead:
    """Return what the footer of a file of ``size`` bytes says; nothing is checked.

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
    version = _version_of(footer)
    if version != VERSION or len(footer) < FOOTER_BYTES:
        return PageHead(version)
    _, _, _, _, _, _, length, parent, _ = FIELDS.unpack_from(footer)
    return PageHead(version, parent[:length] if 0 < length <= MAX_KEY_BYTES else None)


def checksum_of(views: Sequence[memoryview], head: bytes) -> bytes:
    """Return the checksum of a payload and of its footer's head."""
    checksum = xxhash.xxh3_128()
    _update(checksum, [*views, memoryview(head)])
    return checksum.digest()


def _update(checksum: xxhash.xxh3_128, views: Sequence[memoryview]) -> None:
    for view in views:
        checksum.update(view)


def _why_another_size(file: int, size: int) -> Outcome:
    version = _version_of(os.pread(file, FOOTER_BYTES, max(size - FOOTER_BYTES, 0)))
    if version is None:
        return Outcome.DAMAGED
    return Outcome.FOREIGN if version == VERSION else Outcome.OLD_FORMAT


def _version_of(end: bytes) -> int | None:
    """Return the format version of a file that ends like this; None where there is no footer."""
    tail = end[-_FROM_MAGIC_BYTES:]
    if len(tail) < _FROM_MAGIC_BYTES or not tail.startswith(MAGIC):
        return None
    return int.from_bytes(tail[8:12], "little")


def _open_over(path: str, size: int) -> int | None:
    """Open a file to write over and give it ``size`` bytes; None, and no file, where it is not wholly ours to write."""
    file = None
    try:
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(file)
        ours = (stat.S_IFREG | 0o600, os.geteuid(), 1)
        if (status.st_mode, status.st_uid, status.st_nlink) == ours:
            if status.st_size != size:
                os.ftruncate(file, size)
            return file
    except OSError:
        pass  # such as for want of a descriptor: a new file has to do
    if file is not None:
        os.close(file)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return None


def pieces(views: Sequence[memoryview]) -> list[list[memoryview]]:
    """Cut and gather views so that each piece is one system call and still in the CPU's cache when it is hashed."""
    cut: list[list[memoryview]] = []
    room = 0
    for view in views:
        start = 0
        while start < len(view):
            if room == 0 or len(cut[-1]) == _MAX_VIEWS:
                cut.append([])
                room = _PIECE_BYTES
            part = view[start : start + room]
            cut[-1].append(part)
            start += len(part)
            room -= len(part)
    return cut


def _read_ahead(file: int, views: list[memoryview], offset: int) -> int:
    """``preadv``, but only a little from the start of a file.

    A short first read makes the kernel read ahead: in large folios and while it copies. One long read does neither, nor
    does one that asks for what is in the page cache alone; from a disk both cost twice the CPU time.
    """
    return os.preadv(file, views if offset else [views[0][:_FIRST_READ]], offset)


def _whole(move: Callable[[int, list[memoryview], int], int], file: int, views: list[memoryview], offset: int) -> int:
    """Call ``preadv`` or ``pwritev`` until all bytes have moved or the file ends; return the bytes moved."""
    total = moved = move(file, views, offset)
    if moved == sum(view.nbytes for view in views):  # as nearly always
        return total
    left = list(views)
    while moved:
        while left and moved >= left[0].nbytes:
            moved -= left[0].nbytes
            left.pop(0)
        if not left:
            break
        left[0] = left[0][moved:]
        moved = move(file, left, offset + total)
        total += moved
    return total
