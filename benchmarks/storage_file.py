"""File storage against ``dd bs=1M``: pages of 1 MB written and read one after the other, checksums on.

Both do the same in turns, in the same cache state, and change who goes first; a ratio is the median over those pairs.
``cached``: reads come out of the page cache, writes end in it. ``disk``: reads begin with the files dropped from the
page cache, writes end with a sync. Writes make new files, or (``replacing``) replace the bytes
of files that are there: the storage is at its capacity, dd writes without truncating.

dd moves everything through one buffer of 1 MB, which stays in the CPU's cache. ``own_memory`` false does the same with
one page a thread; true moves every byte to and from memory of its own, touched before, as a cache does, and so measures
memory bandwidth too. ``plain`` shows how fast that can be: threads that only ``preadv`` the same files into the same
memory, and check nothing.

Other programs on the machine spoil the figures: dd needs one CPU for some milliseconds, the storage all of them. A turn
begins once the CPUs have been idle for a moment (or after ``--patience`` seconds anyway); ``quiet_pairs`` tells how
many did, and only these count where there are enough. Run it with ``nice -n -20`` where none ever does. ``cpu_us`` is
the CPU time of each for a megabyte.

ext4 makes files slowly for some minutes after many were removed near by, so nothing is removed before the end: that
takes a gigabyte for each pair of ``write`` (31 pairs: 33 GB). Do not run it twice within ten minutes.

Run: python benchmarks/storage_file.py --directory DIR --output benchmarks/results/storage_file.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from hicache_controller.storage import FileStorage, Fingerprint
from hicache_kernels.probe import load_outcome

MB = 1 << 20
BATCH = 64
"""Pages a call."""
ENOUGH_PAIRS = 9


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


def idle_share(seconds: float) -> float:
    """Share of all CPUs that is idle for so long."""

    def ticks() -> tuple[int, int]:
        values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        return values[3] + values[4], sum(values)

    before = ticks()
    time.sleep(seconds)
    after = ticks()
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def wait_until_idle(patience: float) -> bool:
    """Wait for the other programs to pause; tell whether they did."""
    deadline = time.monotonic() + patience
    while True:
        if idle_share(0.05) >= 0.9:
            return True
        if time.monotonic() >= deadline:
            return False


def dd(arguments: list[str]) -> Time:
    """Time as dd itself counts it, without its start; CPU time with its start, about a millisecond."""
    before = used(resource.RUSAGE_CHILDREN)
    done = subprocess.run(["dd", "bs=1M", *arguments], check=True, capture_output=True, text=True, env={"LC_ALL": "C"})
    found = re.search(r"copied, ([0-9.e+-]+) s", done.stderr)
    if found is None:
        raise RuntimeError(f"dd said {done.stderr!r}")
    return Time(float(found[1]), used(resource.RUSAGE_CHILDREN) - before)


class Files:
    """A dd file and a storage next to it, with keys of pages of 1 MB."""

    def __init__(
        self,
        directory: Path,
        megabytes: int,
        own_memory: bool,
        threads: int,
        patience: float,
        *,
        full: bool = False,
    ) -> None:
        self.patience = patience
        self.directory, self.megabytes, self.threads = directory, megabytes, threads
        self.dd_path = directory / "dd"
        fingerprint = Fingerprint("benchmark", "1")
        capacity = megabytes * (MB + 4096) if full else None
        self.storage = FileStorage(
            directory / "storage", fingerprint=fingerprint, threads=threads, capacity_bytes=capacity
        )
        self.pool = Pool(megabytes if own_memory else threads, MB)
        self.storage.register_mem_pool_host(self.pool)
        self.indices = torch.arange(megabytes) % self.pool.page_num
        self.keys: list[bytes] = []
        self.plain_threads = ThreadPoolExecutor(threads)
        self.dd_files = 0

    def write(self) -> None:
        """Store new pages, a chain, in batches as a backup does."""
        self.keys = [os.urandom(16) for _ in range(self.megabytes)]
        for start in range(0, self.megabytes, BATCH):
            keys = self.keys[start : start + BATCH]
            parents = [self.keys[start - 1] if start else None, *keys[:-1]]
            stored = self.storage.batch_set(keys, self.indices[start : start + BATCH], parents=parents)
            if not all(stored):
                raise RuntimeError("a page was not stored")

    def read(self) -> None:
        for start in range(0, self.megabytes, BATCH):
            keys = self.keys[start : start + BATCH]
            if not all(self.storage.batch_get(keys, self.indices[start : start + BATCH])):
                raise RuntimeError("a page was not loaded")

    def plain_read(self) -> None:
        """Read the files into the same memory, and nothing else."""

        left = iter(list(zip(self.paths, self.indices.tolist(), strict=True)))

        def some(_: int) -> None:
            for path, page in left:
                file = os.open(path, os.O_RDONLY)
                os.preadv(file, self.pool.page_memory(page), 0)
                os.close(file)

        list(self.plain_threads.map(some, range(self.threads)))

    @property
    def paths(self) -> list[str]:
        return [self.storage.page_path(key) for key in self.keys]

    def new_dd_file(self) -> None:
        self.dd_files += 1
        self.dd_path = self.directory / f"dd{self.dd_files}"

    def dd_write(self, *arguments: str) -> Time:
        return dd(["if=/dev/zero", f"of={self.dd_path}", f"count={self.megabytes}", *arguments])

    def dd_read(self) -> Time:
        return dd([f"if={self.dd_path}", "of=/dev/null"])

    def drop(self) -> None:
        drop([self.dd_path, *map(Path, self.paths)])

    def close(self) -> None:
        self.plain_threads.shutdown()
        self.storage.close()


def compare_reads(files: Files, state: str, pairs: int) -> dict[str, object]:
    files.write()
    files.dd_write()
    sync(files.directory)
    files.read()
    files.dd_read()
    ways = {"dd": files.dd_read, "storage": lambda: timed(files.read), "plain": lambda: timed(files.plain_read)}
    return in_turns(ways, files, pairs, before=files.drop if state == "disk" else lambda: None)


def compare_writes(files: Files, state: str, pairs: int) -> dict[str, object]:
    disk = state == "disk"

    def write() -> None:
        files.write()
        if disk:
            sync(files.directory)

    def leave() -> None:
        # Nothing is removed: making files where many were just removed is slow on some file systems. What was written
        # leaves the page cache, so that both find memory that was used before.
        sync(files.directory)
        if files.dd_path.exists():
            files.drop()
        files.new_dd_file()

    flush = ["conv=fsync"] if disk else []
    ways = {"dd": lambda: files.dd_write(*flush), "storage": lambda: timed(write)}
    return in_turns(ways, files, pairs, before=leave)


def compare_replacing(files: Files, state: str, pairs: int) -> dict[str, object]:
    disk = state == "disk"

    def write() -> None:
        files.write()
        if disk:
            sync(files.directory)

    files.write()
    files.dd_write()
    flush = ["conv=notrunc,fsync"] if disk else ["conv=notrunc"]
    ways = {"dd": lambda: files.dd_write(*flush), "storage": lambda: timed(write)}
    return in_turns(ways, files, pairs, before=lambda: sync(files.directory))


def in_turns(
    ways: dict[str, Callable[[], Time]], files: Files, pairs: int, before: Callable[[], None]
) -> dict[str, object]:
    """Run the ways one after the other, each first in its turn; medians of their rates and of the ratios to dd."""
    times: dict[str, list[Time]] = {name: [] for name in ways}
    quiet: list[bool] = []
    names = list(ways)
    for turn in range(pairs):
        start = turn % len(names)
        calm = []
        for name in names[start:] + names[:start]:
            before()
            calm.append(wait_until_idle(files.patience))
            times[name].append(ways[name]())
        quiet.append(all(calm))
    row: dict[str, object] = {
        "load_average": round(os.getloadavg()[0], 2),
        "pairs": pairs,
        "quiet_pairs": sum(quiet),
    }
    if sum(quiet) >= ENOUGH_PAIRS:
        times = {name: list(itertools.compress(taken, quiet)) for name, taken in times.items()}
    for name, taken in times.items():
        row[f"{name}_gb_s"] = round(statistics.median(files.megabytes * MB / time.wall / 1e9 for time in taken), 3)
        row[f"{name}_cpu_us"] = round(statistics.median(time.cpu for time in taken) / files.megabytes * 1e6, 1)
    for name in names[1:]:
        ratios = sorted(theirs.wall / ours.wall for ours, theirs in zip(times[name], times["dd"], strict=True))
        row[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        row[f"{name}_ratio_quartiles"] = [round(ratios[len(ratios) * part // 4], 3) for part in (1, 3)]
    return row


COMPARISONS = {"read": compare_reads, "write": compare_writes, "replacing": compare_replacing}


def compare(directory: Path, what: str, state: str, own_memory: bool, options: argparse.Namespace) -> dict[str, object]:
    threads, megabytes = options.threads, options.megabytes
    directory = directory / f"{what}-{state}-{own_memory}"
    directory.mkdir()
    files = Files(directory, megabytes, own_memory, threads, options.patience, full=what == "replacing")
    try:
        row = {"what": what, "state": state, "own_memory": own_memory, "threads": threads, "megabytes": megabytes}
        return row | COMPARISONS[what](files, state, options.pairs)
    finally:
        files.close()


def small_pages(directory: Path, page_bytes: int, pages: int, threads: int, runs: int) -> dict[str, object]:
    written, read = [], []
    for _ in range(runs):
        storage = FileStorage(directory / "small", fingerprint=Fingerprint("benchmark", "1"), threads=threads)
        pool, indices = Pool(pages, page_bytes), torch.arange(pages)
        storage.register_mem_pool_host(pool)
        keys = [os.urandom(16) for _ in range(pages)]
        written.append(timed(functools.partial(storage.batch_set, keys, indices, parents=[None, *keys[:-1]])))
        read.append(timed(functools.partial(storage.batch_get, keys, indices)))
        storage.close()
    return {
        "page_bytes": page_bytes,
        "threads": threads,
        "written_pages_s": round(pages / statistics.median(time.wall for time in written)),
        "read_pages_s": round(pages / statistics.median(time.wall for time in read)),
        "written_cpu_us_a_page": round(statistics.median(time.cpu for time in written) / pages * 1e6, 1),
        "read_cpu_us_a_page": round(statistics.median(time.cpu for time in read) / pages * 1e6, 1),
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
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--patience", type=float, default=1.0)
    parser.add_argument("--states", nargs="+", default=["cached", "disk"])
    parser.add_argument("--what", nargs="+", default=list(COMPARISONS))
    parser.add_argument("--open-pages", type=int, default=100_000, help="0 compares with dd, and nothing else")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    reads = load_outcome("files", "cpu")  # a storage would load it in the background, and read in Python until then
    with tempfile.TemporaryDirectory(dir=arguments.directory) as top:
        directory = Path(top)
        rows = []
        for what in arguments.what:
            for state in arguments.states:
                for own_memory in (False, True):
                    rows.append(compare(directory, what, state, own_memory, arguments))
                    print(json.dumps(rows[-1]), flush=True)
        others: dict[str, object] = {}
        if arguments.open_pages:
            others["small_pages"] = [small_pages(directory, size, 8192, 8, 3) for size in (4096, 65536)]
            others["replacing"] = [full(directory, 4096, 8192), full(directory, MB, 512)]
            others["open"] = opening(directory, arguments.open_pages)
            print(json.dumps(others))
    result = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "kernel": platform.release()},
        "load_average": os.getloadavg(),
        "nice": os.nice(0),
        "reads": "in Python" if reads.reason else "compiled",
        "against_dd": rows,
        **others,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
