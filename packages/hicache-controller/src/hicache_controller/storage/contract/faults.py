"""A storage that fails on purpose, for tests of code that has to survive failures."""

from __future__ import annotations

import itertools
import os
import threading

from hicache_kernels.validation import whole

from ..base import HiCacheStorage, RegisteredPool, RemovalListener, StoragePool, StorageStats
from ..file import FileStorage


class FaultyStorage(HiCacheStorage):
    """Wraps a storage and breaks every n-th page, as media do.

    Parameters
    ----------
    inner
        What does the work.
    fail_store_every, fail_load_every
        Every n-th page is not stored, or not loaded, its host page filled with other bytes, as after a
        read that failed half way; 0 for none.
    flip_every
        Every n-th page that is stored has one bit flipped in its file; needs a :class:`FileStorage`.
    hang
        Every call waits while this event is clear; None for calls that do not wait.

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
        self.inner = inner
        self._store_every = whole("fail_store_every", fail_store_every, least=0)
        self._load_every = whole("fail_load_every", fail_load_every, least=0)
        self._flip_every = whole("flip_every", flip_every, least=0)
        if flip_every and not isinstance(inner, FileStorage):
            raise ValueError(f"flip_every is {flip_every}, but {type(inner).__name__} keeps no files; use FileStorage")
        self._hang = hang
        self._stores, self._loads, self._flips = (itertools.count(1) for _ in range(3))

    def register_mem_pool_host(self, pool: StoragePool, name: str = "kv") -> None:
        """Register the pool here and with the storage inside."""
        self.inner.register_mem_pool_host(pool, name)
        super().register_mem_pool_host(pool, name)

    def set_removal_listener(self, callback: RemovalListener | None) -> None:
        """Have the storage inside report what it removes."""
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
        return self.inner.find_pages(pool, keys, leading=leading)

    def load_pages(self, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> list[bool]:
        """Load from the storage inside, and damage every n-th page."""
        self._wait()
        loaded = self.inner.load_pages(pool, keys, pages)
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
            for i, done in zip(fine, self.inner.store_pages(pool, *of_those), strict=True):
                stored[i] = done
        if self._flip_every and isinstance(self.inner, FileStorage):
            for key, done in zip(keys, stored, strict=True):
                if done and next(self._flips) % self._flip_every == 0:
                    self._flip_bit(self.inner.page_path(key, pool.name))
        return stored

    def report_removed(self) -> None:
        """Report what the storage inside removed."""
        self.inner.report_removed()

    def _flip_bit(self, path: str) -> None:
        at = int.from_bytes(os.urandom(8), "little") % (8 * os.stat(path).st_size)
        with open(path, "r+b", buffering=0) as file:
            (byte,) = os.pread(file.fileno(), 1, at // 8)
            os.pwrite(file.fileno(), bytes([byte ^ 1 << at % 8]), at // 8)

    def _wait(self) -> None:
        if self._hang is not None:
            self._hang.wait()
