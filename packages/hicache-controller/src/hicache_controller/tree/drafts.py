"""Registers the pools of a draft model with the tree of its target model."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_pools.group import PoolEntry
from hicache_pools.packed_draft import unwrap_draft_pool
from hicache_pools.pool_transfer import PoolHitPolicy, PoolName

from ..pool_transfers import SidecarPoolSpec
from .cache import UnifiedRadixCache


def register_hicache_draft_pools(
    tree: UnifiedRadixCache,
    *,
    entry: PoolEntry | None = None,
    indices_from_pool: PoolName | str = PoolName.KV,
    packed_draft_device_pools: Sequence[object] = (),
) -> None:
    """Make a draft model's KV move with its target's.

    Parameters
    ----------
    tree
        The target model's.
    entry
        A stand-alone draft's host pool. It becomes a sidecar: it takes no slots of its own but shares those of
        ``indices_from_pool``, and is registered with the storage where one is attached.
    indices_from_pool
        The anchor, or the sliding window's pool.
    packed_draft_device_pools
        Device pools of draft layers that were packed into an owner's host pool when that was built. They take no slots
        and need no registration; this checks that the owner has them.

    Raises
    ------
    ValueError
        Nothing is given, a packed pool is in no owner, or as :meth:`UnifiedRadixCache.register_sidecar_pool`.
    """
    if entry is None and not packed_draft_device_pools:
        raise ValueError("entry is None and packed_draft_device_pools is empty; a draft model has one of them")
    owners = tree.controller.host_group.entries
    packed = {id(unwrap_draft_pool(pool)) for owner in owners for pool in owner.packed_draft_device_pools}
    for number, pool in enumerate(packed_draft_device_pools):
        if id(unwrap_draft_pool(pool)) not in packed:
            raise ValueError(
                f"packed_draft_device_pools[{number}] is in no pool of the group; give it to its owner's host pool and "
                "PoolEntry when they are built, as packed_draft_device_pools"
            )
    if entry is not None:
        windowed = str(indices_from_pool) in tree.windows
        policy = PoolHitPolicy.TRAILING_PAGES if windowed else PoolHitPolicy.ALL_PAGES
        tree.register_sidecar_pool(SidecarPoolSpec(entry.name, indices_from_pool, policy), entry)


def maybe_register_hicache_draft(
    tree: object,
    *,
    entry: PoolEntry | None = None,
    indices_from_pool: PoolName | str = PoolName.KV,
    packed_draft_device_pools: Sequence[object] = (),
) -> bool:
    """Register a draft model if there is one, as :func:`register_hicache_draft_pools`; tells whether there was.

    Raises
    ------
    NotImplementedError
        The tree is no :class:`UnifiedRadixCache`, which would lose the draft's KV at every eviction.
    """
    if entry is None and not packed_draft_device_pools:
        return False
    if not isinstance(tree, UnifiedRadixCache):
        raise NotImplementedError(
            f"tree is a {type(tree).__name__}, which cannot keep a draft model's KV with its target's; use a "
            "UnifiedRadixCache, or turn the hierarchical cache or speculative decoding off"
        )
    register_hicache_draft_pools(
        tree,
        entry=entry,
        indices_from_pool=indices_from_pool,
        packed_draft_device_pools=packed_draft_device_pools,
    )
    return True
