"""Hands checked row copies to the compiled modules, in the descriptions that planes have too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import tvm_ffi

from .constants import H200
from .pieces import Axis, Piece, describe_piece
from .row_sets import RowSet
from .rows import DIRECT_ALIGNMENT, RowGroup, RowSpace, describe, widest_vector
from .staging import canonical_device
from .streams import own_stream

THREADS = 1024
STAGED_BLOCKS = 132
STAGED_THREADS = 512
STAGING_BUFFERS = 2


def _spaces(rows: Sequence[RowSet], device: torch.device, keep: list[torch.Tensor]) -> list[RowSpace]:
    """Spaces of rows, with their tables brought to the device; ``keep`` holds those until the kernel is queued."""
    spaces = []
    for each in rows:
        table = None if each.table is None else each.table.contiguous().to(device)
        if table is not None:
            keep.append(table)
        spaces.append(each.space(table))
    return spaces


def default_blocks(destination: Sequence[RowSet], source: Sequence[RowSet]) -> int:
    """CTAs that reach the full bandwidth of the direction; the smaller number where foreign tables hide it."""
    reads_host = source[0].layers is not None and source[0].device.type == "cpu"
    constants = H200.load if reads_host else H200.write_back
    return constants.default_ctas


def _check_pinned(side: Sequence[RowSet]) -> None:
    for rows in side:
        if rows.layers is not None and rows.device.type == "cpu" and not rows.layers.tensors[0].is_pinned():
            raise ValueError(
                f"{rows.name} is CPU memory that is not pinned; a GPU copies to and from pinned memory only"
            )


def move_rows(
    module: tvm_ffi.Module,
    destination: Sequence[RowSet],
    destination_indices: torch.Tensor,
    source: Sequence[RowSet],
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
    groups = []
    spaces = zip(_spaces(destination, device, keep), _spaces(source, device, keep), strict=True)
    for to, of, (to_space, of_space) in zip(destination, source, spaces, strict=True):
        # Page-first rows: all layers of a slot are neighbours, so walk them together.
        dense = to.stride == to.row_bytes and of.stride == of.row_bytes
        inner = 0 if dense or to.layer_count == 1 else 1
        width = widest_vector([to.alignment, of.alignment])
        groups.append(RowGroup(of_space, to_space, to.layer_count, to.row_bytes, inner, width))
    indices = _same_width(source_indices, destination_indices, device)
    blocks = block_quota or default_blocks(destination, source)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    module.move_rows(describe(groups), *indices, blocks, THREADS, 0, stream)


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
    destination: Sequence[RowSet],
    destination_indices: torch.Tensor,
    source: Sequence[RowSet],
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
        Where host memory is not pinned, or staging memory is not aligned.
    """
    if device.type != "cpu":
        _check_pinned(destination)
    capacity = min(buffer.shape[0] for buffer in staging) // page_size
    buffers = min(STAGING_BUFFERS, capacity)
    chunk_pages = capacity // buffers
    keep: list[torch.Tensor] = []
    groups, pieces = [], []
    layers, row_bytes = source[0].layer_count, source[0].row_bytes
    slot_bytes = layers * row_bytes
    offsets = torch.arange(0, slot_bytes, row_bytes, dtype=torch.int64, device="cpu").to(device)
    for to, of, of_space, buffer in zip(destination, source, _spaces(source, device, keep), staging, strict=True):
        in_staging = RowSpace(offsets.data_ptr(), buffer.data_ptr(), 1, slot_bytes, 0)
        width = widest_vector([of.alignment, buffer.data_ptr()])
        if not width:
            raise ValueError(
                f"staging memory for {of.name} starts at {buffer.data_ptr():#x}; kernels need a multiple of "
                f"{DIRECT_ALIGNMENT} bytes"
            )
        groups.append(RowGroup(of_space, in_staging, layers, row_bytes, 1, width))
        piece = _piece(to, page_size)
        pieces.append(describe_piece(piece, buffer.data_ptr(), page_size * slot_bytes, (slot_bytes, row_bytes)))
    slots = source_indices.to(device).contiguous()
    pages = (destination_indices[::page_size] // page_size).contiguous()
    streams = _Streams(device, buffers)
    half = chunk_pages * page_size * slot_bytes
    module.write_back(
        torch.tensor(pieces, dtype=torch.int64, device="cpu"),
        describe(groups),
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


def _piece(to: RowSet, page_size: int) -> Piece:
    """Describe an element of a page, repeated along its layers and slots."""
    if to.layers is None:
        raise ValueError(f"{to.name} has no tensor")
    address = to.layers.tensors[0].data_ptr()
    slots, layers = Axis(page_size, to.stride), Axis(to.layer_count, to.layer_stride)
    return Piece(address, to.row_bytes, slots, layers, page_size * to.stride, 0, members=(), memory=address)


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
        """Make the current stream wait for the copies."""
        if self._events:
            self._current.wait_stream(self._copy)
