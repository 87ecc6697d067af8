"""Writes the tables of the kernels' README from the JSON that ``hicache-kernels bench`` wrote.

python benchmarks/kernels_table.py benchmarks/results/h200.json            # rewrites the README
python benchmarks/kernels_table.py benchmarks/results/h200.json --check    # fails where it is not up to date
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hicache_kernels import Direction
from hicache_kernels.bench.cases import Pattern
from hicache_kernels.bench.report import Report
from hicache_kernels.bench.targets import Target, evaluate_targets

README = Path(__file__).parents[1] / "packages" / "hicache-kernels" / "README.md"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:], ""])


def target_row(target: Target, idle: Target) -> list[str]:
    worst = "not measured" if target.worst is None else f"{target.worst:.3f}"
    aim = f"{'at least' if target.at_least else 'at most'} {target.limit:g}"
    differs = idle.worst is not None and idle.worst != target.worst
    return [target.what, aim, worst, f"{target.missed} of {target.of}", f"{idle.worst:.3f}" if differs else ""]


def targets_table(report: Report) -> str:
    head = ("what", "aim", "worst", "cases that miss", "worst from an idle device")
    return table(head, map(target_row, evaluate_targets(report), evaluate_targets(from_idle(report))))


def from_idle(report: Report) -> Report:
    """Report whose bandwidths have the time in them that the thread needs before the device has work."""
    cases = [
        replace(result, measurement=replace(result.measurement, ratio=result.measurement.idle_ratio))
        for result in report.cases
    ]
    return replace(report, cases=cases)


def quota_table(report: Report) -> str:
    """Bandwidth and disturbance by CTAs, and of plain copies and the staged path, which hold none of them."""
    runs = [d for d in report.disturbances if d.case.pattern is Pattern.RUN]
    ways = sorted({(d.case.policy, d.case.block_quota) for d in runs}, key=lambda way: (way[0], way[1] or 0))
    shown = {(d.case.policy, d.case.block_quota, d.workload, d.case.direction): f"{d.slowdown:.2f}" for d in runs}
    rows = []
    for policy, quota in ways:
        idle = [idle_share(report, policy, quota, direction) for direction in (Direction.WRITE_BACK, Direction.LOAD)]
        disturbed = [
            shown.get((policy, quota, workload, direction), "")
            for direction in (Direction.WRITE_BACK, Direction.LOAD)
            for workload in ("prefill", "decode")
        ]
        rows.append([way_name(policy, quota), *idle, *disturbed])
    graphs = [f"{workload} during {way}" for way in ("D2H", "H2D") for workload in ("prefill", "decode")]
    return table(("transfer", "D2H", "H2D", *graphs), rows)


def way_name(policy: str, quota: int | None) -> str:
    return policy if quota is None else f"{policy}, {quota} CTA{'s' * (quota != 1)}"


def loss_table(report: Report) -> str:
    """Write what loads of several pools cost a model, by path."""
    found = {(d.case, d.workload): d for d in report.disturbances if d.case.pattern is not Pattern.RUN}
    alone = {result.case: result.measurement for result in report.cases}
    rows = []
    for case in dict.fromkeys(case for case, _ in found):
        during = {workload: found[case, workload] for workload in ("prefill", "decode")}
        path = during["decode"].path
        idle = alone.get(case)
        shape = f"{case.shape.row_bytes} x {case.shape.layers}, page {case.page_size}"
        rows.append([
            f"{shape}, {case.pattern.value}, {case.layout.value}",
            way_name(case.policy, case.block_quota) + (f" ({path})" if case.policy == "auto" else ""),
            "" if idle is None else f"{idle.ratio:.2f}",
            f"{during['prefill'].of_plain:.2f}",
            f"{during['decode'].slowdown:.2f}",
            f"{during['decode'].ratio:.2f}",
            "" if idle is None else f"{idle.submit_seconds * 1e3:.2f}",
        ])  # fmt: skip
    head = (
        "pool",
        "transfer",
        "alone",
        "prefill, of a plain copy's",
        "decode, of its time alone",
        "bus next to decode",
    )
    return table((*head, "caller, ms"), rows)


def idle_share(report: Report, policy: str, quota: int | None, direction: Direction) -> str:
    """Share of a plain copy with no compute next to it: the quota's own case, or the worst run of the staged grid."""
    ratios = [
        result.measurement.ratio
        for result in report.cases
        if (result.case.policy, result.case.block_quota, result.case.direction) == (policy, quota, direction)
        and result.case.layer_by_layer
        and result.measurement.path == policy
        and (quota is not None or result.case.pattern.value == "run")
    ]
    return f"{min(ratios):.2f}" if ratios else ""


def fill(text: str, name: str, content: str) -> str:
    """Put a table between the comments that mark its place.

    Raises
    ------
    ValueError
        Where the text has no such place, or several.
    """
    place = re.compile(rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if len(place.findall(text)) != 1:
        raise ValueError(f"the text has {len(place.findall(text))} places for the table {name!r}; it must have one")
    return place.sub(lambda found: found[1] + content + found[2], text)


def filled(text: str, report: Report) -> str:
    tables = {"targets": targets_table, "quota": quota_table, "losses": loss_table}
    for name, make in tables.items():
        text = fill(text, name, make(report))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--check", action="store_true", help="change nothing, fail where something would change")
    options = parser.parse_args()
    before = options.readme.read_text(encoding="utf-8")
    after = filled(before, Report.from_json(options.report.read_text(encoding="utf-8")))
    if options.check and before != after:
        raise SystemExit(f"{options.readme} is not up to date: run this without --check")
    if not options.check:
        options.readme.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
