"""Reclaim: lets pools of a group that run short evict through the tree, which knows what can go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hicache_pools.pool_entry import PoolEntry

logger = logging.getLogger(__name__)


class Reclaim:
    """Callbacks of pool entries, and when they may evict.

    An allocation of the engine that finds a pool short calls back, and the tree evicts. An allocation of the tree calls
    back as well; then nothing is evicted, as the tree has made what room it can before, and is in the middle of its own
    work. Nor is anything evicted on a thread other than the one that uses the tree, as the tree is not thread-safe, or
    if ranks keep equal trees: the others know nothing of this one's pool.

    Parameters
    ----------
    alone
        Whether this is the only rank.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._thread = threading.get_ident()
        self._working = 0

    def use_on_this_thread(self) -> None:
        """Note which thread uses the tree."""
        self._thread = threading.get_ident()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold callbacks off while the tree is at work."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def serve(
        self,
        entry: PoolEntry,
        *,
        evict_host: Callable[[int], object],
        evict_device: Callable[[int], object],
    ) -> None:
        """Set an entry's callbacks. They replace those of an earlier tree, never those that the engine has set.

        Parameters
        ----------
        entry
            Of the anchor or of a windowed pool.
        evict_host, evict_device
            ``fn(pages)``, the tree's.
        """
        if entry.host_evict_fn is None or isinstance(entry.host_evict_fn, _Callback):
            entry.host_evict_fn = _Callback(self, entry, evict_host)
        if entry.device_evict_fn is None or isinstance(entry.device_evict_fn, _Callback):
            entry.device_evict_fn = _Callback(self, entry, evict_device)

    def _may_evict(self, entry: PoolEntry) -> bool:
        if self._working:
            return False
        if not self._alone:
            logger.debug("pool %s is short on this rank; ranks make room by calls of the tree, in step", entry.name)
            return False
        if threading.get_ident() != self._thread:
            logger.debug("pool %s is short on a thread that does not use the tree", entry.name)
            return False
        return True


class _Callback:
    """What a pool that is short calls; its type tells a tree's from an engine's."""

    def __init__(self, reclaim: Reclaim, entry: PoolEntry, evict: Callable[[int], object]) -> None:
        self._reclaim = reclaim
        self._entry = entry
        self._evict = evict
        self._page_size = int(entry.host_pool.page_size)

    def __call__(self, slots: int) -> None:
        if self._reclaim._may_evict(self._entry):
            with self._reclaim.held():
                self._evict(-(-slots // self._page_size))
