"""StorageCalls: the calls that move pages between the host and one storage, counted, timed and never raising."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hicache_pools.pool_transfer import PoolHitPolicy

from .metrics import Metrics
from .storage.base import HiCacheStorage
from .storage.generic import TensorPages
from .storage_settings import StorageSettings

logger = logging.getLogger(__name__)


class StoragePart(NamedTuple):
    """One pool's pages in a storage operation.

    Attributes
    ----------
    name
        Of the pool in the storage.
    keys
        One a page.
    host_indices
        int64 or int32 slots on CPU, whole pages in the order of ``keys``.
    parents
        For each page the key of the page before it, None for a first page; None where pages are independent.
    hit_policy
        Whether there is a part for each of the anchor's pages, or one for the last pages only.
    """

    name: str
    keys: Sequence[bytes]
    host_indices: torch.Tensor
    parents: Sequence[bytes | None] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES

    @property
    def trailing(self) -> bool:
        """Whether it is for the last pages only."""
        return self.hit_policy is PoolHitPolicy.TRAILING_PAGES

    def batch(self, start: int, end: int) -> StoragePart:
        """Cut out a range of its pages."""
        page_size = len(self.host_indices) // max(1, len(self.keys))
        return self._replace(
            keys=self.keys[start:end],
            host_indices=self.host_indices[start * page_size : end * page_size],
            parents=None if self.parents is None else self.parents[start:end],
        )


class StorageCalls:
    """Calls to one storage, which the operations of both directions make.

    Parameters
    ----------
    store
        The storage.
    metrics
        Where to count.
    settings
        Pages a call, and attempts at a page.
    skipped
        Called with the pages of a pool that a cancelled backup has not stored, and the pool's name.

    Attributes
    ----------
    store, metrics, settings, skipped
        As given.
    stopping
        Set once operations are to end after the call that runs.
    backups
        Calls to store pages that have ended, which shows whether storage makes progress.
    """

    def __init__(
        self,
        store: HiCacheStorage | TensorPages,
        metrics: Metrics,
        settings: StorageSettings,
        skipped: Callable[[int, str], None],
    ) -> None:
        self.store = store
        self.metrics = metrics
        self.settings = settings
        self.skipped = skipped
        self.stopping = threading.Event()
        self.backups = 0

    def save(self, part: StoragePart) -> int:
        """Store pages; return how many leading ones are stored, 0 where the storage raises."""
        keys, indices, parents, name = part.keys, part.host_indices, part.parents, part.name
        stored = self._leading("backup", name, lambda: self.store.batch_set(keys, indices, parents=parents, name=name))
        self.backups += 1
        return stored

    def fetch(self, part: StoragePart) -> int:
        """Fill host pages; return how many leading ones are there, 0 where the storage raises."""
        keys, indices, name = part.keys, part.host_indices, part.name
        return self._leading("prefetch", name, lambda: self.store.batch_get(keys, indices, name=name))

    def _leading(self, operation: str, pool: str, call: Callable[[], list[bool]]) -> int:
        began = time.perf_counter()
        try:
            moved = call()
        except Exception:
            self.metrics.count("storage_errors", operation=operation)
            logger.debug("storage failed to %s pages", operation, exc_info=True)
            return 0
        finally:
            self.metrics.observe("storage_seconds", time.perf_counter() - began, operation=operation)
        pages = moved.index(False) if False in moved else len(moved)
        self.metrics.count("storage_pages", pages, operation=operation, pool=pool)
        return pages
