"""Reclaim: lets pools of a group that run short evict through the tree, which knows what can go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from hicache_pools.pool_entry import PoolEntry

from ..controller import HiCacheController

logger = logging.getLogger(__name__)


class _Callback(partial[None]):
    """What a pool that is short calls; its type tells a tree's from an engine's."""


class Reclaim:
    """Callbacks of pool entries, and when they may evict.

    An allocation of the engine that finds a pool short calls back, and the tree evicts. An allocation of the tree calls
    back as well; then nothing is evicted, as the tree has made what room it can before, and is in the middle of its own
    work. Nor is anything evicted on a thread other than the one that uses the tree, as the tree is not thread-safe, or
    if ranks keep equal trees: the others know nothing of this one's pool.
    """

    def __init__(self, controller: HiCacheController) -> None:
        self._controller = controller
        self._thread = threading.get_ident()
        self._working = 0

    def use_on_this_thread(self) -> None:
        """Note which thread uses the tree."""
        self._thread = threading.get_ident()

    def _evict(self, entry: PoolEntry, evict: Callable[[int], object], slots: int) -> None:
        """Evict for an allocation from a pool that is short, if that may be now."""
        if self._working:
            return
        if self._controller.agreement.needed:
            logger.debug("pool %s is short on this rank; ranks make room by calls of the tree, in step", entry.name)
            return
        if threading.get_ident() != self._thread:
            logger.debug("pool %s is short on a thread that does not use the tree", entry.name)
            return
        with self.held(), self._controller.engine_calls, self._controller.storage.one_call():
            evict(-(-slots // int(entry.host_pool.page_size)))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold callbacks off while the tree is at work."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    def serve(
        self, entry: PoolEntry, evict_host: Callable[[int], object], evict_device: Callable[[int], object]
    ) -> None:
        """Let a pool call ``fn(pages)``; replaces callbacks of an earlier tree, never those that the engine has set."""
        if entry.host_evict_fn is None or isinstance(entry.host_evict_fn, _Callback):
            entry.host_evict_fn = _Callback(self._evict, entry, evict_host)
        if entry.device_evict_fn is None or isinstance(entry.device_evict_fn, _Callback):
            entry.device_evict_fn = _Callback(self._evict, entry, evict_device)
