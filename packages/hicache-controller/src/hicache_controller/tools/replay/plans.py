"""Which pools a model of each kind has: names, rows, layers, and how long a window a prefix needs of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import hicache_pools
from hicache_pools.pool_transfer import PoolName

from ..dtypes import ELEMENT_BYTES

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "Mapping[str, list[torch.Tensor]]"
"""One tensor a layer, by the name of the buffer family."""

_STATE_ROWS = 16
_CONVOLUTION_TAPS = 4
_C4, _C128 = 4, 128
_MAX_VALUES = {"layers": 4096, "row_bytes": 1 << 20, "page_size": 1 << 20, "window_tokens": 1 << 30}


@dataclass(frozen=True)
class BufferPlan:
    """One buffer family of a pool.

    Attributes
    ----------
    name
        As the device pool calls it.
    shape, dtype
        Of a row, what one layer keeps for ``slots_per_row`` slots; the type by torch's name of it.
    host_pool
        The host pool that mirrors it, where that is not the pool's own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "uint8"
    slots_per_row: int = 1
    host_pool: PoolName | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class PoolPlan:
    """One device pool of a model.

    Attributes
    ----------
    name
        Its name in the group.
    describe
        Makes the device pool from its tensors and the page size.
    buffers
        Its buffer families.
    layers
        The model's layers that it serves.
    page_size
        Slots a page: the model's, or 1 for states.
    window_pages
        Last pages that a prefix needs of it; None for the anchor and the pools on its slots, of which all are needed.
    packed_draft_layers
        Layers of a draft model that follow its own in every slot.
    """

    name: PoolName
    describe: Callable[[Tensors, int], hicache_pools.DevicePool]
    buffers: tuple[BufferPlan, ...]
    layers: tuple[int, ...]
    page_size: int
    window_pages: int | None = None
    packed_draft_layers: int = 0

    @property
    def layer_num(self) -> int:
        """Layers with the packed drafts'."""
        return len(self.layers) + self.packed_draft_layers

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: all layers and buffers."""
        return sum(b.row_bytes * (self.page_size // b.slots_per_row) for b in self.buffers) * self.layer_num


class Geometry(NamedTuple):
    """What the pools of a model have in common.

    Attributes
    ----------
    layers
        Of the model.
    row_bytes
        Bytes one layer keeps for one token in one component.
    page_size
        Tokens a page.
    window_tokens
        Tokens a sliding window sees.
    """

    layers: int
    row_bytes: int
    page_size: int
    window_tokens: int

    def every(self, step: int, first: int = 0) -> tuple[int, ...]:
        """Every ``step``-th layer of the model."""
        return tuple(range(first, self.layers, step))

    @property
    def window_pages(self) -> int:
        """Pages that the last tokens of a prefix of whole pages lie in."""
        return -(-self.window_tokens // self.page_size)


def _row(name: str, geometry: Geometry) -> BufferPlan:
    return BufferPlan(name, (1, geometry.row_bytes))


def _attention(geometry: Geometry, layers: tuple[int, ...], name: PoolName = PoolName.KV) -> PoolPlan:
    return PoolPlan(
        name,
        lambda tensors, page_size: hicache_pools.MHATokenToKVPool.from_buffers(
            k=tensors["k"], v=tensors["v"], page_size=page_size
        ),
        (_row("k", geometry), _row("v", geometry)),
        layers,
        geometry.page_size,
        geometry.window_pages if name is PoolName.SWA else None,
    )


def _latent(geometry: Geometry, layers: tuple[int, ...], name: PoolName = PoolName.KV) -> PoolPlan:
    return PoolPlan(
        name,
        lambda tensors, page_size: hicache_pools.MLATokenToKVPool.from_buffers(kv=tensors["kv"], page_size=page_size),
        (_row("kv", geometry),),
        layers,
        geometry.page_size,
        geometry.window_pages if name is PoolName.SWA else None,
    )


def _sparse(geometry: Geometry, layers: tuple[int, ...]) -> PoolPlan:
    # A row of index keys is a page: the keys of its slots, then a float32 scale for each.
    index = BufferPlan(
        "index_k",
        (geometry.page_size * (geometry.row_bytes + 4),),
        slots_per_row=geometry.page_size,
        host_pool=PoolName.INDEXER,
    )
    return PoolPlan(
        PoolName.KV,
        lambda tensors, page_size: hicache_pools.DSATokenToKVPool.from_buffers(
            kv=tensors["kv"], index_k=tensors["index_k"], page_size=page_size
        ),
        (_row("kv", geometry), index),
        layers,
        geometry.page_size,
    )


def _recurrent(geometry: Geometry, layers: tuple[int, ...]) -> PoolPlan:
    width = geometry.row_bytes
    return PoolPlan(
        PoolName.MAMBA,
        lambda tensors, _: hicache_pools.MambaPool.from_buffers(conv=tensors["conv"], temporal=tensors["temporal"]),
        (
            BufferPlan("conv", (_CONVOLUTION_TAPS, width // 2), "bfloat16"),
            BufferPlan("temporal", (_STATE_ROWS, width // 4), "float32"),
        ),
        layers,
        page_size=1,
        window_pages=1,
    )


def _compressed(geometry: Geometry, layers: tuple[int, ...], name: PoolName, ratio: int) -> PoolPlan:
    return PoolPlan(
        name,
        lambda tensors, page_size: hicache_pools.DeepSeekV4PagedPool.from_buffers(
            kv=tensors["kv"], compression_ratio=ratio, page_size=page_size
        ),
        (BufferPlan("kv", (geometry.row_bytes,), slots_per_row=ratio),),
        layers,
        geometry.page_size,
    )


def _compressor_state(geometry: Geometry, layers: tuple[int, ...], name: PoolName) -> PoolPlan:
    return PoolPlan(
        name,
        lambda tensors, _: hicache_pools.DeepSeekV4StatePool.from_buffers(state=tensors["state"]),
        (BufferPlan("state", (_STATE_ROWS, geometry.row_bytes // 4), "float32"),),
        layers,
        page_size=1,
        window_pages=1,
    )


def _draft(geometry: Geometry) -> tuple[PoolPlan, ...]:
    owner = _attention(geometry, geometry.every(1))
    packed = PoolPlan(owner.name, owner.describe, owner.buffers, owner.layers, owner.page_size, packed_draft_layers=1)
    return packed, _attention(geometry, (geometry.layers,), PoolName.DRAFT)


def _deepseek_v4(geometry: Geometry) -> tuple[PoolPlan, ...]:
    c4, c128 = geometry.every(2), geometry.every(2, 1)
    return (
        _compressed(geometry, c4, PoolName.DEEPSEEK_V4_C4, _C4),
        _compressed(geometry, c4, PoolName.DEEPSEEK_V4_C4_INDEXER, _C4),
        _compressed(geometry, c128, PoolName.DEEPSEEK_V4_C128, _C128),
        _latent(geometry, geometry.every(1), PoolName.SWA),
        _compressor_state(geometry, c4, PoolName.DEEPSEEK_V4_C4_STATE),
        _compressor_state(geometry, c4, PoolName.DEEPSEEK_V4_C4_INDEXER_STATE),
        _compressor_state(geometry, c128, PoolName.DEEPSEEK_V4_C128_STATE),
    )


_MODELS: Mapping[str, Callable[[Geometry], tuple[PoolPlan, ...]]] = MappingProxyType(
    {
        "mha": lambda g: (_attention(g, g.every(1)),),
        "mla": lambda g: (_latent(g, g.every(1)),),
        "swa": lambda g: (_attention(g, g.every(2)), _attention(g, g.every(2, 1), PoolName.SWA)),
        "mamba": lambda g: (_attention(g, g.every(2)), _recurrent(g, g.every(2, 1))),
        "dsa": lambda g: (_sparse(g, g.every(1)),),
        "deepseek_v4": _deepseek_v4,
        "draft": _draft,
        "hybrid": lambda g: (
            _attention(g, g.every(3)),
            _attention(g, g.every(3, 1), PoolName.SWA),
            _recurrent(g, g.every(3, 2)),
        ),
        "hybrid_dsa": lambda g: (
            _sparse(g, g.every(3)),
            _attention(g, g.every(3, 1), PoolName.SWA),
            _recurrent(g, g.every(3, 2)),
        ),
    }
)

POOLS = tuple(_MODELS)
"""Kinds of models, by what they keep."""

DEFAULT_PAGE_SIZES: Mapping[str, int] = MappingProxyType(dict.fromkeys(POOLS, 64) | {"deepseek_v4": 256})
"""Tokens a page where nothing else is said."""


def model_pools(kind: str, geometry: Geometry) -> tuple[PoolPlan, ...]:
    """Return the device pools of a model: first the anchor and those on its slots, then the windowed ones.

    The model's layers take turns between the pools of ``swa``, ``mamba``, ``deepseek_v4`` and the hybrid kinds.

    Raises
    ------
    ValueError
        Where the kind is unknown, a size out of range, the model has too few layers for its pools, or a page holds no
        whole rows.
    """
    if kind not in _MODELS:
        raise ValueError(f"pool is {kind!r}; one of {', '.join(POOLS)} is expected")
    for name, largest in _MAX_VALUES.items():
        value = getattr(geometry, name)
        if not 0 < value <= largest:
            raise ValueError(f"{name} is {value}; accepted is 1 to {largest}")
    plans = _MODELS[kind](geometry)
    for plan in plans:
        if not plan.layers:
            raise ValueError(f"layers is {geometry.layers}; that leaves none for {plan.name} of pool {kind}")
        for buffer in plan.buffers:
            if plan.page_size % buffer.slots_per_row:
                raise ValueError(
                    f"page_size is {plan.page_size}; pool {kind} needs a multiple of {buffer.slots_per_row}, as a row "
                    f"of {plan.name} covers as many tokens"
                )
    return plans
