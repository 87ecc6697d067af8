"""A plane: rows of one size, where they lie on the device and where on the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .checks import check_tensor, checked_tensors
from .layout import HostStrides
from .validation import whole


def _checked_layers(tensors: Sequence[torch.Tensor], form: str, index_dims: int) -> torch.Tensor:
    """Check that the layers' tensors are alike and their rows dense; returns the first."""
    if not checked_tensors("tensors", tensors):
        raise ValueError(f"tensors is empty; it must hold one {form} a layer")
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        shape, strides = tuple(tensor.shape), tensor.stride()
        if tensor.dim() < index_dims or 0 in shape:
            raise ValueError(f"tensors[{number}] has shape {shape}; it must be {form}, and nowhere empty")
        if (shape, strides, tensor.dtype) != (tuple(first.shape), first.stride(), first.dtype):
            raise ValueError(
                f"tensors[{number}] is {tensor.dtype} of shape {shape} and strides {strides}; it must be like "
                f"tensors[0], {first.dtype} of shape {tuple(first.shape)} and strides {first.stride()}"
            )
    step = 1
    for size, stride in zip(reversed(first.shape[index_dims:]), reversed(first.stride()[index_dims:]), strict=True):
        if size > 1 and stride != step:
            raise ValueError(
                f"tensors[0] of shape {tuple(first.shape)} has strides {first.stride()}; the elements of a row must be "
                f"dense in {form}"
            )
        step *= size
    return first


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
        """Rows of one tensor a layer, each ``[slots, ...]``; everything after dim 0 is the row and must be dense.

        Raises
        ------
        ValueError
            Where the layers' tensors are not alike, or a row is not dense; so do the other forms.
        """
        first = _checked_layers(tensors, "[slots, ...]", 1)
        stride = first.stride(0) * first.element_size()
        return cls(tuple(tensors), tuple(t.data_ptr() for t in tensors), 1, first.shape[0], 0, 1, stride)

    @classmethod
    def block_major(cls, tensors: Sequence[torch.Tensor]) -> DeviceRows:
        """Rows of one tensor a layer, each ``[blocks, block, ...]``; a K or V view of a joint tensor will do."""
        first = _checked_layers(tensors, "[blocks, block, ...]", 2)
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
    def block_head_major(cls, tensors: Sequence[torch.Tensor]) -> DeviceRows:
        """Rows of one tensor a layer, each ``[blocks, heads, block, dim]`` in any order of memory; one row a head."""
        first = _checked_layers(tensors, "[blocks, heads, block, dim]", 3)
        if first.dim() != 4:
            raise ValueError(f"tensors[0] has shape {tuple(first.shape)}; it must be [blocks, heads, block, dim]")
        blocks, heads, block, _ = first.shape
        block_stride, head_stride, slot_stride = (stride * first.element_size() for stride in first.stride()[:3])
        bases = tuple(t.data_ptr() + head * head_stride for t in tensors for head in range(heads))
        return cls(tuple(tensors), bases, heads, blocks * block, slot_stride, block, block_stride)

    @classmethod
    def head_major(cls, tensors: Sequence[torch.Tensor]) -> DeviceRows:
        """Rows of one tensor a layer, each ``[heads, slots, dim]``; one row a head."""
        first = _checked_layers(tensors, "[heads, slots, dim]", 2)
        if first.dim() != 3:
            raise ValueError(f"tensors[0] has shape {tuple(first.shape)}; it must be [heads, slots, dim]")
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

    @property
    def host_end(self) -> int:
        """Byte of the host buffer after the last one of this plane."""
        strides, host = self.host.strides, self.host
        end = strides.offset + (host.pages - 1) * strides.page + (self.device.layers - 1) * strides.layer
        return end + (host.page_size - 1) * strides.slot + self.element_bytes


