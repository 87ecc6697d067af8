"""Room: allocations from the pools, after evicting what is in the way."""

from __future__ import annotations

import torch

from ..controller import HiCacheController
from ..engine_calls import EngineCalls
from .allocator import PageAllocator
from .evictor import Evictor
from .node import Pages
from .radix_tree import RadixTree
from .ranks import Ranks
from .reclaim import Reclaim
from .residency import Residency


class Room:
    """Allocates on all ranks or on none: what one has no room for no other may use, or their trees would differ.

    What a callback of the engine raises during an eviction is raised before anything is allocated.

    Attributes
    ----------
    ranks
        The ranks that agree.
    """

    def __init__(
        self,
        tree: RadixTree,
        residency: Residency,
        evictor: Evictor,
        controller: HiCacheController,
        device_allocator: PageAllocator,
        reclaim: Reclaim,
        ranks: Ranks,
        calls: EngineCalls,
    ) -> None:
        self._windows = tree.windows
        self._page_size = tree.page_size
        self._residency = residency
        self._evictor = evictor
        self._controller = controller
        self._device = device_allocator
        self._reclaim = reclaim
        self.ranks = ranks
        self._calls = calls

    def on_device(self) -> int:
        """Return the device pages that are free."""
        return self.ranks.smallest(self._device.available_pages)

    def make_on_device(self, count: int) -> bool:
        """Evict until ``count`` device pages are free; returns whether they are."""
        room = self.on_device()
        if room < count:
            self._evictor.evict_device(count - room)
            self._calls.raise_first()
            room = self.on_device()
        return room >= count

    def alloc_device(self, count: int) -> Pages | None:
        """Allocate device pages; None if there are too few."""
        pages = self._device.alloc_pages(count) if self.make_on_device(count) else None
        if self.ranks.all(pages is not None):
            return pages
        if pages is not None:
            self._device.free_pages(pages)
        return None

    def alloc_window_device(self, name: str, count: int) -> Pages | None:
        """Allocate device pages of a windowed pool; None if there are too few."""
        pages = self._take_window_device(name, count)
        if pages is None and self._evictor.evict_window_device(name, count):
            self._calls.raise_first()
            pages = self._take_window_device(name, count)
        return pages

    def _take_window_device(self, name: str, count: int) -> Pages | None:
        pages = self._windows[name].alloc_device(count)
        if self.ranks.all(pages is not None):
            return pages
        if pages is not None:
            self._residency.free(pages, device=True, pool=name)
        return None

    def make_for_window(self, name: str, count: int) -> bool:
        """Return whether a windowed pool has room on the device, after evicting; a load that follows takes the same."""
        pages = self.alloc_window_device(name, count)
        if pages is None:
            return False
        self._residency.free(pages, device=True, pool=name)
        return True

    def alloc_host(self, count: int) -> torch.Tensor | None:
        """Take host slots for ``count`` pages, or for as many as evicting makes room for; None if there are none."""
        pool = self._controller.mem_pool_host
        room = self.ranks.smallest(pool.available_size() // self._page_size)
        if room < count:
            self._evictor.evict_host(count - room)
            self._calls.raise_first()
            count = min(count, self.ranks.smallest(pool.available_size() // self._page_size))
        with self._reclaim.held():
            return pool.alloc(count * self._page_size) if count else None

    def make_for_window_host(self, name: str, count: int) -> None:
        """Evict until a windowed pool has ``count`` free host pages, as far as possible."""
        missing = count - self.ranks.smallest(self._windows[name].free_host_pages())
        if missing > 0:
            self._evictor.evict_window_host(name, missing)
            self._calls.raise_first()

    def alloc_window_host(self, name: str, count: int) -> torch.Tensor | None:
        """Take host slots of a windowed pool; None if there are too few."""
        self.make_for_window_host(name, count)
        with self._reclaim.held():
            slots = self._controller.host_group.alloc(count * self._windows[name].converter.page_size, name)
        if self.ranks.all(slots is not None):
            return slots
        if slots is not None:
            self._controller.evict_host(slots, pool=name)
        return None
