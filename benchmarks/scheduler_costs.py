"""Time the scheduler's thread spends on bookkeeping: a write with its ack, a load with its ack, and polls of nothing.

Everything runs on the CPU over one small pool, with every transfer done where it is started, so that what is measured
is the bookkeeping and the transfer of one page; one figure is of a transfer by a thread. Figures are CPU time of the
scheduler's thread, the least of several means, in microseconds. With ``--before`` and the JSON of a run of other code
on the same machine, the ratios to that run are printed and kept, too:

    PYTHONPATH=/path/of/other/code python benchmarks/scheduler_costs.py --output /tmp/before.json
    python benchmarks/scheduler_costs.py --before /tmp/before.json --output benchmarks/results/scheduler_costs.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hicache_controller import HybridCacheController, UnifiedRadixCache
from hicache_pools import ExtentAllocator, HostPoolGroup, MHATokenToKVPool, MHATokenToKVPoolHost, PoolEntry

PAGE_SIZE = 16
PAGES = 64
LAYERS = 4
ROUNDS = 15
CALLS = 200


class Stack:
    """One MHA pool, its host pool, and a controller over both, with lanes on threads or without."""

    def __init__(self, *, synchronous: bool) -> None:
        device_pool = MHATokenToKVPool(PAGES * PAGE_SIZE, PAGE_SIZE, torch.bfloat16, 2, 16, LAYERS, "cpu")
        host_pool = MHATokenToKVPoolHost(device_pool, 0, 0, PAGE_SIZE, "page_first", False, pages=PAGES)
        self.allocator = ExtentAllocator(PAGES, PAGE_SIZE)
        entry = PoolEntry(
            "kv",
            host_pool,
            device_pool,
            lambda layer: layer if layer < LAYERS else None,
            device_alloc_fn=self.allocator.alloc,
            device_free_fn=self.allocator.free,
        )
        self.controller = HybridCacheController(HostPoolGroup([entry]), synchronous=synchronous)
        device = self.allocator.alloc(PAGE_SIZE)
        host = self.controller.write(device, node_id=0)
        if device is None or host is None:
            raise RuntimeError("a pool has no room, although it was made for this")
        self.device, self.host = device, host
        self.controller.start_writing()
        self._finish(self.controller.poll_writes)

    @staticmethod
    def _finish(poll: Callable[[bool], list[object]]) -> None:
        if not poll(True):
            raise RuntimeError("nothing was done")

    def write(self) -> None:
        controller = self.controller
        host = controller.write(self.device, node_id=1)
        controller.start_writing()
        acks = controller.poll_writes(True)
        if host is None or acks[0].error is not None:
            raise RuntimeError("a write failed")
        controller.evict_host(host)

    def load(self) -> None:
        controller = self.controller
        device = controller.load(self.host, node_id=2)
        controller.start_loading()
        acks = controller.poll_loads(True)
        if device is None or acks[0].error is not None:
            raise RuntimeError("a load failed")
        controller.evict_device(device)


def microseconds(call: Callable[[], object]) -> float:
    """Time that the CPU spends in this thread on one call: the least mean of several rounds."""
    means = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        means.append((time.thread_time() - begin) / CALLS * 1e6)
    return round(min(means), 2)


def measure() -> dict[str, float]:
    """Measure everything."""
    stack = Stack(synchronous=True)
    controller = stack.controller
    tree = UnifiedRadixCache(controller, ExtentAllocator(1, PAGE_SIZE), page_size=PAGE_SIZE)
    found = {
        "write_with_ack": microseconds(stack.write),
        "load_with_ack": microseconds(stack.load),
        "idle_poll_writes": microseconds(controller.poll_writes),
        "idle_poll_loads": microseconds(controller.poll_loads),
        "idle_start_writing": microseconds(controller.start_writing),
        "idle_tree_poll": microseconds(tree.poll),
    }
    controller.shutdown()
    threads = Stack(synchronous=False)
    found["write_with_ack_by_a_thread"] = microseconds(threads.write)
    threads.controller.shutdown()
    return found


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--before", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure()
    before = json.loads(arguments.before.read_text())["microseconds"] if arguments.before else {}
    for name, value in found.items():
        ratio = f"  {value / before[name]:.2f} of {before[name]:.1f}" if name in before else ""
        print(f"{name:28} {value:8.2f} us{ratio}")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        result = {"microseconds": found} | ({"microseconds_before": before} if before else {})
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
