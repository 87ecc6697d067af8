"""Check an installed platform wheel on a GPU: where its modules come from, first transfers, tests and the benchmark.

Everything runs with an empty cache, with no compiler on PATH and none named by the environment. Then the benchmark runs
in turns from the wheel and from a build for this machine (which needs the toolkit), and the shares of a plain copy are
held against each other. Options of pytest come from PYTEST_ADDOPTS, such as ``-n 14`` (with OMP_NUM_THREADS=1).

    python benchmarks/wheel_on_gpu.py --output OUT                  # all of it: about 6 minutes with 14 workers
    python benchmarks/wheel_on_gpu.py --output OUT --only modules first tests
    python benchmarks/wheel_on_gpu.py --output OUT --only compare --device cpu      # without a GPU
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = ("modules", "first", "tests", "compare")
ROUNDS = 6
LIMIT = 0.99
HOMES = ("CUDA_HOME", "CUDA_PATH", "CXX", "HICACHE_KERNELS_PREBUILT", "HICACHE_KERNELS_BUILD")
ORIGINS = """
import sys
from hicache_kernels.probe import load_outcome
found = {name: load_outcome(name, sys.argv[1]) for name in ("main", "staged")}
print({name: (each.origin, str(each.path), each.reason) for name, each in found.items()})
sys.exit(any(each.origin != sys.argv[2] for each in found.values()))
"""


def environment(cache: str, *, build: bool = False) -> dict[str, str]:
    """Return the environment of a step: an empty cache and, unless modules are to be built, no compiler."""
    if build:
        return {**os.environ, "HICACHE_KERNELS_CACHE": cache, "HICACHE_KERNELS_BUILD": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in HOMES}
    return {**kept, "HICACHE_KERNELS_CACHE": cache, "PATH": str(Path(sys.executable).parent / "nothing")}


def run(arguments: list[str], cache: str, *, build: bool = False) -> None:
    """Run Python, and stop where it fails."""
    print("$ python", *arguments[:6], flush=True)
    subprocess.run([sys.executable, *arguments], env=environment(cache, build=build), check=True)


def compare(device: str, out: Path, cache: str) -> dict[str, Any]:
    """Run the quick benchmark in turns from the wheel and from a build; their shares of a plain copy, case by case.

    The build runs twice a round: how far it is from itself says how far from it the wheel may be by chance.
    """
    shares: dict[str, dict[str, list[float]]] = {"wheel": {}, "built": {}, "built again": {}}
    origins = list(shares)
    for number in range(ROUNDS):
        first = number % len(origins)
        for origin in (*origins[first:], *origins[:first]):
            cases = shares[origin]
            path = out / f"bench_{origin.replace(' ', '_')}_{number}.json"
            flags = ["--device", device, "--quick", "--no-interference", "--json", str(path)]
            if device == "cpu":
                flags += ["--mib", "64"]
            run(["-m", "hicache_kernels", "bench", *flags], f"{cache}/{origin.split()[0]}", build=origin != "wheel")
            for result in json.loads(path.read_text())["cases"]:
                if result["case"]["policy"] == "auto":
                    continue  # may take another path by chance, which says nothing of the modules
                cases.setdefault(json.dumps(result["case"]), []).append(result["measurement"]["ratio"])
    medians = {
        case: {origin: statistics.median(cases[case]) for origin, cases in shares.items()} for case in shares["wheel"]
    }
    found: dict[str, Any] = {"device": device, "rounds": ROUNDS}
    for origin in ("wheel", "built again"):
        ratios = sorted(each[origin] / each["built"] for each in medians.values())
        found[f"{origin} over built"] = {
            "median": statistics.median(ratios),
            "worst": ratios[0],
            "best": ratios[-1],
            "cases below the limit": sum(ratio < LIMIT for ratio in ratios),
        }
    return {**found, "cases": [{**json.loads(case), **each} for case, each in medians.items()]}


def main() -> None:
    """Run the steps in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of the results")
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as cache:
        run(["-c", ORIGINS, given.device, "wheel"], cache)
        if "first" in given.only:
            report = str(given.output / "first_transfer.json")
            run([str(here / "first_transfer.py"), "--device", given.device, "--output", report], cache)
        if "tests" in given.only:
            run(["-m", "pytest", "-q", str(here.parent / "tests" / "gpu")], cache)
        if "compare" in given.only:
            run(["-c", ORIGINS, given.device, "built"], f"{cache}/built", build=True)
            found = compare(given.device, given.output, cache)
            (given.output / f"wheel_{given.device}.json").write_text(json.dumps(found, indent=1) + "\n")
            print({name: value for name, value in found.items() if name != "cases"})


if __name__ == "__main__":
    main()
