"""``hicache bench``: what the cache is worth under a model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from hicache_kernels.command_line import (
    FAILED,
    CommandError,
    check_device,
    check_output,
    check_plot,
    errors,
    find_device,
    first_line,
    output,
    terminated_like_interrupted,
    write_output,
)

from .models import PRESETS, shape_of
from .options import DTYPES, TIERS, EngineOptions

bench_app = typer.Typer(no_args_is_help=True, help="Measure the cache under a model.")


@bench_app.callback()
def _bench() -> None:
    """Measure the cache under a model."""


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
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
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
    check_device(device)
    if json_file is not None:
        check_output("--json", json_file)
    if plot_file is not None:
        check_plot(plot_file, "hicache-controller[plot]")
    if find_spec("transformers") is None:
        raise CommandError("models come from transformers: install hicache-controller[transformers]")

    def options_on(device: str) -> EngineOptions:
        small = device == "cpu"
        name = model or ("tiny" if small else "1b")
        shape = shape_of(name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        default = "512,1024,2048" if name == "tiny" else "2048,4096,8192,16384,32768"
        return EngineOptions(
            shape,
            dtype or ("float32" if small else "bfloat16"),
            device,
            _lengths(prompts or default),
            tail=tail,
            tiers=tuple(tier for tier in tiers.split(",") if tier),
            page_size=page_size,
            repeats=repeats,
            chunk=chunk,
            storage=storage_dir,
            storage_threads=storage_threads,
        )

    try:
        _check_for_any(options_on, (device,) if device else ("cpu", "cuda"))
        options = options_on(find_device(device))
    except ValueError as error:
        raise CommandError(str(error)) from None
    from .report import make_report, plot, show

    with _one_line_errors(storage_dir), terminated_like_interrupted(), errors.status("starting") as status:
        from .engine import EngineBench

        update: Callable[[str], None] = status.update
        with EngineBench(options) as bench:
            report = make_report(options, bench.cache.page_size, bench.run(update))
    show(report, output)
    if json_file is not None:
        write_output("--json", json_file, lambda path: path.write_text(json.dumps(report.as_json(), indent=1) + "\n"))
    if plot_file is not None:
        write_output("--plot", plot_file, lambda path: plot(report, path))


def _check_for_any(options_on: Callable[[str], EngineOptions], devices: Sequence[str]) -> None:
    """Raise ValueError where the options work on none of the devices; does not import torch."""
    faults = []
    for device in devices:
        try:
            options_on(device)
        except ValueError as error:
            faults.append(error)
    if len(faults) == len(devices):
        raise faults[0]


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(length) for length in text.split(","))
    except ValueError:
        raise CommandError(f"--prompts is {text!r}; whole numbers with commas between are expected") from None


@contextlib.contextmanager
def _one_line_errors(storage: Path | None) -> Iterator[None]:
    """Say in one line what cannot work."""
    import torch

    from .engine import BenchError

    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{error.filename or storage or 'storage'}: {error.strerror or error}") from None
    except (ValueError, torch.OutOfMemoryError) as error:
        raise CommandError(first_line(error)) from None
    except BenchError as error:
        raise CommandError(str(error), FAILED) from None
