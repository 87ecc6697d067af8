"""Registers pools that share the slots of a pool of the tree."""

from __future__ import annotations

from hicache_pools.group import PoolEntry

from ..controller import HiCacheController
from ..pool_transfers import SidecarPoolSpec


def register_sidecar(controller: HiCacheController, spec: SidecarPoolSpec, entry: PoolEntry) -> None:
    """Add a sidecar pool; see :meth:`UnifiedRadixCache.register_sidecar_pool`."""
    if spec.pool_name != entry.name:
        raise ValueError(f"spec is for pool {spec.pool_name!s} and entry is {entry.name!s}; both must be the same")
    source = controller.host_group.get_pool(spec.indices_from_pool)
    for what in ("page_size", "size"):
        mine, theirs = int(getattr(entry.host_pool, what)), int(getattr(source, what))
        if mine != theirs if what == "page_size" else mine < theirs:
            raise ValueError(
                f"pool {entry.name!s} has {what} {mine}; it shares the slots of {spec.indices_from_pool!s}, which has "
                f"{theirs}, and needs {'the same' if what == 'page_size' else 'at least as many'}"
            )
    controller.add_entry(entry)
    controller.add_sidecar(spec)
