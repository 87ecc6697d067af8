"""``hicache-kernels bench``: runs the benchmark, prints tables, writes JSON and a picture."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from .command_line import (
    CommandError,
    check_device,
    check_output,
    check_plot,
    errors,
    find_device,
    output,
    read_json,
    write_output,
)

if TYPE_CHECKING:
    from .bench import Report


def bench(
    device: Annotated[str | None, typer.Option(help="Device to measure; the GPU if there is one.")] = None,
    mib: Annotated[int, typer.Option(min=1, help="MiB of an operation.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="Measured repetitions of each.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="A small part of the grid.")] = False,
    interference: Annotated[bool, typer.Option(help="Measure compute during transfers.")] = True,
    build: Annotated[bool, typer.Option("--build", help="Time a build of both modules on two cores.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture here; needs matplotlib.")] = None,
    show: Annotated[Path | None, typer.Option(help="Measure nothing: show a report written before.")] = None,
) -> None:
    """Measure transfers as shares of a plain copy, and graphs of matrix products during them."""
    check_device(device)
    if json_path is not None:
        check_output("--json", json_path, show)
    if plot is not None:
        check_plot(plot, "hicache-kernels[bench]", show)
    if show is not None:
        report = _read_report(show)
    else:
        largest = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 22  # both directions have buffers
        if mib > largest:
            raise CommandError(f"--mib is {mib}; accepted is 1 to {largest}, a quarter of this machine's memory")
        report = _measure(device, mib << 20, repeats, quick=quick, interference=interference, build=build)
    show_report(report, output)
    if json_path is not None:
        write_output("--json", json_path, lambda path: path.write_text(report.to_json() + "\n"))
    if plot is not None:
        from .bench.plot import plot_report

        write_output("--plot", plot, lambda path: plot_report(report, path))


def _read_report(path: Path) -> Report:
    fields = read_json("--show", path)
    from .bench import Report

    try:
        return Report.from_json(json.dumps(fields))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CommandError(f"--show is {path}; that is not a report written by --json") from None


def _measure(device: str | None, size: int, repeats: int, *, quick: bool, interference: bool, build: bool) -> Report:
    where = find_device(device)
    from .bench import direct_grid, grid, quick_grid, run_benchmark
    from .bench.cases import PLAIN, Case, disturbing_cases, quota_grid

    cases: tuple[Case, ...] = (*quick_grid(), *direct_grid((128, 2048)))
    if not quick:
        disturbing = (case for case in disturbing_cases() if case.policy != PLAIN)
        cases = tuple(dict.fromkeys((*grid(), *direct_grid(), *quota_grid(), *disturbing)))
    with errors.status("starting") as status:
        return run_benchmark(
            [case for case in cases if case.page_bytes <= size],
            device=where,
            size=size,
            repeats=repeats,
            interference=interference,
            build=build,
            progress=status.update,
        )


def show_report(report: Report, to: Console) -> None:
    """Print the tables of a report."""
    plain = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in report.plain_bytes_per_second.items())
    to.print(
        f"{report.environment['device']}: a plain copy moves {plain}; the planner uses constants "
        f"{report.constants.source}",
        soft_wrap=True,
    )
    to.print(_transfer_table(report))
    if report.disturbances:
        to.print(_disturbance_table(report))
    to.print(_target_table(report))


def _transfer_table(report: Report) -> Table:
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
    return table


def _disturbance_table(report: Report) -> Table:
    from .bench.targets import describe

    table = Table(
        "graph",
        "transfer",
        "path",
        Column("time", justify="right"),
        Column("of plain copy", justify="right"),
        Column("ratio", justify="right"),
        title="graphs next to transfers",
    )
    for d in report.disturbances:
        figures = f"x {d.slowdown:.3f}", f"x {d.of_plain:.3f}", f"{d.ratio:.3f}"
        table.add_row(d.workload, describe(d.case), d.path, *figures)
    return table


def _target_table(report: Report) -> Table:
    from .bench import evaluate_targets

    table = Table("target", "limit", "worst", "missed", Column("where", overflow="fold"), title="targets")
    for target in evaluate_targets(report):
        sign = ">=" if target.at_least else "<="
        worst = "" if target.worst is None else f"{target.worst:.3f}"
        colour = {True: "green", False: "red", None: "dim"}[target.holds]
        missed = f"{target.missed} of {target.of}"
        table.add_row(target.what, f"{sign} {target.limit}", f"[{colour}]{worst}[/]", missed, target.where)
    return table
