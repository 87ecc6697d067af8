"""The hicache command line: replay a trace, make one, show what this machine can do."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from . import report as reports
from .bench.cli import bench_app
from .capacity_command import capacity
from .radix import WritePolicy
from .replay import POOLS, Replay, ReplayError, ReplayOptions, VerificationError
from .replay.plans import DEFAULT_PAGE_SIZES
from .storage_worker import PrefetchPolicy
from .trace import TraceError, TraceRequest, make_trace, read_trace, write_trace

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
trace_app = typer.Typer(no_args_is_help=True, help="Request traces.")
app.add_typer(trace_app, name="trace")
app.add_typer(bench_app, name="bench")
app.command()(capacity)

BAD_INPUT = 2
WRONG_BYTES = 1
INTERRUPTED = 130
PICTURES = (".png", ".pdf", ".svg")

_output = Console()
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


@app.callback()
def _main(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the packages log.")] = False,
) -> None:
    """hicache: a hierarchical KV cache for LLM inference engines."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )


def _stop(message: str, code: int = BAD_INPUT) -> NoReturn:
    _errors.print(f"error: {message}", markup=False)
    raise typer.Exit(code)


def _pages(text: str, option: str, all_pages: int) -> int:
    """Pages from a number, or from a percentage of the trace's distinct pages."""
    try:
        value = round(all_pages * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except ValueError:
        value = 0
    if value <= 0:
        _stop(f"{option} is {text!r}; a positive number of pages, or of percent such as 10%, is expected")
    return value


def _check_output(path: Path, option: str, trace: Path | None) -> None:
    """Stop now rather than after the replay where a file cannot be written."""
    try:
        if trace is not None and path.exists() and path.samefile(trace):
            _stop(f"{option} is {path}; that is the trace")
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        _stop(f"{option} is {path}: {error.strerror or error}")


def _load_requests(trace: Path | None, limit: int | None) -> list[TraceRequest]:
    if limit is not None and limit <= 0:
        _stop(f"--requests is {limit}; it must be positive")
    if trace is None:
        return make_trace(limit or 300)
    try:
        return read_trace(trace, limit)
    except TraceError as error:
        _stop(str(error))
    except OSError as error:
        _stop(f"{trace}: {error.strerror or error}")


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
    for path, option in ((json_file, "--json"), (plot, "--plot")):
        if path is not None:
            _check_output(path, option, trace)
    if plot is not None and plot.suffix not in PICTURES:
        _stop(f"--plot is {plot}; a name that ends with one of {', '.join(PICTURES)} is expected")
    if l3_dir is not None and not l3_dir.name:
        _stop(f"--l3-dir is {str(l3_dir)!r}; the name of a directory is expected")
    if l3_dir is not None and (l3_bytes == 0 or not data or storage != "file"):
        _stop("--l3-dir needs --data, --storage file and an --l3-bytes that is not 0; nothing would be stored there")
    loaded = _load_requests(trace, requests)
    page_size = DEFAULT_PAGE_SIZES.get(pool, 64) if page_size is None else page_size
    distinct = len({block for request in loaded for block in request.blocks})
    largest = max(len(request.blocks) for request in loaded)
    if page_size <= 0 or block_tokens < page_size:
        _stop(f"page_size is {page_size} and block_tokens is {block_tokens}; 0 < page_size <= block_tokens is expected")
    per_block = block_tokens // page_size
    options = ReplayOptions(
        device=device or reports.default_device(),
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
        with _ended_like_interrupted(), Replay(loaded, options) as running:
            _output.print(reports.setup_line(running, trace), highlight=False)
            _run(running)
            result = running.report
    except ReplayError as error:
        _stop(str(error))
    except VerificationError as error:
        _stop(f"wrong bytes: {error}", WRONG_BYTES)
    except OSError as error:
        _stop(f"{error.filename or l3_dir}: {error.strerror or error}")
    except KeyboardInterrupt:
        kept = "" if l3_dir is None else f"; {l3_dir} stays usable"
        _stop(f"interrupted{kept}", INTERRUPTED)
    _output.print(reports.table(result, options))
    if json_file is not None:
        json_file.write_text(json.dumps(reports.as_json(result, options), indent=2) + "\n")
    if plot is not None:
        reports.plot(result, options, plot)


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end the run in order, as Ctrl-C does: a temporary storage must not stay behind."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(running: Replay) -> None:
    columns = (
        TextColumn("replay"),
        BarColumn(),
        TaskProgressColumn(show_speed=False),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} requests/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_errors, transient=True, disable=not sys.stderr.isatty()) as progress:
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
        write_trace(out, make_trace(requests, seed=seed, system_prompts=system_prompts, turns=turns))
    except ValueError as error:
        _stop(str(error))
    except OSError as error:
        _stop(f"{out}: {error.strerror or error}")


@app.command()
def info(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    pool: Annotated[str, typer.Option(help=f"Pools of the model: {', '.join(POOLS)}.")] = "mha",
    layers: Annotated[int, typer.Option(help="Model layers.")] = 32,
    row_bytes: Annotated[int, typer.Option(help="Bytes a row.")] = 2048,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page [64; deepseek_v4: 256].")] = None,
) -> None:
    """Show versions, devices, compilers, the build cache, and the path each transfer of a pool would take and why."""
    try:
        reports.show_information(
            _output,
            device=device or reports.default_device(),
            pool=pool,
            layers=layers,
            row_bytes=row_bytes,
            page_size=DEFAULT_PAGE_SIZES.get(pool, 64) if page_size is None else page_size,
        )
    except (ValueError, RuntimeError, MemoryError) as error:
        _stop(str(error).splitlines()[0])


if __name__ == "__main__":
    app()