def check_planes(planes: Sequence[Plane]) -> None:
    """Check the planes of one pool against each other, and each against the memory it addresses.

    Raises
    ------
    ValueError
        Naming the plane, the value and what is accepted.
    """
    if not planes:
        raise ValueError("planes is empty; a transfer needs at least one")
    for number, plane in enumerate(planes):
        _check_parts(f"planes[{number}]", plane)
    first = planes[0]
    for plane in planes:
        rows, host = plane.device, plane.host
        whole(f"plane {plane.name}: row_bytes", plane.row_bytes)
        for name in ("rows_per_layer", "slots", "block_slots"):
            whole(f"plane {plane.name}: {name}", getattr(rows, name))
        for name in ("offset", "page", "layer", "slot"):
            whole(f"plane {plane.name}: host stride {name}", getattr(host.strides, name), least=0)
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
        for name in ("pages", "page_size"):
            whole(f"plane {plane.name}: {name}", getattr(host, name))
        for name, value in (("device slots", rows.slots), ("host slots", host.slots)):
            if value >= 1 << 31:
                raise ValueError(f"plane {plane.name}: {value} {name}; at most {(1 << 31) - 1} can be addressed")
        if host.buffer.device.type != "cpu" or host.buffer.dtype != torch.uint8 or host.buffer.dim() != 1:
            raise ValueError(
                f"plane {plane.name}: the host buffer is {host.buffer.dtype} with {host.buffer.dim()} dimensions on "
                f"{host.buffer.device}; it must be flat uint8 on the CPU"
            )
        strides, end = host.strides, plane.host_end
        if end > host.buffer.numel():
            raise ValueError(
                f"plane {plane.name}: its pages end at byte {end}, the host buffer has {host.buffer.numel()} bytes"
            )
        if not host.buffer.is_contiguous():
            raise ValueError(f"plane {plane.name}: the host buffer has stride {host.buffer.stride(0)}; it must be 1")
        _check_apart(
            f"plane {plane.name}: host",
            plane.element_bytes,
            (
                ("page", strides.page, host.pages),
                ("layer", strides.layer, rows.layers),
                ("slot", strides.slot, host.page_size),
            ),
        )
        _check_device_rows(plane)
    _check_components_apart(planes)


def _check_parts(name: str, plane: object) -> None:
    """Check that a plane is one, of parts with memory."""
    if not isinstance(plane, Plane):
        raise TypeError(f"{name} is a {type(plane).__name__}; it must be a Plane")
    for part, value, kind in (("device", plane.device, DeviceRows), ("host", plane.host, HostRows)):
        if not isinstance(value, kind):
            raise TypeError(f"{part} of plane {plane.name} is a {type(value).__name__}; it must be {kind.__name__}")
    checked_tensors(f"device.tensors of plane {plane.name}", plane.device.tensors)
    check_tensor(f"host.buffer of plane {plane.name}", plane.host.buffer)


def _check_apart(what: str, size: int, axes: Sequence[tuple[str, int, int]]) -> None:
    """Check that no byte belongs to two places: each step of (name, stride, count) leads past the bytes before it."""
    for name, stride, count in sorted(axes, key=lambda axis: axis[1]):
        if count > 1 and stride < size:
            raise ValueError(
                f"{what} {name} stride is {stride}; it must be at least the {size} bytes that it steps over"
            )
        size += (count - 1) * stride


def _check_components_apart(planes: Sequence[Plane]) -> None:
    ordered = sorted(planes, key=lambda plane: plane.host.buffer.data_ptr() + plane.host.strides.offset)
    for before, plane in itertools.pairwise(ordered):
        start = before.host.buffer.data_ptr() + before.host.strides.offset
        distance = plane.host.buffer.data_ptr() + plane.host.strides.offset - start
        if distance < before.element_bytes:
            raise ValueError(
                f"plane {plane.name}: its first element starts {distance} bytes after that of plane {before.name}, "
                f"whose elements have {before.element_bytes} bytes; planes must not share bytes of the host"
            )


def _check_device_rows(plane: Plane) -> None:
    rows = plane.device
    span = (rows.slots - 1) // rows.block_slots * rows.block_stride
    span += min(rows.slots, rows.block_slots) * rows.slot_stride - rows.slot_stride + plane.row_bytes
    _check_apart(
        f"plane {plane.name}: device",
        plane.row_bytes,
        (
            ("slot", rows.slot_stride, min(rows.slots, rows.block_slots)),
            ("block", rows.block_stride, -(-rows.slots // rows.block_slots)),
        ),
    )
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
