"""Options that several commands share, and what becomes of their results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hicache_kernels.command_line import check_output, check_plot, write_output

Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
PageSize = Annotated[int | None, typer.Option(help="Tokens a page [64; deepseek_v4: 256].")]


def check_results(json_file: Path | None, picture: Path | None, *inputs: Path | None) -> None:
    """Stop before the work where ``--json`` or ``--plot`` cannot be written, or would overwrite an input.

    Raises
    ------
    CommandError
        Naming the option, the file and the reason.
    """
    if json_file is not None:
        check_output("--json", json_file, *inputs)
    if picture is not None:
        check_plot(picture, "hicache-controller[plot]", *inputs)


def write_figures(json_file: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures to ``--json``, where it was given."""
    if json_file is not None:
        write_output("--json", json_file, lambda path: path.write_text(json.dumps(figures, indent=2) + "\n"))


def write_picture(picture: Path | None, draw: Callable[[Path], object]) -> None:
    """Have ``draw`` write the picture of ``--plot``, where it was given."""
    if picture is not None:
        write_output("--plot", picture, draw)
