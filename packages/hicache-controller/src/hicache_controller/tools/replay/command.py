"""``hicache replay``: run the requests of a trace against the real cache."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hicache_kernels.command_line import (
    FAILED,
    INTERRUPTED,
    CommandError,
    check_device,
    errors,
    find_device,
    show,
    terminated_like_interrupted,
)

from ...policies import PrefetchPolicy, WritePolicy
from ..command_options import Device, JsonFile, PageSize, check_results, write_figures, write_picture
from ..trace import TraceRequest, make_trace, read_trace
from .options import STORAGES, ReplayError, ReplayOptions
from .plans import DEFAULT_PAGE_SIZES, POOLS
from .results import VerificationError

if TYPE_CHECKING:
    from .runner import Replay

_Trace = Annotated[Path | None, typer.Argument(help="Trace to replay; without one, a generated trace.")]
_Requests = Annotated[int | None, typer.Option(help="Replay only the first N requests.")]
_Pool = Annotated[
    str, typer.Option(help=f"Pools of the model: {', '.join(POOLS)}; layers take turns where there are several.")
]
_Layers = Annotated[int, typer.Option(help="Model layers.")]
_RowBytes = Annotated[int, typer.Option(help="Bytes one layer keeps for one token in one component.")]
_BlockTokens = Annotated[int, typer.Option(help="Tokens of a block of the trace.")]
_L1Pages = Annotated[str, typer.Option(help="Device pages, or percent of the trace's distinct ones [10%].")]
_L2Pages = Annotated[str, typer.Option(help="Host pages, or percent of the trace's distinct ones [25%].")]
_WindowTokens = Annotated[int, typer.Option(help="Tokens of a sliding window.")]
_CheckpointBlocks = Annotated[int, typer.Option(help="Blocks between the places where windows and states are kept.")]
_L1Checkpoints = Annotated[
    int | None, typer.Option(help="Checkpoints of windows and states on the device; by default as many as pages.")
]
_L2Checkpoints = Annotated[int | None, typer.Option(help="The same on the host.")]
_L3Bytes = Annotated[int | None, typer.Option(help="Storage capacity; 0 for none, no limit by default.")]
_L3Dir = Annotated[Path | None, typer.Option(help="Storage directory; by default a temporary one.")]
_Storage = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(STORAGES)}, a backend's entry point, or module:Class; memory ends with the process."
    ),
]
_StorageOption = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE for the constructor of another backend; VALUE is JSON or text.")
]
_Master = Annotated[str, typer.Option(help="Address of the Mooncake master.")]
_SegmentBytes = Annotated[
    int, typer.Option(help="Memory given to the Mooncake store while this runs; 0 where other clients give it.")
]
_Prefetch = Annotated[PrefetchPolicy, typer.Option(help="How long a request waits for its pages from storage.")]
_Write = Annotated[WritePolicy, typer.Option(help="When pages are written back.")]
_Eviction = Annotated[
    str, typer.Option(help="What leaves a tier first: lru, lfu, size_aware, fifo, filo, mru or slru.")
]
_Data = Annotated[bool, typer.Option("--data/--no-data", help="Move and check bytes, or only track pages.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw the hits by tier into this picture.")]


def replay(
    trace: _Trace = None,
    requests: _Requests = None,
    device: Device = None,
    pool: _Pool = "mha",
    layers: _Layers = 4,
    row_bytes: _RowBytes = 64,
    page_size: PageSize = None,
    block_tokens: _BlockTokens = 512,
    l1_pages: _L1Pages = "",
    l2_pages: _L2Pages = "",
    window_tokens: _WindowTokens = 128,
    checkpoint_blocks: _CheckpointBlocks = 1,
    l1_checkpoints: _L1Checkpoints = None,
    l2_checkpoints: _L2Checkpoints = None,
    l3_bytes: _L3Bytes = None,
    l3_dir: _L3Dir = None,
    storage: _Storage = "file",
    storage_option: _StorageOption = None,
    mooncake_master: _Master = "127.0.0.1:50051",
    mooncake_segment_bytes: _SegmentBytes = 1 << 30,
    prefetch_policy: _Prefetch = PrefetchPolicy.WAIT_COMPLETE,
    write_policy: _Write = WritePolicy.WRITE_THROUGH,
    eviction: _Eviction = "lru",
    data: _Data = True,
    json_file: JsonFile = None,
    plot: _Plot = None,
) -> None:
    """Replay a request trace against the real cache and check every loaded byte.

    Complete blocks of 512 tokens count; the rest of a request is not cached. By default L1 and L2 hold at least the
    largest request.
    """
    check_device(device)
    check_results(json_file, plot, trace)
    loaded = _load_requests(trace, requests)
    page_size = DEFAULT_PAGE_SIZES.get(pool, 64) if page_size is None else page_size
    options = ReplayOptions(
        device=device or "cpu",
        pool=pool,
        layers=layers,
        row_bytes=row_bytes,
        page_size=page_size,
        block_tokens=block_tokens,
        l1_pages=_pages("--l1-pages", l1_pages, 10, loaded, page_size, block_tokens),
        l2_pages=_pages("--l2-pages", l2_pages, 25, loaded, page_size, block_tokens),
        l3_bytes=l3_bytes,
        l3_dir=l3_dir,
        write_policy=write_policy,
        eviction=eviction,
        data=data,
        storage=storage,
        storage_options=_storage_options(storage_option or []),
        mooncake_master=mooncake_master,
        mooncake_segment_bytes=mooncake_segment_bytes,
        prefetch_policy=prefetch_policy,
        window_tokens=window_tokens,
        checkpoint_blocks=checkpoint_blocks,
        l1_checkpoints=l1_checkpoints,
        l2_checkpoints=l2_checkpoints,
    )
    _replay(loaded, options, device, trace, json_file, plot)


def _replay(
    requests: Sequence[TraceRequest],
    options: ReplayOptions,
    device: str | None,
    trace: Path | None,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Check the options, run the replay and show what it saw."""
    if options.l3_dir is not None:
        _check_directory(options.l3_dir, options)
    try:
        options.check_sizes(requests)
    except ReplayError as error:
        raise CommandError(str(error)) from None
    options = replace(options, device=find_device(device))
    from . import report
    from .runner import Replay

    with _one_line_errors(options.l3_dir), terminated_like_interrupted(), Replay(requests, options) as running:
        show(report.setup_line(running, trace), highlight=False)
        _run(running)
        result = running.report
    show(report.table(result, options))
    write_figures(json_file, report.as_json(result, options))
    write_picture(plot, lambda path: report.plot(result, options, path))


