"""Times `hicache replay TRACE --no-data`, one page a block, as a whole process: seconds, memory, hits. Writes JSON.

Processor seconds are given next to the seconds that passed, and so is the load: other programs on the machine show.

python benchmarks/replay_bookkeeping.py TRACE --output benchmarks/results/replay_bookkeeping.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS = ("process_seconds", "processor_seconds", "replay_seconds")
SIZES = {"unbounded": ("100%", "100%"), "evicting": ("5%", "10%")}


def measure(trace: Path, l1: str, l2: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        arguments = ["replay", str(trace), "--no-data", "--page-size", "512", "--l1-pages", l1, "--l2-pages", l2]
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "hicache_controller.tools.cli", *arguments, "--json", str(figures)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        report = json.loads(figures.read_text())["report"]
    kept = ("requests", "blocks", "hits", "l1_hits", "l2_hits", "l3_hits")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = {"process_seconds": wall, "processor_seconds": processor, "replay_seconds": report["seconds"]}
    return seconds | {name: report[name] for name in kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, object] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }
    for name, sizes in SIZES.items():
        runs = [measure(arguments.trace, *sizes) for _ in range(arguments.rounds)]
        median = {key: statistics.median(run[key] for run in runs) for key in SECONDS}
        results[name] = runs[0] | median | {"requests_per_second": runs[0]["requests"] / median["replay_seconds"]}
    # Of the largest child, in KiB on Linux.
    results["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    text = json.dumps(results, indent=2) + "\n"
    if arguments.output:
        arguments.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
