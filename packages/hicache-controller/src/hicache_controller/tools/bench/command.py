"""``hicache bench``: what the cache is worth under a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from hicache_kernels.command_line import (
    FAILED,
    CommandError,
    check_device,
    errors,
    find_device,
    first_line,
    output,
    terminated_like_interrupted,
)

from ..command_options import Device, JsonFile, check_results, write_figures, write_picture
from .models import PRESETS, shape_of
from .options import DTYPES, TIERS, EngineOptions

bench_app = typer.Typer(no_args_is_help=True, help="Measure the cache under a model.")


@bench_app.callback()
def _bench() -> None:
    """Measure the cache under a model."""


_Model = Annotated[
    str, typer.Option(help=f"Random-weight model: {', '.join(PRESETS)}; by default 1b on a GPU, tiny on a CPU.")
]
_Prompts = Annotated[str, typer.Option(help="Lengths of prompts in tokens, as 4096,32768; by default several.")]
_Tail = Annotated[int, typer.Option(help="Tokens after the cached prefix, computed in every case.")]
_Tiers = Annotated[str, typer.Option(help="Tiers to measure.")]
_PageSize = Annotated[int | None, typer.Option(help="Tokens a page; by default what copies fast.")]
_Repeats = Annotated[int, typer.Option(help="Measured repetitions, of which the median counts.")]
_Chunk = Annotated[
    int | None, typer.Option(help="Most tokens of one pass where the prompt is computed anew; all by default.")
]
_Layers = Annotated[int | None, typer.Option(help="Other layers than the model's.")]
_Hidden = Annotated[int | None, typer.Option(help="Another width.")]
_Heads = Annotated[int | None, typer.Option(help="Other query heads.")]
_KVHeads = Annotated[int | None, typer.Option(help="Other key and value heads.")]
_HeadDim = Annotated[int | None, typer.Option(help="Other values a head.")]
_Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; by default bfloat16 on a GPU.")]
_StorageDir = Annotated[
    Path | None, typer.Option(help="Directory for L3, whose pages are removed again; by default a temporary one.")
]
_StorageThreads = Annotated[int | None, typer.Option(help="Threads that move the pages of L3.")]
_PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the times into this picture.")]

_ALL_TIERS = ",".join(TIERS)


@bench_app.command()
def engine(
    model: _Model = "",
    prompts: _Prompts = "",
    tail: _Tail = 64,
    tiers: _Tiers = _ALL_TIERS,
    page_size: _PageSize = None,
    repeats: _Repeats = 5,
    chunk: _Chunk = None,
    layers: _Layers = None,
    hidden: _Hidden = None,
    heads: _Heads = None,
    kv_heads: _KVHeads = None,
    head_dim: _HeadDim = None,
    dtype: _Dtype = "",
    device: Device = None,
    storage_dir: _StorageDir = None,
    storage_threads: _StorageThreads = None,
    json_file: JsonFile = None,
    plot_file: _PlotFile = None,
) -> None:
    """Measure the time to the first token of long prompts: computed anew, and from each tier of the cache.

    The same run measures transformers' own offloaded cache (on a GPU), a plain copy of the bytes that are loaded, and
    the time that is left to compute with the whole prefix in L1. All are medians of one run, and every tier must give
    the very same logits.
    """
    check_device(device)
    check_results(json_file, plot_file)
    if find_spec("transformers") is None:
        raise CommandError("models come from transformers: install hicache-controller[transformers]")

    def options_on(device: str) -> EngineOptions:
        small = device == "cpu"
        name = model or ("tiny" if small else "1b")
        default = "512,1024,2048" if name == "tiny" else "2048,4096,8192,16384,32768"
        return EngineOptions(
            shape_of(name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim),
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
    _measure(options, json_file, plot_file)


def _measure(options: EngineOptions, json_file: Path | None, plot_file: Path | None) -> None:
    """Run the benchmark and show what it found."""
    from .report import make_report, plot, show

    with _one_line_errors(options.storage), terminated_like_interrupted(), errors.status("starting") as status:
        from .engine import EngineBench

        update: Callable[[str], None] = status.update
        with EngineBench(options) as bench:
            report = make_report(options, bench.cache.page_size, bench.run(update))
    show(report, output)
    write_figures(json_file, report.as_json())
    write_picture(plot_file, lambda path: plot(report, path))


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
