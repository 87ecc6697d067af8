"""Time of the extent allocator's calls with a million pages, and its bookkeeping memory; writes results/extents.json.

Run with one core to itself: python benchmarks/extents.py
"""

import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from hicache_pools.extents import ExtentAllocator

PAGES = 1 << 20
CALLS = 20_000
TAKE = 64
LIMIT_MICROSECONDS = 50.0
LIMIT_BYTES = 16.0


def fresh(allocator: ExtentAllocator) -> list[np.ndarray]:
    """Half of the pool in pieces of 64 pages."""
    return fill(allocator, lambda: TAKE, PAGES // 2)


def mixed(allocator: ExtentAllocator) -> list[np.ndarray]:
    """Pieces of 1 to 256 pages up to the brim, then every second one freed: many runs of all lengths."""
    held = fill(allocator, lambda: random.randint(1, 256), PAGES)
    random.shuffle(held)
    for pages in held[: len(held) // 2]:
        allocator.free_pages(pages)
    return held[len(held) // 2 :]


def small_then_large(allocator: ExtentAllocator) -> list[np.ndarray]:
    """Fill with single pages, clear, fill with pieces of 4096."""
    fill(allocator, lambda: 1, PAGES)
    allocator.clear()
    return fill(allocator, lambda: 4096, PAGES // 2)


def every_other(allocator: ExtentAllocator) -> list[np.ndarray]:
    """Every other page free: an allocation of 64 pages takes 64 runs."""
    pages = allocator.alloc_pages(PAGES)
    assert pages is not None
    allocator.free_pages(pages[::2])
    return [pages[1::2]]


def fill(allocator: ExtentAllocator, size: Callable[[], int], pages: int) -> list[np.ndarray]:
    held = []
    while pages:
        piece = allocator.alloc_pages(min(size(), pages))
        assert piece is not None
        pages -= len(piece)
        held.append(piece)
    return held


def measure(allocator: ExtentAllocator) -> dict[str, float]:
    """Allocate and free 64 pages each, at random, around what the pool holds now."""
    slots = TAKE * allocator.page_size
    held: list[torch.Tensor] = []
    alloc_times, free_times = [], []
    while len(alloc_times) < CALLS:
        if len(held) < 64 or (len(held) < 512 and random.random() < 0.5):
            start = time.perf_counter_ns()
            indices = allocator.alloc(slots)
            alloc_times.append(time.perf_counter_ns() - start)
            assert indices is not None
            held.append(indices)
        else:
            indices = held.pop(random.randrange(len(held)))
            start = time.perf_counter_ns()
            allocator.free(indices)
            free_times.append(time.perf_counter_ns() - start)
    for indices in held:
        allocator.free(indices)
    allocator.check_integrity()
    return {
        "alloc_median_us": round(statistics.median(alloc_times) / 1e3, 2),
        "alloc_p99_us": round(float(np.percentile(alloc_times, 99)) / 1e3, 2),
        "free_median_us": round(statistics.median(free_times) / 1e3, 2),
        "free_p99_us": round(float(np.percentile(free_times, 99)) / 1e3, 2),
    }


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for page_size in (1, 16, 64):
        for scenario in (fresh, mixed, small_then_large, every_other):
            allocator = ExtentAllocator(PAGES, page_size)
            held = scenario(allocator)
            stats = allocator.stats()
            result = {
                "scenario": scenario.__name__,
                "page_size": page_size,
                "free_runs": stats.free_runs,
                "bytes_per_page": round(stats.bookkeeping_bytes / PAGES, 2),
                **measure(allocator),
            }
            del held
            print(result, flush=True)
            results.append(result)
    single_run = [result for result in results if result["scenario"] != "every_other"]
    summary = {
        "pages": PAGES,
        "pages_per_call": TAKE,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "within_50_us_except_every_other": all(
            max(result["alloc_median_us"], result["free_median_us"]) < LIMIT_MICROSECONDS for result in single_run
        ),
        "within_16_bytes": all(result["bytes_per_page"] < LIMIT_BYTES for result in results),
        "results": results,
    }
    path = Path(__file__).parent / "results" / "extents.json"
    path.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
