"""PoolEntry: a host pool in a group, and the callbacks that feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .pool_transfer import PoolName

REQUIRED_POOL_ATTRIBUTES = (
    "alloc",
    "available_size",
    "backup_from_device_all_layer",
    "can_use_write_back_jit",
    "capabilities",
    "clear",
    "destroy",
    "device",
    "free",
    "layer_num",
    "layout",
    "load_to_device_per_layer",
    "owned_pages",
    "page_size",
    "size",
)


@dataclass(eq=False, slots=True)
class PoolEntry:
    """A host pool in a group, and how it is fed.

    Callbacks may be set after the group was built, as the tree that evicts is made later than the pools.

    Attributes
    ----------
    name
        Unique within the group.
    host_pool
        Any pool with the attributes of ``REQUIRED_POOL_ATTRIBUTES``.
    device_pool
        Its device side, or None.
    layer_mapper
        Model layer to the pool's layer, or None where the model layer is not in this pool.
    is_primary_index_anchor
        Whether other pools derive their indices from this one.
    host_evict_fn, device_evict_fn
        ``fn(slots)`` frees at least that many slots of the pool if it can. Called with no lock held; it may call the
        group, raise, or free less.
    device_alloc_fn, device_free_fn
        ``fn(slots) -> indices or None`` and ``fn(indices)`` on the engine's own allocator.
    packed_draft_device_pools
        Device pools of draft layers that are tail layers of ``host_pool``.
    indices_from_pool
        Pool of the group whose slots this one uses; None for a pool with slots of its own.
    """

    name: PoolName | str
    host_pool: Any
    device_pool: Any
    layer_mapper: Callable[[int], int | None]
    is_primary_index_anchor: bool = False
    host_evict_fn: Callable[[int], object] | None = None
    device_evict_fn: Callable[[int], object] | None = None
    device_alloc_fn: Callable[[int], torch.Tensor | None] | None = None
    device_free_fn: Callable[[torch.Tensor], object] | None = None
    packed_draft_device_pools: tuple[Any, ...] = ()
    indices_from_pool: PoolName | str | None = None


def check_entry(entry: PoolEntry, names: set[str]) -> None:
    """Raise where it is not a PoolEntry, its name is taken or its host pool lacks an attribute."""
    if not isinstance(entry, PoolEntry):
        raise TypeError(f"entry is a {type(entry).__name__}; a group takes PoolEntry")
    if entry.name in names:
        raise ValueError(f"entry {entry.name!s} is there already; names are unique within a group")
    missing = [name for name in REQUIRED_POOL_ATTRIBUTES if not hasattr(entry.host_pool, name)]
    if missing:
        raise TypeError(
            f"host_pool of entry {entry.name!s} is a {type(entry.host_pool).__name__} without {', '.join(missing)}; "
            f"a pool of a group has {', '.join(REQUIRED_POOL_ATTRIBUTES)}"
        )


def check_device_callbacks(entry: PoolEntry) -> None:
    """Raise where no device slots can be taken through the entry."""
    if entry.device_alloc_fn is None or entry.device_free_fn is None:
        raise ValueError(
            f"entry {entry.name!s} has no device_alloc_fn or no device_free_fn; both are needed to take device slots"
        )
