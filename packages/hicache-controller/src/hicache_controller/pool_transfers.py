"""Pool transfers: the parts of an operation in pools other than the anchor, added, checked and given their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from hicache_kernels.staging import Direction
from hicache_pools.group import HostPoolGroup
from hicache_pools.pool_transfer import PoolHitPolicy, PoolName, PoolTransfer

from .in_flight import Access, PageUse
from .indices import check_device_indices, check_range, device_slot_count, own_indices, page_use
from .operations import CacheOperation
from .slots import Slots
from .storage.base import ANCHOR
from .storage_tasks import StoragePart
from .transfer_handle import words


@dataclass(frozen=True)
class SidecarPoolSpec:
    """A pool that moves with every operation of the pool whose slots it shares.

    Attributes
    ----------
    pool_name
        Of the sidecar, an entry of the group.
    indices_from_pool
        Pool whose slots it shares, usually the anchor.
    hit_policy
        Which of its pages storage must have.
    """

    pool_name: PoolName | str
    indices_from_pool: PoolName | str
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES

    @classmethod
    def of_group(cls, group: HostPoolGroup) -> tuple[SidecarPoolSpec, ...]:
        """Make one for each pool of a group that uses the slots of another, as the group was built."""
        return tuple(
            cls(entry.name, entry.indices_from_pool) for entry in group.entries if entry.indices_from_pool is not None
        )

    def transfer(self) -> PoolTransfer:
        """Make its part of an operation."""
        return PoolTransfer(self.pool_name, hit_policy=self.hit_policy, indices_from_pool=self.indices_from_pool)


def with_sidecars(
    group: HostPoolGroup, sidecars: Sequence[SidecarPoolSpec], named: Sequence[PoolTransfer], anchor_moves: bool = True
) -> Sequence[PoolTransfer]:
    """Add the sidecars that share the slots of a pool that takes part in an operation to the transfers named in it.

    Raises
    ------
    ValueError
        If a transfer names the anchor, or a pool has two.
    """
    if not sidecars and not named:
        return ()
    anchor = str(group.anchor_entry.name)
    names = [str(transfer.name) for transfer in named]
    wrong = anchor if anchor in names else next((name for name in names if names.count(name) > 1), None)
    if wrong is not None:
        raise ValueError(
            f"pool_transfers names {wrong}; accepted is one transfer for each pool other than the anchor {anchor}"
        )
    transfers = list(named)
    moving = {*names, anchor} if anchor_moves else set(names)
    for spec in sidecars:
        if str(spec.pool_name) not in moving and str(spec.indices_from_pool) in moving:
            moving.add(str(spec.pool_name))
            transfers.append(spec.transfer())
    return transfers


def prepare_transfers(slots: Slots, transfers: Sequence[PoolTransfer], direction: Direction) -> None:
    """Check the slots that transfers come with, and make copies of them: the tensors are the caller's again.

    Raises
    ------
    ValueError
        If a transfer has slots that its pool does not have or has not allocated.
    RuntimeError
        If a write's device slots are those of a load that was not started.
    """
    is_load = direction is Direction.LOAD
    for transfer in transfers:
        host, device = transfer.host_indices, transfer.device_indices
        entry = slots.group.get_entry(transfer.name)
        if device is not None:
            of_pool = "" if entry is slots.group.anchor_entry else f" of pool {transfer.name!s}"
            check_device_indices(f"device_indices{of_pool}", device, entry)
        # Sides that do not fit are an error of their own; slots that are shared are checked where they are owned.
        fits = is_load if device is None else host is not None and host.numel() == device.numel()
        if host is not None and fits and transfer.indices_from_pool is None:
            slots.check_host(entry, host)
        if device is not None and not is_load:
            slots.check_not_loading(entry, device)
    for transfer in transfers:
        if transfer.host_indices is not None:
            transfer.host_indices = own_indices(transfer.host_indices)
        if transfer.device_indices is not None:
            transfer.device_indices = own_indices(transfer.device_indices)


def resolve(slots: Slots, operation: CacheOperation) -> bool:
    """Take the slots of an operation's other pools: host slots of a write, device slots of a load.

    Returns
    -------
    bool
        False, with nothing taken, where a pool has no room.

    Raises
    ------
    ValueError
        If a transfer has one side only, or sides that do not fit. Nothing is taken.
    """
    group, transfers, is_load = slots.group, operation.pool_transfers, operation.direction is Direction.LOAD
    take = partial(
        group.resolve_device_transfers if is_load else group.resolve_host_transfers,
        transfers,
        primary_device_indices=operation.device_indices,
        primary_host_indices=operation.host_indices,
    )
    if take() is None and (is_load or not slots.reap() or take() is None):
        return False
    try:
        for transfer in transfers:
            _check_sides(slots, transfer, operation.direction)
    except ValueError:
        group.release_transfers(transfers)
        raise
    return True


def _check_sides(slots: Slots, transfer: PoolTransfer, direction: Direction) -> None:
    host, device = transfer.host_indices, transfer.device_indices
    if host is None or device is None or host.numel() != device.numel():
        counts = [None if side is None else side.numel() for side in (host, device)]
        what = "load-back" if direction is Direction.LOAD else words(direction)
        raise ValueError(
            f"transfer {transfer.name!s} has {counts[0]} host indices and {counts[1]} device indices; "
            f"a {what} needs as many of both"
        )
    if transfer.indices_from_pool is not None and host.numel():
        # Its own pool may have fewer slots than the one that it shares them with.
        entry = slots.group.get_entry(transfer.name)
        slots.check_host(entry, host, shared=True)
        check_range(f"device_indices of pool {transfer.name!s}", device, device_slot_count(entry))


class StorageParts(NamedTuple):
    """What an operation with storage moves, and which host pages that uses."""

    parts: list[StoragePart]
    uses: list[PageUse]


def storage_parts(
    slots: Slots,
    access: Access,
    host_indices: torch.Tensor | None,
    keys: Sequence[bytes],
    parents: Sequence[bytes | None] | None,
    transfers: Sequence[PoolTransfer],
) -> StorageParts:
    """Check what moves between host and storage, the anchor's part first, and start the writes that fill it.

    Nothing moves without host slots.

    Raises
    ------
    ValueError
        If a part has slots that are not whole allocated pages, as many as its keys, or lacks slots or keys.
    """
    if host_indices is None:
        return StorageParts([], [])
    if parents is not None and len(parents) != len(keys):
        raise ValueError(f"parents has {len(parents)} entries for {len(keys)} keys; one a key is expected")
    anchor = slots.group.anchor_entry
    slots.check_host(anchor, host_indices, len(keys))
    host_indices = own_indices(host_indices)
    parts = [StoragePart(ANCHOR, list(keys), host_indices, None if parents is None else list(parents))]
    uses = [page_use(anchor, "host", access, host_indices)]
    by_name = {str(transfer.name): transfer for transfer in transfers}
    for transfer in transfers:
        part = _storage_part(slots, transfer, parts[0], by_name)
        parts.append(part)
        uses.append(page_use(slots.group.get_entry(part.name), "host", access, part.host_indices))
    slots.start_writes_of(uses)
    return StorageParts(parts, uses)


def _storage_part(
    slots: Slots,
    transfer: PoolTransfer,
    anchor_part: StoragePart,
    by_name: dict[str, PoolTransfer],
) -> StoragePart:
    group, name, keys = slots.group, str(transfer.name), anchor_part.keys
    indices, names, policy = transfer.host_indices, transfer.keys, transfer.hit_policy
    shares = transfer.indices_from_pool
    owner = by_name.get(str(shares))
    if shares is not None and shares == group.anchor_entry.name:
        indices, names = anchor_part.host_indices, keys if names is None else names
    elif owner is not None:
        indices, names, policy = owner.host_indices, owner.keys, owner.hit_policy
    if indices is None or names is None:
        missing = "host_indices" if indices is None else "keys"
        raise ValueError(f"transfer {name} has no {missing}; storage needs both")
    whole = policy is PoolHitPolicy.ALL_PAGES
    if whole and len(names) != len(keys):
        raise ValueError(
            f"transfer {name} has {len(names)} keys; with the hit policy all_pages it needs one for "
            f"each of the anchor's {len(keys)} pages"
        )
    if shares is not None and shares != group.anchor_entry.name and owner is None:
        raise ValueError(f"transfer {name} shares the slots of {shares!s}, which has no transfer here")
    slots.check_host(group.get_entry(name), indices, len(names), shared=shares is not None)
    stored = [each if isinstance(each, bytes) else each.encode() for each in names]
    return StoragePart(name, stored, own_indices(indices), anchor_part.parents if whole else None, policy)
