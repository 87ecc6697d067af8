"""BlockPool: an engine's blocks, whatever lies inside them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hicache_kernels import DeviceRows
from hicache_kernels.validation import whole

from .base import DevicePool
from .components import DeviceComponent, checked_layers

Layers = Sequence[torch.Tensor]


class BlockPool(DevicePool):
    """Whole blocks of an engine's cache: a slot is a block, and a page is one slot.

    For engines that allocate, hash and move blocks. What a block holds need not be known: keys and values apart or
    joined, heads first or tokens first, latents, recurrent states, any type. Its bytes are kept in the order in which
    they lie in memory.
    """

    @classmethod
    def from_buffers(
        cls,
        *,
        blocks: Layers | Mapping[str, Layers],
        block_dim: int = 0,
        index_translation: torch.Tensor | None = None,
    ) -> BlockPool:
        """Describe tensors an engine already has.

        Parameters
        ----------
        blocks
            One tensor a layer, or by name several families of them, such as the states of a recurrent layer. Each has
            any number of dimensions in any order of memory, and may be strided: blocks may have padding between them.
            The bytes of a block that lie together are one row: ``[blocks, heads, block, 2 * dim]`` has one row a block,
            ``[2, blocks, block, heads, dim]`` with ``block_dim=1`` two.
        block_dim
            The dimension that counts blocks.
        index_translation
            See :class:`DevicePool`.

        Raises
        ------
        TypeError, ValueError
            If layers of a family differ, families differ in layers, blocks or device, a tensor has no such dimension,
            no two neighbouring elements of a block lie together, or blocks overlap.
        """
        families = blocks if isinstance(blocks, Mapping) else {"blocks": blocks}
        if not families:
            raise ValueError("blocks is empty; pass one tensor a layer, or by name families of them")
        pool = cls.__new__(cls)
        components = [_component(str(name), layers, block_dim) for name, layers in families.items()]
        pool.describe(components, 1, index_translation)
        return pool


class _Axis(NamedTuple):
    """One dimension of a tensor, in elements."""

    stride: int
    extent: int


def _component(name: str, layers: Layers, block_dim: int) -> DeviceComponent:
    tensors = checked_layers(name, layers)
    first = tensors[0]
    block_dim = whole("block_dim", block_dim, least=0)
    if block_dim >= first.dim():
        raise ValueError(f"block_dim is {block_dim}; {name} has shape {tuple(first.shape)}: it must be one of these")
    axes = [_Axis(*axis) for axis in zip(first.stride(), first.shape, strict=True)]
    block = axes.pop(block_dim)
    axes = sorted((axis for axis in axes if axis.extent > 1), reverse=True)
    _check_apart(name, first, axes, block)
    row = _dense(axes)
    if not row and axes:
        raise ValueError(
            f"{name} has strides {first.stride()} for shape {tuple(first.shape)}: no two elements of a block lie "
            "together; one dimension other than block_dim must have stride 1"
        )
    outer = axes[: len(axes) - len(row)]
    item = first.element_size()
    row_bytes = item
    for axis in row:
        row_bytes *= axis.extent
    offsets = [item * sum(steps) for steps in itertools.product(*(_steps(axis) for axis in outer))]
    bases = tuple(tensor.data_ptr() + offset for tensor in tensors for offset in offsets)
    rows = DeviceRows(tensors, bases, len(offsets), block.extent, 0, 1, block.stride * item)
    shape = tuple(axis.extent for axis in axes) or (1,)
    return DeviceComponent(name, tensors, rows, row_bytes, shape, first.dtype)


def _dense(axes: Sequence[_Axis]) -> Sequence[_Axis]:
    """Return the last of the axes, given with falling strides, whose elements lie one after the other."""
    expected = 1
    for number, axis in reversed(list(enumerate(axes))):
        if axis.stride != expected:
            return axes[number + 1 :]
        expected *= axis.extent
    return axes


def _steps(axis: _Axis) -> range:
    return range(0, axis.stride * axis.extent, axis.stride)


def _check_apart(name: str, tensor: torch.Tensor, axes: Sequence[_Axis], block: _Axis) -> None:
    reach = 1
    for axis in sorted([*axes, block]):
        if axis.extent > 1 and axis.stride < reach:
            raise ValueError(
                f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, so that blocks overlap; every "
                "block must have memory of its own"
            )
        reach += axis.stride * (axis.extent - 1)
