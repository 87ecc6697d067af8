"""Times a pinned host pool against ``torch.empty(pin_memory=True)``; writes JSON.

Each measurement is a process of its own, and the ways take turns: the first to touch memory that the machine has not
handed out before may wait for a hypervisor, which no code here can change.

    python benchmarks/pinning.py --gib 64 --rounds 2 --output pinning.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hicache_pools.host_memory import CHUNK_BYTES, allocate_host_buffer

WAYS = ("torch", "transparent", "off")
"""torch, and this package with and without transparent huge pages."""


def copy_bandwidth(tensor: torch.Tensor) -> float:
    """GB/s from the device to the last 256 MiB of a host tensor: pinned memory that copies slowly is not pinned."""
    part = tensor[-min(256 << 20, tensor.numel()) :]
    source = torch.ones(part.numel(), dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        part.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    if not bool((part[:: 1 << 12] == 1).all()):
        raise RuntimeError("the copy into the pinned memory did not arrive")
    return part.numel() / min(times) / 1e9


def measure(way: str, nbytes: int, page_bytes: int, chunk_bytes: int, threads: int | None) -> dict[str, Any]:
    """Pin, copy, unpin, in this process."""
    torch.zeros(1, device="cuda")
    start = time.perf_counter()
    if way == "torch":
        tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        pin = time.perf_counter() - start
        result: dict[str, Any] = {"pinned": tensor.is_pinned(), "gb_per_s": copy_bandwidth(tensor)}
        start = time.perf_counter()
        del tensor
        torch._C._host_emptyCache()
    else:
        buffer = allocate_host_buffer(
            nbytes, page_bytes=page_bytes, chunk_bytes=chunk_bytes, huge_pages=way, threads=threads
        )
        pin = time.perf_counter() - start
        result = {
            "pinned": buffer.tensor.is_pinned(),
            "gb_per_s": copy_bandwidth(buffer.tensor),
            "boundaries": buffer.boundaries,
            "numa_node": buffer.numa_node,
            "reason": buffer.reason,
        }
        start = time.perf_counter()
        buffer.close()
    return {"seconds": pin, "release_seconds": time.perf_counter() - start, **result}


def in_a_process(arguments: argparse.Namespace, way: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", way, "--gib", str(arguments.gib)]
    command += ["--page-bytes", str(arguments.page_bytes), "--chunk-bytes", str(arguments.chunk_bytes)]
    command += ["--threads", str(arguments.threads)] if arguments.threads else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring {way} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def transparent_huge_pages() -> str:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        return "not in this kernel"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=64.0, help="size of the pool")
    parser.add_argument("--page-bytes", type=int, default=5 << 20, help="bytes of a pool page")
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES, help="bytes registered at once, at most")
    parser.add_argument("--threads", type=int, default=None, help="threads that touch the memory")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each way")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--output", type=Path, default=None, help="JSON file; standard output otherwise")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    nbytes = int(arguments.gib * (1 << 30)) // arguments.page_bytes * arguments.page_bytes
    if not torch.cuda.is_available():
        raise SystemExit("pinning needs a CUDA or ROCm device; torch finds none")
    if arguments.measure:
        measured = measure(arguments.measure, nbytes, arguments.page_bytes, arguments.chunk_bytes, arguments.threads)
        print(json.dumps(measured))
        return

    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in arguments.ways}
    for _ in range(arguments.rounds):
        for way in arguments.ways:
            runs[way].append(in_a_process(arguments, way))
            print(f"{way}: {runs[way][-1]['seconds']:.2f} s", file=sys.stderr)
    medians = {way: statistics.median(run["seconds"] for run in of_way) for way, of_way in runs.items()}
    report = {
        "bytes": nbytes,
        "page_bytes": arguments.page_bytes,
        "chunk_bytes": arguments.chunk_bytes,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "transparent_huge_pages": transparent_huge_pages(),
        "median_seconds": medians,
        "of_torch": {way: seconds / medians["torch"] for way, seconds in medians.items() if "torch" in medians},
        "runs": runs,
    }
    text = json.dumps(report, indent=2)
    if arguments.output is None:
        print(text)
    else:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
