"""File storage against ``dd bs=1M``: pages written and read one after the other, checksums on, in the same cache state.

``cached``: writes end in the page cache, reads come out of it. ``disk``: writes end with a sync of the file system
and reads start with the files dropped from the page cache. dd moves everything through one buffer of 1 MB, which stays
in the CPU's cache; ``own_memory`` false does the same with one page a thread, ``own_memory`` true moves every byte to
and from memory of its own, as a cache does, and so measures memory bandwidth too.

Where other programs use the machine, wall-clock rates say little: ``cpu_us`` is the CPU time of both for a megabyte.

Run: python benchmarks/storage_file.py --directory DIR --output benchmarks/results/storage_file.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from hicache_controller.storage import FileStorage, Fingerprint

MB = 1 << 20


@dataclass(frozen=True)
class Geometry:
    layout: str = "page_first"
    page_size: int = 1


class Pool:
    """Pages of one buffer, every one of them touched."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.page_num, self.page_size, self.page_bytes, self.geometry = pages, 1, page_bytes, Geometry()
        self.buffer = torch.empty(pages * page_bytes, dtype=torch.uint8).random_(0, 255)
        self._memory = memoryview(self.buffer.numpy())  # type: ignore[arg-type]

    def page_memory(self, page: int) -> tuple[memoryview, ...]:
        return (self._memory[page * self.page_bytes : (page + 1) * self.page_bytes],)


