"""One page as a file: the payload, then a footer that says what it is and proves that it is whole.

The footer is 192 bytes, integers little-endian: key padded to 64 bytes, magic ``HICACHEP``, uint32 format version,
uint32 footer length, uint64 payload length, uint8 key length, uint8 parent length, 6 zero bytes, parent padded to 64
bytes, 16 bytes of the pool's fingerprint, 16 bytes XXH3-128 of everything before. The payload comes first so that it
lies on the blocks of the file system, which makes writes faster. Magic and version begin 128 bytes before the end in
every version; in version 1 nothing came before them, and key and parent, of 32 bytes each, followed the zero bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import xxhash

from .base import MAX_KEY_BYTES

MAGIC = b"HICACHEP"
VERSION = 2
FIELDS = struct.Struct("<64s8sIIQBB6x64s16s")
UNCHECKED_BYTES = 16  # the checksum itself
FOOTER_BYTES = FIELDS.size + UNCHECKED_BYTES

_FROM_MAGIC_BYTES = 128
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_ANY_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # that is there: a link is refused, a pipe is not waited for
_PIECE_BYTES = 1 << 20
_FIRST_READ = 4 << 10
_READ_AHEAD_FROM = 64 << 10
_ALLOCATE_FROM = 64 << 10
_MAX_VIEWS = 1000  # Linux accepts at most 1,024 in one call

_libc = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


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


class PageId(NamedTuple):
    """What a page's footer must say: its key, the fingerprint of its pool, and the bytes of its payload.

    ``magic`` is what the footers of a storage have.
    """

    key: bytes
    fingerprint: bytes
    size: int
    magic: bytes = MAGIC

    def footer_head(self, parent: bytes | None) -> bytes:
        """Return the footer of a page that follows ``parent``, without its checksum."""
        before = parent or b""
        fields = (self.magic, VERSION, FOOTER_BYTES, self.size, len(self.key), len(before), before, self.fingerprint)
        return FIELDS.pack(self.key, *fields)

    def outcome(self, footer: bytes, digest: bytes) -> Outcome:
        """Return what a page is that was read in full.

        Parameters
        ----------
        footer
            Its last 192 bytes.
        digest
            XXH3-128 of all but the last 16.
        """
        key, magic, version, _, size, key_length, _, _, fingerprint = FIELDS.unpack_from(footer)
        if magic != self.magic:
            return Outcome.DAMAGED
        if version != VERSION:
            return Outcome.OLD_FORMAT
        if digest != footer[-UNCHECKED_BYTES:]:
            return Outcome.DAMAGED
        return Outcome.HIT if (key[:key_length], fingerprint, size, magic) == self else Outcome.FOREIGN


def write_page(
    path: str,
    views: Sequence[memoryview],
    page: PageId,
    *,
    parent: bytes | None,
    touched: int | None = None,
    over: bool = False,
) -> None:
    """Write a page into a file of mode 0600, a new one or ``over`` a file that is no longer needed.

    Writing over a file saves making and removing inodes and blocks, which some file systems do slowly when files come
    and go all the time. Who still reads the old page meanwhile finds that its checksum or its key is wrong.

    Parameters
    ----------
    path, views, page, parent
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
    size = page.size + FOOTER_BYTES
    old = _open_over(path, size) if over else None
    file = new_file(path) if old is None else old
    try:
        if old is None and page.size >= _ALLOCATE_FROM:
            _allocate(file, size)
        checksum, offset = xxhash.xxh3_128(), 0
        *first, last = pieces(views) or [[]]
        for piece in first:
            _update(checksum, piece)
            offset += _whole(os.pwritev, file, piece, offset)
        head = page.footer_head(parent)
        _update(checksum, [*last, memoryview(head)])
        _whole(os.pwritev, file, [*last, memoryview(head + checksum.digest())], offset)
        if touched is not None:
            os.utime(file, ns=(touched, touched))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(file)


