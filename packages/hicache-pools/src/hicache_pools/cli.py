"""The command line of hicache-pools: reports on how its allocator behaves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .fragmentation import Fragmentation, FragmentationReport, fragmentation_report, read_trace

app = typer.Typer(no_args_is_help=True)


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
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the curves there, as PNG.")] = None,
) -> None:
    """Replay a trace's allocations and compare pages per run: a FIFO free list, plain best fit, and extents."""
    try:
        report = fragmentation_report(
            read_trace(trace, requests),
            pool_blocks=pool_blocks,
            pages_per_block=pages_per_block,
            node_blocks=[blocks or None for blocks in ((0, 8) if node_blocks is None else node_blocks)],
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if json_file is not None:
        json_file.write_text(report.to_json() + "\n", encoding="utf-8")
    if plot_file is not None:
        plot(report, plot_file)
    Console().print(_table(report))


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
