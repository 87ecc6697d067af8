"""The pools, groups and allocators that a replay runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hicache_kernels import HostLayout
from hicache_pools import (
    ExtentAllocator,
    HostPool,
    HostPoolGroup,
    NullPoolHost,
    PoolEntry,
    PoolName,
    PoolSpec,
    build_host_pool_group,
)

from ...hybrid import SidecarPoolSpec
from ...tree import WindowComponent
from .options import ReplayError, ReplayOptions
from .plans import PoolPlan, Tensors
from .rows import Rows


@dataclass(frozen=True, eq=False)
class ReplayModel:
    """What a model's pools are in a replay.

    Attributes
    ----------
    group
        The host pools, each with its device pool and its allocator.
    rows
        The device rows; None for bookkeeping.
    allocator
        Device pages of the anchor.
    windows
        The windowed pools.
    sidecars
        Pools on the anchor's slots.
    slots_per_page
        Of the anchor.
    """

    group: HostPoolGroup
    rows: Rows | None
    allocator: ExtentAllocator
    windows: tuple[WindowComponent, ...]
    sidecars: tuple[SidecarPoolSpec, ...]
    slots_per_page: int

    @property
    def anchor(self) -> HostPool:
        """The anchor's host pool."""
        pool: HostPool = self.group.anchor_entry.host_pool
        return pool


def build_model(options: ReplayOptions) -> ReplayModel:
    """Make the pools of checked options.

    Raises
    ------
    ReplayError
        Where the device has no memory for them.
    """
    plans = options.plans
    # Without rows a page's tokens need no slots of their own; one slot is enough for the page.
    slots_per_page = options.page_size if options.data else 1
    rows, group = _with_bytes(options, plans) if options.data else (None, _without_bytes(options, plans))
    windows = tuple(WindowComponent(plan.name, plan.window_pages) for plan in plans if plan.window_pages)
    allocator = ExtentAllocator(options.l1_pages, slots_per_page)
    _let_alloc(group.anchor_entry, allocator)
    for plan in plans:
        if plan.window_pages is not None:
            size = plan.page_size if options.data else 1
            _let_alloc(group.get_entry(plan.name), ExtentAllocator(options.pool_pages(plan)[0], size))
    return ReplayModel(group, rows, allocator, windows, SidecarPoolSpec.of_group(group), slots_per_page)


def _let_alloc(entry: PoolEntry, allocator: ExtentAllocator) -> None:
    entry.device_alloc_fn, entry.device_free_fn = allocator.alloc, allocator.free


def _without_bytes(options: ReplayOptions, plans: tuple[PoolPlan, ...]) -> HostPoolGroup:
    """Make pools without bytes, of the anchor and of those with slots of their own."""
    sizes = {PoolName.KV: options.l2_pages}
    sizes |= {plan.name: options.pool_pages(plan)[1] for plan in plans if plan.window_pages is not None}
    return HostPoolGroup(
        PoolEntry(name, NullPoolHost(pages, 1), None, lambda layer: layer, is_primary_index_anchor=name == PoolName.KV)
        for name, pages in sizes.items()
    )


def _with_bytes(options: ReplayOptions, plans: tuple[PoolPlan, ...]) -> tuple[Rows, HostPoolGroup]:
    device = torch.device(options.device)
    try:
        tensors = {str(plan.name): _allocate(plan, options.pool_pages(plan)[0], device) for plan in plans}
    except RuntimeError as error:  # the device has no memory for them
        raise ReplayError(f"l1_pages is {options.l1_pages}: {str(error).splitlines()[0]}") from None
    sizes = {plan.name: options.pool_pages(plan) for plan in plans}
    return Rows(plans, tensors, device), _host_pools(plans, tensors, sizes, options.page_size, HostLayout.PAGE_FIRST)


def sample_group(plans: Sequence[PoolPlan], page_size: int, device: str, layout: HostLayout) -> HostPoolGroup:
    """Make host pools of a page each, to see what transfers of such a model would do.

    State pools have no ``layer_first``; they keep ``page_first`` then.
    """
    tensors = {str(plan.name): _allocate(plan, 1, torch.device(device)) for plan in plans}
    return _host_pools(plans, tensors, {plan.name: (1, 1) for plan in plans}, page_size, layout)


def _host_pools(
    plans: Sequence[PoolPlan],
    tensors: Mapping[str, Tensors],
    sizes: Mapping[PoolName, tuple[int, int]],
    page_size: int,
    layout: HostLayout,
) -> HostPoolGroup:
    specs: dict[str, PoolSpec] = {}
    for plan in plans:
        own = len(plan.layers)
        mine = {name: layers[:own] for name, layers in tensors[plan.name].items()}
        draft = {name: layers[own:] for name, layers in tensors[plan.name].items()}
        owns_slots = plan.name == PoolName.KV or plan.window_pages is not None
        specs[plan.name] = PoolSpec(
            plan.describe(mine, plan.page_size),
            plan.layers,
            indices_from_pool=None if owns_slots else PoolName.KV,
            pages=sizes[plan.name][1] if owns_slots else None,
            packed_draft_device_pools=[plan.describe(draft, plan.page_size)] if plan.packed_draft_layers else (),
            layout=HostLayout.PAGE_FIRST if plan.page_size == 1 and layout is HostLayout.LAYER_FIRST else None,
        )
    # The ratio sizes an anchor without bytes, as no pool has its number of pages; the half makes up for rounding down.
    device_pages, host_pages = sizes[plans[0].name]
    ratio = (host_pages + 0.5) / device_pages
    return build_host_pool_group(specs, page_size=page_size, host_to_device_ratio=ratio, layout=layout)


def _allocate(plan: PoolPlan, pages: int, device: torch.device) -> dict[str, list[torch.Tensor]]:
    slots = pages * plan.page_size
    return {
        buffer.name: [
            torch.zeros((slots // buffer.slots_per_row, *buffer.shape), dtype=vars(torch)[buffer.dtype], device=device)
            for _ in range(plan.layer_num)
        ]
        for buffer in plan.buffers
    }
