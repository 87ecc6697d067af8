"""Hands checked row copies to the compiled modules: both sides as spaces, the word, the streams and the CTAs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import tvm_ffi

from .constants import H200
from .row_sets import Rows
from .staging import canonical_device
from .streams import own_stream

THREADS = 1024
STAGED_BLOCKS = 132
STAGED_THREADS = 512
STAGING_BUFFERS = 2
WORD_BYTES = (16, 8, 4)


def word_bytes(*sizes: int) -> int:
    """Widest of 16, 8 and 4 bytes that divides all the given sizes and addresses."""
    common = math.gcd(*sizes)
    return next((word for word in WORD_BYTES if common % word == 0), WORD_BYTES[-1])


def _space(rows: Rows, device: torch.device, keep: list[torch.Tensor]) -> list[int]:
    """Fields of a space: row table, base, slots of a block, bytes between blocks, bytes between slots of a block."""
    if rows.table is None:
        if rows.layers is None:
            raise ValueError(f"{rows.name} has neither tensors nor a table")
        return [0, rows.layers.kernel_address(rows.name, 0), 1, rows.stride, 0]
    table = rows.table.contiguous().to(device)
    keep.append(table)
    return [table.data_ptr(), 0, 1, rows.stride, 0]


def _group(source: list[int], destination: list[int], rows: Rows, inner: int, word: int) -> list[int]:
    return [*source, *destination, rows.layer_count, rows.row_bytes, inner, word]


def default_blocks(destination: Sequence[Rows], source: Sequence[Rows]) -> int:
    """CTAs that reach the full bandwidth of the direction; the smaller number where foreign tables hide it."""
    reads_host = source[0].layers is not None and source[0].device.type == "cpu"
    constants = H200.load if reads_host else H200.write_back
    return constants.default_ctas


def _check_pinned(side: Sequence[Rows]) -> None:
    for rows in side:
        if rows.layers is not None and rows.device.type == "cpu" and not rows.layers.tensors[0].is_pinned():
            raise ValueError(
                f"{rows.name} is CPU memory that is not pinned; a GPU copies to and from pinned memory only"
            )


def move_rows(
    module: tvm_ffi.Module,
    destination: Sequence[Rows],
    destination_indices: torch.Tensor,
    source: Sequence[Rows],
    source_indices: torch.Tensor,
    device: torch.device,
    *,
    block_quota: int | None,
) -> None:
    """Queue a row copy of the main module on the current stream.

    Raises
    ------
    ValueError
        Where host memory is not pinned.
    """
    if device.type != "cpu":
        _check_pinned(destination)
        _check_pinned(source)
    keep: list[torch.Tensor] = []
    fields = []
    for to, of in zip(destination, source, strict=True):
        # Page-first rows: all layers of a slot are neighbours, so walk them together.
        dense = to.stride == to.row_bytes and of.stride == of.row_bytes
        inner = 0 if dense or to.layer_count == 1 else 1
        fields.append(
            _group(
                _space(of, device, keep),
                _space(to, device, keep),
                to,
                inner,
                word_bytes(to.alignment, of.alignment),
            )
        )
    indices = _same_width(source_indices, destination_indices, device)
    blocks = block_quota or default_blocks(destination, source)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    module.move_rows(torch.tensor(fields, dtype=torch.int64, device="cpu"), *indices, blocks, THREADS, 0, stream)


def _same_width(
    source: torch.Tensor, destination: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = source.dtype if source.dtype == destination.dtype else torch.int64
    # Made on the current stream, so their memory outlives the kernel that reads them.
    return (
        source.to(device=device, dtype=dtype).contiguous(),
        destination.to(device=device, dtype=dtype).contiguous(),
    )


def stage_pages(
    module: tvm_ffi.Module,
    destination: Sequence[Rows],
    destination_indices: torch.Tensor,
    source: Sequence[Rows],
    source_indices: torch.Tensor,
    staging: Sequence[torch.Tensor],
    device: torch.device,
    *,
    page_size: int,
    block_quota: int | None,
) -> None:
    """Queue a staged write-back through the caller's staging memory, which is split into two buffers where it can be.

    Work queued on the current stream afterwards sees the host bytes, and may reuse the staging memory.

    Raises
    ------
    ValueError
        Where host memory is not pinned.
    """
    if device.type != "cpu":
        _check_pinned(destination)
    capacity = min(buffer.shape[0] for buffer in staging) // page_size
    buffers = min(STAGING_BUFFERS, capacity)
    chunk_pages = capacity // buffers
    keep: list[torch.Tensor] = []
    groups, pieces = [], []
    slot_bytes = source[0].layer_count * source[0].row_bytes
    offsets = torch.arange(0, slot_bytes, source[0].row_bytes, dtype=torch.int64, device="cpu").to(device)
    for to, of, buffer in zip(destination, source, staging, strict=True):
        staged = [offsets.data_ptr(), buffer.data_ptr(), 1, slot_bytes, 0]
        word = word_bytes(of.alignment, buffer.data_ptr())
        groups.append(_group(_space(of, device, keep), staged, of, 1, word))
        pieces.append(_piece(to, buffer, page_size, slot_bytes))
    slots = source_indices.to(device).contiguous()
    pages = (destination_indices[::page_size] // page_size).contiguous()
    streams = _Streams(device, buffers)
    half = chunk_pages * page_size * slot_bytes
    module.write_back(
        torch.tensor(pieces, dtype=torch.int64, device="cpu"),
        torch.tensor(groups, dtype=torch.int64, device="cpu"),
        pages,
        slots,
        torch.tensor([[half * i, *streams.events(i)] for i in range(buffers)], dtype=torch.int64, device="cpu"),
        torch.empty(0, dtype=torch.int64, device="cpu"),
        page_size,
        chunk_pages,
        0,
        block_quota or STAGED_BLOCKS,
        STAGED_THREADS,
        streams.rows,
        streams.copies,
    )
    streams.join()


def _piece(to: Rows, staging: torch.Tensor, page_size: int, slot_bytes: int) -> list[int]:
    """Fields of a piece, which copies move: an element of a page, repeated along its layers and slots."""
    if to.layers is None:
        raise ValueError(f"{to.name} has no tensor")
    host = to.layers.tensors[0].data_ptr()
    layers = [to.layer_count, to.layer_stride, to.row_bytes]
    slots = [page_size, to.stride, slot_bytes]
    return [host, page_size * to.stride, 0, to.row_bytes, staging.data_ptr(), page_size * slot_bytes, *layers, *slots]


class _Streams:
    """Streams and events of one staged operation as the handles a module takes; all 0 on the CPU."""

    def __init__(self, device: torch.device, buffers: int) -> None:
        self._events: list[torch.cuda.Event] = []
        self.rows = self.copies = 0
        if device.type == "cpu":
            return
        self._current = torch.cuda.current_stream(device)
        self._copy = own_stream(canonical_device(device), "copies of the staged calls")
        self.rows, self.copies = self._current.cuda_stream, self._copy.cuda_stream
        self._events = [torch.cuda.Event() for _ in range(2 * buffers)]  # type: ignore[no-untyped-call]
        for event in self._events:
            event.record(self._current)  # an event has no handle before it was recorded

    def events(self, buffer: int) -> tuple[int, int]:
        if not self._events:
            return 0, 0
        return self._events[2 * buffer].cuda_event, self._events[2 * buffer + 1].cuda_event

    def join(self) -> None:
        """Hold the current stream behind the copies."""
        if self._events:
            self._current.wait_stream(self._copy)
