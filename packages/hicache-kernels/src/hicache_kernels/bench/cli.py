"""``hicache-kernels bench``: runs the benchmark, prints tables, writes JSON and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

from .cases import direct_grid, grid, quick_grid, quota_grid
from .plot import plot_report
from .report import Report, run_benchmark, write_report
from .targets import evaluate_targets

console = Console()
errors = Console(stderr=True)


def bench(
    device: Annotated[str, typer.Option(help="Device to measure; the GPU if there is one.")] = "",
    mib: Annotated[int, typer.Option(min=1, help="MiB of an operation.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Measured repetitions of each.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A small part of the grid.")] = False,
    interference: Annotated[bool, typer.Option(help="Measure compute beside transfers.")] = True,
    build: Annotated[bool, typer.Option("--build", help="Time a build of both modules on two cores.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here; needs matplotlib.")] = None,
    show: Annotated[Path | None, typer.Option(help="Measure nothing: show a report written before.")] = None,
) -> None:
    """Measure transfers as shares of a plain copy, and graphs of matrix products beside them."""
    if show is not None:
        report = Report.from_json(show.read_text())
    else:
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        cases = (*quick_grid(), *direct_grid((128, 2048))) if quick else (*grid(), *direct_grid(), *quota_grid())
        size = mib << 20
        with errors.status("starting") as status:
            report = run_benchmark(
                [case for case in cases if case.page_bytes <= size],
                device=where,
                size=size,
                repeats=repeats,
                interference=interference,
                build=build,
                progress=status.update,
            )
    show_report(report, console)
    if json_path is not None:
        write_report(report, json_path)
    if plot is not None:
        try:
            plot_report(report, plot)
        except ModuleNotFoundError as error:
            errors.print(f"[red]error:[/] {error}", soft_wrap=True)
            raise typer.Exit(1) from error


def show_report(report: Report, to: Console) -> None:
    """Print the tables of a report."""
    plain = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in report.plain_bytes_per_second.items())
    to.print(
        f"{report.environment['device']}: a plain copy moves {plain}; the planner goes by constants "
        f"{report.constants.source}",
        soft_wrap=True,
    )
    table = Table(
        "rows",
        "page",
        "layout",
        "pages",
        "direction",
        "policy",
        "path",
        Column("ratio", justify="right"),
        Column("idle", justify="right"),
        Column("busy, ms", justify="right"),
        Column("released", justify="right"),
        Column("first layer", justify="right"),
        title="transfers, as shares of a plain copy",
    )
    for result in report.cases:
        case, measured = result.case, result.measurement
        table.add_row(
            f"{case.shape.row_bytes} x {case.shape.layers} x {case.shape.planes}",
            f"{case.page_size}, {case.page_bytes >> 10} KiB",
            case.layout.value,
            case.pattern.value,
            case.direction.value,
            case.policy if case.block_quota is None else f"{case.policy}, {case.block_quota} CTAs",
            measured.path,
            f"{measured.ratio:.3f}",
            f"{measured.idle_ratio:.3f}",
            f"{measured.submit_seconds * 1e3:.2f}",
            f"{measured.release_share:.2f}",
            f"{measured.first_layer_share * case.shape.layers:.2f} / {case.shape.layers}",
        )
    to.print(table)
    if report.disturbances:
        beside = Table(
            "graph",
            "direction",
            "path",
            Column("CTAs", justify="right"),
            Column("time", justify="right"),
            Column("ratio", justify="right"),
            title="graphs beside transfers",
        )
        for d in report.disturbances:
            quota = "" if d.block_quota is None else str(d.block_quota)
            beside.add_row(d.workload, d.direction.value, d.policy, quota, f"x {d.slowdown:.3f}", f"{d.ratio:.3f}")
        to.print(beside)
    targets = Table("target", "limit", "worst", "missed", Column("where", overflow="fold"), title="targets")
    for target in evaluate_targets(report):
        sign = ">=" if target.at_least else "<="
        worst = "" if target.worst is None else f"{target.worst:.3f}"
        colour = {True: "green", False: "red", None: "dim"}[target.holds]
        missed = f"{target.missed} of {target.of}"
        targets.add_row(target.what, f"{sign} {target.limit}", f"[{colour}]{worst}[/]", missed, target.where)
    to.print(targets)
