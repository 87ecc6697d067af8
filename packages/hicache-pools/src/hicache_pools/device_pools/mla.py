"""MLATokenToKVPool: the latent rows of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hicache_kernels.validation import whole

from .base import DevicePool
from .components import BufferForm, DeviceComponent, checked_layers, component_from_tensors


class MLATokenToKVPool(DevicePool):
    """One latent row a slot and layer, ``kv_lora_rank + qk_rope_head_dim`` values.

    Parameters
    ----------
    size, page_size
        Slots to allocate, and slots a page.
    dtype
        Of the latent.
    kv_lora_rank, qk_rope_head_dim, layer_num
        Shape of a row, and number of layers.
    device
        Where to allocate.
    index_translation
        See :class:`DevicePool`.

    Attributes
    ----------
    kv_buffer
        The latent rows, one tensor a layer, in the form they were given.
    kv_cache_dim
        Values of a row.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: torch.device | str = "cpu",
        *,
        index_translation: torch.Tensor | None = None,
    ) -> None:
        for name, value in (
            ("size", size),
            ("page_size", page_size),
            ("kv_lora_rank", kv_lora_rank),
            ("layer_num", layer_num),
        ):
            whole(name, value)
        whole("qk_rope_head_dim", qk_rope_head_dim, least=0)
        shape = (size, 1, kv_lora_rank + qk_rope_head_dim)
        kv = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self._describe_latent(kv, latent_component(kv), page_size, index_translation)

    @classmethod
    def from_buffers(
        cls,
        *,
        kv: Sequence[torch.Tensor],
        page_size: int,
        index_translation: torch.Tensor | None = None,
    ) -> MLATokenToKVPool:
        """Describe tensors an engine already has.

        Parameters
        ----------
        kv
            One tensor a layer: ``[slots, dim]``, ``[slots, 1, dim]``, ``[blocks, block, dim]`` or
            ``[blocks, block, 1, dim]``; dimensions before ``dim`` may be strided.
        page_size
            Slots a page.
        index_translation
            See :class:`DevicePool`.
        """
        pool = cls.__new__(cls)
        pool._describe_latent(kv, latent_component(kv), page_size, index_translation)
        return pool

    def _describe_latent(
        self,
        kv: Sequence[torch.Tensor],
        component: DeviceComponent,
        page_size: int,
        index_translation: torch.Tensor | None,
    ) -> None:
        self.describe([component], page_size, index_translation)
        self.kv_buffer = list(kv)
        self.kv_cache_dim = component.element_shape[-1]


def latent_component(kv: Sequence[torch.Tensor]) -> DeviceComponent:
    """Describe latent rows; ``[slots, 1, dim]`` puts the rows where blocks of one slot would."""
    shape = tuple(checked_layers("kv", kv)[0].shape)
    if len(shape) not in (2, 3, 4) or (len(shape) == 4 and shape[2] != 1):
        raise ValueError(
            f"kv has shape {shape}; accepted are [slots, dim], [slots, 1, dim], [blocks, block, dim] and "
            "[blocks, block, 1, dim]"
        )
    form = BufferForm.SLOT_MAJOR if len(shape) == 2 or shape[1] == 1 else BufferForm.BLOCK_MAJOR
    component = component_from_tensors("kv", kv, form)
    return replace(component, element_shape=(1, component.element_shape[-1]))
