"""Reads the shapes engines keep their caches in as rows: which dimension is the slot, which are the element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from hicache_kernels import DeviceRows
from hicache_kernels.checks import checked_tensors
from hicache_kernels.validation import one_of, whole


class BufferForm(StrEnum):
    """Order of a buffer's dimensions, outermost first."""

    SLOT_MAJOR = "slot_major"
    """``[slots, *element]``."""
    BLOCK_MAJOR = "block_major"
    """``[blocks, block, *element]``."""
    HEAD_MAJOR = "head_major"
    """``[heads, slots, dim]``."""
    BLOCK_HEAD_MAJOR = "block_head_major"
    """``[blocks, heads, block, dim]``; only ``dim`` must be dense."""


@dataclass(frozen=True, eq=False)
class DeviceComponent:
    """One buffer family of a device pool: a row a slot (or a row a group of slots) in each layer.

    Attributes
    ----------
    name
        The component's, as in ``geometry`` and in messages.
    tensors
        The engine's tensors, one a layer.
    rows
        Where the rows lie; ``rows.slots`` counts rows.
    row_bytes
        Bytes of one row. A head-major buffer has a row a head, any other a row an element.
    element_shape, dtype
        Shape and type of what one layer keeps for one row number.
    slots_per_row
        Token slots that a row covers: 1, the page size of a page-granular buffer, or a compression ratio.
    """

    name: str
    tensors: tuple[torch.Tensor, ...]
    rows: DeviceRows
    row_bytes: int
    element_shape: tuple[int, ...]
    dtype: torch.dtype
    slots_per_row: int = 1

    @property
    def element_bytes(self) -> int:
        """Bytes one layer keeps for one row number, from shape and type alone."""
        return self.row_bytes * self.rows.rows_per_layer

    @property
    def slots(self) -> int:
        """Token slots that the rows cover."""
        return self.rows.slots * self.slots_per_row

    @property
    def layers(self) -> int:
        """Layers that have rows."""
        return self.rows.layers

    def check_in_place(self) -> None:
        """Raise RuntimeError where the memory under the first layer is no longer the memory that was described.

        An engine that frees its cache frees all layers; looking at one costs next to nothing.
        """
        if self.tensors[0].data_ptr() != self.rows.bases[0]:
            raise RuntimeError(
                f"{self.name}[0] was described at {self.rows.bases[0]:#x} and lies at {self.tensors[0].data_ptr():#x}: "
                "its memory was freed or replaced; describe the new memory and make a new host pool"
            )


def component_from_tensors(
    name: str,
    tensors: Sequence[torch.Tensor],
    form: BufferForm | str = BufferForm.SLOT_MAJOR,
    *,
    slots_per_row: int = 1,
) -> DeviceComponent:
    """Describe one component.

    Parameters
    ----------
    name
        The argument the tensors were passed as; it names the component too.
    tensors
        One a layer, of one shape, stride, dtype and device. The dimensions of the element must be dense (in
        ``[blocks, block, heads, dim]`` and the head-major forms only ``dim``), those before it may be strided, as long
        as no two rows overlap.
    form
        Order of the dimensions.
    slots_per_row
        Token slots that a row covers.

    Raises
    ------
    TypeError, ValueError
        Naming the tensor and what is accepted.
    """
    form = one_of("form", form, BufferForm)
    tensors = checked_layers(name, tensors)
    first = tensors[0]
    slots_per_row = whole(f"slots_per_row of {name}", slots_per_row)
    if form is BufferForm.HEAD_MAJOR:
        if first.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(first.shape)}; a head-major buffer is [heads, slots, dim]")
        _check_strides(name, first, 2)
        heads, _, dim = first.shape
        rows = DeviceRows.head_major(tensors)
        return DeviceComponent(
            name, tensors, rows, dim * first.element_size(), (heads, dim), first.dtype, slots_per_row
        )
    if form is BufferForm.BLOCK_HEAD_MAJOR or (form is BufferForm.BLOCK_MAJOR and _has_heads_apart(first)):
        if first.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(first.shape)}; block-head-major is [blocks, heads, block, dim]")
        blocks = tensors if form is BufferForm.BLOCK_HEAD_MAJOR else tuple(t.transpose(1, 2) for t in tensors)
        _check_strides(name, blocks[0], 3)
        _, heads, _, dim = blocks[0].shape
        rows = DeviceRows.block_head_major(blocks)
        return DeviceComponent(
            name, tensors, rows, dim * first.element_size(), (heads, dim), first.dtype, slots_per_row
        )
    index_dims = 1 if form is BufferForm.SLOT_MAJOR else 2
    if first.dim() <= index_dims:
        wanted = "[slots, ...]" if index_dims == 1 else "[blocks, block, ...]"
        raise ValueError(f"{name} has shape {tuple(first.shape)}; a {form.value} buffer is {wanted}")
    _check_strides(name, first, index_dims)
    element = tuple(first.shape[index_dims:])
    rows = DeviceRows.slot_major(tensors) if index_dims == 1 else DeviceRows.block_major(tensors)
    row_bytes = element_bytes(element, first.dtype)
    return DeviceComponent(name, tensors, rows, row_bytes, element, first.dtype, slots_per_row)


def element_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a dense element."""
    count = 1
    for extent in shape:
        count *= extent
    return count * dtype.itemsize


def checked_layers(name: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the layers as a tuple once they are seen to be alike; a tensor is not taken for a sequence of layers.

    Raises
    ------
    TypeError, ValueError
        Naming the layer that differs.
    """
    layers = checked_tensors(name, tensors)
    if not layers:
        raise ValueError(f"{name} is empty; pass one tensor a layer")
    first = layers[0]
    if first.numel() == 0:
        raise ValueError(f"{name}[0] has shape {tuple(first.shape)}; it must hold at least one element")
    for number, layer in enumerate(layers[1:], start=1):
        for what, value, wanted in (
            ("shape", tuple(layer.shape), tuple(first.shape)),
            ("stride", layer.stride(), first.stride()),
            ("dtype", layer.dtype, first.dtype),
            ("device", layer.device, first.device),
        ):
            if value != wanted:
                raise ValueError(
                    f"{name}[{number}] has {what} {value}; every layer must have {wanted}, as {name}[0] has"
                )
    return layers


def left_out(layers: object) -> bool:
    """Whether an optional family of layers is none: an empty sequence."""
    return isinstance(layers, Sequence) and not layers


def _has_heads_apart(tensor: torch.Tensor) -> bool:
    """Whether the heads of ``[blocks, block, heads, dim]`` are not one dense element, but rows of their own."""
    return tensor.dim() == 4 and tensor.shape[2] > 1 and tensor.stride(2) != tensor.shape[3]


def _check_strides(name: str, tensor: torch.Tensor, index_dims: int) -> None:
    expected = 1
    for dim in range(tensor.dim() - 1, index_dims - 1, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            raise ValueError(
                f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}; the dimensions from "
                f"{index_dims} on must be dense, only those before may be strided"
            )
        expected *= tensor.shape[dim]
    reach = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride < reach:
            raise ValueError(
                f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, so that rows overlap; every "
                "slot must have memory of its own"
            )
        reach += stride * (extent - 1)
