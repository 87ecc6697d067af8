"""What the tree keeps in memory for each cached page."""

from __future__ import annotations

import gc
import secrets
import tracemalloc

from hicache_controller.controller import HiCacheController
from hicache_controller.tree import UnifiedRadixCache
from hicache_pools import ExtentAllocator, HostPoolGroup, NullPoolHost, PoolEntry


def test_a_cached_page_takes_less_than_200_bytes() -> None:
    pages, run = 4096, 8  # runs of eight pages: a block of 512 tokens at 64 tokens a page
    allocator = ExtentAllocator(pages, 1)
    entry = PoolEntry(
        "kv",
        NullPoolHost(pages, 1),
        None,
        lambda layer: layer,
        device_alloc_fn=allocator.alloc,
        device_free_fn=allocator.free,
    )
    tree = UnifiedRadixCache(HiCacheController(HostPoolGroup([entry]), synchronous=True), allocator, page_size=1)
    gc.collect()
    tracemalloc.start()
    for _ in range(pages // run):
        match = tree.match_prefix([secrets.token_bytes(16) for _ in range(run)])
        fresh = tree.alloc_device(run)
        assert fresh is not None
        tree.release(tree.insert(match, fresh).match)
        tree.poll()
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.stats() == (pages // run, pages, pages)
    assert used / pages < 200
