"""A plane: rows of one size, where they lie on the device and where on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .layout import HostStrides


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Device side of a plane, made from tensors the engine owns; keeps them alive, allocates nothing.

    Row ``r`` of slot ``s`` starts at ``bases[r] + (s // block_slots) * block_stride + (s % block_slots) * slot_stride``
    bytes. Model layer ``l`` owns the rows ``l * rows_per_layer ... (l + 1) * rows_per_layer - 1``.

    Attributes
    ----------
    tensors
        The engine's tensors, on one device.
    bases
        Address of row r of slot 0, one for each of layers * rows_per_layer rows.
    rows_per_layer
        1, or the number of heads of a head-major buffer.
    slots
        Number of addressable slots.
    slot_stride, block_slots, block_stride
        Bytes between slots of a block, slots of a block, bytes between blocks. A slot-major buffer has blocks of one
        slot.
    """

    tensors: tuple[torch.Tensor, ...]
    bases: tuple[int, ...]
    rows_per_layer: int
    slots: int
    slot_stride: int
    block_slots: int
    block_stride: int

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.tensors[0].device

    @property
    def layers(self) -> int:
        """Model layers these rows serve."""
        return len(self.bases) // self.rows_per_layer

    @classmethod
    def slot_major(cls, tensors: Sequence[torch.Tensor]) -> DeviceRows:
        """Rows of one tensor a layer, each ``[slots, ...]``; everything behind dim 0 is the row and must be dense."""
        first = tensors[0]
        stride = first.stride(0) * first.element_size()
        return cls(tuple(tensors), tuple(t.data_ptr() for t in tensors), 1, first.shape[0], 0, 1, stride)

    @classmethod
    def block_major(cls, tensors: Sequence[torch.Tensor]) -> DeviceRows:
        """Rows of one tensor a layer, each ``[blocks, block, ...]``; a K or V view of a joint tensor will do."""
        first = tensors[0]
        item = first.element_size()
        return cls(
            tuple(tensors),
            tuple(t.data_ptr() for t in tensors),
            1,
            first.shape[0] * first.shape[1],
            first.stride(1) * item,
            first.shape[1],
            first.stride(0) * item,
        )

    @classmethod
    def head_major(cls, tensors: Sequence[torch.Tensor]) -> DeviceRows:
        """Rows of one tensor a layer, each ``[heads, slots, dim]``; one row a head."""
        first = tensors[0]
        item = first.element_size()
        bases = tuple(t.data_ptr() + h * t.stride(0) * item for t in tensors for h in range(t.shape[0]))
        return cls(tuple(tensors), bases, first.shape[0], first.shape[1], 0, 1, first.stride(1) * item)


@dataclass(frozen=True, eq=False)
class HostRows:
    """Host side of a plane inside a pool's buffer.

    Sub-row ``r`` of (page, layer, slot in page) starts at
    ``offset + page * page_stride + layer * layer_stride + slot * slot_stride + r * row_bytes`` bytes of ``buffer``.

    Attributes
    ----------
    buffer
        Flat uint8 CPU tensor, pinned where a GPU reads it.
    strides
        The plane's component in :func:`hicache_kernels.layout.host_strides`.
    pages, page_size
        Geometry; ``page_size`` in slots.
    """

    buffer: torch.Tensor
    strides: HostStrides
    pages: int
    page_size: int

    @property
    def slots(self) -> int:
        """Number of addressable slots."""
        return self.pages * self.page_size


@dataclass(frozen=True, eq=False)
class Plane:
    """Rows of ``row_bytes`` bytes on both sides; ``name`` is the component's, for messages."""

    name: str
    row_bytes: int
    device: DeviceRows
    host: HostRows

    @property
    def element_bytes(self) -> int:
        """Bytes one layer keeps for one slot: its rows, one after the other on the host."""
        return self.row_bytes * self.device.rows_per_layer


def check_planes(planes: Sequence[Plane]) -> None:
    """Check the planes of one pool against each other, and each against the memory it addresses.

    Raises
    ------
    ValueError
        Naming the plane, the value and what is accepted.
    """
    if not planes:
        raise ValueError("planes is empty; a transfer needs at least one")
    first = planes[0]
    for plane in planes:
        rows, host = plane.device, plane.host
        if plane.row_bytes < 1:
            raise ValueError(f"plane {plane.name}: row_bytes is {plane.row_bytes}; it must be positive")
        if len(rows.bases) != rows.rows_per_layer * rows.layers or not rows.bases:
            raise ValueError(
                f"plane {plane.name}: {len(rows.bases)} row bases; it must be a multiple of the {rows.rows_per_layer} "
                "rows of a layer"
            )
        pairs = (
            ("layers", rows.layers, first.device.layers),
            ("device slots", rows.slots, first.device.slots),
            ("pages", host.pages, first.host.pages),
            ("page_size", host.page_size, first.host.page_size),
            ("device", rows.device, first.device.device),
        )
        for name, value, expected in pairs:
            if value != expected:
                raise ValueError(f"plane {plane.name}: {name} is {value}; the pool's first plane has {expected}")
        for name, value in (("device slots", rows.slots), ("host slots", host.slots)):
            if value >= 1 << 31:
                raise ValueError(f"plane {plane.name}: {value} {name}; at most {(1 << 31) - 1} can be addressed")
        if host.buffer.device.type != "cpu" or host.buffer.dtype != torch.uint8 or host.buffer.dim() != 1:
            raise ValueError(
                f"plane {plane.name}: the host buffer is {host.buffer.dtype} with {host.buffer.dim()} dimensions on "
                f"{host.buffer.device}; it must be flat uint8 on the CPU"
            )
        strides = host.strides
        end = strides.offset + (host.pages - 1) * strides.page + (rows.layers - 1) * strides.layer
        end += (host.page_size - 1) * strides.slot + plane.element_bytes
        if min(strides.offset, strides.page, strides.layer, strides.slot) < 0 or end > host.buffer.numel():
            raise ValueError(
                f"plane {plane.name}: its pages end at byte {end}, the host buffer has {host.buffer.numel()} bytes"
            )
        _check_device_rows(plane)


def _check_device_rows(plane: Plane) -> None:
    rows = plane.device
    span = (rows.slots - 1) // rows.block_slots * rows.block_stride
    span += min(rows.slots, rows.block_slots) * rows.slot_stride - rows.slot_stride + plane.row_bytes
    for tensor in rows.tensors:
        if tensor.device != rows.device:
            raise ValueError(
                f"plane {plane.name}: tensors lie on {rows.device} and {tensor.device}; one device is needed"
            )
    for row, base in enumerate(rows.bases):
        storage = rows.tensors[row // rows.rows_per_layer].untyped_storage()
        start = storage.data_ptr()
        if base < start or base + span > start + storage.nbytes():
            raise ValueError(
                f"plane {plane.name}: row {row} spans {span} bytes from byte {base - start} of a tensor of "
                f"{storage.nbytes()} bytes"
            )
