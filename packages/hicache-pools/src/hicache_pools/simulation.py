"""Runs pools on CPU tensors with the torch reference, for the tests of engines: no GPU, no compiler, the same results.

An engine's test wraps whatever makes its host pools in :func:`cpu_simulation`, and keeps its device tensors on CPU::

    with cpu_simulation():
        host_pool = MHATokenToKVPoolHost(device_pool, 2.0, 0, page_size=16)
    fill_randomly(device_pool)
    before = read_slots(device_pool, slots)
    host_pool.backup_from_device_all_layer(device_pool, host_slots, slots, "kernel")

Pools made inside keep the reference for good, whatever ``transfer_policy`` asks for; everything else about them is as
always. Each transfer is done when its call returns, so its events are None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from hicache_kernels import (
    Capabilities,
    Compute,
    HostRows,
    HostStrides,
    Plane,
    PlaneTransfer,
    TransferPolicy,
    TransferResult,
    reference,
)
from hicache_kernels.checks import CheckedIndices, check_indices

from .device_pools import DeviceComponent, DevicePool

_REASON = "this pool was made inside cpu_simulation"
_active: ContextVar[bool] = ContextVar("hicache_pools_cpu_simulation", default=False)


@contextmanager
def cpu_simulation() -> Iterator[None]:
    """Make host pools that run the torch reference; their device pools must be on CPU (ValueError otherwise)."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def simulation_is_active() -> bool:
    """Whether the caller is inside :func:`cpu_simulation`."""
    return _active.get()


class ReferenceTransfer(PlaneTransfer):
    """Transfers of a simulated pool: the checks of every transfer, then plain torch; loads no compiled module."""

    def write_back(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        policy: TransferPolicy | str | None = None,
        block_quota: int | None = None,
        compute: Compute | str | None = None,
    ) -> TransferResult:
        """Copy all layers; done when it returns. ``policy``, ``block_quota`` and ``compute`` change nothing."""
        indices = self._checked(host_indices, device_indices)
        reference.write_back(self.planes, host_indices, device_indices)
        return TransferResult("reference", _REASON, indices.page_count * self.page_bytes, indices.runs)

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
        """Copy one layer, or all with None; done when it returns. The other arguments change nothing."""
        indices = self._checked(host_indices, device_indices)
        reference.load(self.planes, host_indices, device_indices, layer)
        layers = self.layers if layer is None else 1
        size = indices.page_count * self.page_bytes // self.layers * layers
        return TransferResult("reference", _REASON, size, indices.runs)

    def capabilities(self) -> Capabilities:
        """Nothing but the reference."""
        return Capabilities("reference", "reference", False, False, f"neither staged nor direct: {_REASON}")

    def _checked(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> CheckedIndices:
        plane = self.planes[0]
        return check_indices(
            host_indices,
            device_indices,
            page_size=self.page_size,
            host_slots=plane.host.slots,
            device_slots=plane.device.slots,
            device=self.device,
        )


def fill_randomly(device_pool: DevicePool) -> None:
    """Write random bytes to every row of every layer of a device pool."""
    for component in device_pool.components:
        for row in range(len(component.rows.bases)):
            view = _row_view(component, row)
            view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, device=view.device))


def read_slots(device_pool: DevicePool, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copy the bytes of slots out, to compare them before and after.

    Parameters
    ----------
    device_pool
        Any device pool.
    slots
        int64 or int32 ``[n]``, before translation where the pool translates. Where a row covers several slots, all
        slots of a row are given, one after the other.

    Returns
    -------
    dict
        By component, uint8 ``[layers, rows, element bytes]`` on CPU, with ``rows`` being n or n / slots a row.
    """
    slots = slots.to(device_pool.device).long()
    if device_pool.index_translation is not None:
        slots = device_pool.index_translation.to(device_pool.device)[slots].long()
    bytes_of = {}
    for component in device_pool.components:
        numbers = slots[:: component.slots_per_row] // component.slots_per_row
        block = component.rows.block_slots
        rows = [
            _row_view(component, row)[numbers // block, numbers % block] for row in range(len(component.rows.bases))
        ]
        per_layer = component.rows.rows_per_layer
        layers = [torch.cat(rows[first : first + per_layer], dim=1) for first in range(0, len(rows), per_layer)]
        bytes_of[component.name] = torch.stack(layers).cpu()
    return bytes_of


def _row_view(component: DeviceComponent, row: int) -> torch.Tensor:
    nowhere = HostRows(torch.empty(0, dtype=torch.uint8, device="cpu"), HostStrides(0, 0, 0, 0), 1, 1)
    return reference.device_row_view(Plane(component.name, component.row_bytes, component.rows, nowhere), row)
