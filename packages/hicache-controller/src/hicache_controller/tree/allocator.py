"""PageAllocator: what the tree needs of the engine's device allocator."""

from __future__ import annotations

from typing import Protocol

from hicache_pools import DevicePool, ExtentAllocator, PoolEntry

from .node import Pages


class PageAllocator(Protocol):
    """Hands out device pages; :class:`hicache_pools.ExtentAllocator` is one."""

    @property
    def page_num(self) -> int:
        """Pages in all."""

    @property
    def available_pages(self) -> int:
        """Free pages."""

    def alloc_pages(self, count: int, /) -> Pages | None:
        """Return ``count`` page numbers for the caller to keep, or None."""

    def free_pages(self, pages: Pages, /) -> int:
        """Give pages back."""


def check_device_pages(anchor: PoolEntry, allocator: PageAllocator, page_size: int) -> None:
    """Check that every page an allocator can hand out is one of the anchor's device pool."""
    if isinstance(allocator, ExtentAllocator) and allocator.page_size != page_size:
        raise ValueError(f"device_allocator has pages of {allocator.page_size} slots; page_size is {page_size}")
    if isinstance(anchor.device_pool, DevicePool) and allocator.page_num * page_size > anchor.device_pool.index_size:
        raise ValueError(
            f"device_allocator has {allocator.page_num} pages of {page_size} slots; the device pool of the anchor has "
            f"{anchor.device_pool.index_size} slots"
        )
