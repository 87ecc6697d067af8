"""Tables of the performance page, made from the JSON that the benchmarks wrote; a file that is not there is said so."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PLACE = re.compile(r"<!-- table: ([a-z_0-9]+) ([\w.-]+\.json) -->")
PICTURE = re.compile(r"<!-- picture: ([\w.-]+\.png) ([^>]+) -->")
KERNELS_TABLE = Path(__file__).parents[2] / "benchmarks" / "kernels_table.py"

Figures = Mapping[str, Any]


def fill_tables(markdown: str, results: Path) -> str:
    """Replace each ``<!-- table: NAME FILE.json -->`` by that table of a file in ``results``.

    Raises
    ------
    KeyError
        No table has the name.
    """

    def table(found: re.Match[str]) -> str:
        make, file = TABLES[found[1]], results / found[2]
        if not file.exists():
            return f"*Not measured yet: `benchmarks/results/{file.name}` is not there.*"
        return make(file)

    return PLACE.sub(table, markdown)


def place_pictures(markdown: str, results: Path) -> str:
    """Replace each ``<!-- picture: FILE.png WHAT IT SHOWS -->`` by that picture of ``results``, if it is there."""

    def picture(found: re.Match[str]) -> str:
        return f"![{found[2]}](results/{found[1]})" if (results / found[1]).exists() else ""

    return PICTURE.sub(picture, markdown)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Make a Markdown table; all but the first column are aligned to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, rule, *rows))


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def kernels_targets(file: Path) -> str:
    """Worst case of each aim of the kernels."""
    module, report = _kernels(file)
    return f"{_environment(report.environment)}\n\n{module.targets_table(report)}"


def kernels_quota(file: Path) -> str:
    """Bandwidth by CTAs, and what it costs compute meanwhile."""
    module, report = _kernels(file)
    return str(module.quota_table(report))


def kernels_losses(file: Path) -> str:
    """Cost of loads to the model next to them, by path."""
    module, report = _kernels(file)
    return str(module.loss_table(report))


def _kernels(file: Path) -> tuple[ModuleType, Any]:
    spec = importlib.util.spec_from_file_location(KERNELS_TABLE.stem, KERNELS_TABLE)
    if spec is None or spec.loader is None:
        raise ImportError(f"{KERNELS_TABLE} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module, module.Report.from_json(file.read_text(encoding="utf-8"))


def _environment(environment: Mapping[str, str]) -> str:
    return "Measured on: " + ", ".join(f"{name} {value}" for name, value in environment.items()) + "."


def pinning(file: Path) -> str:
    """Seconds to allocate and pin, by method."""
    found: Figures = _read(file)
    seconds, of_torch = found["median_seconds"], found["of_torch"]
    head = ("method", "seconds", "of torch", "GB/s of a copy from it")
    rows = [
        (name, f"{seconds[name]:.2f}", f"{of_torch[name]:.2f}", f"{found['runs'][name][0]['gb_per_s']:.1f}")
        for name in seconds
    ]
    where = f"{found['device']}, {found['cores']} cores, torch {found['torch']}, kernel {found['kernel']}"
    return f"{found['bytes'] / 1e9:.1f} GB on {where}:\n\n{table(head, rows)}"


def fragmentation(file: Path) -> str:
    """Pages a run in the second half of the trace, by strategy."""
    rows = [
        (
            "one a request" if each["node_blocks"] is None else f"{each['node_blocks']} blocks",
            each["strategy"],
            f"{each['runs']:,}",
            f"{each['pages_per_run']:.1f}",
        )
        for each in _read(file)["results"]
    ]
    return table(("nodes of the tree", "strategy", "runs", "pages a run"), rows)


def extents(file: Path) -> str:
    """Time of a call of the allocator."""
    found: Figures = _read(file)
    rows = [
        (
            f"{each['scenario'].replace('_', ' ')}, page size {each['page_size']}",
            f"{each['free_runs']:,}",
            f"{each['alloc_median_us']:.0f}",
            f"{each['free_median_us']:.0f}",
            each["bytes_per_page"],
        )
        for each in found["results"]
    ]
    head = ("pool before", "free runs", "alloc, us", "free, us", "bytes a page")
    return f"{found['pages']:,} pages, {found['pages_per_call']} a call, medians:\n\n{table(head, rows)}"


def tree(file: Path) -> str:
    """Time of a match and an insert against the size of the tree."""
    found: Figures = _read(file)
    rows = [
        (f"{each['tokens']:,}", f"{each['nodes']:,}", f"{each['match_ms']:.3f}", f"{each['insert_ms']:.3f}")
        for each in found["against_size"]
    ]
    long_prompt = found["long_prompt"]
    return (
        f"{table(('tokens in the tree', 'nodes', 'match, ms', 'insert, ms'), rows)}\n\n"
        f"Match and insert of 32,768 tokens, half of them cached: {long_prompt['median_ms']:.2f} ms median, "
        f"{long_prompt['p99_ms']:.2f} ms at the 99th percentile."
    )


def replay(file: Path) -> str:
    """Show the requests a second of the bookkeeping, and where blocks came from."""
    found: Figures = _read(file)
    counts = ("requests", "blocks", "l1_hits", "l2_hits", "l3_hits")
    rows = [
        (name, *(f"{found[name][key]:,}" for key in counts), f"{found[name]['requests_per_second']:,.0f}")
        for name in ("unbounded", "evicting")
    ]
    head = ("tiers", "requests", "blocks", "L1 hits", "L2 hits", "L3 hits", "requests/s")
    return f"Python {found['python']}, {found['cores']} cores:\n\n{table(head, rows)}"


def storage(file: Path) -> str:
    """File storage against dd in the same run."""
    found: Figures = _read(file)
    rows = [
        (
            f"{_WHAT[each['what']]}, {each['state']}, {_MEMORY[each['own_memory']]}",
            f"{each['dd_gb_s']:.2f}",
            f"{each['storage_gb_s']:.2f}",
            f"{each['storage_ratio']:.2f}",
            f"{each['plain_ratio']:.2f}" if "plain_ratio" in each else "",
            f"{each['dd_cpu_us']:.0f}",
            f"{each['storage_cpu_us']:.0f}",
        )
        for each in found["against_dd"]
    ]
    head = ("what, page cache", "dd, GB/s", "storage", "ratio", "plain reads", "CPU us a MB, dd", "storage")
    machine, load = found["machine"], found["load_average"][0]
    opened = found["open"]
    return (
        f"{machine['cores']} cores under a load of {load:.1f}, Linux {machine['kernel']}; medians:\n\n"
        f"{table(head, rows)}\n\nOpening {opened['pages']:,} pages: {opened['seconds']} s."
    )


_WHAT = {"read": "read", "write": "write new files", "replacing": "replace files"}
_MEMORY = {True: "memory of its own", False: "one buffer a thread"}


def engine(file: Path) -> str:
    """Show the time to first token over the prompt length, and its ratios."""
    found: Figures = _read(file)
    options, times = found["options"], found["times"]
    shown = {
        "prefill": "computed anew",
        "offloaded": "offloaded cache",
        "l3": "L3",
        "l2": "L2",
        "l1": "L1",
        "load_seconds": "the load alone",
        "copy": "plain copy",
    }
    ratios = {"prefill_over_l2": "anew / L2", "l2_over_bound": "L2 / larger of copy and L1", "l3_over_l2": "L3 / L2"}
    rows = [
        (
            f"{each['prompt']:,}",
            each["load_path"],
            *(_figure(each[name], 1e3) for name in shown),
            *(_figure(each[name], 1) for name in ratios),
        )
        for each in times
    ]
    what = (
        f"A random-weight model of {options['parameters'] / 1e9:.2f} billion parameters in {options['dtype']}, "
        f"{options['token_bytes']:,} bytes a token, pages of {options['page_size']} tokens; milliseconds, medians."
    )
    head = ("prompt", "loads", *shown.values(), *ratios.values())
    return f"{_environment(found['environment'])} {what}\n\n{table(head, rows)}"


def _figure(value: float | None, scale: float) -> str:
    return "" if value is None else f"{scale * value:.2f}"


def submission(file: Path) -> str:
    """Show the time the caller's thread spends on a submission."""
    found: Figures = _read(file)
    rows = [
        (
            f"{each['pool']}, rows of {each['row_bytes']}, {each['layers']} layers",
            each["page_size"],
            each["layout"],
            each["device_indices"],
            each["write_back_submission_ms_median"],
            each["load_back_submission_ms_median"],
        )
        for each in found["rows"]
    ]
    head = ("pool", "page size", "layout", "device indices on", "write-back, ms", "load-back, ms")
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    return f"Measured on: {machine}. Medians of {found['rounds']}:\n\n{table(head, rows)}"


def planning(file: Path) -> str:
    """Time that planning an operation takes, by what the pool has planned before."""
    found: Figures = _read(file)
    rows = [
        (
            each["rows"],
            each["direction"].replace("_", "-"),
            each["pages"],
            each["path"],
            each["new_us"],
            each["known_us"],
        )
        for each in found["rows"]
    ]
    head = ("rows, layers, planes", "operation", "pages of 16 slots", "path", "a new shape, us", "a known one, us")
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    return f"Measured on: {machine}.\n\n{table(head, rows)}"


TABLES: Mapping[str, Callable[[Path], str]] = {
    "kernels_targets": kernels_targets,
    "kernels_quota": kernels_quota,
    "kernels_losses": kernels_losses,
    "pinning": pinning,
    "fragmentation": fragmentation,
    "extents": extents,
    "tree": tree,
    "replay": replay,
    "storage": storage,
    "engine": engine,
    "submission": submission,
    "planning": planning,
}
"""Tables by name."""
