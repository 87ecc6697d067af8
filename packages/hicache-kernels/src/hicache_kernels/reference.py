"""Every transfer once more in plain torch: oracle of the tests, last fallback, and what engines' tests patch in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .jit_kernel_reference import (
    transfer_hicache_all_layer,
    transfer_hicache_all_layer_mla,
    transfer_hicache_all_layer_mla_staged_lf_pf,
    transfer_hicache_all_layer_staged_lf_pf,
    transfer_hicache_one_layer,
    transfer_hicache_one_layer_mla,
)
from .plane import Plane

__all__ = [
    "device_row_view",
    "host_row_view",
    "load",
    "transfer_hicache_all_layer",
    "transfer_hicache_all_layer_mla",
    "transfer_hicache_all_layer_mla_staged_lf_pf",
    "transfer_hicache_all_layer_staged_lf_pf",
    "transfer_hicache_one_layer",
    "transfer_hicache_one_layer_mla",
    "write_back",
]


def device_row_view(plane: Plane, row: int) -> torch.Tensor:
    """View device row ``row`` of every slot, uint8 ``[blocks, block_slots, row_bytes]``, over the engine's tensor."""
    rows = plane.device
    tensor = rows.tensors[row // rows.rows_per_layer]
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return storage.as_strided(
        (rows.slots // rows.block_slots, rows.block_slots, plane.row_bytes),
        (rows.block_stride, rows.slot_stride, 1),
        rows.bases[row] - storage.data_ptr(),
    )


def host_row_view(plane: Plane, row: int) -> torch.Tensor:
    """View device row ``row`` of every host slot, uint8 ``[pages, page_size, row_bytes]`` over the pool's buffer."""
    layer, sub_row = divmod(row, plane.device.rows_per_layer)
    strides = plane.host.strides
    return plane.host.buffer.as_strided(
        (plane.host.pages, plane.host.page_size, plane.row_bytes),
        (strides.page, strides.slot, 1),
        plane.host.buffer.storage_offset() + strides.offset + layer * strides.layer + sub_row * plane.row_bytes,
    )


def _rows(plane: Plane, layer: int | None) -> Iterable[int]:
    per_layer = plane.device.rows_per_layer
    if layer is None:
        return range(len(plane.device.bases))
    return range(layer * per_layer, (layer + 1) * per_layer)


def write_back(planes: Sequence[Plane], host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
    """Copy every layer of the given device slots to the given host slots (int64 or int32 slot indices, any device)."""
    for plane in planes:
        host = host_indices.cpu().long()
        device = device_indices.to(plane.device.device).long()
        block = plane.device.block_slots
        for row in _rows(plane, None):
            bytes_ = device_row_view(plane, row)[device // block, device % block]
            host_row_view(plane, row)[host // plane.host.page_size, host % plane.host.page_size] = bytes_.cpu()


def load(
    planes: Sequence[Plane], host_indices: torch.Tensor, device_indices: torch.Tensor, layer: int | None = None
) -> None:
    """Copy one layer (or all, with None) of the given host slots to the given device slots."""
    for plane in planes:
        host = host_indices.cpu().long()
        device = device_indices.to(plane.device.device).long()
        block = plane.device.block_slots
        for row in _rows(plane, layer):
            bytes_ = host_row_view(plane, row)[host // plane.host.page_size, host % plane.host.page_size]
            device_row_view(plane, row)[device // block, device % block] = bytes_.to(plane.device.device)
