"""``hicache bench``: what the cache is worth under a model."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console

from .engine import TIERS, BenchError, EngineBench, EngineOptions
from .models import PRESETS, shape_of
from .report import make_report, plot, show

bench_app = typer.Typer(no_args_is_help=True, help="Measure the cache under a model.")

PICTURES = (".png", ".pdf", ".svg")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_output = Console()
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


@bench_app.callback()
def _bench() -> None:
    """Measure the cache under a model."""


def _stop(message: str, code: int = 2) -> NoReturn:
    _errors.print(f"error: {message}", markup=False)
    raise typer.Exit(code)


@bench_app.command()
def engine(
    model: Annotated[
        str, typer.Option(help=f"Random-weight model: {', '.join(PRESETS)}; by default 1b on a GPU, tiny on a CPU.")
    ] = "",
    prompts: Annotated[str, typer.Option(help="Lengths of prompts in tokens, as 4096,32768; by default several.")] = "",
    tail: Annotated[int, typer.Option(help="Tokens behind the cached prefix, computed in every case.")] = 64,
    tiers: Annotated[str, typer.Option(help="Tiers to measure.")] = ",".join(TIERS),
    page_size: Annotated[int | None, typer.Option(help="Tokens a page; by default what copies fast.")] = None,
    repeats: Annotated[int, typer.Option(help="Measured repetitions, of which the median counts.")] = 5,
    chunk: Annotated[
        int | None, typer.Option(help="Most tokens of one pass where the prompt is computed anew; all by default.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Other layers than the model's.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Another width.")] = None,
    heads: Annotated[int | None, typer.Option(help="Other query heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Other key and value heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Other values a head.")] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; by default bfloat16 on a GPU.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = "",
    storage_dir: Annotated[
        Path | None, typer.Option(help="Directory for L3, whose pages are removed again; by default a temporary one.")
    ] = None,
    storage_threads: Annotated[int | None, typer.Option(help="Threads that move the pages of L3.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw the times into this picture.")] = None,
) -> None:
    """Measure the time to the first token of long prompts: computed anew, and from each tier of the cache.

    Beside it: transformers' own offloaded cache (on a GPU), a plain copy of the bytes that are loaded, and the time
    that is left to compute with the whole prefix in L1. All are medians of one run, and every tier must give the very
    same logits.
    """
    if plot_file is not None and plot_file.suffix not in PICTURES:
        _stop(f"--plot is {plot_file}; a name that ends with one of {', '.join(PICTURES)} is expected")
    for option, file in (("--json", json_file), ("--plot", plot_file)):
        if file is not None:
            _check_writable(option, file)
    where = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    gpu = where.type != "cpu"
    kind = dtype or ("bfloat16" if gpu else "float32")
    if kind not in DTYPES:
        _stop(f"--dtype is {dtype!r}; accepted are {', '.join(DTYPES)}")
    name = model or ("1b" if gpu else "tiny")
    default = "512,1024,2048" if name == "tiny" else "2048,4096,8192,16384,32768"
    try:
        lengths = tuple(int(length) for length in (prompts or default).split(","))
    except ValueError:
        _stop(f"--prompts is {prompts!r}; whole numbers with commas between are expected")
    with _one_line_errors(), _errors.status("starting") as status:
        shape = shape_of(name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        options = EngineOptions(
            shape,
            DTYPES[kind],
            where,
            lengths,
            tail=tail,
            tiers=tuple(tier for tier in tiers.split(",") if tier),
            page_size=page_size,
            repeats=repeats,
            chunk=chunk,
            storage=storage_dir,
            storage_threads=storage_threads,
        )
        update: Callable[[str], None] = status.update
        with EngineBench(options) as bench:
            report = make_report(options, bench.cache.page_size, bench.run(update))
    show(report, _output)
    with _one_line_errors():
        if json_file is not None:
            json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n")
        if plot_file is not None:
            plot(report, plot_file)


def _device(name: str) -> torch.device:
    """Return a device that a model can run on here."""
    accepted = "accepted are cpu and cuda, or cuda:1 and so on for another GPU"
    try:
        where = torch.device(name)
    except RuntimeError:
        _stop(f"--device is {name!r}; {accepted}")
    if where.type not in ("cpu", "cuda"):
        _stop(f"--device is {name!r}; {accepted}")
    gpus = torch.cuda.device_count()
    if where.type == "cuda" and (where.index or 0) >= gpus:
        _stop(f"--device is {name!r}, and torch sees {gpus} GPUs here")
    return where


def _check_writable(option: str, file: Path) -> None:
    """Stop before anything is measured where the result could not be written; makes the directory."""
    if file.is_dir():
        _stop(f"{option} is {file}, a directory; the name of a file is expected")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _stop(f"{option} is {file}, which cannot be written: {error.filename}: {error.strerror}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        _stop(f"{option} is {file}, which cannot be written: permission denied")


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Say in one line what cannot work."""
    try:
        yield
    except (ValueError, ModuleNotFoundError, MemoryError, OSError, torch.OutOfMemoryError) as error:
        _stop(str(error).splitlines()[0])
    except BenchError as error:
        _stop(str(error), 1)
