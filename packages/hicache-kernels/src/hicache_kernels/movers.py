"""The two compiled paths of one pool: everything a call needs, prepared once, around the modules' entry points."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import tvm_ffi

from .direct_cost import BULK_LOAD_ROW_BYTES, BULK_MULTIPLE
from .layer_events import NO_HANDLES, LayerEvents
from .pieces import staging_layout
from .plane import Plane
from .rows import STAGED_ALIGNMENT, RowTables, build_tables, copy_strides, kernel_strides
from .staged_cost import layer_groups
from .staging import Direction, StagingRing
from .streams import own_stream

DIRECT_THREADS = 1024
"""Threads of a CTA of a direct write-back: few, full CTAs keep the bus busy with the fewest SMs."""
DIRECT_LOAD_THREADS = 2560
"""Threads of a kernel that loads one layer, all CTAs together: at 64 bytes each, just over what the bus has under way
in 2 us. More would only queue up, and then drain with the bus half idle at the end of the layer."""
BULK_SHARED_BYTES = 160 << 10
"""Shared memory of a CTA that moves rows as bulk copies (sm_90 and later): two cover what the bus has under way."""
BULK_BLOCKS = 2
"""CTAs from which bulk copies pay."""
STAGED_THREADS = 1024
"""Threads of a CTA of a re-layout or scatter kernel, which runs on all SMs for a short time."""
MIN_COPY_BYTES = 2 << 20
"""Average bytes of a copy from which copies without staging keep the bus busy."""
MIN_COPY_WIDTH = 64 << 10
"""Width of a 2-D copy from which it runs at full speed next to compute, too. Loads 16, 32 and 64 KB wide reach 0.86,
0.99 and 1.00 of a plain copy on an idle device, and 0.48, 0.73 and 0.99 next to matrix products that are bound by its
memory (a tuning run on an H200)."""


class DirectMover:
    """Moves rows between device and host in one kernel (on CPU: with memcpy in the caller's thread).

    Raises
    ------
    ValueError
        Where rows, strides or addresses are not multiples of 4 bytes, or kernels cannot reach all of a plane's host
        memory from one address.
    """

    def __init__(self, planes: Sequence[Plane], module: tvm_ffi.Module) -> None:
        self._move = module["move_rows"]
        self._move_layers = module["move_layers"]
        self._device = planes[0].device.device
        self._row_bytes = min(plane.row_bytes for plane in planes)
        self._tables = build_tables(planes, kernel_strides(planes), layered=True)
        self._described: dict[tuple[bool, int | None], tvm_ffi.Tensor] = {}
        self._turns = itertools.count()

    def move(
        self,
        source_indices: torch.Tensor,
        destination_indices: torch.Tensor,
        *,
        to_device: bool,
        layer: int | None,
        blocks: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Queue the move of one layer (or all) on ``stream``; both index tensors are of one dtype, on the device."""
        threads = DIRECT_THREADS
        if to_device and layer is not None:
            threads = min(threads, max(128, -(-DIRECT_LOAD_THREADS // (32 * blocks)) * 32))
        groups = self._described.get((to_device, layer))
        if groups is None:
            groups = self._describe(to_device, layer)
        bulk = self._bulk(blocks) if to_device else 0
        handle = 0 if stream is None else stream.cuda_stream
        self._move(groups, source_indices, destination_indices, blocks, threads, bulk, handle)
        if stream is not None and not torch.cuda.is_current_stream_capturing():
            self._tables.tables.record_stream(stream)

    def load_with_events(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        layers: range,
        events: LayerEvents,
        blocks: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Queue the load of layers in order, with an event after each.

        One kernel takes all of them and counts its warps out of each, which a second stream waits for: so the bus is
        busy from the first byte to the last. Where that cannot be, it is a kernel a layer, on two streams in turn:
        while one starts or drains, the other keeps the bus busy; each gets half the CTAs, so that both together hold no
        more than the quota.
        """
        if not torch.cuda.is_current_stream_capturing():
            done = torch.empty(len(layers), dtype=torch.int32, device=self._device)
            # Loads of other streams may be under way: this one's events should not wait for theirs.
            side = self.streams[next(self._turns) % len(self.streams)]
            if self.load_layers(
                host_slots,
                device_slots,
                first_layer=layers.start,
                done=done,
                events=events.handles,
                blocks=blocks,
                stream=stream.cuda_stream,
                side_stream=side.cuda_stream,
            ):
                done.record_stream(side)
                self._tables.tables.record_stream(stream)
                return
        fork = stream.record_event()
        streams = self.streams[: min(2, blocks)]
        for each in streams:
            each.wait_event(fork)
        for layer, event in zip(layers, events.events, strict=True):
            each = streams[layer % len(streams)]
            self.move(host_slots, device_slots, to_device=True, layer=layer, blocks=blocks // len(streams), stream=each)
            event.record(each)
        # What the streams read is reused only by this stream's later work.
        for each in streams:
            stream.wait_stream(each)

    @functools.cached_property
    def streams(self) -> tuple[torch.cuda.Stream, ...]:
        """Streams of the layers of loads with events."""
        return tuple(own_stream(self._device, f"layers, {number}") for number in range(2))

    def load_layers(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        *,
        first_layer: int,
        done: torch.Tensor,
        events: torch.Tensor,
        blocks: int,
        stream: int,
        side_stream: int,
    ) -> bool:
        """Queue the load of layers in order, in one kernel, and an event a layer.

        Parameters
        ----------
        host_slots, device_slots
            As in :meth:`move`.
        first_layer
            The layers are this one and the next, as many as ``done`` has entries.
        done
            int32 ``[layers]`` on the device, written to.
        events
            int64 ``[layers]`` on CPU: handles of events, recorded on ``side_stream`` once a layer's rows are filled.
        blocks, stream
            Shape of the grid; stream of the kernel.
        side_stream
            Another stream.

        Returns
        -------
        bool
            False, with no row moved, where it takes more than one kernel or the runtime cannot wait for one's counts.
        """
        groups = self._described.get((True, first_layer))
        if groups is None:
            groups = self._describe(True, first_layer)
        queued: int = self._move_layers(
            groups,
            host_slots,
            device_slots,
            done,
            events,
            blocks,
            DIRECT_THREADS,
            self._bulk(blocks),
            stream,
            side_stream,
        )
        return queued == 1

    def _bulk(self, blocks: int) -> int:
        """Shared memory of a CTA for the bulk copies of a load; 0 where the row kernel is as fast."""
        long = self._row_bytes >= BULK_LOAD_ROW_BYTES and self._row_bytes % BULK_MULTIPLE == 0
        return BULK_SHARED_BYTES if long and blocks >= BULK_BLOCKS else 0

    def _describe(self, to_device: bool, layer: int | None) -> tvm_ffi.Tensor:
        groups = tvm_ffi.from_dlpack(self._tables.groups(to_device=to_device, layer=layer))
        self._described[to_device, layer] = groups
        return groups


def _row_lines(planes: Sequence[Plane]) -> tvm_ffi.Tensor | None:
    """Lines of every layer, as csrc/staged/runs.h reads them; None where a plane's slots are not evenly spaced."""
    table: list[list[int]] = []
    for plane in planes:
        rows = plane.device
        if rows.block_slots > 1 and rows.block_stride != rows.block_slots * rows.slot_stride:
            return None
    for layer in range(planes[0].device.layers):
        for plane, side in zip(planes, copy_strides(planes), strict=True):
            rows = plane.device
            slot = rows.block_stride if rows.block_slots == 1 else rows.slot_stride
            for row in range(rows.rows_per_layer):
                host = side.offset + layer * side.layer + row * plane.row_bytes
                base = rows.bases[layer * rows.rows_per_layer + row]
                table.append([base, host, plane.row_bytes, slot, side.slot, side.page])
    return tvm_ffi.from_dlpack(torch.tensor(table, dtype=torch.int64, device="cpu"))


@dataclass(frozen=True, eq=False)
class _Prepared:
    pieces: tvm_ffi.Tensor
    groups: tvm_ffi.Tensor
    tables: RowTables


class StagedMover:
    """Moves pages through staging memory, by the copy engine (on CPU: through a buffer, with memcpy).

    Parameters
    ----------
    planes
        Planes of the pool; row bytes are multiples of 16.
    module
        The staged module.
    ring
        Staging memory.
    boundaries
        Host addresses, ascending, that no copy spans.
    blocks
        CTAs of the re-layout kernels.

    Raises
    ------
    ValueError
        Where rows, device strides or device addresses are not multiples of 16 bytes.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        module: tvm_ffi.Module,
        ring: StagingRing,
        boundaries: Sequence[int],
        blocks: int,
    ) -> None:
        for plane in planes:
            if plane.row_bytes % STAGED_ALIGNMENT:
                raise ValueError(
                    f"plane {plane.name}: rows of {plane.row_bytes} bytes; staged transfers need multiples of "
                    f"{STAGED_ALIGNMENT}"
                )
        self._planes = tuple(planes)
        self._write_back = module["write_back"]
        self._load = module["load"]
        self._copy_runs = module["copy_runs"]
        self._lines = _row_lines(planes)
        self._lines_per_layer = sum(plane.device.rows_per_layer for plane in planes)
        self.write_lane = ring.lane(Direction.WRITE_BACK)
        self.load_lane = ring.lane(Direction.LOAD)
        self._boundaries = tvm_ffi.from_dlpack(torch.tensor(sorted(boundaries), dtype=torch.int64, device="cpu"))
        self._blocks = blocks
        self._layers = planes[0].device.layers
        self._page_size = planes[0].host.page_size
        self._page_bytes = sum(plane.element_bytes for plane in planes) * self._page_size
        # Keys of a direction are looked up and added with its lane's lock held.
        self._prepared: dict[tuple[Direction, int, int], _Prepared] = {}
        # Fails here, not in the first transfer, where addresses do not fit.
        self._prepare(Direction.LOAD, 1, 1)

    def _prepare(self, direction: Direction, chunk_pages: int, layers: int) -> _Prepared:
        """Pieces, groups and row tables for staging buffers of ``chunk_pages`` pages of ``layers`` layers."""
        layout = staging_layout(self._planes, layers=layers, chunk_pages=chunk_pages)
        tables = build_tables(self._planes, layout.planes, layered=layers > 1, inner=self._page_size)
        if min(tables.vector_bytes) < STAGED_ALIGNMENT:
            names = ", ".join(plane.name for plane in self._planes)
            raise ValueError(
                f"planes {names}: device addresses or strides are not multiples of {STAGED_ALIGNMENT} bytes, which "
                "staged transfers need"
            )
        groups = tables.groups(to_device=direction is Direction.LOAD, layer=0, layers=layers)
        prepared = _Prepared(tvm_ffi.from_dlpack(layout.pieces), tvm_ffi.from_dlpack(groups), tables)
        self._prepared[direction, chunk_pages, layers] = prepared
        return prepared

    def write_back(self, pages: torch.Tensor, slots: torch.Tensor, stream: torch.cuda.Stream | None) -> int:
        """Queue the write-back of whole pages; returns the number of copies. Call with the lane's lock held.

        Parameters
        ----------
        pages
            int64 ``[pages]`` on CPU: host pages.
        slots
            int32 or int64 ``[pages * page_size]`` on the device: device slots.
        stream
            The caller's stream; None on CPU.
        """
        lane, layers = self.write_lane, self._layers
        chunk_pages = lane.chunk_pages(self._page_bytes * layers)
        prepared = self._prepared.get((Direction.WRITE_BACK, chunk_pages, layers))
        if prepared is None:
            prepared = self._prepare(Direction.WRITE_BACK, chunk_pages, layers)
        copies: int = self._write_back(
            prepared.pieces,
            prepared.groups,
            pages,
            slots,
            lane.table,
            self._boundaries,
            self._page_size,
            chunk_pages,
            lane.cursor,
            self._blocks,
            STAGED_THREADS,
            0 if stream is None else stream.cuda_stream,
            lane.stream_handle,
        )
        # Where there are several chunks, the first is short, which can make one more.
        chunks = -(-pages.shape[0] // chunk_pages)
        lane.filled(chunks + (chunks > 1), stream, prepared.tables.tables)
        return copies

    def load(
        self,
        pages: torch.Tensor,
        slots: torch.Tensor,
        stream: torch.cuda.Stream | None,
        *,
        first_layer: int,
        end_layer: int,
        layers_each: int = 1,
        moved: int = 0,
        copy_events: torch.Tensor = NO_HANDLES,
    ) -> int:
        """Queue the load of layers ``first_layer`` to ``end_layer - 1`` in order; returns the number of copies.

        Copies take up to ``layers_each`` layers at once, the first ones fewer: one, one, two, four, and so on, so that
        no layer is ready later than when twice as much as it needs has crossed the bus; where ``moved`` layers have
        gone before them, the first copies take as many. ``copy_events`` holds handles
        of events, int64 on CPU, recorded on ``stream`` after the rows of each of these copies, as many as
        :func:`~hicache_kernels.staged_cost.layer_steps` gives; or none. Other parameters are those of
        :meth:`write_back`.
        """
        lane = self.load_lane
        copies = step = 0
        for start, end, each in layer_groups(first_layer, end_layer, layers_each, moved):
            events, steps = copy_events, (end - start) // each
            if copy_events.shape[0]:
                events = copy_events[step : step + steps]
                step += steps
            chunk_pages = lane.chunk_pages(self._page_bytes * each)
            prepared = self._prepared.get((Direction.LOAD, chunk_pages, each))
            if prepared is None:
                prepared = self._prepare(Direction.LOAD, chunk_pages, each)
            copies += self._load(
                prepared.pieces,
                prepared.groups,
                pages,
                slots,
                lane.table,
                self._boundaries,
                self._page_size,
                chunk_pages,
                lane.cursor,
                start,
                end,
                each,
                events,
                # Host bytes may be ready only after work of the caller's stream.
                lane.fence if start == first_layer else 0,
                self._blocks,
                STAGED_THREADS,
                0 if stream is None else stream.cuda_stream,
                lane.stream_handle,
            )
            lane.filled(-(-pages.shape[0] // chunk_pages) * steps, stream, prepared.tables.tables)
        return copies

    def copy_runs(
        self,
        direction: Direction,
        pages: torch.Tensor,
        slots: torch.Tensor,
        stream: torch.cuda.Stream | None,
        *,
        first_layer: int,
        end_layer: int,
        layer_events: torch.Tensor = NO_HANDLES,
    ) -> int | None:
        """Queue 2-D copies between device rows and host pages, without staging or a kernel, where both sides are runs.

        Parameters
        ----------
        direction
            Which way.
        pages, stream, first_layer, end_layer, layer_events
            As in :meth:`load`; the events are recorded on the copy stream.
        slots
            Device slots, int32 or int64 on CPU.

        Returns
        -------
        int or None
            Number of copies, all on the copy stream; None, with nothing queued, where they would be short or narrow.
        """
        # A copy has at most all pages of a row of each slot.
        if self._lines is None or self._page_bytes * pages.shape[0] < MIN_COPY_BYTES * self._lines_per_layer:
            return None
        lane = self.write_lane if direction is Direction.WRITE_BACK else self.load_lane
        lane.begin()
        copies: int = self._copy_runs(
            self._lines,
            pages,
            slots,
            self._boundaries,
            self._page_size,
            self._lines_per_layer,
            first_layer,
            end_layer,
            layer_events,
            direction is Direction.WRITE_BACK,
            MIN_COPY_BYTES,
            MIN_COPY_WIDTH,
            lane.fence,
            0 if stream is None else stream.cuda_stream,
            lane.stream_handle,
        )
        return None if copies < 0 else copies
