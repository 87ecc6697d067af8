"""MambaPool: recurrent states, one a request or checkpoint rather than one a token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Unpack

import torch

from hicache_kernels.validation import whole

from .base import DevicePool, DevicePoolOptions
from .components import BufferForm, DeviceComponent, component_from_tensors, left_out

Layers = Sequence[torch.Tensor]


class MambaPool(DevicePool):
    """Convolution states, a temporal state, and any number of side states a slot and layer, each with its own dtype.

    Components are named ``conv[0]``, ``conv[1]``, ..., ``temporal``, and ``side[name]``. A page is one slot.

    Parameters
    ----------
    size
        Slots to allocate.
    conv_shapes, temporal_shape
        Shapes of the convolution states and of the temporal state of one slot and layer.
    conv_dtype, temporal_dtype
        Their types.
    layer_num
        Layers that have a state.
    device
        Where to allocate.
    side
        Shape and dtype of more states, by name.
    index_translation
        See :class:`DevicePool`.

    Attributes
    ----------
    conv_buffer
        Convolution states: ``conv_buffer[i][layer]`` is ``[slots, *conv_shapes[i]]``.
    temporal_buffer
        Temporal state: ``temporal_buffer[layer]`` is ``[slots, *temporal_shape]``; empty where there is none.
    side_buffer
        Side states: ``side_buffer[name][layer]`` is ``[slots, ...]``.
    """

    def __init__(
        self,
        size: int,
        conv_shapes: Sequence[Sequence[int]],
        temporal_shape: Sequence[int],
        conv_dtype: torch.dtype,
        temporal_dtype: torch.dtype,
        layer_num: int,
        device: torch.device | str = "cpu",
        *,
        side: Mapping[str, tuple[Sequence[int], torch.dtype]] | None = None,
        **options: Unpack[DevicePoolOptions],
    ) -> None:
        for name, value in (("size", size), ("layer_num", layer_num)):
            whole(name, value)
        shapes = {f"conv_shapes[{number}]": shape for number, shape in enumerate(conv_shapes)}
        shapes["temporal_shape"] = temporal_shape
        shapes |= {f"side[{name!r}]": shape for name, (shape, _) in (side or {}).items()}
        for name, shape in shapes.items():
            for extent in shape:
                whole(name, extent)

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
            return [torch.zeros((size, *shape), dtype=dtype, device=device) for _ in range(layer_num)]

        self._describe_states(
            [allocate(shape, conv_dtype) for shape in conv_shapes],
            allocate(temporal_shape, temporal_dtype),
            {name: allocate(shape, dtype) for name, (shape, dtype) in (side or {}).items()},
            **options,
        )

    @classmethod
    def from_buffers(
        cls,
        *,
        conv: Layers | Sequence[Layers],
        temporal: Layers = (),
        side: Layers | Sequence[Layers] | Mapping[str, Layers] | None = None,
        page_size: int = 1,
        index_translation: torch.Tensor | None = None,
    ) -> MambaPool:
        """Describe tensors an engine already has; dim 0 of each is the slot, and may be strided.

        Parameters
        ----------
        conv
            One tensor a layer, or for several convolution states one such sequence for each: ``conv[i][layer]``.
            ``stacked.unbind(0)`` makes the layers of a tensor ``[layers, slots, ...]``.
        temporal
            One tensor a layer; none for a model that keeps convolution states alone.
        side
            One tensor a layer; a sequence of such sequences, named 0, 1, ...; or a mapping from names to them.
        page_size
            Must be 1.
        index_translation
            See :class:`DevicePool`.
        """
        if page_size != 1:
            raise ValueError(f"page_size is {page_size}; a state pool has pages of 1 slot")
        named = (
            side
            if isinstance(side, Mapping)
            else {str(i): s for i, s in enumerate(_families("side", () if side is None else side))}
        )
        pool = cls.__new__(cls)
        pool._describe_states(_families("conv", conv), temporal, named, index_translation)
        return pool

    def _describe_states(
        self,
        conv: Sequence[Layers],
        temporal: Layers,
        side: Mapping[str, Layers],
        index_translation: torch.Tensor | None = None,
    ) -> None:
        components = [_state(f"conv[{i}]", layers) for i, layers in enumerate(conv)]
        components += [] if left_out(temporal) else [_state("temporal", temporal)]
        components += [_state(f"side[{name}]", layers) for name, layers in side.items()]
        self.describe(components, 1, index_translation)
        self.conv_buffer = [list(layers) for layers in conv]
        self.temporal_buffer = list(temporal)
        self.side_buffer = {name: list(layers) for name, layers in side.items()}


def _state(name: str, layers: Layers) -> DeviceComponent:
    return component_from_tensors(name, layers, BufferForm.SLOT_MAJOR)


def _families(name: str, layers: Layers | Sequence[Layers]) -> list[Layers]:
    """Return whether layers are one family (one tensor a layer), not a sequence of families."""
    if isinstance(layers, torch.Tensor):
        raise TypeError(f"{name} is one tensor; pass a sequence with one tensor a layer, such as {name}.unbind(0)")
    if not isinstance(layers, Iterable) or isinstance(layers, Iterator):
        raise TypeError(f"{name} is a {type(layers).__name__}; pass one tensor a layer, or one sequence a state")
    if all(isinstance(layer, torch.Tensor) for layer in layers):
        family: list[torch.Tensor] = [layer for layer in layers if isinstance(layer, torch.Tensor)]
        return [family] if family else []
    families: list[Layers] = []
    for number, layer in enumerate(layers):
        if isinstance(layer, torch.Tensor):
            raise TypeError(
                f"{name}[{number}] is a tensor among sequences; pass one tensor a layer, or one sequence a state"
            )
        if not isinstance(layer, Iterable):
            raise TypeError(
                f"{name}[{number}] is a {type(layer).__name__}; pass one tensor a layer, or one sequence a state"
            )
        families.append(list(layer))
    return families
