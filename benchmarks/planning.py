"""Time that planning alone takes from the caller's thread, on the CPU, by the constants of an H200; JSON.

Each operation is planned as one of a shape that its pool has not seen, and then once more. No byte is moved: the pools
are of CPU memory, and the constants say that a GPU holds the rows.

    python benchmarks/planning.py --output benchmarks/results/planning.json      (some seconds)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from hicache_kernels import DeviceRows, Direction, HostRows, Plane, PlaneTransfer, host_strides
from hicache_kernels.bench.cases import SHAPES, Shape
from hicache_kernels.constants import H200

PAGE_SIZE = 16
POOL_PAGES = 2
SIZES = (1, 4, 64, 256)
"""Pages of an operation."""


class Row(NamedTuple):
    """Medians of one operation, in microseconds."""

    rows: str
    direction: str
    pages: int
    path: str
    new_us: float
    known_us: float


def pool(shape: Shape) -> PlaneTransfer:
    """Make a pool of few pages: a plan asks for as many as it likes."""
    size = {"layers": shape.layers, "pages": POOL_PAGES, "page_size": PAGE_SIZE}
    strides = host_strides("page_first_direct", [shape.row_bytes] * shape.planes, **size)
    host = torch.zeros(shape.slot_bytes * PAGE_SIZE * POOL_PAGES, dtype=torch.uint8)
    planes = []
    for number, place in enumerate(strides):
        layers = [torch.zeros(POOL_PAGES * PAGE_SIZE, shape.row_bytes, dtype=torch.uint8) for _ in range(shape.layers)]
        rows = DeviceRows.slot_major(layers)
        planes.append(Plane(f"plane {number}", shape.row_bytes, rows, HostRows(host, place, POOL_PAGES, PAGE_SIZE)))
    return PlaneTransfer(planes, constants=H200)


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def measure(repeats: int) -> Iterator[Row]:
    for shape in SHAPES:
        pools = [pool(shape) for _ in range(repeats)]
        for each in pools:
            each.capabilities()  # loads the modules
        for direction in Direction:
            for pages in SIZES:

                def plan(transfer: PlaneTransfer, direction: Direction = direction, pages: int = pages) -> str:
                    return transfer.plan(direction, pages=pages, runs=pages).path

                new = [microseconds(lambda each=each: plan(each)) for each in pools]
                known = [microseconds(lambda each=each: plan(each)) for each in pools]
                yield Row(
                    f"{shape.row_bytes} x {shape.layers} x {shape.planes}",
                    direction.value,
                    pages,
                    plan(pools[0]),
                    round(statistics.median(new), 1),
                    round(statistics.median(known), 1),
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = [row._asdict() for row in measure(arguments.repeats)]
    for row in rows:
        print(json.dumps(row))
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
