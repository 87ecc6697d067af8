"""Time the caller's thread spends on submitting a write-back and a load-back through ``HiCacheController``; JSON.

A submission is everything a scheduler calls until the transfer is on its way: ``write`` and ``start_writing``, ``load``
and ``start_loading``. Host pages are runs. The engine's own allocator of device slots is not part of it: it hands out
indices that were made before. Every transfer is waited for before the next, and its error raised.

The first call of a process builds or loads the kernels and calibrates the device; that is not measured either.

    python benchmarks/submission.py --output benchmarks/results/submission.json      (a GPU: about 30 s)
    python benchmarks/submission.py --device cpu --megabytes 16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hicache_controller import HybridCacheController
from hicache_controller.hybrid import SidecarPoolSpec
from hicache_pools import (
    DevicePool,
    HostPool,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
)
from hicache_pools.group import HostPoolGroup, PoolEntry

LIMIT_MS = 1.0


class Case(NamedTuple):
    """What is submitted: the anchor's rows, its pages, and into how many operations the bytes are cut."""

    pool: str
    row_bytes: int
    layers: int
    page_size: int
    layout: str
    operations: int = 1
    sidecar: bool = False


CASES = (
    Case("mha", 2048, 32, 64, "page_first_direct"),
    Case("mha", 2048, 32, 16, "page_first"),
    Case("mha", 2048, 32, 1, "page_first"),
    Case("mha", 1024, 28, 64, "page_first"),
    Case("mha", 256, 80, 16, "page_first_direct"),
    Case("mla", 1152, 61, 64, "page_first_direct"),
    Case("mla", 1152, 61, 1, "page_first"),
    Case("mha", 2048, 32, 16, "page_first_direct", operations=8),
    Case("mha", 2048, 32, 16, "page_first", sidecar=True),
)


