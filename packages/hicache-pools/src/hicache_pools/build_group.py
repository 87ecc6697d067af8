"""build_host_pool_group: from the device pools of a model to a group of host pools that share one amount of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from hicache_kernels import HostLayout, TransferPolicy
from hicache_kernels.validation import finite, whole

from .device_pools import (
    DeepSeekV4PagedPool,
    DeepSeekV4StatePool,
    DevicePool,
    DSATokenToKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from .extent_index import MAX_PAGES
from .group import HostPoolGroup
from .host_pools import (
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    DSAIndexerPoolHost,
    HostMemoryOptions,
    HostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NullPoolHost,
)
from .memory_budget import HostMemoryBudget
from .packed_draft import unwrap_draft_pool
from .pool_entry import PoolEntry
from .pool_transfer import PoolName

HOST_POOL_TYPES: Mapping[type[DevicePool], type[HostPool]] = MappingProxyType(
    {
        # The first that fits is taken, so what derives from another comes before it.
        DSATokenToKVPool: MLATokenToKVPoolHost,
        MLATokenToKVPool: MLATokenToKVPoolHost,
        MHATokenToKVPool: MHATokenToKVPoolHost,
        MambaPool: MambaPoolHost,
        DeepSeekV4PagedPool: DeepSeekV4PagedHostPool,
        DeepSeekV4StatePool: DeepSeekV4StateHostPool,
    }
)
"""Which host pool mirrors which device pool."""

INDEX_SOURCES: Mapping[str, PoolName] = MappingProxyType(
    {
        PoolName.INDEXER: PoolName.KV,
        PoolName.DEEPSEEK_V4_C4: PoolName.KV,
        PoolName.DEEPSEEK_V4_C4_INDEXER: PoolName.KV,
        PoolName.DEEPSEEK_V4_C128: PoolName.KV,
        PoolName.DEEPSEEK_V4_C128_INDEXER: PoolName.KV,
    }
)
"""Pools that take no slots but use those of another (``indices_from_pool`` of their transfers)."""


@dataclass(frozen=True)
class PoolSpec:
    """A device pool, and what the group should know of it.

    Attributes
    ----------
    device_pool
        What is mirrored.
    layers
        Model layers that the pool's layers serve, in order; None for 0, 1, 2, ...
    indices_from_pool
        Pool whose slots it uses; None looks the name up in ``INDEX_SOURCES``.
    pages
        Exact number of host pages; None lets the split decide. Not for pools that use another's slots.
    packed_draft_device_pools
        Draft pools whose layers follow the owner's in every slot.
    layout
        Where it differs from the group's: state pools have no ``layer_first``.
    host_pool_type
        Host pool to make; None looks the device pool's type up in ``HOST_POOL_TYPES``.
    """

    device_pool: DevicePool
    layers: Sequence[int] | None = None
    indices_from_pool: PoolName | str | None = None
    pages: int | None = None
    packed_draft_device_pools: Sequence[object] = ()
    layout: HostLayout | str | None = None
    host_pool_type: type[HostPool] | None = None

    def __post_init__(self) -> None:
        if self.pages is not None:
            whole("pages", self.pages, most=MAX_PAGES)
        for number, layer in enumerate(self.layers or ()):
            whole(f"layers[{number}]", layer, least=0)


@dataclass(frozen=True)
class _Plan:
    """One host pool to be made."""

    name: str
    spec: PoolSpec
    host_pool_type: type[HostPool]
    source: str | None
    page_size: int
    page_bytes: int
    """Of a host page, drafts included."""

    @property
    def device_pages(self) -> int:
        return self.spec.device_pool.size // self.page_size


def build_host_pool_group(
    device_pools: Mapping[str, DevicePool | PoolSpec],
    *,
    page_size: int,
    host_size: float = 0.0,
    host_to_device_ratio: float = 2.0,
    layout: HostLayout | str = HostLayout.PAGE_FIRST,
    pin_memory: bool = True,
    allocator_type: str = "default",
    transfer_policy: TransferPolicy | str = TransferPolicy.AUTO,
    memory_options: HostMemoryOptions | None = None,
) -> HostPoolGroup:
    """Make the host pools of a model and group them.

    The anchor is the pool called ``kv``. A DSA pool makes two host pools, ``kv`` and ``indexer``. Where pools derive
    from ``kv`` and no device pool has that name (DeepSeek-V4), the anchor keeps slots but no bytes. Callbacks of the
    entries (reclaim, device slots) are set on them afterwards.

    Parameters
    ----------
    device_pools
        By name, see :class:`PoolName`; the model's order.
    page_size
        Slots of a page, of all pools but those of states, which have pages of one.
    host_size
        GB (10**9 bytes) for all pools together, where positive; divided so that each holds the same multiple of its
        device pool.
    host_to_device_ratio
        Host slots for each device slot, where ``host_size`` is 0.
    layout, pin_memory, allocator_type, transfer_policy, memory_options
        As in :class:`HostPool`. State pools refuse ``layer_first``: give them a ``PoolSpec`` with another layout.

    Returns
    -------
    HostPoolGroup
        It owns its pools: ``destroy()`` gives their memory back.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range, a name derives from one that is not there, or a device pool has no host pool.
    HostMemoryBudgetError
        Together they need more than the budget has.
    Exception
        What a pool raises; those made before it have been destroyed.
    """
    page_size = whole("page_size", page_size)
    for name, size in (("host_size", host_size), ("host_to_device_ratio", host_to_device_ratio)):
        finite(name, size)
    plans = _plans(device_pools, page_size)
    anchor_pages = _bare_anchor_pages(plans)
    pages = _pages(plans, host_size, host_to_device_ratio, anchor_pages)
    options = memory_options or HostMemoryOptions()
    (options.budget or HostMemoryBudget()).check(sum(plan.page_bytes * pages[plan.name] for plan in plans))

    entries: list[PoolEntry] = []
    try:
        if anchor_pages is not None:
            anchor = NullPoolHost(pages[PoolName.KV], page_size, layout)
            entries.append(PoolEntry(PoolName.KV, anchor, None, _no_layer, is_primary_index_anchor=True))
        for plan in plans:
            host_pool = plan.host_pool_type(
                plan.spec.device_pool,
                host_to_device_ratio,
                host_size,
                plan.page_size,
                layout if plan.spec.layout is None else plan.spec.layout,
                pin_memory,
                "cpu",
                allocator_type,
                transfer_policy=transfer_policy,
                pages=pages[plan.name],
                packed_draft_device_pools=plan.spec.packed_draft_device_pools,
                memory_options=memory_options,
            )
            entries.append(
                PoolEntry(
                    _name(plan.name),
                    host_pool,
                    plan.spec.device_pool,
                    layer_mapper(plan.spec.device_pool.layer_num, plan.spec.layers),
                    is_primary_index_anchor=plan.name == PoolName.KV,
                    packed_draft_device_pools=tuple(plan.spec.packed_draft_device_pools),
                )
            )
        return HostPoolGroup(entries)
    except BaseException:
        for entry in entries:
            entry.host_pool.destroy()
        raise


def layer_mapper(layer_num: int, layers: Sequence[int] | None = None) -> Callable[[int], int | None]:
    """Return the map from a model layer to a pool's layer, None for a model layer that the pool does not have.

    Parameters
    ----------
    layer_num
        Layers of the pool.
    layers
        Model layers that they serve, in order; None for 0, 1, 2, ...
    """
    layer_num = whole("layer_num", layer_num)
    model_layers = range(layer_num) if layers is None else layers
    if len(model_layers) != layer_num or len(set(model_layers)) != layer_num:
        raise ValueError(
            f"layers is {list(model_layers)}; the pool has {layer_num} layers, each serves one model layer"
        )
    return {model_layer: layer for layer, model_layer in enumerate(model_layers)}.get


def _plans(device_pools: Mapping[str, DevicePool | PoolSpec], page_size: int) -> list[_Plan]:
    if not isinstance(device_pools, Mapping):
        raise TypeError(f"device_pools is a {type(device_pools).__name__}; it must be a mapping from names to pools")
    if not device_pools:
        raise ValueError("device_pools is empty; a group has at least one pool")
    plans: list[_Plan] = []
    for name, given in device_pools.items():
        spec = given if isinstance(given, PoolSpec) else PoolSpec(given)
        plans.append(_plan(str(name), spec, page_size))
        layer_mapper(spec.device_pool.layer_num, spec.layers)
        if isinstance(spec.device_pool, DSATokenToKVPool) and spec.host_pool_type is None:
            if PoolName.INDEXER in device_pools:
                raise ValueError(f"device_pools has {name} with an indexer inside, and {PoolName.INDEXER} as well")
            drafts = [d for d in spec.packed_draft_device_pools if isinstance(unwrap_draft_pool(d), DSATokenToKVPool)]
            indexer = replace(
                spec,
                host_pool_type=DSAIndexerPoolHost,
                indices_from_pool=str(name),
                pages=None,
                packed_draft_device_pools=drafts,
            )
            plans.append(_plan(PoolName.INDEXER.value, indexer, page_size))
    names = {plan.name for plan in plans}
    for plan in plans:
        if plan.source is None:
            continue
        if plan.source not in names and plan.source != PoolName.KV:
            raise ValueError(
                f"{plan.name} uses the slots of {plan.source}, which is not in device_pools: {sorted(names)}"
            )
        if plan.spec.pages is not None:
            raise ValueError(
                f"{plan.name} has pages={plan.spec.pages}, but uses the slots of {plan.source}; set them there"
            )
        for source in plans:
            if source.name == plan.source and source.source is not None:
                raise ValueError(f"{plan.name} uses the slots of {source.name}, which has none of its own")
    return plans


def _plan(name: str, spec: PoolSpec, page_size: int) -> _Plan:
    host_pool_type = spec.host_pool_type
    if host_pool_type is None:
        fits = [host for device, host in HOST_POOL_TYPES.items() if isinstance(spec.device_pool, device)]
        if not fits:
            raise TypeError(
                f"device_pools[{name!r}] is a {type(spec.device_pool).__name__}; accepted are "
                f"{', '.join(t.__name__ for t in HOST_POOL_TYPES)}, and others in a PoolSpec with host_pool_type"
            )
        host_pool_type = fits[0]
    elif not isinstance(spec.device_pool, DevicePool):
        raise TypeError(f"device_pools[{name!r}] is a {type(spec.device_pool).__name__}; it must be a DevicePool")
    page_size = host_pool_type.fixed_page_size or page_size
    for component in spec.device_pool.components:
        if page_size % component.slots_per_row:
            raise ValueError(
                f"page_size is {page_size}; a row of {component.name} in device_pools[{name!r}] covers "
                f"{component.slots_per_row} slots, so the page size must be a multiple of that"
            )
    wanted = host_pool_type.component_names
    pools = (spec.device_pool, *(unwrap_draft_pool(draft) for draft in spec.packed_draft_device_pools))
    page_bytes = sum(
        component.element_bytes * component.layers * (page_size // component.slots_per_row)
        for pool in pools
        for component in pool.components
        if wanted is None or component.name in wanted
    )
    source = spec.indices_from_pool
    if source is None:
        source = INDEX_SOURCES.get(name)
    return _Plan(name, spec, host_pool_type, None if source is None else str(source), page_size, page_bytes)


def _bare_anchor_pages(plans: Sequence[_Plan]) -> int | None:
    """Device pages of an anchor that keeps no bytes, or None where ``kv`` is a pool or nothing derives from it."""
    if any(plan.name == PoolName.KV for plan in plans):
        return None
    derived = [plan.device_pages for plan in plans if plan.source == PoolName.KV]
    return max(derived) if derived else None


def _pages(
    plans: Sequence[_Plan], host_size: float, host_to_device_ratio: float, anchor_pages: int | None
) -> dict[str, int]:
    """Host pages of each pool; a pool that uses another's slots has as many as that one."""
    fixed = {plan.name: plan.spec.pages for plan in plans if plan.spec.pages is not None}
    device_pages = {plan.name: plan.device_pages for plan in plans if plan.source is None}
    if anchor_pages is not None:
        device_pages[PoolName.KV.value] = anchor_pages
    page_bytes = dict.fromkeys(device_pages, 0)
    for plan in plans:
        page_bytes[plan.source or plan.name] += plan.page_bytes

    if host_size > 0:
        taken = sum(page_bytes[name] * count for name, count in fixed.items())
        left = int(host_size * 1e9) - taken
        if left < 0:
            raise ValueError(f"host_size is {host_size} GB; the pools with a number of pages need {taken} bytes")
        mirrored = sum(page_bytes[name] * count for name, count in device_pages.items() if name not in fixed)
        # Whole numbers, so that rounding never asks for more than there is.
        shares = {name: count * left // max(mirrored, 1) for name, count in device_pages.items()}
    else:
        shares = {name: int(count * host_to_device_ratio) for name, count in device_pages.items()}
    pages = shares | fixed
    for name, count in pages.items():
        if count < 1:
            size = f"host_size {host_size} GB" if host_size > 0 else f"host_to_device_ratio {host_to_device_ratio}"
            raise ValueError(
                f"{size} leaves no page for pool {name}, whose pages have {page_bytes[name]} bytes; give more"
            )
    return pages | {plan.name: pages[plan.source] for plan in plans if plan.source is not None}


def _no_layer(_: int) -> None:
    """No model layer is in a pool without bytes."""


def _name(name: str) -> PoolName | str:
    return PoolName(name) if name in set(PoolName) else name
