"""Layer maps: which layer of which pool a model layer loads, and an operation's transfers made from a pool entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from hicache_pools.group import PoolEntry
from hicache_pools.packed_draft import unwrap_draft_pool

from .transfer_handle import L2Transfer

_MOST_LAYERS = 1 << 16


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

    def transfers(
        self,
        entry: PoolEntry,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        load: bool,
        io_backend: str,
        block_quota: int | None = None,
    ) -> Iterator[L2Transfer]:
        """Yield what moves for one pool: a load has a transfer for each packed draft, a write-back takes them along.

        Host indices go to the CPU, where every path wants them; device indices stay where they are, for the pool knows
        where its path wants those.
        """
        name = str(entry.name)
        host = host_indices.cpu()
        sides = [(entry.device_pool, self.maps[name], False)]
        if load:
            drafts = zip(entry.packed_draft_device_pools, self.draft_maps[name], strict=True)
            sides += [(pool, layer_map, True) for pool, layer_map in drafts]
        for pool, layer_map, is_draft in sides:
            yield L2Transfer(
                name,
                entry.host_pool,
                pool,
                host,
                device_indices,
                layer_map,
                is_draft=is_draft,
                io_backend=io_backend,
                block_quota=block_quota,
            )


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
    for layer in range(_MOST_LAYERS):
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