class Bench:
    """A controller over pools that take the operations of one case once."""

    def __init__(self, case: Case, total_bytes: int, device: str, indices: str) -> None:
        token_bytes = case.row_bytes * case.layers * (1 if case.pool == "mla" else 2)
        token_bytes += 2 * 128 * case.layers if case.sidecar else 0
        pages = total_bytes // token_bytes // case.page_size // case.operations * case.operations
        if not pages:
            raise ValueError(f"{total_bytes} bytes are less than a page for each operation of {case}")
        slots = pages * case.page_size
        self.bytes = slots * token_bytes
        self.host_pools: list[HostPool] = []
        anchor = self._entry("kv", self._device_pool(case, slots, device), case)
        entries = [anchor]
        if case.sidecar:
            side = MHATokenToKVPool(slots, case.page_size, torch.uint8, 1, 128, case.layers, device)
            entries.append(self._entry("side", side, case))
        sidecars = [SidecarPoolSpec("side", "kv")] if case.sidecar else []
        self.parts = list(torch.arange(slots).to(indices).chunk(case.operations))
        self._handed_out = 0
        anchor.device_alloc_fn, anchor.device_free_fn = self._alloc_device, lambda given: None
        self.controller = HybridCacheController(HostPoolGroup(entries), sidecars=sidecars)

    @staticmethod
    def _device_pool(case: Case, slots: int, device: str) -> DevicePool:
        if case.pool == "mla":
            rank = case.row_bytes // 2 - 64
            return MLATokenToKVPool(slots, case.page_size, torch.bfloat16, rank, 64, case.layers, device)
        heads, dim = (case.row_bytes // 256, 128) if case.row_bytes >= 256 else (1, case.row_bytes // 2)
        return MHATokenToKVPool(slots, case.page_size, torch.bfloat16, heads, dim, case.layers, device)

    def _entry(self, name: str, device_pool: DevicePool, case: Case) -> PoolEntry:
        kind = MLATokenToKVPoolHost if isinstance(device_pool, MLATokenToKVPool) else MHATokenToKVPoolHost
        pool = kind(device_pool, 1.0, 0, case.page_size, case.layout)
        self.host_pools.append(pool)
        return PoolEntry(name, pool, device_pool, lambda layer: layer if layer < case.layers else None)

    def _alloc_device(self, slots: int) -> torch.Tensor:
        self._handed_out += 1
        return self.parts[(self._handed_out - 1) % len(self.parts)]

    def round(self) -> dict[str, float]:
        """Write everything back and load it again; seconds by call, over all operations."""
        controller, clock = self.controller, time.perf_counter
        seconds: dict[str, float] = {}
        start, cpu = clock(), time.thread_time()
        hosts = [controller.write(part, node_id=number) for number, part in enumerate(self.parts)]
        queued = clock()
        controller.start_writing()
        seconds |= {"write": queued - start, "start_writing": clock() - queued, "write_cpu": time.thread_time() - cpu}
        self._finish(controller.poll_writes)
        start, cpu = clock(), time.thread_time()
        for number, host in enumerate(hosts):
            if host is None or controller.load(host, node_id=number) is None:
                raise RuntimeError("a pool has no room, although it was made for everything at once")
        queued = clock()
        controller.start_loading()
        seconds |= {"load": queued - start, "start_loading": clock() - queued, "load_cpu": time.thread_time() - cpu}
        self._finish(controller.poll_loads)
        for host in hosts:
            if host is not None:
                controller.evict_host(host)
        return seconds

    @staticmethod
    def _finish(poll: Callable[[bool], list[Any]]) -> None:
        for ack in poll(True):
            if ack.error is not None:
                raise ack.error

    def paths(self) -> dict[str, str]:
        """Path that the transfers of each direction took."""
        operations = self.controller.metrics.snapshot().counters["transfer_operations"]
        found: dict[str, set[str]] = {}
        for labels in map(dict, operations):
            found.setdefault(labels["direction"], set()).add(labels["path"])
        return {direction: "+".join(sorted(paths)) for direction, paths in found.items()}

    def close(self) -> None:
        self.controller.shutdown()
        for pool in self.host_pools:
            pool.destroy()


def measure(case: Case, total_bytes: int, device: str, indices: str, rounds: int) -> dict[str, object]:
    bench = Bench(case, total_bytes, device, indices)
    try:
        for _ in range(3):
            bench.round()
        samples = [bench.round() for _ in range(rounds)]
        row: dict[str, object] = {**case._asdict(), "device_indices": indices, "megabytes": round(bench.bytes / 2**20)}
        row["paths"] = bench.paths()
    finally:
        bench.close()
    row |= {f"{name}_ms": round(statistics.median(s[name] for s in samples) * 1e3, 3) for name in samples[0]}
    for what, calls in (("write_back", ("write", "start_writing")), ("load_back", ("load", "start_loading"))):
        totals = sorted(sum(sample[call] for call in calls) * 1e3 for sample in samples)
        row[f"{what}_submission_ms_median"] = round(statistics.median(totals), 3)
        row[f"{what}_submission_ms_most"] = round(totals[-1], 3)
    return row


def machine(device: str) -> dict[str, object]:
    facts: dict[str, object] = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    facts["cpu"] = names[0] if names else platform.machine()
    if device != "cpu":
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--megabytes", type=int, help="of one submission; 512 on a GPU, 16 on a CPU")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    megabytes = arguments.megabytes or (16 if arguments.device == "cpu" else 512)
    facts = machine(arguments.device)
    Bench(Case("mha", 256, 2, 16, "page_first"), 1 << 20, arguments.device, "cpu").round()
    rows = []
    for case in CASES:
        for indices in dict.fromkeys((arguments.device, "cpu")):
            rows.append(measure(case, megabytes << 20, arguments.device, indices, arguments.rounds))
            print(json.dumps(rows[-1]), flush=True)
    worst = {
        what: max(float(str(row[f"{what}_submission_ms_median"])) for row in rows)
        for what in ("write_back", "load_back")
    }
    result = {
        "machine": facts,
        "limit_ms": LIMIT_MS,
        "worst_median_ms": worst,
        "rounds": arguments.rounds,
        "rows": rows,
    }
    print(json.dumps(worst))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
