"""PlaneTransfer: every way between the device rows and the host pages of one pool, in two calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from . import reference
from .constants import Compute, DeviceConstants
from .direct_cost import shares_one_event
from .indices import OperationIndices
from .layer_events import LayerEvents, SpareEvents
from .paths import PlanePaths
from .plane import Plane, check_planes
from .plans import OperationPlans
from .results import Capabilities, TransferPolicy, TransferResult, transfer_policy
from .staged_cost import layer_steps, moved_before
from .staging import Direction, StagingRing, canonical_device
from .validation import whole
from .work import DIRECT, REFERENCE, Plan

__all__ = ["BOTH_RUNS", "Capabilities", "PlaneTransfer", "TransferPolicy", "TransferResult"]

BOTH_RUNS = "device slots are runs too, so the copies need no staging"
"""Ends the reason of a staged operation that went without staging."""


def _check_boundaries(boundaries: Sequence[int], size: int) -> None:
    for index, offset in enumerate(boundaries):
        whole(f"boundaries[{index}]", offset, least=0, most=size)


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
        constants: DeviceConstants | None = None,
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
        self._on_cpu = self.device.type == "cpu"
        self._paths = PlanePaths(self.planes, self.device, ring, self.boundaries)
        self._plans = OperationPlans(self.planes, self._paths, self.device, self._policy, constants)
        self._spare_events = SpareEvents()

    @property
    def policy(self) -> TransferPolicy:
        """Default policy of the operations."""
        return self._policy

    @property
    def ring(self) -> StagingRing:
        """Staging memory of this pool's transfers."""
        return self._paths.ring

    # ---- paths

    def capabilities(self) -> Capabilities:
        """Paths, reasons and build errors; builds or loads the modules where that has not happened yet."""
        available = self._paths.available
        pages = self.planes[0].host.pages
        write_back = self._plans.find(Direction.WRITE_BACK, pages, 1)
        load = self._plans.find(Direction.LOAD, pages, 1)
        missing = [
            f"{name}: {reason}"
            for name, reason in (("staged", available.staged_reason), ("direct", available.direct_reason))
            if reason
        ]
        return Capabilities(
            write_back.path,
            load.path,
            available.staged,
            available.direct,
            "; ".join(missing) if missing else write_back.reason,
            self._paths.build_error(),
        )

    def plan(
        self,
        direction: Direction,
        *,
        pages: int,
        runs: int,
        layer_by_layer: bool = False,
        compute: Compute | str | None = None,
    ) -> Plan:
        """Path an operation of ``pages`` host pages in ``runs`` runs would take under the pool's policy, and why.

        ``layer_by_layer`` for loads whose layers are calls of their own, rather than one call with events; ``compute``
        as in :meth:`write_back`.
        """
        pages, runs = whole("pages", pages, least=0), whole("runs", runs, least=0)
        return self._plans.find(direction, pages, runs, layer_by_layer=layer_by_layer, compute=compute)

    # ---- operations

    def write_back(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        policy: TransferPolicy | str | None = None,
        block_quota: int | None = None,
        compute: Compute | str | None = None,
    ) -> TransferResult:
        """Queue the copy of all layers of ``device_indices`` to ``host_indices`` after the current stream's work.

        Parameters
        ----------
        host_indices, device_indices
            int64 or int32 slot indices ``[n]``, whole pages in order (``n % page_size == 0``; the slots of a page
            neighbours and aligned on the host side), on CPU or the device; no host slot twice. Host indices on the
            device allow the direct path only. Under graph capture both lie on the device.
        policy, block_quota
            Override the pool's policy; cap the CTAs a direct transfer may hold.
        compute
            What the model computes meanwhile, where the caller knows: ``"prefill"``, ``"decode"``, ``"idle"``. What
            each way would take from it counts as its cost.

        Raises
        ------
        TypeError, ValueError, IndexError
            Before anything was queued, naming the tensor and its value.
        hicache_kernels.planner.PathUnavailableError
            Where the policy demands a path that is missing.
        """
        stream = None if self._on_cpu else torch.cuda.current_stream()
        if stream is not None and stream.device != self.device:
            with torch.cuda.device(self.device):
                return self.write_back(
                    host_indices, device_indices, policy=policy, block_quota=block_quota, compute=compute
                )
        reader = self._paths.indices
        indices = reader.read(host_indices, device_indices, stream)
        plan = self._plan(Direction.WRITE_BACK, indices, policy, block_quota, False, compute)
        size = indices.page_count * self.page_bytes
        if size == 0:
            return TransferResult(plan.path, "nothing to move", 0, 0)
        if plan.path == REFERENCE:
            reference.write_back(self.planes, host_indices, device_indices)
            return TransferResult(plan.path, plan.reason, size, indices.runs)
        try:
            if plan.path != DIRECT:
                return self._write_back_staged(indices, plan, size, stream)
            host_slots, device_slots = reader.on_device(indices, stream, both=True)
            self._paths.direct.move(
                device_slots, host_slots, to_device=False, layer=None, blocks=max(1, plan.block_quota), stream=stream
            )
            done = None if stream is None else stream.record_event()
            return TransferResult(plan.path, plan.reason, size, indices.runs, done, done)
        finally:
            if stream is not None:
                reader.done(indices, stream)

    def _write_back_staged(
        self, indices: OperationIndices, plan: Plan, size: int, stream: torch.cuda.Stream | None
    ) -> TransferResult:
        pages = _host_pages(indices)
        staged = self._paths.staged
        with staged.write_lane.lock:
            if indices.device.is_cpu:
                copies = staged.copy_runs(
                    Direction.WRITE_BACK, pages, indices.device, stream, first_layer=0, end_layer=self.layers
                )
                if copies is not None:
                    ready = staged.write_lane.copies_done()
                    reason = f"{plan.reason}; {BOTH_RUNS}"
                    return TransferResult(plan.path, reason, size, indices.runs, ready, ready, copies)
            slots = self._paths.indices.on_device(indices, stream, both=False)[1]
            copies = staged.write_back(pages, slots, stream)
            released = None if stream is None else stream.record_event()
            ready = staged.write_lane.copies_done()
            return TransferResult(plan.path, plan.reason, size, indices.runs, released, ready, copies)

    def load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        layer: int | None = None,
        policy: TransferPolicy | str | None = None,
        block_quota: int | None = None,
        compute: Compute | str | None = None,
        layer_events: bool = False,
    ) -> TransferResult:
        """Queue the copy of one layer (or all, with None) of ``host_indices`` to ``device_indices``.

        Work queued on the current stream afterwards sees the filled rows. All layers in one call overlap best: the
        copies of later layers do not wait for the earlier layers' rows.

        Parameters
        ----------
        host_indices, device_indices, policy, block_quota, compute
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
        stream = None if self._on_cpu else torch.cuda.current_stream()
        if stream is not None and stream.device != self.device:
            with torch.cuda.device(self.device):
                return self.load(
                    host_indices,
                    device_indices,
                    layer=layer,
                    policy=policy,
                    block_quota=block_quota,
                    compute=compute,
                    layer_events=layer_events,
                )
        reader = self._paths.indices
        indices = reader.read(host_indices, device_indices, stream, keep=layer is not None)
        plan = self._plan(Direction.LOAD, indices, policy, block_quota, layer is not None, compute)
        layers = range(self.layers) if layer is None else range(layer, layer + 1)
        size = indices.page_count * self.page_bytes // self.layers * len(layers)
        if size == 0:
            return TransferResult(plan.path, "nothing to move", 0, 0)
        if plan.path == REFERENCE:
            reference.load(self.planes, host_indices, device_indices, layer)
            return TransferResult(plan.path, plan.reason, size, indices.runs)
        with_events = layer_events and stream is not None
        try:
            if plan.path == DIRECT:
                return self._load_direct(indices, plan, layer, size, with_events, stream)
            return self._load_staged(indices, plan, layers, size, with_events, stream)
        finally:
            if stream is not None:
                reader.done(indices, stream)
                if with_events:
                    self._spare_events.refill(stream)

    def _load_direct(
        self,
        indices: OperationIndices,
        plan: Plan,
        layer: int | None,
        size: int,
        with_events: bool,
        stream: torch.cuda.Stream | None,
    ) -> TransferResult:
        host_slots, device_slots = self._paths.indices.on_device(indices, stream, both=True)
        blocks = max(1, plan.block_quota)
        layers = range(self.layers) if layer is None else range(layer, layer + 1)
        if stream is None or not with_events or shares_one_event(plan, self.layers):
            self._paths.direct.move(host_slots, device_slots, to_device=True, layer=layer, blocks=blocks, stream=stream)
            done = None if stream is None else stream.record_event()
            events = (done,) * len(layers) if done is not None and with_events else ()
            return TransferResult(plan.path, plan.reason, size, indices.runs, done, done, 0, events)
        taken = self._spare_events.take(len(layers), stream)
        self._paths.direct.load_with_events(host_slots, device_slots, layers, taken, blocks, stream)
        done = stream.record_event()
        return TransferResult(plan.path, plan.reason, size, indices.runs, done, done, 0, taken.events)

    def _load_ahead(
        self,
        host_slots: torch.Tensor,
        device_slots: torch.Tensor,
        layers: range,
        events: LayerEvents,
        blocks: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Queue the first layers of a staged load directly; its copies, which wait for the stream, follow them."""
        direct = self._paths.direct
        if stream is not None and events.events:
            direct.load_with_events(host_slots, device_slots, layers, events, blocks, stream)
            return
        for layer in layers:
            direct.move(host_slots, device_slots, to_device=True, layer=layer, blocks=blocks, stream=stream)

    def _load_staged(
        self,
        indices: OperationIndices,
        plan: Plan,
        layers: range,
        size: int,
        with_events: bool,
        stream: torch.cuda.Stream | None,
    ) -> TransferResult:
        pages = _host_pages(indices)
        staged = self._paths.staged
        with staged.load_lane.lock:
            taken = LayerEvents()
            if indices.device.is_cpu:
                # More than the staged path needs, which takes over what direct copies leave.
                taken = self._spare_events.take(len(layers) if with_events else 0, stream)
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
                    ready = staged.load_lane.copies_done()
                    if stream is not None and ready is not None:
                        stream.wait_event(ready)
                    reason = f"{plan.reason}; {BOTH_RUNS}"
                    return TransferResult(plan.path, reason, size, indices.runs, ready, ready, copies, taken.events)
            ahead = plan.direct_layers
            moved = moved_before(ahead, plan.layers_each, self.layers)
            steps = layer_steps(layers.start + ahead, layers.stop, plan.layers_each, moved) if with_events else []
            if not taken.events:
                taken = self._spare_events.take(ahead + len(steps) if with_events else 0, stream)
            first, rest = taken.first(ahead), taken.rest(ahead).first(len(steps))
            host_slots, device_slots = self._paths.indices.on_device(indices, stream, both=ahead > 0)
            if ahead:
                self._load_ahead(host_slots, device_slots, layers[:ahead], first, plan.block_quota, stream)
            copies = staged.load(
                pages,
                device_slots,
                stream,
                first_layer=layers.start + ahead,
                end_layer=layers.stop,
                layers_each=plan.layers_each,
                moved=moved,
                copy_events=rest.handles,
            )
            ready = staged.load_lane.copies_done()
        released = None if stream is None else stream.record_event()
        # Layers that one copy brings are filled at once, and share its event.
        by_copies = (event for event, each in zip(rest.events, steps, strict=True) for _ in range(each))
        events = (*first.events, *by_copies)
        return TransferResult(plan.path, plan.reason, size, indices.runs, released, ready, copies, events)

    def _plan(
        self,
        direction: Direction,
        indices: OperationIndices,
        policy: TransferPolicy | str | None,
        block_quota: int | None,
        layer_by_layer: bool,
        compute: Compute | str | None,
    ) -> Plan:
        if indices.pages is None and transfer_policy(policy or self.policy) is TransferPolicy.AUTO:
            policy = TransferPolicy.DIRECT
        return self._plans.find(
            direction, indices.page_count, indices.runs, policy, block_quota, layer_by_layer, compute
        )
