"""A storage that fails on purpose: for the tests of whatever has to survive it."""

from __future__ import annotations

import itertools
import os
import threading

from hicache_kernels.validation import whole

from .base import HiCacheStorage, RegisteredPool, RemovalListener, StoragePool, StorageStats
from .file import FileStorage


class FaultyStorage(HiCacheStorage):
    """Wraps a storage and breaks every k-th page, as media do.

    Parameters
    ----------
    inner
        What does the work.
    fail_store_every, fail_load_every
        Each k-th page is not stored, or not loaded, its host page filled with other bytes as by a read that failed
        half way; 0 for none.
    flip_every
        Each k-th page that is stored has one bit flipped in its file; needs a :class:`FileStorage`.
    hang
        Where given, every call waits while the event is clear.

    Raises
    ------
    ValueError
        Where a number is negative, or ``flip_every`` is given for a storage without files.
    """

    def __init__(
        self,
        inner: HiCacheStorage,
        *,
        fail_store_every: int = 0,
        fail_load_every: int = 0,
        flip_every: int = 0,
        hang: threading.Event | None = None,
    ) -> None:
        super().__init__()
        named = {"fail_store_every": fail_store_every, "fail_load_every": fail_load_every, "flip_every": flip_every}
        for name, value in named.items():
            whole(name, value, least=0)
        if flip_every and not isinstance(inner, FileStorage):
            raise ValueError(f"flip_every is {flip_every}, but {type(inner).__name__} keeps no files; use FileStorage")
        self.inner = inner
        self._store_every, self._load_every, self._flip_every = fail_store_every, fail_load_every, flip_every
        self._hang = hang
        self._stores, self._loads, self._flips = (itertools.count(1) for _ in range(3))

    def register_mem_pool_host(self, pool: StoragePool, name: str = "kv") -> None:
        """Register the pool here and with the storage inside."""
        self.inner.register_mem_pool_host(pool, name)
        super().register_mem_pool_host(pool, name)

    def set_removal_listener(self, callback: RemovalListener | None) -> None:
        """Have the storage inside tell what it removes."""
        self.inner.set_removal_listener(callback)

    def clear(self) -> None:
        """Clear the storage inside."""
        self.inner.clear()

    def stats(self) -> StorageStats:
        """Return the counters of the storage inside."""
        return self.inner.stats()

    def close(self) -> None:
        """Close the storage inside too."""
        super().close()
        self.inner.close()

    def format_digest(self, pool: StoragePool) -> bytes:
        """Return the digest of the storage inside."""
        return self.inner.format_digest(pool)

    def find_pages(self, pool: RegisteredPool, keys: list[bytes], *, leading: bool) -> list[bool]:
        """Ask the storage inside."""
        self._wait()
        return self.inner.find_pages(self.inner._pool(pool.name), keys, leading=leading)

    def load_pages(self, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> list[bool]:
        """Load from the storage inside, and damage every n-th page."""
        self._wait()
        loaded = self.inner.load_pages(self.inner._pool(pool.name), keys, pages)
        for i, page in enumerate(pages):
            if self._load_every and next(self._loads) % self._load_every == 0:
                loaded[i] = False
                for view in pool.memory(page):
                    view[:] = os.urandom(len(view))
        return loaded

    def store_pages(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: list[bytes | None]
    ) -> list[bool]:
        """Store in the storage inside, refuse every n-th page, and flip a bit in some."""
        self._wait()
        fine = [i for i in range(len(keys)) if not self._store_every or next(self._stores) % self._store_every]
        stored = [False] * len(keys)
        if fine:
            of_those = [keys[i] for i in fine], [pages[i] for i in fine], [parents[i] for i in fine]
            for i, done in zip(fine, self.inner.store_pages(self.inner._pool(pool.name), *of_those), strict=True):
                stored[i] = done
        for key, done in zip(keys, stored, strict=True):
            if done and self._flip_every and next(self._flips) % self._flip_every == 0:
                self._flip_bit(key, pool.name)
        return stored

    def report_removed(self) -> None:
        """Report what the storage inside removed."""
        self.inner.report_removed()

    def _flip_bit(self, key: bytes, name: str) -> None:
        if not isinstance(self.inner, FileStorage):
            return
        path = self.inner.page_path(key, name)
        at = int.from_bytes(os.urandom(8), "little") % (8 * os.stat(path).st_size)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            (byte,) = os.pread(file, 1, at // 8)
            os.pwrite(file, bytes([byte ^ 1 << at % 8]), at // 8)
        finally:
            os.close(file)

    def _wait(self) -> None:
        if self._hang is not None:
            self._hang.wait()
