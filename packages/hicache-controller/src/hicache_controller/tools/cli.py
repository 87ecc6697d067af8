"""The hicache command line: replay a trace, make one, plan capacity, measure, show what this machine can do."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hicache_kernels.command_line import (
    CommandError,
    CommandGroup,
    check_device,
    find_device,
    first_line,
    output,
    write_output,
)

from .bench.command import bench_app
from .capacity.command import capacity
from .command_options import Device, PageSize
from .replay import POOLS, ReplayOptions
from .replay.command import replay
from .replay.plans import DEFAULT_PAGE_SIZES
from .trace import make_trace, write_trace
from .vllm_config import vllm_config

app = typer.Typer(
    name="hicache", cls=CommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
trace_app = typer.Typer(no_args_is_help=True, help="Request traces.")
app.add_typer(trace_app, name="trace")
app.add_typer(bench_app, name="bench")
app.command()(capacity)
app.command()(replay)
app.command("vllm-config")(vllm_config)

MAX_SAMPLE_BYTES = 1 << 30
"""Most bytes of a page that ``hicache info`` makes to see how it would be moved."""


@app.callback()
def _main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the packages log.")] = False,
) -> None:
    """hicache: a hierarchical KV cache for LLM inference engines."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


@trace_app.command("make")
def make(
    out: Annotated[Path, typer.Argument(help="File to write.")],
    requests: Annotated[int, typer.Option(help="Number of requests.")] = 300,
    seed: Annotated[int, typer.Option(help="Equal seeds make equal traces.")] = 0,
    system_prompts: Annotated[int, typer.Option(help="Distinct system prompts the chats share.")] = 8,
    turns: Annotated[int, typer.Option(help="Mean turns of a chat.")] = 6,
) -> None:
    """Make a trace of many-turn chats with shared system prompts."""
    try:
        made = make_trace(requests, seed=seed, system_prompts=system_prompts, turns=turns)
    except ValueError as error:
        raise CommandError(str(error)) from None
    write_output("FILE", out, lambda path: write_trace(path, made))


@app.command()
def info(
    device: Device = None,
    pool: Annotated[str, typer.Option(help=f"Pools of the model: {', '.join(POOLS)}.")] = "mha",
    layers: Annotated[int, typer.Option(help="Model layers.")] = 32,
    row_bytes: Annotated[int, typer.Option(help="Bytes a row.")] = 2048,
    page_size: PageSize = None,
) -> None:
    """Show versions, devices, compilers, the build cache, and the path each transfer of a pool would take and why."""
    check_device(device)
    page_size = DEFAULT_PAGE_SIZES.get(pool, 64) if page_size is None else page_size
    options = ReplayOptions(pool=pool, layers=layers, row_bytes=row_bytes, page_size=page_size, window_tokens=page_size)
    try:
        plans = options.plans
    except ValueError as error:
        raise CommandError(str(error)) from None
    page_bytes = sum(plan.page_bytes for plan in plans)
    if page_bytes > MAX_SAMPLE_BYTES:
        raise CommandError(f"a page of these pools has {page_bytes} bytes; at most {MAX_SAMPLE_BYTES} are accepted")
    options = replace(options, device=find_device(device))
    from .info import show_information

    try:
        show_information(output, plans, options)
    except (ValueError, RuntimeError) as error:
        raise CommandError(first_line(error)) from None


if __name__ == "__main__":
    app()
