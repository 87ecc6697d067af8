"""The command line of hicache-pools: reports on how its allocator behaves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from hicache_kernels.command_line import CommandError, CommandGroup, check_output, check_plot, show, write_output

from .trace import read_trace

if TYPE_CHECKING:
    from .fragmentation import Fragmentation, FragmentationReport

MAX_PAGES = 1 << 24

app = typer.Typer(name="hicache-pools", cls=CommandGroup, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Report on host memory pools."""


@app.command()
def fragmentation(
    trace: Annotated[
        Path, typer.Argument(envvar="HICACHE_TRACE", exists=True, dir_okay=False, help="Trace in the Mooncake format.")
    ],
    requests: Annotated[int, typer.Option(min=1, help="Replay so many requests.")] = 6000,
    pool_blocks: Annotated[int, typer.Option(min=1, help="Blocks the pool holds.")] = 8000,
    pages_per_block: Annotated[int, typer.Option(min=1, help="Pages a block.")] = 32,
    node_blocks: Annotated[
        list[int] | None, typer.Option(min=0, help="Blocks a node; 0 is one node a request. May be repeated.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report there, as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the curves into this picture.")] = None,
) -> None:
    """Replay a trace's allocations and compare pages per run: a FIFO free list, plain best fit, and extents."""
    if pool_blocks * pages_per_block > MAX_PAGES:
        raise CommandError(
            f"--pool-blocks is {pool_blocks} and --pages-per-block {pages_per_block}; "
            f"accepted is a product of at most {MAX_PAGES}"
        )
    if json_file is not None:
        check_output("--json", json_file, trace)
    if plot_file is not None:
        check_plot(plot_file, "hicache-pools[cli]", trace)
    try:
        loaded = read_trace(trace, requests)
    except ValueError as error:
        raise CommandError(str(error)) from None
    from .fragmentation import fragmentation_report

    report = fragmentation_report(
        loaded,
        pool_blocks=pool_blocks,
        pages_per_block=pages_per_block,
        node_blocks=[blocks or None for blocks in ((0, 8) if node_blocks is None else node_blocks)],
    )
    show(_table(report))
    if json_file is not None:
        write_output("--json", json_file, lambda path: path.write_text(report.to_json() + "\n", encoding="utf-8"))
    if plot_file is not None:
        write_output("--plot", plot_file, lambda path: plot(report, path))


def plot(report: FragmentationReport, path: Path) -> None:
    """Draw pages per run over the requests, one panel a node size, one line a strategy.

    Parameters
    ----------
    report
        What to draw.
    path
        Image file to write; its suffix says the format.
    """
    # Imported here: the command and its table work without matplotlib.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(result.node_blocks for result in report.results))
    figure = Figure(figsize=(5.5 * max(1, len(sizes)), 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(1, len(sizes)), squeeze=False)[0]
    for panel, size in zip(panels, sizes, strict=False):
        for result in report.results:
            if result.node_blocks == size:
                middles = [(window + 0.5) * result.window for window in range(len(result.curve))]
                panel.plot(middles, result.curve, label=f"{result.strategy}: {result.pages_per_run:.0f} in 2nd half")
        panel.set(title=_node_name(size), xlabel="request", ylabel="pages per run", yscale="log")
        panel.legend()
    figure.savefig(path, dpi=120)


def _table(report: FragmentationReport) -> Table:
    title = f"{report.requests} requests, pool of {report.pool_blocks} blocks of {report.pages_per_block} pages"
    table = Table(title=title, caption="second half of the requests")
    for column in ("nodes", "strategy"):
        table.add_column(column)
    for column in ("allocations", "pages", "runs", "pages per run"):
        table.add_column(column, justify="right")
    for result in report.results:
        table.add_row(*_row(result))
    return table


def _row(result: Fragmentation) -> tuple[str, ...]:
    counts = (str(value) for value in (result.allocations, result.pages, result.runs))
    return (_node_name(result.node_blocks), result.strategy, *counts, f"{result.pages_per_run:.1f}")


def _node_name(node_blocks: int | None) -> str:
    return "one a request" if node_blocks is None else f"{node_blocks} blocks"
