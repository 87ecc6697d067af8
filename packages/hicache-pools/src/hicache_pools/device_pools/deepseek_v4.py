"""DeepSeek-V4 device pools: KV compressed 4 or 128 tokens to one, its indexer, and the compressors' states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hicache_kernels.validation import whole

from .base import DevicePool
from .components import BufferForm, component_from_tensors, left_out


class DeepSeekV4PagedPool(DevicePool):
    """Compressed rows of the layers that share a compression ratio, and their indexer's rows if there are any.

    Slots are token slots, as in the pool that anchors the model; a row covers ``compression_ratio`` of them.

    Parameters
    ----------
    size, page_size
        Token slots to allocate rows for (a multiple of the ratio), and token slots a page.
    compression_ratio
        Tokens to one compressed entry: 4 or 128 in the model, any divisor of ``page_size`` here.
    kv_bytes, layer_num
        Bytes of a compressed entry, and layers of this ratio.
    device
        Where to allocate.
    indexer_bytes
        Bytes of an entry of the indexer, 0 where the layers have none.
    index_translation
        See :class:`DevicePool`.

    Attributes
    ----------
    kv_buffer, indexer_buffer
        The rows, one tensor a layer; ``indexer_buffer`` is empty where there is none.
    compression_ratio
        Tokens to one entry.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        compression_ratio: int,
        kv_bytes: int,
        layer_num: int,
        device: torch.device | str = "cpu",
        *,
        indexer_bytes: int = 0,
        index_translation: torch.Tensor | None = None,
    ) -> None:
        for name, value in (
            ("size", size),
            ("page_size", page_size),
            ("compression_ratio", compression_ratio),
            ("kv_bytes", kv_bytes),
            ("layer_num", layer_num),
        ):
            whole(name, value)
        whole("indexer_bytes", indexer_bytes, least=0)
        if size % compression_ratio:
            raise ValueError(f"size is {size}; it must be a multiple of compression_ratio {compression_ratio}")

        def allocate(row_bytes: int) -> list[torch.Tensor]:
            shape = (size // compression_ratio, row_bytes)
            return [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(layer_num if row_bytes else 0)]

        kv, indexer = allocate(kv_bytes), allocate(indexer_bytes)
        self._describe_compressed(kv, indexer, page_size, compression_ratio, compression_ratio, index_translation)

    @classmethod
    def from_buffers(
        cls,
        *,
        kv: Sequence[torch.Tensor],
        indexer: Sequence[torch.Tensor] = (),
        compression_ratio: int,
        page_size: int,
        slots_per_row: int | None = None,
        index_translation: torch.Tensor | None = None,
    ) -> DeepSeekV4PagedPool:
        """Describe tensors an engine already has.

        Parameters
        ----------
        kv, indexer
            One tensor a layer, ``[rows, ...]`` of any dtype, dim 0 may be strided. An indexer with rows of another
            size in slots than ``kv`` is a pool of its own.
        compression_ratio
            Tokens to one compressed entry.
        page_size
            Token slots a page, a multiple of ``slots_per_row``.
        slots_per_row
            Token slots that a row covers: by default ``compression_ratio``, a row an entry; ``page_size`` where a row
            is a whole page with padding.
        index_translation
            See :class:`DevicePool`.
        """
        pool = cls.__new__(cls)
        rows = compression_ratio if slots_per_row is None else slots_per_row
        pool._describe_compressed(kv, indexer, page_size, compression_ratio, rows, index_translation)
        return pool

    def _describe_compressed(
        self,
        kv: Sequence[torch.Tensor],
        indexer: Sequence[torch.Tensor],
        page_size: int,
        compression_ratio: int,
        slots_per_row: int,
        index_translation: torch.Tensor | None,
    ) -> None:
        if whole("slots_per_row", slots_per_row) % whole("compression_ratio", compression_ratio):
            raise ValueError(
                f"slots_per_row is {slots_per_row}; it must be a multiple of compression_ratio {compression_ratio}"
            )
        families = {"kv": kv} if left_out(indexer) else {"kv": kv, "indexer": indexer}
        components = [
            component_from_tensors(name, layers, BufferForm.SLOT_MAJOR, slots_per_row=slots_per_row)
            for name, layers in families.items()
        ]
        self.describe(components, page_size, index_translation)
        self.kv_buffer = list(kv)
        self.indexer_buffer = list(indexer)
        self.compression_ratio = compression_ratio


class DeepSeekV4StatePool(DevicePool):
    """States of the compressors: one row a state slot and layer, page size 1.

    Parameters
    ----------
    size
        State slots to allocate.
    state_shape, dtype, layer_num
        Shape and type of the state of one slot and layer, and layers that have one.
    device
        Where to allocate.
    index_translation
        See :class:`DevicePool`.

    Attributes
    ----------
    state_buffer
        States by name: ``state_buffer[name][layer]`` is ``[slots, ...]``; the name is ``state`` where there is one.
    """

    def __init__(
        self,
        size: int,
        state_shape: Sequence[int],
        dtype: torch.dtype,
        layer_num: int,
        device: torch.device | str = "cpu",
        *,
        index_translation: torch.Tensor | None = None,
    ) -> None:
        for name, value in (("size", size), ("layer_num", layer_num)):
            whole(name, value)
        for extent in state_shape:
            whole("state_shape", extent)
        state = [torch.zeros((size, *state_shape), dtype=dtype, device=device) for _ in range(layer_num)]
        self._describe_states({"state": state}, index_translation)

    @classmethod
    def from_buffers(
        cls,
        *,
        state: Sequence[torch.Tensor] | Mapping[str, Sequence[torch.Tensor]],
        page_size: int = 1,
        index_translation: torch.Tensor | None = None,
    ) -> DeepSeekV4StatePool:
        """Describe tensors an engine already has.

        Parameters
        ----------
        state
            One tensor a layer, ``[slots, ...]`` of any dtype, dim 0 may be strided; or a mapping from names to such
            sequences, where a compressor keeps several states a slot (values and scores, say).
        page_size
            Must be 1.
        index_translation
            See :class:`DevicePool`.
        """
        if page_size != 1:
            raise ValueError(f"page_size is {page_size}; a state pool has pages of 1 slot")
        pool = cls.__new__(cls)
        pool._describe_states(state if isinstance(state, Mapping) else {"state": state}, index_translation)
        return pool

    def _describe_states(
        self, states: Mapping[str, Sequence[torch.Tensor]], index_translation: torch.Tensor | None
    ) -> None:
        if left_out(states) or states == {}:
            raise ValueError("state is empty; pass one tensor a layer, or a mapping from names to such sequences")
        components = [component_from_tensors(name, layers, BufferForm.SLOT_MAJOR) for name, layers in states.items()]
        self.describe(components, 1, index_translation)
        self.state_buffer = {name: list(layers) for name, layers in states.items()}