def _allocate(file: int, size: int) -> None:
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


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """Open whatever is at a path for reading, except a link."""
    file = os.open(path, os.O_RDONLY | _ANY_FILE)
    try:
        yield file
    finally:
        os.close(file)


def read_page(path: str, views: Sequence[memoryview], page: PageId) -> PageRead:
    """Read a page into ``views`` and check it; its file must belong to this user.

    Parameters
    ----------
    path, page
        The file, and what it must say it is.
    views
        Where the payload goes; undefined unless the outcome is a hit.

    Raises
    ------
    OSError
        Where reading fails for another reason than that the file is missing.
    """
    try:
        with opened(path) as file:
            status = os.fstat(file)
            outcome = _read_open(file, status, views, page)
    except FileNotFoundError:
        return PageRead(Outcome.MISSING)
    if outcome is not Outcome.HIT and not _is(path, status):
        return PageRead(Outcome.MISSING)  # evicted while it was read, and written over perhaps
    return PageRead(outcome, status.st_mtime_ns)


def _read_open(file: int, status: os.stat_result, views: Sequence[memoryview], page: PageId) -> Outcome:
    if not stat.S_ISREG(status.st_mode):
        return Outcome.FOREIGN
    if status.st_uid != os.geteuid():
        return Outcome.WRONG_OWNER
    if status.st_size != page.size + FOOTER_BYTES:
        version = _version_of(_end_of(file, status.st_size))
        if version is None:
            return Outcome.DAMAGED
        return Outcome.FOREIGN if version == VERSION else Outcome.OLD_FORMAT
    checksum, offset, footer = xxhash.xxh3_128(), 0, bytearray(FOOTER_BYTES)
    read = _read_ahead if page.size >= _READ_AHEAD_FROM else os.preadv
    *first, last = pieces(views) or [[]]
    for piece in first:
        offset += _whole(read, file, piece, offset)
        _update(checksum, piece)
    offset += _whole(read, file, [*last, memoryview(footer)], offset)
    if offset != status.st_size:
        return Outcome.DAMAGED
    _update(checksum, [*last, memoryview(footer)[:-UNCHECKED_BYTES]])
    return page.outcome(bytes(footer), checksum.digest())


def _is(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), status)
    except OSError:
        return False


class PageHead(NamedTuple):
    """What a file is, and what its footer says: its format version and the page's parent; None where there is none."""

    size: int
    touched: int
    version: int | None
    parent: bytes | None = None


def read_head(path: str) -> PageHead | None:
    """Return what a file says about itself, unchecked; None where it is gone, not readable, or something else."""
    try:
        with opened(path) as file:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return None
            footer = _end_of(file, status.st_size)
    except OSError:
        return None
    head = PageHead(status.st_size, status.st_mtime_ns, _version_of(footer))
    if head.version != VERSION or len(footer) < FOOTER_BYTES:
        return head
    _, _, _, _, _, _, length, parent, _ = FIELDS.unpack_from(footer)
    return head._replace(parent=parent[:length]) if 0 < length <= MAX_KEY_BYTES else head


def checksum_of(views: Sequence[memoryview], head: bytes) -> bytes:
    """Return the checksum of a payload and of its footer's head."""
    checksum = xxhash.xxh3_128()
    _update(checksum, [*views, memoryview(head)])
    return checksum.digest()


def _update(checksum: xxhash.xxh3_128, views: Sequence[memoryview]) -> None:
    for view in views:
        checksum.update(view)


def _end_of(file: int, size: int) -> bytes:
    """Return the last bytes of a file of ``size`` bytes, as many as a footer has, or all."""
    return os.pread(file, FOOTER_BYTES, max(size - FOOTER_BYTES, 0))


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
        file = os.open(path, os.O_WRONLY | _ANY_FILE)
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
    total, left = 0, list(views)
    while left and (moved := move(file, left, offset + total)):
        total += moved
        done = 0
        while done < len(left) and moved >= left[done].nbytes:
            moved -= left[done].nbytes
            done += 1
        del left[:done]
        if moved:
            left[0] = left[0][moved:]
    return total
