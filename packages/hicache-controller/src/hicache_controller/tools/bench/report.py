"""What ``hicache bench engine`` shows: a table, what was aimed at, plain data and a picture."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Column, Table

from .engine import PromptTimes
from .models import count
from .options import EngineOptions


class Target(NamedTuple):
    """A figure that was aimed at, on a data-centre GPU with a model of 1-2 billion parameters and 32k tokens.

    Attributes
    ----------
    name
        The property of :class:`PromptTimes`.
    what
        In words.
    limit
        Largest value, or smallest where ``at_least``.
    at_least
        Whether more is better.
    """

    name: str
    what: str
    limit: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        """Return whether a value is within the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


TARGETS = (
    Target("l2_over_bound", "L2 / max(plain copy, L1)", 1.15),
    Target("prefill_over_l2", "computed anew / L2", 5.0, at_least=True),
    Target("l3_over_l2", "L3 / L2", 3.0),
)

_SERIES: tuple[tuple[str, str, str, str], ...] = (
    ("prefill", "computed anew", "#7f7f7f", "o"),
    ("offloaded", "transformers' offloaded cache", "#d55e00", "s"),
    ("l3", "L3: files", "#56b4e9", "^"),
    ("l2", "L2: host memory", "#0072b2", "o"),
    ("l1", "L1: device (the rest is computed)", "#009e73", "D"),
    ("copy", "plain copy of the same bytes", "#000000", "_"),
)
_HEADS = {"prefill": "anew"}


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """Everything one run found.

    Attributes
    ----------
    environment
        Device, versions, time.
    options
        What was measured, as plain values.
    times
        One a prompt length.
    """

    environment: dict[str, str]
    options: dict[str, Any]
    times: tuple[PromptTimes, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the ratios."""
        rows = [dataclasses.asdict(row) | {t.name: getattr(row, t.name) for t in TARGETS} for row in self.times]
        return {
            "environment": self.environment,
            "options": self.options,
            "targets": {target.name: target.limit for target in TARGETS},
            "times": rows,
        }


def make_report(options: EngineOptions, page_size: int, times: Sequence[PromptTimes]) -> EngineReport:
    """Put figures together with where and how they were measured."""
    gpu = options.device != "cpu"
    environment = {
        "device": torch.cuda.get_device_name(options.device) if gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "hicache-controller": metadata.version("hicache-controller"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    plain = dataclasses.asdict(options) | {
        "storage": None if options.storage is None else str(options.storage),
        "page_size": page_size,
        "parameters": options.shape.parameters,
        "token_bytes": options.token_bytes,
    }
    return EngineReport(environment, plain, tuple(times))


def show(report: EngineReport, console: Console) -> None:
    """Print the report."""
    options = report.options
    console.print(
        f"{count(options['parameters'])} parameters in {options['dtype']} on {report.environment['device']}, "
        f"{options['token_bytes'] / 1024:g} KiB a token in pages of {options['page_size']} tokens",
        highlight=False,
        soft_wrap=True,
    )
    timed = [name for name, *_ in _SERIES if name != "copy"]
    names = [name for name in timed if any(getattr(row, name) is not None for row in report.times)]
    heads = [name.upper() if name[0] == "l" else _HEADS.get(name, name) for name in names]
    times = _table("time to first token, ms", "prompt", "left", *heads)
    moved = _table(
        "what moved, and how long that takes, ms", "prompt", "MB", "path", "load", "plain copy", "from files"
    )
    for row in report.times:
        times.add_row(str(row.prompt), str(row.computed), *(_milliseconds(getattr(row, name)) for name in names))
        took = (row.load_seconds, row.copy, row.fetch_seconds)
        moved.add_row(str(row.prompt), f"{row.load_bytes / 1e6:.1f}", row.load_path, *map(_milliseconds, took))
    ratios = _table("ratios", "prompt", *(target.what for target in TARGETS))
    for row in report.times:
        ratios.add_row(str(row.prompt), *(_ratio(getattr(row, target.name)) for target in TARGETS))
    ratios.add_section()
    ratios.add_row("aim", *(f"{'>=' if target.at_least else '<='} {target.limit:g}" for target in TARGETS))
    console.print(times, moved, ratios)


def plot(report: EngineReport, path: Path) -> None:
    """Draw the times over the prompt length into a file whose ending names the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, label, colour, marker in _SERIES:
        points = [(row.prompt, 1e3 * value) for row in report.times if (value := getattr(row, name)) is not None]
        if points:
            style = "--" if name == "copy" else "-"
            axis.plot(*zip(*points, strict=True), style, marker=marker, color=colour, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = [row.prompt for row in report.times]
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.minorticks_off()
    axis.set_xlabel("tokens of the prompt")
    axis.set_ylabel("time to first token, ms")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    options = report.options
    axis.set_title(
        f"{count(options['parameters'])} parameters, {options['dtype']}, {report.environment['device']}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _table(title: str, *heads: str) -> Table:
    return Table(*(Column(head, justify="right") for head in heads), title=title)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
