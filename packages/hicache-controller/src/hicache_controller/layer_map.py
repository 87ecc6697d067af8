"""Layer maps: which layer of which pool a model layer loads, and the transfers of an operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from hicache_kernels import Compute
from hicache_kernels.staging import Direction
from hicache_kernels.validation import MAX_BLOCKS, whole
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.packed_draft import unwrap_draft_pool

from .operations import CacheOperation
from .transfer_handle import L2Transfer

_MAX_LAYERS = 1 << 16


class LayerPlan(NamedTuple):
    """The layers of a load, over all pools.

    Attributes
    ----------
    layers
        Model layers, followed by the layers of packed drafts.
    maps
        For each pool name, its layer for each model layer, or None.
    draft_maps
        For each pool name, the same for each of its packed drafts.
    """

    layers: int
    maps: dict[str, tuple[int | None, ...]]
    draft_maps: dict[str, tuple[tuple[int | None, ...], ...]]


class TransferPlan:
    """Makes the transfers of operations: by which layers, how, and with how many CTAs.

    Parameters
    ----------
    group
        The pools.
    io_backend
        ``"kernel"`` or ``"direct"``.

    Attributes
    ----------
    quotas
        Most CTAs of the transfers of each direction that are made from now on; None leaves it to the pools.
    compute
        What the model computes during the transfers that are made from now on; None where that is not known.
    """

    def __init__(self, group: HostPoolGroup, io_backend: str) -> None:
        self._group = group
        self._io_backend = io_backend
        self.quotas: dict[Direction, int | None] = dict.fromkeys(Direction)
        self.compute: Compute | None = None
        self.update()

    @property
    def layers(self) -> int:
        """Layers of a load."""
        return self._plan.layers

    def update(self) -> None:
        """Plan for the pools that the group has now."""
        self._plan = layer_plan(self._group.entries)

    def transfers(self, operation: CacheOperation) -> list[L2Transfer]:
        """Make an operation's transfers, the anchor's first.

        Raises
        ------
        ValueError
            If the transfer of another pool was released since the operation was queued.
        """
        made: list[L2Transfer] = []
        if operation.host_indices.numel():
            made += self._of_pool(
                self._group.anchor_entry, operation.host_indices, operation.device_indices, operation.direction
            )
        for part in operation.pool_transfers:
            if part.host_indices is None or part.device_indices is None:
                raise ValueError(f"transfer {part.name!s} was released while it was in flight")
            entry = self._group.get_entry(part.name)
            made += self._of_pool(entry, part.host_indices, part.device_indices, operation.direction)
        return made

    def _of_pool(
        self, entry: PoolEntry, host_indices: torch.Tensor, device_indices: torch.Tensor, direction: Direction
    ) -> Iterator[L2Transfer]:
        """Yield a pool's transfers: a load has one for each packed draft, too, a write-back moves drafts with the pool.

        Host indices go to the CPU, where every path wants them; device indices stay where they are, as the pool knows
        where its path wants those.
        """
        name, plan = str(entry.name), self._plan
        sides = [(entry.device_pool, plan.maps[name], False)]
        if direction is Direction.LOAD and entry.packed_draft_device_pools:
            drafts = zip(entry.packed_draft_device_pools, plan.draft_maps[name], strict=True)
            sides += [(pool, layer_map, True) for pool, layer_map in drafts]
        host = host_indices.cpu()
        hints = (self._io_backend, self.quotas[direction], self.compute)
        for pool, layer_map, is_draft in sides:
            yield L2Transfer(name, entry.host_pool, pool, host, device_indices, layer_map, is_draft, *hints)


def layer_plan(entries: Iterable[PoolEntry]) -> LayerPlan:
    """Find the model layers of some pools by asking their mappers, from layer 0 until every pool layer was named.

    Raises
    ------
    ValueError
        If a mapper names a layer its pool does not have, or never names one that it has.
    """
    entries = tuple(entries)
    maps: dict[str, list[int | None]] = {str(entry.name): [] for entry in entries}
    missing = {str(entry.name): set(range(_own_layers(entry))) for entry in entries}
    for layer in range(_MAX_LAYERS):
        if not any(missing.values()):
            break
        for entry in entries:
            name = str(entry.name)
            local = entry.layer_mapper(layer) if missing[name] else None
            if local is not None and not 0 <= local < _own_layers(entry):
                raise ValueError(
                    f"layer_mapper of pool {name} gives layer {local} for model layer {layer}; the pool has "
                    f"{_own_layers(entry)} layers"
                )
            maps[name].append(local)
            missing[name].discard(-1 if local is None else local)
    for name, left in missing.items():
        if left:
            raise ValueError(f"layer_mapper of pool {name} gives no model layer for its layers {sorted(left)}")
    layers = max((len(layer_map) for layer_map in maps.values()), default=0)
    draft_maps: dict[str, tuple[tuple[int | None, ...], ...]] = {}
    for entry in entries:
        own: list[tuple[int | None, ...]] = []
        for pool in entry.packed_draft_device_pools:
            own.append((*((None,) * layers), *range(unwrap_draft_pool(pool).layer_num)))
            layers += unwrap_draft_pool(pool).layer_num
        draft_maps[str(entry.name)] = tuple(own)
    return LayerPlan(layers, {name: tuple(layer_map) for name, layer_map in maps.items()}, draft_maps)


def _own_layers(entry: PoolEntry) -> int:
    """Layers of a pool without its packed drafts, which its host pool counts as well."""
    return int(entry.host_pool.layer_num) - sum(
        unwrap_draft_pool(pool).layer_num for pool in entry.packed_draft_device_pools
    )


def checked_quota(name: str, quota: int | None) -> int | None:
    """Return a quota of CTAs; ValueError unless it is a whole number in range, or None."""
    return None if quota is None else whole(name, quota, least=0, most=MAX_BLOCKS)


def device_of(group: HostPoolGroup) -> torch.device:
    """Return the device of the pools; an anchor that keeps no bytes has none of its own."""
    pools = [entry.device_pool for entry in (group.anchor_entry, *group.entries) if entry.device_pool is not None]
    return torch.device(pools[0].device) if pools else torch.device("cpu")
