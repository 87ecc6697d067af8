"""Times the longest call of a scheduler's thread, by kind, with storages at 0 to 100 ms a page and one that hangs.

Each figure is the longest of one round; of several rounds the shortest and the longest are given, as other programs on
the machine only ever add to it. `waited_ms` is the longest that a call waited for storage in sum. Then: how many of 250
first-seen pages get to storage. Writes JSON.

python benchmarks/storage_waits.py --output benchmarks/results/storage_waits.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache_controller import HiCacheController, StorageSettings, page_hashes
from hicache_controller.events import HostSignal
from hicache_controller.radix import UnifiedRadixCache
from hicache_controller.storage import MemoryStorage
from hicache_pools import (
    ExtentAllocator,
    HostPoolGroup,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    PoolEntry,
    PoolName,
)

STORAGES = {"0 ms": 0.0, "2 ms": 0.002, "20 ms": 0.02, "100 ms": 0.1, "hung": math.inf}
POLICIES = ("write_through", "write_back")
REQUESTS, REQUEST_PAGES = 12, 32
PREFIXES, PREFIX_TOKENS, PREFIX_PAGE, L1_TOKENS, L2_TOKENS = 5, 16_011, 320, 42_763, 27_127


class SlowStorage(MemoryStorage):
    """Takes a time for each page, or all the time there is."""

    def __init__(self, seconds_per_page: float) -> None:
        super().__init__()
        self.seconds_per_page = seconds_per_page
        self.ended = threading.Event()

    def _pause(self, pages: int) -> None:
        seconds = self.seconds_per_page * pages
        if seconds:
            self.ended.wait(None if math.isinf(seconds) else seconds)

    def find_pages(self, pool: Any, keys: list[bytes], *, leading: bool) -> list[bool]:
        self._pause(1)
        return super().find_pages(pool, keys, leading=leading)

    def load_pages(self, pool: Any, keys: list[bytes], pages: list[int]) -> list[bool]:
        self._pause(len(keys))
        return super().load_pages(pool, keys, pages)

    def store_pages(self, pool: Any, keys: list[bytes], pages: list[int], parents: list[bytes | None]) -> list[bool]:
        self._pause(len(keys))
        return super().store_pages(pool, keys, pages, parents)


class Clock:
    """The longest call by kind, and the longest that one waited for storage."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = defaultdict(float)
        self.waited = self._waiting = 0.0
        self._synchronize, self._thread = HostSignal.synchronize, threading.get_ident()

    def __enter__(self) -> Clock:
        def synchronize(signal: HostSignal, timeout: float | None = None) -> bool:
            start = time.perf_counter()
            came = self._synchronize(signal, timeout)
            if timeout is not None and threading.get_ident() == self._thread:
                self._waiting += time.perf_counter() - start
            return came

        HostSignal.synchronize = synchronize  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        HostSignal.synchronize = self._synchronize  # type: ignore[method-assign]

    def __call__(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self._waiting, start = 0.0, time.perf_counter()
        result = call(*arguments, **options)
        self.longest[call.__name__] = max(self.longest[call.__name__], time.perf_counter() - start)
        self.waited = max(self.waited, self._waiting)
        return result


def make(storage: SlowStorage, device_pages: int, host_pages: int, page_size: int, policy: str, wait: float) -> Any:
    rows = [torch.zeros(device_pages * page_size, 1, 8, dtype=torch.uint8) for _ in range(4)]
    pool = MHATokenToKVPool.from_buffers(k=rows[:2], v=rows[2:], page_size=page_size)
    host = MHATokenToKVPoolHost(pool, 0, 0, page_size, pages=host_pages, pin_memory=False)
    pages = ExtentAllocator(device_pages, page_size)
    functions = {"device_alloc_fn": pages.alloc, "device_free_fn": pages.free}
    entry = PoolEntry(PoolName.KV, host, pool, lambda layer: layer, is_primary_index_anchor=True, **functions)
    controller = HiCacheController(HostPoolGroup([entry]), storage=StorageSettings(max_wait_seconds=wait))
    controller.attach_storage_backend(storage)
    return UnifiedRadixCache(controller, pages, page_size=page_size, write_policy=policy)


def longest_calls(seconds_per_page: float, policy: str) -> tuple[dict[str, float], float]:
    storage = SlowStorage(seconds_per_page)
    tree = make(storage, 256, 64, 16, policy, 0.02)
    with Clock() as clock:
        for number in [*range(REQUESTS), *range(REQUESTS)]:
            keys = page_hashes(np.arange(number * 10_000, number * 10_000 + REQUEST_PAGES * 16), 16)
            match = clock(tree.match_prefix, keys)
            started = clock(tree.start_prefetch, match)
            match = clock(tree.finish_prefetch, started)
            match = clock(tree.load_back, match)
            pages = clock(tree.alloc_device, len(keys) - match.pages)
            match = clock(tree.insert, match, pages).match
            clock(tree.release, match)
            clock(tree.poll)
            clock(tree.evict_host, 8)
    storage.ended.set()
    tree.controller.shutdown()
    return {name: seconds * 1e3 for name, seconds in clock.longest.items()}, clock.waited * 1e3


def first_seen(seconds_per_page: float, wait: float, *, paced: bool) -> dict[str, float]:
    storage = SlowStorage(seconds_per_page)
    tree = make(storage, L1_TOKENS // PREFIX_PAGE, L2_TOKENS // PREFIX_PAGE, PREFIX_PAGE, "write_through", wait)
    for number in range(PREFIXES):
        keys = page_hashes(np.arange(number * 10**6, number * 10**6 + PREFIX_TOKENS), PREFIX_PAGE)
        match = tree.match_prefix(keys)
        match = tree.insert(match, tree.alloc_device(len(keys))).match
        tree.release(match)
        while paced and not tree.drain(timeout=0):
            time.sleep(0.001)
    tree.drain()
    tree.controller.shutdown()
    metrics = tree.controller.metrics.snapshot()
    return {
        "ms_per_page": seconds_per_page * 1e3,
        "max_wait_seconds": wait,
        "polled_until_idle": paced,
        "offered": PREFIXES * (PREFIX_TOKENS // PREFIX_PAGE),
        "stored": metrics.total("backup_pages"),
        "skipped": metrics.total("backup_skipped_pages"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "max_wait_ms": 20,
    }
    longest_calls(0.0, "write_through")  # what is imported, compiled and allocated once
    for name, seconds in STORAGES.items():
        for policy in POLICIES:
            rounds = [longest_calls(seconds, policy) for _ in range(arguments.rounds)]
            results[f"{name}, {policy}"] = {
                "waited_ms": max(waited for _, waited in rounds),
                "longest_ms": {
                    kind: [min(calls[kind] for calls, _ in rounds), max(calls[kind] for calls, _ in rounds)]
                    for kind in rounds[0][0]
                },
            }
    results["first_seen"] = [first_seen(cost, 0.02, paced=True) for cost in (0.0, 0.002, 0.02)]
    results["first_seen"] += [first_seen(0.02, wait, paced=False) for wait in (30.0, 0.02)]
    text = json.dumps(results, indent=2) + "\n"
    if arguments.output:
        arguments.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
