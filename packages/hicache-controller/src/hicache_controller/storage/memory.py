"""Storage in this process's memory: for tests, for bookkeeping pools, and as the smallest example of a backend."""

from __future__ import annotations

from hicache_kernels.validation import whole

from .base import HiCacheStorage, RegisteredPool, StoragePool, StorageStats
from .page_index import PageIndex


class MemoryStorage(HiCacheStorage):
    """A dict of pages with a capacity, the same rules as the file backend, and no medium that could fail.

    Parameters
    ----------
    capacity_bytes
        Most bytes kept; None for no limit. The least recently used pages leave first, a prefix's tail before its head.

    Raises
    ------
    ValueError
        Where the capacity is negative.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__()
        if capacity_bytes is not None:
            whole("capacity_bytes", capacity_bytes, least=0)
        self._capacity = capacity_bytes
        self._index = PageIndex()
        self._bytes: dict[str, dict[bytes, bytes]] = {}
        self._tick = 0

    def clear(self) -> None:
        """Remove every page."""
        self._check_open()
        with self._lock:
            for part, pages in self._bytes.items():
                self.note_removed(pages, part)
            self._index.clear()
            self._bytes.clear()
        self.report_removed()

    def stats(self) -> StorageStats:
        """Return counters since the storage was made, and what it holds."""
        with self._lock:
            return StorageStats(
                pages=len(self._index),
                bytes=self._index.total_bytes,
                capacity_bytes=self._capacity,
                backing_off=False,
                compiled_reads=False,
                **self._counts,
            )

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` where index and pages do not agree."""
        with self._lock:
            self._index.check_integrity()
            known = {(part, entry.key) for entry in self._index for part, _ in entry.parts}
            held = {(part, key) for part, pages in self._bytes.items() for key in pages}
            if known != held:
                raise RuntimeError(f"index and pages differ in {known ^ held}")

    def format_digest(self, pool: StoragePool) -> bytes:
        """Return no bytes: pages here live no longer than the pools of this process."""
        return b""

    def find_pages(self, pool: RegisteredPool, keys: list[bytes], *, leading: bool) -> list[bool]:
        """Return for each key whether its page is there."""
        with self._lock:
            held = self._bytes.get(pool.name, {})
            present = [key in held for key in keys]
            for key, tick in zip(keys, self._ticks(len(keys)), strict=True):
                self._index.touch(key, tick)
        return present

    def load_pages(self, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> list[bool]:
        """Fill pages; return for each key whether its page is loaded."""
        loaded = []
        with self._lock:
            held = self._bytes.get(pool.name, {})
            for key, page, tick in zip(keys, pages, self._ticks(len(keys)), strict=True):
                found = held.get(key)
                loaded.append(found is not None)
                if found is not None:
                    self._index.touch(key, tick)
                    _copy_out(pool, page, found)
            hits = sum(loaded)
            self._counts["hits"] += hits
            self._counts["misses"] += len(keys) - hits
            self._counts["bytes_read"] += hits * pool.page_bytes
        return loaded

    def store_pages(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: list[bytes | None]
    ) -> list[bool]:
        """Store pages; return for each key whether its page is stored."""
        kept = {*keys, *(parent for parent in parents if parent is not None)}
        stored, full = [], False
        with self._lock:
            held = self._bytes.setdefault(pool.name, {})
            for key, page, parent, tick in zip(keys, pages, parents, self._ticks(len(keys)), strict=True):
                if key in held:
                    self._index.touch(key, tick)
                    self._counts["present"] += 1
                elif parent is not None and parent not in self._index:
                    self._counts["orphans"] += 1
                elif full or not self._make_room(pool.page_bytes, kept):
                    self._counts["no_room"] += 1
                    full = True
                else:
                    held[key] = b"".join(pool.memory(page))
                    self._index.add(key, pool.name, pool.page_bytes, parent, tick)
                    self._counts["stored"] += 1
                    self._counts["bytes_written"] += pool.page_bytes
                stored.append(key in held)
        return stored

    def _ticks(self, count: int) -> range:
        """Falling numbers, so that the head of a batch outlives its tail even where no parents are known."""
        self._tick += count
        return range(self._tick, self._tick - count, -1)

    def _make_room(self, size: int, keep: set[bytes]) -> bool:
        if self._capacity is None:
            return True
        if size > self._capacity:
            return False
        while self._index.total_bytes + size > self._capacity:
            entry = self._index.oldest_leaf(keep)
            if entry is None:
                return False
            for part, _ in entry.parts:
                del self._bytes[part][entry.key]
                self.note_removed((entry.key,), part)
            self._index.remove(entry.key)
            self._counts["evicted"] += 1
        return True


def _copy_out(pool: RegisteredPool, page: int, data: bytes) -> None:
    start, stored = 0, memoryview(data)
    for view in pool.memory(page):
        view[:] = stored[start : start + len(view)]
        start += len(view)
