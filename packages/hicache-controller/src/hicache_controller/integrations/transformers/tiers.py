"""Tiers: the device pools, host pools, controller and prefix tree of one model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hicache_kernels import HostLayout
from hicache_kernels.validation import whole
from hicache_pools import (
    DevicePool,
    ExtentAllocator,
    HostPoolGroup,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    NullPoolHost,
    PoolEntry,
    PoolName,
    PoolSpec,
    build_host_pool_group,
)

from ... import HybridCacheController, SidecarPoolSpec, StorageSettings
from ...policies import PrefetchPolicy
from ...tree import UnifiedRadixCache, WindowComponent
from .model_layout import AttentionShape, ModelLayout, StatesShape

PAGE_ROW_BYTES = 64 << 10
"""Bytes of keys a layer and page should have: a copy that wide runs at the speed of the bus, also during compute."""

MIN_PAGE_SIZE, MAX_PAGE_SIZE = 16, 256

STORAGE_BATCH_PAGES = 1024
"""Pages of one call to storage: sessions wait for all of a piece anyway, and a call costs half a millisecond. Of what
is interrupted, or takes longer than sessions wait for storage, the calls that have ended count."""

STORAGE_WAIT_SECONDS = 30.0
"""How long a session waits for storage: no scheduler is held up, and computing a prompt anew mostly takes longer."""

WINDOWED_SHARE = 0.3
"""Part of a tier for windows and states of models that have full attention too."""

MIN_CHECKPOINTS = 8
"""Windows or states a tier holds at least: a session may need three at once."""


@dataclass(frozen=True)
class TierPages:
    """How many pages of each pool a tier has; ``states`` counts sequences."""

    kv: int
    sliding: int
    states: int


@dataclass(frozen=True, eq=False)
class Tiers:
    """The three tiers of one model.

    Attributes
    ----------
    layout
        What the model's layers keep.
    page_size
        Tokens a page.
    window_tokens
        Tokens before the end of a prefix that windowed layers need, 0 without such layers.
    window_pages
        Pages these lie in.
    kv, index, sliding, states
        Device pools; None where the model has no such layers.
    group, controller, tree
        Host pools, transfers, and what is cached where.
    """

    layout: ModelLayout
    page_size: int
    window_tokens: int
    kv: MHATokenToKVPool | None
    index: MLATokenToKVPool | None
    sliding: MHATokenToKVPool | None
    states: MambaPool | None
    group: HostPoolGroup
    controller: HybridCacheController
    tree: UnifiedRadixCache

    @property
    def window_pages(self) -> int:
        """Pages in which the last ``window_tokens`` tokens of a prefix of whole pages lie."""
        return -(-self.window_tokens // self.page_size)

    @property
    def windowed(self) -> bool:
        """Return whether a prefix can be continued only where a window or a state was saved."""
        return self.sliding is not None or self.states is not None

    @property
    def windowed_pools(self) -> tuple[tuple[PoolName, int], ...]:
        """Pools of windows and states, each with its rows a page."""
        found: list[tuple[PoolName, int]] = []
        if self.sliding is not None:
            found.append((PoolName.SWA, self.page_size))
        if self.states is not None:
            found.append((PoolName.MAMBA, 1))
        return tuple(found)

    def state_buffers(self, layer: int) -> list[torch.Tensor]:
        """All state buffers of one of the pool's layers, ``[slots, ...]``, in the order a cache layer has them."""
        if self.states is None:
            return []
        return [family[layer] for family in (*self.states.conv_buffer, *self.states.side_buffer.values())]

    def close(self) -> None:
        """Stop the transfers and give the host memory back.

        Raises
        ------
        RuntimeError
            If a transfer does not end: its memory is left as it is.
        """
        if not self.controller.shutdown():
            raise RuntimeError(
                "a transfer has not ended within a minute, so the host memory it uses was not given back"
            )
        self.group.destroy()


