"""The hicache command line: replay a trace, make one, show what this machine can do."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hicache_kernels.command_line import (
    FAILED,
    INTERRUPTED,
    CommandError,
    CommandGroup,
    check_device,
    check_output,
    check_plot,
    errors,
    find_device,
    first_line,
    output,
    show,
    terminated_like_interrupted,
    write_output,
)

from ..policies import PrefetchPolicy, WritePolicy
from .bench.command import bench_app
from .capacity.command import capacity
from .replay import POOLS, ReplayError, ReplayOptions, VerificationError
from .replay.plans import DEFAULT_PAGE_SIZES
from .trace import TraceRequest, make_trace, read_trace, write_trace

if TYPE_CHECKING:
    from .replay import Replay

app = typer.Typer(
    name="hicache", cls=CommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
trace_app = typer.Typer(no_args_is_help=True, help="Request traces.")
app.add_typer(trace_app, name="trace")
app.add_typer(bench_app, name="bench")
app.command()(capacity)

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


def _pages(text: str, option: str, all_pages: int) -> int:
    """Pages from a number, or from a percentage of the trace's distinct pages."""
    try:
        value = round(all_pages * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except (OverflowError, ValueError):
        value = 0
    if value <= 0:
        raise CommandError(f"{option} is {text!r}; a positive number of pages, or of percent such as 10%, is expected")
    return value


def _load_requests(trace: Path | None, limit: int | None) -> list[TraceRequest]:
    if limit is not None and limit <= 0:
        raise CommandError(f"--requests is {limit}; it must be positive")
    try:
        return make_trace(limit or 300) if trace is None else read_trace(trace, limit)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{trace}: {error.strerror or error}") from None


@app.command()
def replay(
    trace: Annotated[Path | None, typer.Argument(help="Trace to replay; without one, a generated trace.")] = None,
    requests: Annotated[int | None, typer.Option(help="Replay only the first N requests.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    pool: Annotated[
        str, typer.Option(help=f"Pools of the model: {', '.join(POOLS)}; layers take turns where there are several.")
    ] = "mha",
    layers: Annotated[int, typer.Option(help="Model layers.")] = 4,
    row_bytes: Annotated[int, typer.Option(help="Bytes one layer keeps for one token in one component.")] = 64,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page [64; deepseek_v4: 256].")] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens a block of the trace stands for.")] = 512,
    l1_pages: Annotated[str, typer.Option(help="Device pages, or percent of the trace's distinct ones [10%].")] = "",
    l2_pages: Annotated[str, typer.Option(help="Host pages, or percent of the trace's distinct ones [25%].")] = "",
    window_tokens: Annotated[int, typer.Option(help="Tokens a sliding window sees.")] = 128,
    checkpoint_blocks: Annotated[
        int, typer.Option(help="Blocks from one place where windows and states are kept to the next.")
    ] = 1,
    l1_checkpoints: Annotated[
        int | None, typer.Option(help="Places the device has windows and states for; by default as many as pages.")
    ] = None,
    l2_checkpoints: Annotated[int | None, typer.Option(help="The same on the host.")] = None,
    l3_bytes: Annotated[int | None, typer.Option(help="Storage capacity; 0 for none, no limit by default.")] = None,
    l3_dir: Annotated[Path | None, typer.Option(help="Storage directory; by default a temporary one.")] = None,
    storage: Annotated[str, typer.Option(help="file, memory (ends with the process) or mooncake.")] = "file",
    mooncake_master: Annotated[str, typer.Option(help="Address of the Mooncake master.")] = "127.0.0.1:50051",
    mooncake_segment_bytes: Annotated[
        int, typer.Option(help="Memory given to the Mooncake store while this runs; 0 where other clients give it.")
    ] = 1 << 30,
    prefetch_policy: Annotated[
        PrefetchPolicy, typer.Option(help="How long a request waits for its pages from storage.")
    ] = PrefetchPolicy.WAIT_COMPLETE,
    write_policy: Annotated[WritePolicy, typer.Option(help="When pages are written back.")] = WritePolicy.WRITE_THROUGH,
    eviction: Annotated[
        str, typer.Option(help="What leaves a tier first: lru, lfu, size_aware, fifo, filo, mru or slru.")
    ] = "lru",
    data: Annotated[
        bool, typer.Option("--data/--no-data", help="Move and check bytes, or only keep the books.")
    ] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the hits by tier into this picture.")] = None,
) -> None:
    """Replay a request trace against the real cache and check every loaded byte.

    Complete blocks of 512 tokens count; what is left of a request behind them is not cached. By default L1 and L2 hold
    at least the largest request.
    """
    check_device(device)
    if json_file is not None:
        check_output("--json", json_file, trace)
    if plot is not None:
        check_plot(plot, "hicache-controller[plot]", trace)
    if l3_dir is not None and not l3_dir.name:
        raise CommandError(f"--l3-dir is {str(l3_dir)!r}; the name of a directory is expected")
    if l3_dir is not None and (l3_bytes == 0 or not data or storage != "file"):
        raise CommandError(
            "--l3-dir needs --data, --storage file and an --l3-bytes that is not 0; nothing would be stored there"
        )
    loaded = _load_requests(trace, requests)
    page_size = DEFAULT_PAGE_SIZES.get(pool, 64) if page_size is None else page_size
    distinct = len({block for request in loaded for block in request.blocks})
    largest = max(len(request.blocks) for request in loaded)
    if page_size <= 0 or block_tokens < page_size:
        raise CommandError(
            f"page_size is {page_size} and block_tokens is {block_tokens}; 0 < page_size <= block_tokens is expected"
        )
    per_block = block_tokens // page_size
    options = ReplayOptions(
        device=device or "cpu",
        pool=pool,
        layers=layers,
        row_bytes=row_bytes,
        page_size=page_size,
        block_tokens=block_tokens,
        l1_pages=(
            _pages(l1_pages, "--l1-pages", distinct * per_block)
            if l1_pages
            else max(distinct // 10, largest, 1) * per_block
        ),
        l2_pages=(
            _pages(l2_pages, "--l2-pages", distinct * per_block)
            if l2_pages
            else max(distinct // 4, largest, 1) * per_block
        ),
        l3_bytes=l3_bytes,
        l3_dir=l3_dir,
        write_policy=write_policy,
        eviction=eviction,
        data=data,
        storage=storage,
        mooncake_master=mooncake_master,
        mooncake_segment_bytes=mooncake_segment_bytes,
        prefetch_policy=prefetch_policy,
        window_tokens=window_tokens,
        checkpoint_blocks=checkpoint_blocks,
        l1_checkpoints=l1_checkpoints,
        l2_checkpoints=l2_checkpoints,
    )
    try:
        options.check_sizes(loaded)
    except ReplayError as error:
        raise CommandError(str(error)) from None
    options = replace(options, device=find_device(device))
    from .replay import Replay
    from .replay import report as reports

    with _one_line_errors(l3_dir), terminated_like_interrupted(), Replay(loaded, options) as running:
        show(reports.setup_line(running, trace), highlight=False)
        _run(running)
        result = running.report
    show(reports.table(result, options))
    if json_file is not None:
        figures = json.dumps(reports.as_json(result, options), indent=2)
        write_output("--json", json_file, lambda path: path.write_text(figures + "\n"))
    if plot is not None:
        write_output("--plot", plot, lambda path: reports.plot(result, options, path))


@contextlib.contextmanager
def _one_line_errors(storage: Path | None) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except ReplayError as error:
        raise CommandError(str(error)) from None
    except VerificationError as error:
        raise CommandError(f"wrong bytes: {error}", FAILED) from None
    except OSError as error:
        raise CommandError(f"{error.filename or storage or 'storage'}: {error.strerror or error}") from None
    except KeyboardInterrupt:
        kept = "" if storage is None else f"; {storage} stays usable"
        raise CommandError(f"interrupted{kept}", INTERRUPTED) from None


def _run(running: Replay) -> None:
    columns = (
        TextColumn("replay"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} requests/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("replay", total=len(running.requests), rate=0.0)

        def advance() -> None:
            progress.update(task, advance=1, rate=progress.tasks[task].speed or 0.0)

        running.run(advance)


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
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    pool: Annotated[str, typer.Option(help=f"Pools of the model: {', '.join(POOLS)}.")] = "mha",
    layers: Annotated[int, typer.Option(help="Model layers.")] = 32,
    row_bytes: Annotated[int, typer.Option(help="Bytes a row.")] = 2048,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page [64; deepseek_v4: 256].")] = None,
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
