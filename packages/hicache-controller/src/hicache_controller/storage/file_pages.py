"""FilePages: the pages of a storage directory as one process knows them, and the room that they take."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock

from hicache_kernels.validation import MAX_WHOLE

from .base import RegisteredPool
from .directory import MODEL_BYTES, StorageDirectory, disk_bytes, file_size, last_use, remove_file
from .page_file import FOOTER_BYTES, VERSION, read_head
from .page_index import PageEntry, PageIndex

_SHARE = 32  # with other writers, a capacity / 32 is what one may write before it looks at what the others did; less
# with more than 16 others, or their shares would leave no room


class FilePages:
    """An index of the files of a directory, and what is reserved for files to come.

    The index knows all that this process stored, and what others did as of the last scan. A page is its key and 8 bytes
    of fingerprint; a part of it is one file.

    Parameters
    ----------
    root
        The directory.
    capacity
        Most bytes of all files in it; None for no limit.
    lock
        Guards all of this, and ``counts``; never held while the directory's lock is waited for.
    counts
        Where to count.
    removed
        Called, with the lock held, with the page and the part of every file that is gone.

    Attributes
    ----------
    index
        What is known; for holders of the lock.
    lost
        Whether the directory was found removed or replaced.
    """

    def __init__(
        self, root: str, capacity: int | None, lock: Lock, counts: Counter[str], removed: Callable[[bytes, str], None]
    ) -> None:
        self._limited = capacity is not None
        self._capacity = MAX_WHOLE if capacity is None else capacity
        self._lock = lock
        self._counts = counts
        self._removed = removed
        self.index = PageIndex()
        self.lost = False
        self._reserved = 0
        self._spares: list[str] = []  # files of evicted pages, to write over
        self._unseen = 0  # bytes stored since the last look at what others store
        self._presence = (0, 0)
        self._tick = 0
        self.directory = StorageDirectory(root)
        try:
            self.scan()
            self._reserve(0, 0, set())
        except BaseException:
            self.directory.close()
            raise

    def path(self, page: bytes, part: str) -> str:
        """Return the path of a page's part, whether it exists or not."""
        return self.directory.page_path(page, part)

    def size(self, page: bytes, part: str) -> int | None:
        """Return the bytes of a part's file; None where there is none."""
        return file_size(self.path(page, part))

    def has(self, page: bytes, part: str, page_bytes: int) -> bool:
        """Return whether a part is there, in full."""
        return self.size(page, part) == page_bytes + FOOTER_BYTES

    # What is known

    def ticks(self, count: int) -> range:
        """Return falling times in nanoseconds, all later than any before, comparable with the files' times.

        The head of a batch gets the latest, so that it outlives the tail even where no parents are known.
        """
        with self._lock:
            self._tick = max(self._tick, time.time_ns()) + count
            return range(self._tick, self._tick - count, -1)

    def touch(self, uses: Iterable[tuple[bytes, int]]) -> None:
        """Note when pages were used."""
        with self._lock:
            for page, tick in uses:
                self.index.touch(page, tick)

    def note(self, pages: Sequence[bytes], part: str, present: Sequence[bool]) -> None:
        """Note that pages are used now, or that others have removed those that are not present."""
        ticks = self.ticks(len(present))
        with self._lock:
            for page, there, tick in zip(pages, present, ticks, strict=False):
                if there:
                    self.index.touch(page, tick)
                else:
                    self._forget_if_gone(page, part)

    def add(self, page: bytes, part: str, size: int, parent: bytes | None, tick: int, *, fresh: bool) -> None:
        """Note a file, ``fresh`` where this process has just stored it."""
        with self._lock:
            self.index.add(page, part, size, parent, tick)
            self._unseen += size if fresh else 0

    def parts(self, page: bytes) -> list[str]:
        """Return the parts of a page that are known."""
        with self._lock:
            entry = self.index.get(page)
            return [] if entry is None else [part for part, _ in entry.parts]

    def scan(self) -> None:
        """Make the index agree with the directory: read what is new, drop what is gone."""
        self.directory.remove_dead()
        presence = self.directory.presence()
        with self._lock:
            gone = {(entry.key, part) for entry in self.index for part, _ in entry.parts}
        found = []
        for path, page, part in self.directory.names():
            if (page, part) in gone:
                gone.discard((page, part))
            elif (head := read_head(path)) is not None:
                found.append((path, page, part, head))
        with self._lock:
            for page, part in gone:
                self._forget_if_gone(page, part)
            for path, page, part, head in found:
                if head.version is not None and head.version < VERSION:
                    remove_file(path)
                    self._counts["old_format"] += 1
                else:
                    parent = None if head.parent is None else head.parent + page[-MODEL_BYTES:]
                    self.index.add(page, part, disk_bytes(head.size), parent, head.touched)
            self._unseen = 0
            self._presence = presence

    def reopen_if_lost(self) -> None:
        """Come back to a directory that was removed or replaced; other calls wait for the new one, not for its scan."""
        with self._lock:
            if not self.lost:
                return
            fresh = StorageDirectory(self.directory.root)
            self.directory.close()
            self.directory = fresh
            self.lost = False
        try:
            self.scan()
        except BaseException:
            self.lost = True
            raise

    def remove(self, model: bytes) -> None:
        """Remove all pages of a fingerprint; the directory's lock is held."""
        self.scan()
        with self._lock:
            for entry in [entry for entry in self.index if entry.key.endswith(model)]:
                self._remove(entry)

    def _forget_if_gone(self, page: bytes, part: str) -> None:
        entry = self.index.get(page)
        if entry is not None and entry.part_bytes(part) is not None and self.size(page, part) is None:
            self.index.remove_part(page, part)
            self._removed(page, part)

    # Room

    @property
    def share(self) -> int:
        """Bytes that one writer may store before it looks at what others store: all of them together about half."""
        return self._capacity // max(_SHARE, 2 * self._presence[0])

    @contextlib.contextmanager
    def room_for(self, size: int, count: int, keep: set[bytes]) -> Iterator[bool]:
        """Reserve files during a ``with`` block, evicting what is in the way except ``keep``; False without room.

        At its end, the spare files that were not written over are removed.
        """
        fits = False
        try:
            fits = self._reserve(size, count, keep)
            yield fits
        finally:
            with self._lock:
                self._reserved -= size * count if fits else 0
                left, self._spares = self._spares, []
            for spare in left:
                remove_file(spare)

    def _reserve(self, size: int, count: int, keep: set[bytes]) -> bool:
        need = size * count
        presence = self.directory.presence() if self._limited else None
        with self._lock:
            others = presence is not None and presence[0] > 0
            crowded = presence not in (None, self._presence) or (others and self._unseen + need > self.share)
            if not crowded and self._fits(need):
                return True
        with self.directory.locked(exclusive=True):
            self._scan_if_shared()
            if need > self._limit:
                return False
            spare = self.share if self._presence[0] > 0 else 0  # so that the next look at the others is not at once
            with self._lock:
                if self._fits(need):
                    return True
                self._evict(self._limit - need - self._reserved - spare, keep, size, count)
                return self._fits(need)

    @property
    def _limit(self) -> int:
        return self._capacity - self._presence[0] * self.share

    def _fits(self, need: int) -> bool:
        """Reserve ``need`` bytes where they fit."""
        fits = self.index.total_bytes + self._reserved + need <= self._limit
        self._reserved += need if fits else 0
        return fits

    def _scan_if_shared(self) -> None:
        presence = self.directory.presence()
        if presence[0] > 0 or presence != self._presence:
            self.scan()

    def take_spare(self) -> str | None:
        """Return a file to write over, if there is one."""
        with self._lock:
            return self._spares.pop() if self._spares else None

    def make_room_on_disk(self, size: int, count: int, keep: set[bytes]) -> None:
        """Evict as much as ``count`` files take that the disk had no room for, except ``keep``."""
        with self.directory.locked(exclusive=True):
            self._scan_if_shared()
            with self._lock:
                target = self.index.total_bytes - size * count
                if target >= 0:  # less than that would not be enough
                    self._evict(target, keep, size, count)

    def _evict(self, target: int, keep: set[bytes], size: int, count: int) -> None:
        """Remove leaves until at most ``target`` bytes are left; lock and directory's lock are held.

        Of their files up to ``count`` that take ``size`` bytes become spares, which new pages are written over.
        """
        while self.index.total_bytes > target:
            entry = self.index.oldest_leaf(keep)
            if entry is None:
                return
            touched = max((last_use(self.path(entry.key, part)) for part, _ in entry.parts), default=0)
            if touched > entry.tick:  # another process has used it since
                self.index.touch(entry.key, touched)
                continue
            self._remove(entry, size, count)
            self._counts["evicted"] += 1

    def _remove(self, entry: PageEntry, size: int = 0, count: int = 0) -> None:
        """Remove a page, and make its files of ``size`` bytes spares, up to ``count``; both locks are held."""
        for part, part_size in entry.parts:
            path = self.path(entry.key, part)
            if part_size == size and len(self._spares) < count and file_size(path) is not None:
                with contextlib.suppress(FileNotFoundError):
                    spare = self.directory.temporary_path(path)
                    os.rename(path, spare)
                    self._spares.append(spare)
            elif error := remove_file(path):
                raise error
        self.index.remove(entry.key)
        for part, _ in entry.parts:
            self._removed(entry.key, part)


def part_of(pool: RegisteredPool) -> str:
    """Return the part of a page that a pool's files are: its name, and what its format is."""
    return f"{pool.name}-{pool.digest[:4].hex()}"