def default_page_size(layout: ModelLayout) -> int:
    """Return the smallest power of two that makes a layer's share of a page large enough for fast copies."""
    layers = layout.full or layout.sliding
    row = max(1, layout.attention_of(layers, "keys and values").key.bytes)
    page = MIN_PAGE_SIZE
    while page < MAX_PAGE_SIZE and page * row < PAGE_ROW_BYTES:
        page *= 2
    return page


def build_tiers(
    layout: ModelLayout, *, page_size: int, l1_bytes: int, l2_bytes: int, host_layout: HostLayout | str
) -> Tiers:
    """Allocate the device pools and host pools of a model, and make what manages them.

    Parameters
    ----------
    layout
        What the layers keep.
    page_size
        Tokens a page.
    l1_bytes, l2_bytes
        Memory on the device and on the host.
    host_layout
        Order of a page's bytes on the host.

    Raises
    ------
    ValueError
        If a tier has no room for a page and a few checkpoints.
    UnsupportedError
        If layers of one kind keep different shapes.
    """
    page_size = whole("page_size", page_size)
    window_tokens = max(1, layout.window_of(layout.sliding) - 1) if layout.sliding else 0
    window_pages = -(-window_tokens // page_size)
    full = layout.attention_of(layout.full, "keys and values") if layout.full else None
    sliding = layout.attention_of(layout.sliding, "keys and values") if layout.sliding else None
    states = layout.states_of(layout.recurrent) if layout.recurrent else None
    sizes = _PageBytes(
        0 if full is None else full.bytes * len(layout.full) * page_size,
        0 if sliding is None else sliding.bytes * len(layout.sliding) * page_size,
        0 if states is None else states.bytes * len(layout.recurrent),
        window_pages,
    )
    device = _split("l1_gb, by default a part of l2_gb,", l1_bytes, sizes)
    host = _split("l2_gb", l2_bytes, sizes)
    pools = _DevicePools(
        kv=None if full is None else _attention_pool(full, layout.full, device.kv, page_size, layout.device),
        index=None if full is None else _index_pool(full, layout.full, device.kv, page_size, layout.device),
        sliding=None
        if sliding is None
        else _attention_pool(sliding, layout.sliding, device.sliding, page_size, layout.device),
        states=None if states is None else _states_pool(states, layout.recurrent, device.states, layout.device),
    )
    group = build_host_pool_group(
        pools.specs(layout, host),
        page_size=page_size,
        layout=host_layout,
        pin_memory=layout.device.type != "cpu",
    )
    with ExitStack() as undo:
        undo.callback(group.destroy)
        if pools.kv is None:
            anchor = NullPoolHost(host.kv, page_size, host_layout)
            entry = PoolEntry(PoolName.KV, anchor, None, lambda _: None, is_primary_index_anchor=True)
            group = HostPoolGroup([entry, *group.entries])
        pages = _connect_allocators(group, device, page_size)
        controller = _make_controller(group)
        undo.callback(controller.shutdown)
        tree = UnifiedRadixCache(controller, pages, page_size=page_size, components=pools.components(window_pages))
        undo.pop_all()
    return Tiers(
        layout, page_size, window_tokens, pools.kv, pools.index, pools.sliding, pools.states, group, controller, tree
    )


@dataclass(frozen=True)
class _DevicePools:
    """The device pools of a model; None where it has no such layers."""

    kv: MHATokenToKVPool | None
    index: MLATokenToKVPool | None
    sliding: MHATokenToKVPool | None
    states: MambaPool | None

    def specs(self, layout: ModelLayout, host: TierPages) -> dict[str, DevicePool | PoolSpec]:
        """Return how the host pool of each is made."""
        specs: dict[str, DevicePool | PoolSpec] = {}
        if self.kv is not None:
            specs[PoolName.KV] = PoolSpec(self.kv, layers=layout.full, pages=host.kv)
        if self.index is not None:
            specs[PoolName.INDEXER] = PoolSpec(self.index, layers=layout.full)
        if self.sliding is not None:
            specs[PoolName.SWA] = PoolSpec(self.sliding, layers=layout.sliding, pages=host.sliding)
        if self.states is not None:
            specs[PoolName.MAMBA] = PoolSpec(self.states, layers=layout.recurrent, pages=host.states)
        return specs

    def components(self, window_pages: int) -> list[WindowComponent]:
        """Return the windowed components of the tree."""
        components = []
        if self.sliding is not None:
            components.append(WindowComponent(PoolName.SWA, window_pages))
        if self.states is not None:
            components.append(WindowComponent.recurrent_state())
        return components


def _make_controller(group: HostPoolGroup) -> HybridCacheController:
    storage = StorageSettings(
        prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        batch_pages=STORAGE_BATCH_PAGES,
        max_wait_seconds=STORAGE_WAIT_SECONDS,
    )
    sidecars = SidecarPoolSpec.of_group(group)
    return HybridCacheController(group, sidecars=sidecars, queue_inline=True, storage=storage)


@dataclass(frozen=True)
class _PageBytes:
    """Bytes of a page of each pool, and the pages of a window."""

    kv: int
    sliding: int
    states: int
    window_pages: int

    @property
    def checkpoint(self) -> int:
        return self.sliding * self.window_pages + self.states


def _split(name: str, size: int, sizes: _PageBytes) -> TierPages:
    """Divide a tier between full attention, and windows and states."""
    checkpoints = 0
    if sizes.checkpoint:
        share = WINDOWED_SHARE if sizes.kv else 1.0
        checkpoints = max(MIN_CHECKPOINTS, int(size * share) // sizes.checkpoint)
    left = size - checkpoints * sizes.checkpoint
    # Without full attention a page of the anchor is a number and no bytes; windows are what limits.
    pages = left // sizes.kv if sizes.kv else checkpoints * max(64, sizes.window_pages)
    if left < 0 or pages < 1:
        least = MIN_CHECKPOINTS * sizes.checkpoint + sizes.kv
        need = (
            f"a page of this model and {MIN_CHECKPOINTS} windows or states need"
            if checkpoints
            else ("a page of this model needs")
        )
        raise ValueError(f"{name} is {size / 1e9:g} GB; {need} {least / 1e9:g} GB")
    return TierPages(pages, checkpoints * sizes.window_pages, checkpoints)


def _attention_pool(
    shape: AttentionShape, layers: Sequence[int], pages: int, page_size: int, device: torch.device
) -> MHATokenToKVPool:
    def allocate(heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return list(torch.empty((len(layers), pages * page_size, heads, dim), dtype=dtype, device=device).unbind(0))

    return MHATokenToKVPool.from_buffers(k=allocate(*shape.key), v=allocate(*shape.value), page_size=page_size)


def _index_pool(
    shape: AttentionShape, layers: Sequence[int], pages: int, page_size: int, device: torch.device
) -> MLATokenToKVPool | None:
    if shape.index_key is None:
        return None
    _, dim, dtype = shape.index_key
    rows = torch.empty((len(layers), pages * page_size, 1, dim), dtype=dtype, device=device)
    return MLATokenToKVPool.from_buffers(kv=rows.unbind(0), page_size=page_size)


def _states_pool(shape: StatesShape, layers: Sequence[int], slots: int, device: torch.device) -> MambaPool:
    def allocate(state: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        return list(torch.empty((len(layers), slots, *state), dtype=dtype, device=device).unbind(0))

    return MambaPool.from_buffers(
        conv=[allocate(*state) for _, state in shape.conv],
        side={str(number): allocate(*state) for number, state in shape.recurrent},
    )


def _connect_allocators(group: HostPoolGroup, device: TierPages, page_size: int) -> ExtentAllocator:
    """Give each pool with slots of its own an allocator for its device side; returns the anchor's."""
    anchor = ExtentAllocator(device.kv, page_size)
    allocators = {
        PoolName.KV: anchor,
        PoolName.SWA: ExtentAllocator(device.sliding, page_size),
        PoolName.MAMBA: ExtentAllocator(device.states, 1),
    }
    for entry in group.entries:
        if entry.name in allocators:
            allocator = allocators[PoolName(entry.name)]
            entry.device_alloc_fn, entry.device_free_fn = allocator.alloc, allocator.free
    return anchor
