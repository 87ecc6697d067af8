"""PlaneTransfer: every way between the device rows and the host pages of one pool, behind two calls."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from . import planner, reference
from .indices import IndexReader, OperationIndices
from .layout import HostLayout, HostStrides
from .movers import NO_EVENTS, DirectMover, StagedMover
from .plane import Plane, check_planes
from .probe import load_module, unavailable_reason, warn_once
from .results import Capabilities, TransferPolicy, TransferResult, transfer_policy
from .spec import module_device_type
from .staging import Direction, StagingRing, canonical_device, default_ring
from .streams import own_stream
from .validation import whole

__all__ = ["BOTH_RUNS", "Capabilities", "PlaneTransfer", "TransferPolicy", "TransferResult"]

logger = logging.getLogger(__name__)

MOST_PLANS = 1024
"""Plans that a transfer remembers."""
BOTH_RUNS = "device slots are runs too, so the copies need no staging"
"""Ends the reason of a staged operation that went without staging."""


def _layout(strides: HostStrides, page_size: int) -> HostLayout:
    """Layout by its strides; pages of one slot, in which the page-first layouts are one, count as the direct one."""
    if strides.layer > strides.page:
        return HostLayout.LAYER_FIRST
    if page_size > 1 and strides.slot >= strides.layer:
        return HostLayout.PAGE_FIRST
    return HostLayout.PAGE_FIRST_DIRECT


def _check_boundaries(boundaries: Sequence[int], size: int) -> None:
    for index, offset in enumerate(boundaries):
        whole(f"boundaries[{index}]", offset, least=0, most=size)


class _Events(NamedTuple):
    """Events of one load that nobody else has seen, and their handles, int64 on CPU."""

    events: tuple[torch.cuda.Event, ...] = ()
    handles: torch.Tensor = NO_EVENTS

    @classmethod
    def make(cls, count: int, stream: torch.cuda.Stream) -> _Events:
        events = tuple(stream.record_event() for _ in range(count))  # an event has no handle before it was recorded
        return cls(events, torch.tensor([event.cuda_event for event in events], dtype=torch.int64, device="cpu"))


def _host_pages(indices: OperationIndices) -> torch.Tensor:
    if indices.pages is None:
        raise ValueError("host_indices lies on the device; staged transfers need it on the CPU")
    return indices.pages


class PlaneTransfer:
    """Transfers of one pool: its planes, its share of the staging ring, its policy.

    Calls may come from any thread and any current stream. Operations of one direction share the staging ring and follow
    each other; the compiled modules are built, or loaded, by the first call or :meth:`capabilities`.

    Parameters
    ----------
    planes
        At least one; all with the same layers, page size, pages, device and number of device slots.
    policy
        Default policy of the operations.
    boundaries
        Byte offsets in the host buffer (in each, where planes have several) at which a pinned registration ends; no
        copy spans one.
    ring
        Staging memory; the device's shared ring by default.
    constants
        What the planner knows of the device; None takes those of :mod:`hicache_kernels.calibrate`, which the first
        operation measures where this machine has none on disk.

    Raises
    ------
    ValueError
        Naming the plane, the value and what is accepted.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        *,
        policy: TransferPolicy | str = TransferPolicy.AUTO,
        boundaries: Sequence[int] = (),
        ring: StagingRing | None = None,
        constants: planner.DeviceConstants | None = None,
    ) -> None:
        if not isinstance(planes, Iterable):
            raise TypeError(f"planes is a {type(planes).__name__}; it must be a sequence of Plane")
        self.planes = tuple(planes)
        check_planes(self.planes)
        self._policy = transfer_policy(policy)
        self.boundaries = tuple(boundaries)
        first = self.planes[0]
        self.device = canonical_device(first.device.device)
        if ring is not None and not isinstance(ring, StagingRing):
            raise TypeError(f"ring is a {type(ring).__name__}; it must be a StagingRing, or None for the device's own")
        if ring is not None and ring.device != self.device:
            raise ValueError(f"ring lies on {ring.device}; it must lie on {self.device}, as the rows do")
        _check_boundaries(self.boundaries, max(plane.host.buffer.numel() for plane in self.planes))
        self.layers = first.device.layers
        self.page_size = first.host.page_size
        self.page_bytes = sum(plane.element_bytes for plane in self.planes) * self.layers * self.page_size
        self._ring = ring
        self._constants = constants
        self._lock = threading.Lock()
        self._spare_events: dict[int, _Events] = {}
        self._events_wanted = 0
        self._turns = itertools.count()
        self._plans: dict[tuple[object, ...], planner.Plan] = {}
        self._layout = _layout(first.host.strides, self.page_size)

    @property
    def policy(self) -> TransferPolicy:
        """Default policy of the operations."""
        return self._policy

    # ---- paths

    @functools.cached_property
    def ring(self) -> StagingRing:
        """Staging memory of this pool's transfers."""
        return default_ring(self.device) if self._ring is None else self._ring

    @functools.cached_property
    def _indices(self) -> IndexReader:
        device_type = module_device_type(self.device)
        module = load_module("staged", device_type) or load_module("main", device_type)
        return IndexReader(
            page_size=self.page_size,
            host_slots=self.planes[0].host.slots,
            device_slots=self.planes[0].device.slots,
            device=self.device,
            scan=None if module is None else module["scan_indices"],
            upload=None if module is None else module["upload_indices"],
        )

    @functools.cached_property
    def _direct(self) -> tuple[DirectMover | None, str]:
        device_type = module_device_type(self.device)
        module = load_module("main", device_type)
        if module is None:
            return None, unavailable_reason("main", device_type) or "the main module is missing"
        if self.device.type != "cpu":
            for plane in self.planes:
                if not plane.host.buffer.is_pinned():
                    return None, f"the host buffer of plane {plane.name} is not pinned, so kernels cannot reach it"
        try:
            # The device address of host memory is that of the current device.
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                return DirectMover(self.planes, module), ""
        except ValueError as error:
            return None, str(error)

    @functools.cached_property
    def _staged(self) -> tuple[StagedMover | None, str]:
        device_type = module_device_type(self.device)
        module = load_module("staged", device_type)
        if module is None:
            return None, unavailable_reason("staged", device_type) or "the staged module is missing"
        buffers = {plane.host.buffer.data_ptr() for plane in self.planes}
        boundaries = [buffer + offset for buffer in buffers for offset in self.boundaries]
        blocks = 1
        if self.device.type != "cpu":
            blocks = torch.cuda.get_device_properties(self.device).multi_processor_count
        try:
            return StagedMover(self.planes, module, self.ring, boundaries, blocks), ""
        except ValueError as error:
            return None, str(error)

    @functools.cached_property
    def _available(self) -> planner.Availability:
        with self._lock:
            staged, staged_reason = self._staged
            direct, direct_reason = self._direct
        if staged is None and direct is None:
            warn_once(
                f"transfers on {self.device.type} run in plain torch: staged: {staged_reason}; direct: {direct_reason}"
            )
        return planner.Availability(staged is not None, direct is not None, staged_reason, direct_reason)

    def capabilities(self) -> Capabilities:
        """Paths, reasons and build errors; builds or loads the modules where that has not happened yet."""
        available = self._available
        pages = self.planes[0].host.pages
        write_back = self._plan(Direction.WRITE_BACK, pages, 1, None, None, False)
        load = self._plan(Direction.LOAD, pages, 1, None, None, False)
        missing = [
            f"{name}: {reason}"
            for name, reason in (("staged", available.staged_reason), ("direct", available.direct_reason))
            if reason
        ]
        device_type = module_device_type(self.device)
        errors = [reason for name in ("staged", "main") if (reason := unavailable_reason(name, device_type))]
        return Capabilities(
            write_back.path,
            load.path,
            available.staged,
            available.direct,
            "; ".join(missing) if missing else write_back.reason,
            errors[0] if errors else None,
        )

    def plan(self, direction: Direction, *, pages: int, runs: int, layer_by_layer: bool = False) -> planner.Plan:
        """Path an operation of ``pages`` host pages in ``runs`` runs would take under the pool's policy, and why.

        ``layer_by_layer`` for loads whose layers are calls of their own, rather than one call with events.
        """
        pages, runs = whole("pages", pages, least=0), whole("runs", runs, least=0)
        return self._plan(direction, pages, runs, None, None, layer_by_layer)

    def _planner_constants(self) -> planner.DeviceConstants:
        if self._constants is None:
            # Imported here, as calibration measures with transfers.
            from .calibrate import device_constants

            constants = device_constants(self.device)
            if self.device.type != "cpu" and torch.cuda.is_current_stream_capturing():
                return constants
            self._constants = constants
        return self._constants

    def _plan(
        self,
        direction: Direction,
        pages: int,
        runs: int,
        policy: TransferPolicy | str | None,
        block_quota: int | None,
        layer_by_layer: bool,
    ) -> planner.Plan:
        """Plan an operation; operations of one shape are planned once."""
        key = (direction, pages, runs, policy, block_quota, layer_by_layer)
        known = self._plans.get(key)
        if known is not None and type(block_quota) in (int, type(None)):
            return known
        plan = self._plan_anew(direction, pages, runs, policy, block_quota, layer_by_layer)
        if self._constants is not None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _plan_anew(
        self,
        direction: Direction,
        pages: int,
        runs: int,
        policy: TransferPolicy | str | None,
        block_quota: int | None,
        layer_by_layer: bool,
    ) -> planner.Plan:
        work = planner.Work(
            self._layout,
            pages,
            runs,
            self.page_bytes,
            self.page_size,
            self.layers,
            len(self.planes),
            self._smallest_row,
        )
        chosen = str(self.policy if policy is None else transfer_policy(policy))
        if direction is Direction.WRITE_BACK:
            return planner.plan_write_back(
                work,
                constants=self._planner_constants(),
                available=self._available,
                policy=chosen,
                block_quota=block_quota,
                staging_bytes=self.ring.budget_bytes // 2,
            )
        return planner.plan_load(
            work,
            constants=self._planner_constants(),
            available=self._available,
            policy=chosen,
            block_quota=block_quota,
            staging_bytes=self.ring.budget_bytes // 2,
            layer_by_layer=layer_by_layer,
        )

    # ---- operations

    def write_back(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        policy: TransferPolicy | str | None = None,
        block_quota: int | None = None,
    ) -> TransferResult:
        """Queue the copy of all layers of ``device_indices`` to ``host_indices`` behind the current stream's work.

        Parameters
        ----------
        host_indices, device_indices
            int64 or int32 slot indices ``[n]``, whole pages in order (``n % page_size == 0``; the slots of a page
            neighbours and aligned on the host side), on CPU or the device; no host slot twice. Host indices on the
            device allow the direct path only. Under graph capture both lie on the device.
        policy, block_quota
            Override the pool's policy; cap the CTAs a direct transfer may hold.

        Raises
        ------
        TypeError, ValueError, IndexError
            Before anything was queued, naming the tensor and its value.
        hicache_kernels.planner.PathUnavailableError
            Where the policy demands a path that is missing.
        """
        stream = self._current_stream()
        if stream is not None and stream.device != self.device:
            with torch.cuda.device(self.device):
                return self.write_back(host_indices, device_indices, policy=policy, block_quota=block_quota)
        indices = self._indices.read(host_indices, device_indices, stream)
        plan = self._plan_operation(Direction.WRITE_BACK, indices, policy, block_quota, False)
        size = indices.page_count * self.page_bytes
        if size == 0:
            return TransferResult(plan.path, "nothing to move", 0, 0)
        if plan.path == planner.REFERENCE:
            reference.write_back(self.planes, host_indices, device_indices)
            return TransferResult(plan.path, plan.reason, size, indices.runs)
        try:
            if plan.path == planner.DIRECT:
                self._move_direct(self._indices.both_slots(indices, stream), False, None, plan.block_quota, stream)
                done = None if stream is None else stream.record_event()
                return TransferResult(plan.path, plan.reason, size, indices.runs, done, done)
            copies, released, ready, reason = self._write_back_staged(indices, plan.reason, stream)
            return TransferResult(plan.path, reason, size, indices.runs, released, ready, copies)
        finally:
            self._indices.done(indices, stream)

    def _write_back_staged(
        self, indices: OperationIndices, reason: str, stream: torch.cuda.Stream | None
    ) -> tuple[int, torch.cuda.Event | None, torch.cuda.Event | None, str]:
        """Queue a staged write-back: its copies, the events of the result, and the reason."""
        pages = _host_pages(indices)
        staged = self._demand_staged()
        with self.ring.lane(Direction.WRITE_BACK).lock:
            if indices.device.device.type == "cpu":
                copies = staged.copy_runs(
                    Direction.WRITE_BACK, pages, indices.device, stream, first_layer=0, end_layer=self.layers
                )
                if copies is not None:
                    ready = staged.copies_done(Direction.WRITE_BACK)
                    return copies, ready, ready, f"{reason}; {BOTH_RUNS}"
            copies = staged.write_back(pages, self._indices.device_slots(indices, stream), stream)
            released = None if stream is None else stream.record_event()
            return copies, released, staged.copies_done(Direction.WRITE_BACK), reason

    def load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        layer: int | None = None,
        policy: TransferPolicy | str | None = None,
        block_quota: int | None = None,
        layer_events: bool = False,
    ) -> TransferResult:
        """Queue the copy of one layer (or all, with None) of ``host_indices`` to ``device_indices``.

        Work queued on the current stream afterwards sees the filled rows. All layers in one call overlap best: the
        copies of later layers do not wait for the earlier layers' rows.

        Parameters
        ----------
        host_indices, device_indices, policy, block_quota
            As in :meth:`write_back`; no device slot twice.
        layer
            Model layer, or None for all.
        layer_events
            Also record an event after each layer (:attr:`TransferResult.layer_done`).

        Raises
        ------
        TypeError, ValueError, IndexError
            Before anything was queued, naming the tensor and its value.
        hicache_kernels.planner.PathUnavailableError
            Where the policy demands a path that is missing.
        """
        if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int)):
            raise TypeError(f"layer is {layer!r}; it must be an int from 0 to {self.layers - 1}, or None for all")
        if layer is not None and not 0 <= layer < self.layers:
            raise IndexError(f"layer is {layer}; it must be from 0 to {self.layers - 1}, or None for all")
        stream = self._current_stream()
        if stream is not None and stream.device != self.device:
            with torch.cuda.device(self.device):
                return self.load(
                    host_indices,
                    device_indices,
                    layer=layer,
                    policy=policy,
                    block_quota=block_quota,
                    layer_events=layer_events,
                )
        indices = self._indices.read(host_indices, device_indices, stream, keep=layer is not None)
        plan = self._plan_operation(Direction.LOAD, indices, policy, block_quota, layer is not None)
        layers = range(self.layers) if layer is None else range(layer, layer + 1)
        size = indices.page_count * self.page_bytes // self.layers * len(layers)
        if size == 0:
            return TransferResult(plan.path, "nothing to move", 0, 0)
        if plan.path == planner.REFERENCE:
            reference.load(self.planes, host_indices, device_indices, layer)
            return TransferResult(plan.path, plan.reason, size, indices.runs)
        with_events = layer_events and stream is not None
        try:
            if plan.path == planner.DIRECT:
                events: tuple[torch.cuda.Event, ...] = ()
                slots = self._indices.both_slots(indices, stream)
                if with_events and stream is not None:
                    events = self._load_layers_direct(slots, layers, max(1, plan.block_quota), stream)
                else:
                    self._move_direct(slots, True, layer, plan.block_quota, stream)
                done = None if stream is None else stream.record_event()
                return TransferResult(plan.path, plan.reason, size, indices.runs, done, done, 0, events)
            return self._load_staged(indices, plan, layers, size, with_events, stream)
        finally:
            self._indices.done(indices, stream)
            if with_events and stream is not None:
                self._make_spare_events(stream)

    def _load_staged(
        self,
        indices: OperationIndices,
        plan: planner.Plan,
        layers: range,
        size: int,
        with_events: bool,
        stream: torch.cuda.Stream | None,
    ) -> TransferResult:
        pages = _host_pages(indices)
        staged = self._demand_staged()
        with self.ring.lane(Direction.LOAD).lock:
            taken = _Events()
            if indices.device.device.type == "cpu":
                # More than the staged path needs, which takes over what direct copies leave.
                taken = self._take_events(len(layers) if with_events else 0, stream)
                copies = staged.copy_runs(
                    Direction.LOAD,
                    pages,
                    indices.device,
                    stream,
                    first_layer=layers.start,
                    end_layer=layers.stop,
                    layer_events=taken.handles,
                )
                if copies is not None:
                    ready = staged.copies_done(Direction.LOAD)
                    if stream is not None and ready is not None:
                        stream.wait_event(ready)
                    reason = f"{plan.reason}; {BOTH_RUNS}"
                    return TransferResult(plan.path, reason, size, indices.runs, ready, ready, copies, taken.events)
            steps = planner.layer_steps(layers.start, layers.stop, plan.layers_each) if with_events else []
            if not taken.events:
                taken = self._take_events(len(steps), stream)
            taken = _Events(taken.events[: len(steps)], taken.handles[: len(steps)])
            copies = staged.load(
                pages,
                self._indices.device_slots(indices, stream),
                stream,
                first_layer=layers.start,
                end_layer=layers.stop,
                layers_each=plan.layers_each,
                copy_events=taken.handles,
            )
            ready = staged.copies_done(Direction.LOAD)
        released = None if stream is None else stream.record_event()
        # Layers that one copy brings are filled at once, and share its event.
        events = tuple(event for event, each in zip(taken.events, steps, strict=True) for _ in range(each))
        return TransferResult(plan.path, plan.reason, size, indices.runs, released, ready, copies, events)

    def _take_events(self, count: int, stream: torch.cuda.Stream | None) -> _Events:
        """Spare events, made at the end of an earlier load of as many, or new ones."""
        if stream is None or count == 0:
            return _Events()
        taken = self._spare_events.pop(count, None)
        self._events_wanted = count
        return _Events.make(count, stream) if taken is None else taken

    def _make_spare_events(self, stream: torch.cuda.Stream) -> None:
        """Have events for one more load like the last ready, once that is queued."""
        count = self._events_wanted
        if count not in self._spare_events and not torch.cuda.is_current_stream_capturing():
            self._spare_events = {count: _Events.make(count, stream)}

    def _demand_staged(self) -> StagedMover:
        mover, reason = self._staged
        if mover is None:
            raise planner.PathUnavailableError(reason)
        return mover

    def _demand_direct(self) -> DirectMover:
        mover, reason = self._direct
        if mover is None:
            raise planner.PathUnavailableError(reason)
        return mover

    def _plan_operation(
        self,
        direction: Direction,
        indices: OperationIndices,
        policy: TransferPolicy | str | None,
        block_quota: int | None,
        layer_by_layer: bool,
    ) -> planner.Plan:
        if indices.pages is None and transfer_policy(policy or self.policy) is TransferPolicy.AUTO:
            policy = TransferPolicy.DIRECT
        return self._plan(direction, indices.page_count, indices.runs, policy, block_quota, layer_by_layer)

    def _move_direct(
        self,
        slots: tuple[torch.Tensor, torch.Tensor],
        to_device: bool,
        layer: int | None,
        blocks: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        mover = self._demand_direct()
        host_slots, device_slots = slots
        source, destination = (host_slots, device_slots) if to_device else (device_slots, host_slots)
        mover.move(
            source,
            destination,
            to_device=to_device,
            layer=layer,
            blocks=max(1, blocks),
            stream=0 if stream is None else stream.cuda_stream,
        )
        if stream is not None and not torch.cuda.is_current_stream_capturing():
            mover.tables.record_stream(stream)

    def _load_layers_direct(
        self, slots: tuple[torch.Tensor, torch.Tensor], layers: range, blocks: int, stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.Event, ...]:
        """Queue the layers in order, with an event behind each.

        One kernel takes all of them and counts its warps out of each, which a second stream waits for: so the bus is
        busy from the first byte to the last. Where that cannot be, it is a kernel a layer, on two streams in turn:
        while one starts or drains, the other keeps the bus busy; each gets half the CTAs, so that both together hold no
        more than the quota.
        """
        mover = self._demand_direct()
        taken = self._take_events(len(layers), stream)
        if not torch.cuda.is_current_stream_capturing():
            done = torch.empty(len(layers), dtype=torch.int32, device=self.device)
            # Loads of other streams may be under way: the next one's events should not come behind theirs.
            side = self._direct_lanes[next(self._turns) % len(self._direct_lanes)]
            if mover.load_layers(
                *slots,
                first_layer=layers.start,
                done=done,
                events=taken.handles,
                blocks=blocks,
                stream=stream.cuda_stream,
                side_stream=side.cuda_stream,
            ):
                done.record_stream(side)
                mover.tables.record_stream(stream)
                return taken.events
        fork = stream.record_event()
        lanes = self._direct_lanes[: min(2, blocks)]
        for lane in lanes:
            lane.wait_event(fork)
        for layer, event in zip(layers, taken.events, strict=True):
            lane = lanes[layer % len(lanes)]
            self._move_direct(slots, True, layer, blocks // len(lanes), lane)
            event.record(lane)
        # Whatever the lanes read is reused behind this stream's later work only.
        for lane in lanes:
            stream.wait_stream(lane)
        return taken.events

    @functools.cached_property
    def _direct_lanes(self) -> tuple[torch.cuda.Stream, ...]:
        return tuple(own_stream(self.device, f"layers, {number}") for number in range(2))

    # ---- devices and indices

    def _current_stream(self) -> torch.cuda.Stream | None:
        """Stream of the current device, which need not be the rows'; None on CPU."""
        return None if self.device.type == "cpu" else torch.cuda.current_stream()

    @functools.cached_property
    def _smallest_row(self) -> int:
        return min(plane.row_bytes for plane in self.planes)
