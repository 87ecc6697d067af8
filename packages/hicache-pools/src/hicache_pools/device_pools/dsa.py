"""DSATokenToKVPool: latent rows and index keys of sparse attention with an indexer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from hicache_kernels.validation import whole

from .base import DevicePoolOptions
from .components import BufferForm, DeviceComponent, component_from_tensors
from .mla import MLATokenToKVPool, latent_component


class DSATokenToKVPoolOptions(DevicePoolOptions, total=False):
    """Keyword arguments of :class:`DSATokenToKVPool` beyond its shape."""

    quant_block_size: int


class DSATokenToKVPool(MLATokenToKVPool):
    """An MLA latent a slot, and index keys with their scales a page.

    The index buffer is page-granular: a row holds the keys of ``index_page_size`` slots and then their scales, so a row
    is moved whole.

    Parameters
    ----------
    size, page_size
        Slots to allocate (a multiple of ``page_size``), and slots a page, of both buffers.
    dtype
        Of the latent.
    kv_lora_rank, qk_rope_head_dim, layer_num
        Shape of a latent row, and number of layers.
    device
        Where to allocate.
    index_head_dim
        Bytes of an index key (one a value).
    quant_block_size
        Values that share a float32 scale; 128 by default.
    index_translation
        See :class:`DevicePool`.

    Attributes
    ----------
    kv_buffer, kv_cache_dim
        As in :class:`MLATokenToKVPool`.
    index_k_with_scale_buffer
        Index keys and scales, one tensor a layer.
    index_page_size
        Slots that a row of it covers.
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
        index_head_dim: int,
        **options: Unpack[DSATokenToKVPoolOptions],
    ) -> None:
        unknown = options.keys() - DSATokenToKVPoolOptions.__optional_keys__
        if unknown:
            raise TypeError(f"{sorted(unknown)} are no keyword arguments of {type(self).__name__}")
        quant_block_size = options.get("quant_block_size", 128)
        for name, value in (
            ("size", size),
            ("page_size", page_size),
            ("kv_lora_rank", kv_lora_rank),
            ("layer_num", layer_num),
            ("index_head_dim", index_head_dim),
            ("quant_block_size", quant_block_size),
        ):
            whole(name, value)
        whole("qk_rope_head_dim", qk_rope_head_dim, least=0)
        if size % page_size:
            raise ValueError(f"size is {size}; it must be a multiple of page_size {page_size}")
        if index_head_dim % quant_block_size:
            raise ValueError(
                f"index_head_dim is {index_head_dim}; it must be a multiple of quant_block_size {quant_block_size}"
            )
        kv_shape = (size, 1, kv_lora_rank + qk_rope_head_dim)
        index_shape = (size // page_size, page_size * (index_head_dim + index_head_dim // quant_block_size * 4))
        kv = [torch.zeros(kv_shape, dtype=dtype, device=device) for _ in range(layer_num)]
        index_k = [torch.zeros(index_shape, dtype=torch.uint8, device=device) for _ in range(layer_num)]
        self._describe_sparse(kv, index_k, page_size, page_size, options.get("index_translation"))

    @classmethod
    def from_buffers(  # type: ignore[override]  # it needs the index keys as well
        cls,
        *,
        kv: Sequence[torch.Tensor],
        index_k: Sequence[torch.Tensor],
        page_size: int,
        index_page_size: int | None = None,
        index_translation: torch.Tensor | None = None,
    ) -> DSATokenToKVPool:
        """Describe tensors an engine already has.

        Parameters
        ----------
        kv
            As in :meth:`MLATokenToKVPool.from_buffers`.
        index_k
            One tensor a layer, ``[pages, ...]`` of any dtype: what comes after dim 0 is a row.
        page_size
            Slots a page.
        index_page_size
            Slots that a row of ``index_k`` covers; by default ``page_size``.
        index_translation
            See :class:`DevicePool`.
        """
        pool = cls.__new__(cls)
        index_page_size = page_size if index_page_size is None else index_page_size
        pool._describe_sparse(kv, index_k, page_size, index_page_size, index_translation)
        return pool

    def _describe_sparse(
        self,
        kv: Sequence[torch.Tensor],
        index_k: Sequence[torch.Tensor],
        page_size: int,
        index_page_size: int,
        index_translation: torch.Tensor | None,
    ) -> None:
        latent: DeviceComponent = latent_component(kv)
        index = component_from_tensors("index_k", index_k, BufferForm.SLOT_MAJOR, slots_per_row=index_page_size)
        self.describe([latent, index], page_size, index_translation)
        self.kv_buffer = list(kv)
        self.kv_cache_dim = latent.element_shape[-1]
        self.index_k_with_scale_buffer = list(index_k)
        self.index_page_size = index_page_size