def _check_directory(directory: Path, options: ReplayOptions) -> None:
    if not directory.name:
        raise CommandError(f"--l3-dir is {str(directory)!r}; the name of a directory is expected")
    if options.l3_bytes == 0 or not options.data or options.storage != "file":
        raise CommandError(
            "--l3-dir needs --data, --storage file and an --l3-bytes that is not 0; nothing would be stored there"
        )


def _load_requests(trace: Path | None, limit: int | None) -> list[TraceRequest]:
    if limit is not None and limit <= 0:
        raise CommandError(f"--requests is {limit}; it must be positive")
    try:
        return make_trace(limit or 300) if trace is None else read_trace(trace, limit)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{trace}: {error.strerror or error}") from None


def _pages(
    option: str, text: str, percent: int, requests: Sequence[TraceRequest], page_size: int, block_tokens: int
) -> int:
    """Return the pages of a tier: a number, or percent of the trace's distinct pages.

    By default that is ``percent``, or the largest request where that has more.
    """
    if page_size <= 0 or block_tokens < page_size:
        raise CommandError(
            f"page_size is {page_size} and block_tokens is {block_tokens}; 0 < page_size <= block_tokens is expected"
        )
    per_block = block_tokens // page_size
    distinct = len({block for request in requests for block in request.blocks})
    if not text:
        return max(distinct * percent // 100, *(len(request.blocks) for request in requests), 1) * per_block
    try:
        value = round(distinct * per_block * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except (OverflowError, ValueError):
        value = 0
    if value <= 0:
        raise CommandError(f"{option} is {text!r}; a positive number of pages, or of percent such as 10%, is expected")
    return value


def _storage_options(given: Sequence[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` texts; a value that is not JSON is text."""
    options: dict[str, Any] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name.isidentifier() or not equals:
            raise CommandError(f"--storage-option is {each!r}; NAME=VALUE is expected")
        try:
            options[name] = json.loads(value)
        except (RecursionError, ValueError):
            options[name] = value
    return options


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
