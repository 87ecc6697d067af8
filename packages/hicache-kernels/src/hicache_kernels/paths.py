"""The compiled paths that one pool's transfers can take, loaded when they are first asked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import torch

from .indices import IndexReader
from .movers import DirectMover, StagedMover
from .plane import Plane
from .planner import Availability, PathUnavailableError
from .probe import load_module, unavailable_reason, warn_once
from .spec import module_device_type
from .staging import StagingRing, default_ring


class PlanePaths:
    """Movers of one pool's planes, the reader of their indices, and the reason for each path that is missing.

    Two threads that ask first at the same time may each make a mover; both work, and one is kept.

    Parameters
    ----------
    planes
        Checked planes of the pool.
    device
        Where their rows lie, with its index.
    ring
        Staging memory; the device's shared ring with None.
    boundaries
        Byte offsets in the host buffers that no copy spans.
    """

    def __init__(
        self, planes: Sequence[Plane], device: torch.device, ring: StagingRing | None, boundaries: Sequence[int]
    ) -> None:
        self._planes = planes
        self._device = device
        self._device_type = module_device_type(device)
        self._ring = ring
        self._boundaries = boundaries

    @functools.cached_property
    def ring(self) -> StagingRing:
        """Staging memory."""
        return default_ring(self._device) if self._ring is None else self._ring

    @functools.cached_property
    def indices(self) -> IndexReader:
        """Reader of the indices of operations."""
        module = load_module("staged", self._device_type) or load_module("main", self._device_type)
        return IndexReader(
            page_size=self._planes[0].host.page_size,
            host_slots=self._planes[0].host.slots,
            device_slots=self._planes[0].device.slots,
            device=self._device,
            scan=None if module is None else module["scan_indices"],
            upload=None if module is None else module["upload_indices"],
        )

    @functools.cached_property
    def _direct(self) -> tuple[DirectMover | None, str]:
        module = load_module("main", self._device_type)
        if module is None:
            return None, unavailable_reason("main", self._device_type) or "the main module is missing"
        if self._device.type != "cpu":
            for plane in self._planes:
                if not plane.host.buffer.is_pinned():
                    return None, f"the host buffer of plane {plane.name} is not pinned, so kernels cannot reach it"
        try:
            # The device address of host memory is that of the current device.
            with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
                return DirectMover(self._planes, module), ""
        except ValueError as error:
            return None, str(error)

    @functools.cached_property
    def _staged(self) -> tuple[StagedMover | None, str]:
        module = load_module("staged", self._device_type)
        if module is None:
            return None, unavailable_reason("staged", self._device_type) or "the staged module is missing"
        buffers = {plane.host.buffer.data_ptr() for plane in self._planes}
        boundaries = [buffer + offset for buffer in buffers for offset in self._boundaries]
        blocks = 1
        if self._device.type != "cpu":
            blocks = torch.cuda.get_device_properties(self._device).multi_processor_count
        try:
            return StagedMover(self._planes, module, self.ring, boundaries, blocks), ""
        except ValueError as error:
            return None, str(error)

    @functools.cached_property
    def direct(self) -> DirectMover:
        """Mover of the direct path; PathUnavailableError where there is none."""
        mover, reason = self._direct
        if mover is None:
            raise PathUnavailableError(reason)
        return mover

    @functools.cached_property
    def staged(self) -> StagedMover:
        """Mover of the staged path; PathUnavailableError where there is none."""
        mover, reason = self._staged
        if mover is None:
            raise PathUnavailableError(reason)
        return mover

    @functools.cached_property
    def available(self) -> Availability:
        """Which paths there are; a missing one is logged once a process where none is left."""
        (staged, staged_reason), (direct, direct_reason) = self._staged, self._direct
        if staged is None and direct is None:
            warn_once(
                f"transfers on {self._device.type} run in plain torch: staged: {staged_reason}; direct: {direct_reason}"
            )
        return Availability(staged is not None, direct is not None, staged_reason, direct_reason)

    def build_error(self) -> str | None:
        """Return the first error of a build or a load, or None."""
        errors = (unavailable_reason(name, self._device_type) for name in ("staged", "main"))
        return next((error for error in errors if error), None)