def sync(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        subprocess.run(["sync", "-f", str(directory)], check=True)
    finally:
        os.close(file)


def drop(paths: list[Path]) -> None:
    """Drop files from the page cache; they are clean."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


class Time(NamedTuple):
    """Seconds of the wall clock and of all CPUs."""

    wall: float
    cpu: float


def used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def timed(work: Callable[[], object]) -> Time:
    start, cpu = time.perf_counter(), used(resource.RUSAGE_SELF)
    work()
    return Time(time.perf_counter() - start, used(resource.RUSAGE_SELF) - cpu)


def dd(arguments: list[str]) -> Time:
    """Time as dd itself counts it, without its start; CPU time with its start, about a millisecond."""
    before = used(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["dd", "bs=1M", *arguments], check=True, capture_output=True, text=True, env={"LC_ALL": "C"})
    found = re.search(r"copied, ([0-9.e+-]+) s", done.stderr)
    if found is None:
        raise RuntimeError(f"dd said {done.stderr!r}")
    return Time(float(found[1]), used(resource.RUSAGE_CHILDREN) - before)


def dd_run(directory: Path, count: int, state: str) -> tuple[Time, Time]:
    path = directory / "dd"
    sync(directory)
    flush = ["conv=fsync"] if state == "disk" else []
    write = dd(["if=/dev/zero", f"of={path}", f"count={count}", *flush])
    sync(directory)
    if state == "disk":
        drop([path])
    read = dd([f"if={path}", "of=/dev/null"])
    path.unlink()
    return write, read


def storage_run(
    directory: Path, pages: int, page_bytes: int, own_memory: bool, state: str, threads: int
) -> tuple[Time, Time]:
    # Nothing is removed between runs: making files where many were just removed is slow on some file systems.
    storage = FileStorage(directory / "storage", fingerprint=Fingerprint("benchmark", "1"), threads=threads)
    pool = Pool(pages if own_memory else threads, page_bytes)
    storage.register_mem_pool_host(pool)
    keys = [os.urandom(16) for _ in range(pages)]
    batch = max(1, min(pages, 64 * MB // page_bytes, 256))
    indices = torch.arange(pages)
    if not own_memory:  # a batch is cut into one slice a thread
        indices = indices % batch * threads // batch

    def write() -> None:
        for start in range(0, pages, batch):
            part = keys[start : start + batch]
            parents = [keys[start - 1] if start else None, *part[:-1]]
            stored = storage.batch_set(part, indices[start : start + batch], parents=parents)
            if not all(stored):
                raise RuntimeError("a page was not stored")
        if state == "disk":
            sync(directory)

    def read() -> None:
        for start in range(0, pages, batch):
            if not all(storage.batch_get(keys[start : start + batch], indices[start : start + batch])):
                raise RuntimeError("a page was not loaded")

    sync(directory)
    written = timed(write)
    sync(directory)
    if state == "disk":
        drop([Path(storage.page_path(key)) for key in keys])
    loaded = timed(read)
    storage.close()
    return written, loaded


def compare(
    directory: Path, megabytes: int, own_memory: bool, state: str, threads: int, runs: int
) -> dict[str, object]:
    """Run dd and storage in turn; the best rate of each (what others do to the machine only slows), and medians."""
    rates: dict[str, list[float]] = {"dd_write": [], "dd_read": [], "storage_write": [], "storage_read": []}
    cpu: dict[str, list[float]] = {name: [] for name in rates}
    for _ in range(runs):
        for name, (write, read) in (
            ("dd", dd_run(directory, megabytes, state)),
            ("storage", storage_run(directory, megabytes, MB, own_memory, state, threads)),
        ):
            for what, taken in ((f"{name}_write", write), (f"{name}_read", read)):
                rates[what].append(megabytes * MB / taken.wall / 1e9)
                cpu[what].append(taken.cpu / megabytes * 1e6)
    row: dict[str, object] = {"state": state, "own_memory": own_memory, "threads": threads, "megabytes": megabytes}
    row |= {f"{name}_gb_s_best": round(max(values), 3) for name, values in rates.items()}
    row |= {f"{name}_gb_s_median": round(statistics.median(values), 3) for name, values in rates.items()}
    row |= {f"{name}_cpu_us_a_mb": round(statistics.median(values)) for name, values in cpu.items()}
    for what in ("write", "read"):
        ours, theirs = rates[f"storage_{what}"], rates[f"dd_{what}"]
        row[f"{what}_ratio_of_best"] = round(max(ours) / max(theirs), 3)
        row[f"{what}_ratio_median"] = round(statistics.median(s / d for s, d in zip(ours, theirs, strict=True)), 3)
    return row


def small_pages(directory: Path, page_bytes: int, pages: int, threads: int, runs: int) -> dict[str, object]:
    results = [storage_run(directory, pages, page_bytes, True, "cached", threads) for _ in range(runs)]
    written, read = (statistics.median(r[i].wall for r in results) for i in range(2))
    cpu = [statistics.median(r[i].cpu for r in results) / pages * 1e6 for i in range(2)]
    return {
        "page_bytes": page_bytes,
        "threads": threads,
        "written_pages_s": round(pages / written),
        "read_pages_s": round(pages / read),
        "written_cpu_us_a_page": round(cpu[0], 1),
        "read_cpu_us_a_page": round(cpu[1], 1),
    }


def full(directory: Path, page_bytes: int, pages: int) -> dict[str, object]:
    """Pages written a second once the capacity is reached, so that each replaces another."""
    files = page_bytes + 4096
    with_open = FileStorage(directory / "full", fingerprint=Fingerprint("benchmark", "1"), capacity_bytes=pages * files)
    pool, indices = Pool(256, page_bytes), torch.arange(256)
    with_open.register_mem_pool_host(pool)

    def fill(count: int) -> None:
        for _ in range(0, count, 256):
            keys = [os.urandom(16) for _ in range(256)]
            if not all(with_open.batch_set(keys, indices, parents=[None, *keys[:-1]])):
                raise RuntimeError("a page was not stored")

    fill(pages)
    taken = timed(lambda: fill(pages))
    evicted = with_open.stats().evicted
    with_open.clear()
    with_open.close()
    return {
        "page_bytes": page_bytes,
        "pages": pages,
        "written_pages_s": round(pages / taken.wall),
        "written_cpu_us_a_page": round(taken.cpu / pages * 1e6, 1),
        "evicted": evicted,
    }


def opening(directory: Path, pages: int) -> dict[str, object]:
    pool = Pool(256, 64)
    indices = torch.arange(256)
    storage = FileStorage(directory / "open", fingerprint=Fingerprint("benchmark", "1"))
    storage.register_mem_pool_host(pool)
    for _ in range(pages // 256):
        storage.batch_set([os.urandom(16) for _ in range(256)], indices)
    storage.close()
    again: list[FileStorage] = []
    seconds = timed(lambda: again.append(FileStorage(directory / "open", fingerprint=Fingerprint("benchmark", "1"))))
    found = again[0].stats().pages
    again[0].close()
    return {"pages": found, "seconds": round(seconds.wall, 2), "cpu_seconds": round(seconds.cpu, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where to write; on the medium to measure")
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[8])
    parser.add_argument("--states", nargs="+", default=["cached", "disk"])
    parser.add_argument("--open-pages", type=int, default=100_000)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as top:
        directory = Path(top)
        rows = []
        for state in arguments.states:
            for threads in arguments.threads:
                for own_memory in (False, True):
                    rows.append(compare(directory, arguments.megabytes, own_memory, state, threads, arguments.runs))
                    print(json.dumps(rows[-1]))
        small = [small_pages(directory, size, 8192, 8, 3) for size in (4096, 65536)]
        print(json.dumps(small))
        replacing = [full(directory, 4096, 8192), full(directory, MB, 512)]
        print(json.dumps(replacing))
        opened = opening(directory, arguments.open_pages) if arguments.open_pages else None
        print(json.dumps(opened))
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()},
        "load_average": os.getloadavg(),
        "against_dd": rows,
        "small_pages": small,
        "replacing": replacing,
        "open": opened,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
