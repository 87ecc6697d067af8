"""One rank of the tests of identical trees; started by test_tree_ranks.py in a process of its own."""

from __future__ import annotations

import datetime
import json
import random
import sys
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed

from hicache_controller.controller import HiCacheController
from hicache_controller.hashing import page_hashes
from hicache_controller.storage.contract import FaultyStorage
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_settings import StorageSettings
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
    def __init__(self, rank: int, seed: int, mode: str) -> None:
        self.mode, self.answers, self.held = mode, threading.Event(), np.empty(0, np.int64)
        self.answers.set()
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
            storage=StorageSettings(
                prefetch_policy="wait_complete",
                retry_seconds=0,
                batch_pages=2,
                backup_retries=0,
                max_wait_seconds=30 if mode == "faults" else 0.001,
            ),
            distributed_group=torch.distributed.group.WORLD,
        )
        # Each rank loses other pages.
        self.controller.attach_storage_backend(
            FaultyStorage(
                MemoryStorage(), fail_store_every=5 + 2 * rank, fail_load_every=9 - 2 * rank, hang=self.answers
            )
        )
        self.tree = UnifiedRadixCache(self.controller, self.allocator, page_size=1)

    def disturb(self) -> None:
        """Let this rank's storage hang or answer, and its engine hold other device pages, as the other's do not."""
        (self.answers.set if self.own.random() < 0.5 else self.answers.clear)()
        self.allocator.free_pages(self.held)
        held = self.allocator.alloc_pages(min(self.own.randrange(5), self.allocator.available_pages))
        self.held = np.empty(0, np.int64) if held is None else held

    def calm(self) -> None:
        """End what :meth:`disturb` did."""
        self.answers.set()
        self.allocator.free_pages(self.held)
        self.held = np.empty(0, np.int64)

    def round(self) -> list[int]:
        """Serve a request; the pages found by step."""
        tree, shared = self.tree, self.shared
        keys = make_keys(shared.randrange(40), shared.randint(1, 10))
        match = tree.match_prefix(keys)
        found = [match.device_pages, match.host_pages]
        self.pool.failing = self.own.random() < 0.2
        match = tree.prefetch(match) if self.mode == "faults" else tree.finish_prefetch(tree.start_prefetch(match))
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


def main(rank: int, port: int, rounds: int, mode: str) -> None:
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=600),
    )
    served = Rank(rank, port, mode)
    report = []
    for _ in range(rounds):
        if mode == "unequal":
            served.disturb()
        found = served.round()
        if mode == "unequal":
            served.tree.poll()
        else:
            served.tree.drain()
        served.tree.check_integrity()
        report.append([found, served.tree.pretty()])
    served.calm()
    served.tree.drain()
    report.append([[], served.tree.pretty()])
    storage = served.controller.storage.backend.stats()
    result = {
        "rounds": report,
        "free": [served.allocator.available_pages, served.pool.available_size()],
        "tree": list(served.tree.stats()),
        "storage": list(storage),
        "refused": served.pool.refused,
        "skipped": served.controller.metrics.snapshot().total("backup_skipped_pages"),
        "broken": served.controller.agreement.broken,
    }
    served.tree.reset()
    result["free_after_reset"] = [served.allocator.available_pages, served.pool.available_size()]
    sys.stdout.write("\n" + json.dumps(result))
    served.controller.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
