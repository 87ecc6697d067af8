"""One rank of the test of identical trees; started by test_tree_ranks.py in a process of its own."""

from __future__ import annotations

import datetime
import json
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed

from hicache_controller.controller import HiCacheController
from hicache_controller.hashing import page_hashes
from hicache_controller.storage.faults import FaultyStorage
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_link import StorageSettings
from hicache_controller.tree import UnifiedRadixCache
from hicache_pools.extents import ExtentAllocator
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import NullPoolHost

DEVICE_PAGES, HOST_PAGES, STORED_PAGES = 16, 24, 200
DOCUMENTS = 8


class Host(NullPoolHost):
    """A host pool whose next allocation can be made to fail."""

    failing = False
    refused = 0

    def alloc(self, n: int) -> Any:
        if self.failing:
            self.failing = False
            self.refused += 1
            return None
        return super().alloc(n)


def make_keys(seed: int, length: int) -> list[bytes]:
    """Pages of one of a few documents, with an end of its own now and then."""
    document = np.random.default_rng(seed % DOCUMENTS).integers(0, 1000, 12)
    tail = np.random.default_rng(seed).integers(0, 1000, 12)
    tokens = np.concatenate((document[: length // 2 + 1], tail[: length // 2])) if seed % 3 else document[:length]
    return page_hashes(tokens, 1)


class Rank:
    def __init__(self, rank: int, seed: int) -> None:
        self.shared, self.own = random.Random(f"shared {seed}"), random.Random(f"{seed} {rank}")
        self.allocator = ExtentAllocator(DEVICE_PAGES)
        self.pool = Host(HOST_PAGES, 1)
        entry = PoolEntry(
            "kv",
            self.pool,
            None,
            lambda layer: layer,
            device_alloc_fn=self.allocator.alloc,
            device_free_fn=self.allocator.free,
        )
        self.controller = HiCacheController(
            HostPoolGroup([entry]),
            storage=StorageSettings(prefetch_policy="wait_complete", retry_seconds=0, batch_pages=2, backup_retries=0),
            distributed_group=torch.distributed.group.WORLD,
        )
        # Each rank loses other pages.
        self.controller.attach_storage_backend(
            FaultyStorage(MemoryStorage(), fail_store_every=5 + 2 * rank, fail_load_every=9 - 2 * rank)
        )
        self.tree = UnifiedRadixCache(self.controller, self.allocator, page_size=1)

    def round(self) -> list[int]:
        """Serve a request; the pages found by step."""
        tree, shared = self.tree, self.shared
        keys = make_keys(shared.randrange(40), shared.randint(1, 10))
        match = tree.match_prefix(keys)
        found = [match.device_pages, match.host_pages]
        # A write that finds no room on one rank alone cannot be: the ranks' host pools hold the same pages.
        fetches_only = match.node is tree.root or match.node.host is not None
        self.pool.failing = self.own.random() < 0.2 and fetches_only
        match = tree.prefetch(match)
        self.pool.failing = False
        found.append(match.pages)
        match = tree.load_back(match)
        found.append(match.pages)
        pages = tree.alloc_device(len(keys) - match.pages)
        if pages is None:
            tree.release(match)
            return found
        tree.release(tree.insert(match, pages).match)
        if shared.random() < 0.3:
            found.append(tree.evict_device(shared.randint(1, DEVICE_PAGES)))
        if shared.random() < 0.2:
            found.append(tree.evict_host(shared.randint(1, HOST_PAGES)))
        return found


def main(rank: int, port: int, rounds: int) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=20),
    )
    served = Rank(rank, port)
    report = []
    for _ in range(rounds):
        found = served.round()
        served.tree.drain()
        served.tree.check_integrity()
        report.append([found, served.tree.pretty()])
    storage = served.controller.storage.backend.stats()
    result = {
        "rounds": report,
        "free": [served.allocator.available_pages, served.pool.available_size()],
        "tree": list(served.tree.stats()),
        "storage": list(storage),
        "refused": served.pool.refused,
        "broken": served.controller.agreement.broken,
    }
    served.tree.reset()
    result["free_after_reset"] = [served.allocator.available_pages, served.pool.available_size()]
    sys.stdout.write("\n" + json.dumps(result))
    served.controller.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
