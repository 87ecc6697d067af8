"""Plans of one pool's operations: operations of one shape are planned once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import planner
from .constants import Compute, DeviceConstants
from .layout import HostLayout, HostStrides
from .paths import PlanePaths
from .plane import Plane
from .results import TransferPolicy, transfer_policy
from .staging import Direction
from .work import Plan, Work

MAX_PLANS = 1024
"""Plans that a pool's transfers remember."""


def strides_layout(strides: HostStrides, page_size: int) -> HostLayout:
    """Layout by its strides; pages of one slot, in which the page-first layouts are one, count as the direct one."""
    if strides.layer > strides.page:
        return HostLayout.LAYER_FIRST
    if page_size > 1 and strides.slot >= strides.layer:
        return HostLayout.PAGE_FIRST
    return HostLayout.PAGE_FIRST_DIRECT


class OperationPlans:
    """Plans by the shape of the operation; small ones by their size alone, where any runs have the same plan.

    Parameters
    ----------
    planes
        Planes of the pool.
    paths
        What its transfers can take.
    device
        Device of the rows.
    policy
        Policy of operations that give none.
    constants
        What the planner knows of the device; None takes those of :mod:`hicache_kernels.calibrate`.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        paths: PlanePaths,
        device: torch.device,
        policy: TransferPolicy,
        constants: DeviceConstants | None,
    ) -> None:
        host, rows = planes[0].host, planes[0].device
        self._paths = paths
        self._device = device
        self._policy = policy
        self._constants = constants
        self._layout = strides_layout(host.strides, host.page_size)
        self._page_bytes = sum(plane.element_bytes for plane in planes) * rows.layers * host.page_size
        self._page_size = host.page_size
        self._layers = rows.layers
        self._planes = len(planes)
        self._shortest_row = min(plane.row_bytes for plane in planes)
        self._known: dict[tuple[object, ...], Plan] = {}

    def find(
        self,
        direction: Direction,
        pages: int,
        runs: int,
        policy: TransferPolicy | str | None = None,
        block_quota: int | None = None,
        layer_by_layer: bool = False,
        compute: Compute | str | None = None,
    ) -> Plan:
        """Return the plan of an operation; errors as of :func:`hicache_kernels.planner.plan_write_back`."""
        terms = (policy, block_quota, layer_by_layer, compute)
        if type(block_quota) in (int, type(None)):
            known = self._known.get((direction, pages, runs, *terms))
            if known is None:
                known = self._known.get((direction, pages, None, *terms))
            if known is not None:
                return known
        plan = self._plan(direction, pages, runs, policy, block_quota, layer_by_layer, compute)
        if self._constants is not None:
            if len(self._known) >= MAX_PLANS:
                self._known.clear()
            self._known[direction, pages, None if plan.any_runs else runs, *terms] = plan
        return plan

    def _plan(
        self,
        direction: Direction,
        pages: int,
        runs: int,
        policy: TransferPolicy | str | None,
        block_quota: int | None,
        layer_by_layer: bool,
        compute: Compute | str | None,
    ) -> Plan:
        work = Work(
            self._layout,
            pages,
            runs,
            self._page_bytes,
            self._page_size,
            self._layers,
            self._planes,
            self._shortest_row,
        )
        constants, available = self._device_constants(), self._paths.available
        chosen = str(self._policy if policy is None else transfer_policy(policy))
        staging_bytes = self._paths.ring.budget_bytes // 2
        if direction is Direction.WRITE_BACK:
            return planner.plan_write_back(
                work,
                constants=constants,
                available=available,
                policy=chosen,
                block_quota=block_quota,
                compute=compute,
                staging_bytes=staging_bytes,
            )
        return planner.plan_load(
            work,
            constants=constants,
            available=available,
            policy=chosen,
            block_quota=block_quota,
            compute=compute,
            staging_bytes=staging_bytes,
            layer_by_layer=layer_by_layer,
        )

    def _device_constants(self) -> DeviceConstants:
        if self._constants is None:
            # Imported here, as calibration measures with transfers.
            from .calibrate import device_constants

            constants = device_constants(self._device)
            if self._device.type != "cpu" and torch.cuda.is_current_stream_capturing():
                return constants
            self._constants = constants
        return self._constants
