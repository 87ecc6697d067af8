"""One picture of a report: bandwidth by page size, and what transfers cost the compute next to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..staging import Direction
from .cases import Pattern
from .report import Report

COLOURS = {"staged": "#0072b2", "direct": "#d55e00", "auto": "#009e73"}
MARKERS = {Pattern.RUN: "o", Pattern.RUNS_OF_16: "s", Pattern.SCATTERED: "x"}


def plot_report(report: Report, path: Path) -> None:
    """Draw a report into a file whose ending names the format.

    Raises
    ------
    ModuleNotFoundError
        Where matplotlib is missing: install ``hicache-kernels[bench]``.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: install hicache-kernels[bench]") from error
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    for axis, direction in zip(axes, Direction, strict=False):
        _draw_bandwidth(axis, report, direction)
    _draw_disturbances(axes[2], report)
    figure.suptitle(f"{report.environment['device']}, {report.environment['time']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _draw_bandwidth(axis: Any, report: Report, direction: Direction) -> None:
    for policy, colour in COLOURS.items():
        for pattern, marker in MARKERS.items():
            points = [
                (result.case.page_bytes / 1024, result.measurement.ratio)
                for result in report.cases
                if result.measurement.path != "none"
                and (result.case.policy, result.case.pattern, result.case.direction) == (policy, pattern, direction)
                and result.case.block_quota is None
            ]
            if points:
                # Auto covers the path it takes, so it is drawn as a ring around it.
                hollow = {"facecolors": "none"} if policy == "auto" and marker != "x" else {}
                size = 60 if policy == "auto" else 22
                label = f"{policy}, {pattern.value}"
                axis.scatter(*zip(*points, strict=True), s=size, marker=marker, color=colour, label=label, **hollow)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, 1.08)
    axis.set_xlabel("page, KiB")
    axis.set_ylabel("share of a plain pinned copy")
    axis.set_title(direction.value.replace("_", "-"))
    if axis.collections:
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=3)


def _draw_disturbances(axis: Any, report: Report) -> None:
    for workload, line in (("prefill", "-"), ("decode", "--")):
        for direction, colour in zip(Direction, ("#cc79a7", "#56b4e9"), strict=True):
            found = [
                d
                for d in report.disturbances
                if (d.workload, d.case.direction, d.case.pattern) == (workload, direction, Pattern.RUN)
            ]
            label = f"{workload}, {direction.value.replace('_', '-')}"
            direct = sorted((d.case.block_quota or 0, d.slowdown, d.ratio) for d in found if d.case.policy == "direct")
            if direct:
                axis.plot(
                    [ratio for _, _, ratio in direct],
                    [s for _, s, _ in direct],
                    line,
                    marker=".",
                    color=colour,
                    label=label,
                )
                for quota, slowdown, ratio in direct:
                    axis.annotate(str(quota), (ratio, slowdown), fontsize=7)
            for staged in (d for d in found if d.case.policy == "staged"):
                axis.scatter([staged.ratio], [staged.slowdown], marker="*", s=90, color=colour)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_xlabel("bandwidth of the transfer during the graph")
    axis.set_ylabel("time of the graph / its time alone")
    axis.set_title("graphs: direct by CTAs, staged as stars")
    if report.disturbances:
        axis.legend(fontsize=7)
