"""Show what a replay saw: tables, plain data and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Group
from rich.table import Table

from hicache_kernels.command_line import printable

if TYPE_CHECKING:
    from .options import ReplayOptions
    from .results import ReplayReport
    from .runner import Replay

_TIERS = ("L1 device", "L2 host", "L3 storage", "miss")
_COLOURS = ("#1b7837", "#7fbf7b", "#d9f0d3", "#af8dc3")


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def setup_line(running: Replay, trace: Path | None) -> str:
    """One line on what is replayed and which path the bytes take."""
    options = running.options
    source = printable(str(trace)) if trace is not None else "a generated trace"
    line = (
        f"{len(running.requests)} requests of {source}; {options.pool} pool on {options.device}, "
        f"L1 {options.l1_pages} and L2 {options.l2_pages} pages of {options.page_size} tokens"
    )
    if not options.data:
        return f"{line}; bookkeeping only"
    found = running.model.group.capabilities()
    paths = {
        name: f"write-back: {each.path_write_back}, load-back: {each.path_load} ({each.reason})"
        for name, each in found.items()
    }
    if len(paths) == 1:
        return "\n".join((line, *paths.values()))
    return "\n".join((line, *(f"{name}: {path}" for name, path in paths.items())))


def table(report: ReplayReport, options: ReplayOptions) -> Group:
    """Everything the replay saw."""
    hits = Table(title="Where the blocks came from")
    hits.add_column("tier")
    hits.add_column("blocks", justify="right")
    hits.add_column("percent", justify="right")
    counts = (report.l1_hits, report.l2_hits, report.l3_hits, report.misses)
    for tier, count in zip(_TIERS, counts, strict=True):
        hits.add_row(tier, f"{count:,}", f"{100 * count / max(report.blocks, 1):.1f}")
    hits.add_section()
    hits.add_row("all", f"{report.blocks:,}", "100.0")

    paths = Table(title="What moved")
    for column in ("path", "bytes", "GB/s", "pages a copy"):
        paths.add_column(column, justify="left" if column == "path" else "right")
    for name, path in report.paths.items():
        run = f"{path.mean_run:.1f}" if path.runs else "-"
        speed = f"{path.gb_per_second:.2f}" if path.bytes else "-"
        paths.add_row(name, _size(path.bytes), speed, run)

    pools = Table(title="Pages by pool")
    pools.add_column("pool", overflow="fold")
    for column in ("L1 to L2", "L2 to L1", "L2 to L3", "L3 to L2", "rows verified"):
        pools.add_column(column, justify="right")
    for name, pool in report.pools.items():
        moved = (pool.written_back, pool.loaded_back, pool.stored, pool.fetched, pool.rows_verified)
        pools.add_row(name, *(f"{count:,}" for count in moved))

    total = Table(show_header=False)
    total.add_column()
    total.add_column(justify="right")
    total.add_row("requests", f"{report.requests:,}")
    total.add_row("tokens", f"{report.tokens:,}")
    total.add_row("rows verified", f"{report.rows_verified:,}" if options.data else "none (bookkeeping only)")
    total.add_row("time", f"{report.seconds:.2f} s ({report.requests / max(report.seconds, 1e-9):,.0f} requests/s)")
    tables = (hits, paths, total) if len(report.pools) == 1 else (hits, paths, pools, total)
    return Group(*tables)


def as_json(report: ReplayReport, options: ReplayOptions) -> dict[str, Any]:
    """Figures and options as plain data."""
    settings = {
        name: value if isinstance(value, int | bool | None) else str(value)
        for name, value in dataclasses.asdict(options).items()
    }
    return {"options": settings, "report": report.as_json()}


def plot(report: ReplayReport, options: ReplayOptions, path: Path) -> None:
    """Draw the share of blocks from each tier over the replay, and the bytes each path moved."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    edges, share = _shares(report.history)
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 1.2))
    # The last step needs its height at its right edge too, or it is not drawn.
    left.stackplot(edges, np.vstack([share, share[-1:]]).T, labels=_TIERS, colors=_COLOURS, step="post")
    left.set(xlabel="request", ylabel="percent of blocks", ylim=(0, 100), xlim=(0, edges[-1]))
    left.set_title(
        f"{report.hits:,} of {report.blocks:,} blocks hit; L1 {options.l1_pages:,}, L2 {options.l2_pages:,} pages"
    )
    left.legend(loc="lower right", framealpha=0.9)
    names = list(report.paths)
    right.barh(names, [report.paths[name].bytes / 1e9 for name in names], color=_COLOURS[0])
    right.invert_yaxis()
    right.set(xlabel="GB moved")
    figure.savefig(path, dpi=150)


def _shares(history: Sequence[tuple[int, int, int, int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Cut a replay into at most 120 ranges of requests: their edges, and percent of blocks by tier in each."""
    counts = np.array(history, dtype=np.float64)
    edges = np.linspace(0, len(counts), min(len(counts), 120) + 1).astype(np.int64)
    sums = np.add.reduceat(counts, edges[:-1], axis=0)
    return edges, 100 * sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
