"""HybridCacheController: operations that move several pools of a model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache_pools.group import HostPoolGroup
from hicache_pools.pool_transfer import PoolHitPolicy, PoolName, PoolTransfer

from .controller import HiCacheController
from .events import Event
from .first_error import FirstError
from .in_flight import Access, Place, Side, Use, page_granules
from .indices import check_device_indices, check_range, device_slot_count, own_indices
from .layer_map import LayerPlan, layer_plan
from .operations import CacheOperation
from .storage_calls import StoragePart
from .storage_tasks import PrefetchOperation
from .transfer_handle import L2Transfer


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

    def transfer(self) -> PoolTransfer:
        """Make its part of an operation."""
        return PoolTransfer(self.pool_name, hit_policy=self.hit_policy, indices_from_pool=self.indices_from_pool)


class HybridCacheController(HiCacheController):
    """A controller whose operations have parts in further pools: windows, states, indexers, packed drafts.

    Parameters
    ----------
    host_group
        The pools.
    sidecars
        Pools that take part in every operation without being named in it.
    options
        Keywords of :class:`HiCacheController`.

    Raises
    ------
    KeyError
        A sidecar is not in the group, or shares the slots of a pool that is not.
    ValueError
        As :class:`HiCacheController`.
    """

    def __init__(self, host_group: HostPoolGroup, *, sidecars: Sequence[SidecarPoolSpec] = (), **options: Any) -> None:
        for spec in sidecars:
            host_group.get_entry(spec.pool_name)
            host_group.get_entry(spec.indices_from_pool)
        self._sidecars = tuple(sidecars)
        super().__init__(host_group, **options)

    @property
    def sidecars(self) -> tuple[SidecarPoolSpec, ...]:
        """Pools that take part in every operation."""
        return self._sidecars

    def add_sidecar(self, spec: SidecarPoolSpec) -> None:
        """Let a pool of the group take part in every operation from now on; KeyError if it is not in the group."""
        self.host_group.get_entry(spec.pool_name)
        self.host_group.get_entry(spec.indices_from_pool)
        self._sidecars = (*self._sidecars, spec)

    def write(
        self,
        device_indices: torch.Tensor,
        *,
        node_id: int,
        ready_event: Event | None = None,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> torch.Tensor | None:
        """Queue a write-back of the anchor's slots and of further pools', all or nothing.

        Parameters
        ----------
        device_indices, node_id, ready_event
            As in :meth:`HiCacheController.write`; empty where only further pools move.
        pool_transfers
            One a further pool, with its device indices or the pool it derives them from. Their host indices are filled
            in; they are the caller's with an ack without error, and None again where the operation fails. Indices on
            CPU become copies, so the tensors they came in are the caller's again at once; others stay as in
            ``device_indices``.

        Returns
        -------
        torch.Tensor or None
            The anchor's host slots; None where a pool has no room, with the transfers as they were.

        Raises
        ------
        KeyError
            A transfer names a pool that the group does not have.
        ValueError, RuntimeError
            As :meth:`HiCacheController.write`, for any of the pools.
        """
        transfers = self._with_sidecars(pool_transfers, anchor_moves=device_indices.numel() > 0)
        with self._lock:
            self._check_given(transfers, load=False)
            for transfer in transfers:
                if transfer.device_indices is not None:
                    entry = self.host_group.get_entry(transfer.name)
                    self._device_slots.check_not_loading(entry, transfer.device_indices)
            _own_indices_of(transfers)
            return self._write(device_indices, node_id, ready_event, transfers)

    def load(
        self,
        host_indices: torch.Tensor,
        *,
        node_id: int,
        ready_event: Event | None = None,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> torch.Tensor | None:
        """Queue a load-back of the anchor's slots and of further pools', all or nothing; see :meth:`write`.

        The transfers come with host indices, and their device indices are filled in through the entries'
        ``device_alloc_fn``, or come with both.
        """
        transfers = self._with_sidecars(pool_transfers, anchor_moves=host_indices.numel() > 0)
        with self._lock:
            self._check_given(transfers, load=True)
            _own_indices_of(transfers)
            return self._load(host_indices, node_id, ready_event, transfers)

    def storage_exists(self, keys: Sequence[bytes], *, pool_transfers: Sequence[PoolTransfer] = ()) -> int:
        """Return the leading pages of which the storage of every rank has all that the pools' hit policies need.

        Parameters
        ----------
        keys
            Storage key of each of the anchor's pages.
        pool_transfers
            One a further pool. With the hit policy ``TRAILING_PAGES`` as many last pages are needed as it has keys, one
            where it has none.
        """
        return self.storage.exists(keys, self._with_sidecars(pool_transfers))

    def storage_restorable_lengths(
        self, keys: Sequence[bytes], *, pool_transfers: Sequence[PoolTransfer] = ()
    ) -> list[int]:
        """Return the length in pages of every prefix of which the storage of every rank has all that the pools need.

        Lengths are in ascending order. Between two of them there may be prefixes that cannot be restored, where pages
        of a window, or the state behind a page, are missing. Parameters are as in :meth:`storage_exists`; ranks of a
        group have to ask with as many keys.
        """
        return self.storage.restorable_lengths(keys, self._with_sidecars(pool_transfers))

    def backup(
        self,
        host_indices: torch.Tensor,
        keys: Sequence[bytes],
        *,
        parents: Sequence[bytes | None] | None = None,
        node_id: int,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> None:
        """Queue host pages of the anchor and of further pools for storage.

        Parameters
        ----------
        host_indices, keys, parents, node_id
            As in :meth:`HiCacheController.backup`.
        pool_transfers
            One a further pool, with its host indices and keys. A pool that shares the anchor's slots needs neither.
            With the hit policy ``ALL_PAGES`` a page counts as stored once its part is, too.
        """
        self._backup(host_indices, keys, parents, node_id, self._with_sidecars(pool_transfers))

    def prefetch(
        self,
        host_indices: torch.Tensor | None,
        keys: Sequence[bytes],
        *,
        request_id: str,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> PrefetchOperation:
        """Queue pages of the anchor and of further pools to come from storage; see :meth:`backup`.

        The transfers come with host indices, which stay the caller's. Where one has the hit policy ``TRAILING_PAGES``,
        either the whole prefix comes or none of it counts.
        """
        return self._prefetch(host_indices, keys, request_id, self._with_sidecars(pool_transfers))

    # Inside

    def _layer_plan(self) -> LayerPlan:
        return layer_plan(self.host_group.entries)

    def _with_sidecars(
        self, pool_transfers: Sequence[PoolTransfer], *, anchor_moves: bool = True
    ) -> list[PoolTransfer]:
        """Add the sidecars whose source takes part in the operation."""
        named = [str(transfer.name) for transfer in pool_transfers]
        anchor = str(self.host_group.anchor_entry.name)
        wrong = anchor if anchor in named else next((name for name in named if named.count(name) > 1), None)
        if wrong is not None:
            raise ValueError(
                f"pool_transfers names {wrong}; accepted is one transfer for each pool other than the anchor {anchor}"
            )
        transfers = list(pool_transfers)
        moving = {*named, anchor} if anchor_moves else set(named)
        for spec in self._sidecars:
            if str(spec.pool_name) not in moving and str(spec.indices_from_pool) in moving:
                moving.add(str(spec.pool_name))
                transfers.append(spec.transfer())
        return transfers

    def _check_given(self, transfers: Sequence[PoolTransfer], *, load: bool) -> None:
        """Raise ValueError where a transfer comes with slots that its pool does not have or has not allocated."""
        for transfer in transfers:
            host, device = transfer.host_indices, transfer.device_indices
            entry = self.host_group.get_entry(transfer.name)
            if device is not None:
                check_device_indices(f"device_indices of pool {transfer.name!s}", device, entry)
            # Sides that do not fit are an error of their own; slots that are shared are checked where they are owned.
            fits = load if device is None else host is not None and host.numel() == device.numel()
            if host is not None and fits and transfer.indices_from_pool is None:
                self._host_slots.check(entry, host)

    def _storage_parts(
        self,
        host_indices: torch.Tensor,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None] | None,
        pool_transfers: Sequence[PoolTransfer],
        access: Access,
    ) -> tuple[list[StoragePart], list[Use]]:
        parts, uses = super()._storage_parts(host_indices, keys, parents, (), access)
        anchor = self.host_group.anchor_entry.name
        by_name = {str(transfer.name): transfer for transfer in pool_transfers}
        for transfer in pool_transfers:
            slots, names, policy = transfer.host_indices, transfer.keys, transfer.hit_policy
            source = by_name.get(str(transfer.indices_from_pool))
            if transfer.indices_from_pool == anchor:
                slots, names = parts[0].host_indices, keys if names is None else names
            elif source is not None:
                slots, names, policy = source.host_indices, source.keys, source.hit_policy
            if slots is None or names is None:
                missing = "host_indices" if slots is None else "keys"
                raise ValueError(f"transfer {transfer.name!s} has no {missing}; storage needs both")
            whole = policy is PoolHitPolicy.ALL_PAGES
            if whole and len(names) != len(keys):
                raise ValueError(
                    f"transfer {transfer.name!s} has {len(names)} keys; with the hit policy all_pages it needs one for "
                    f"each of the anchor's {len(keys)} pages"
                )
            shares = transfer.indices_from_pool
            if shares is not None and shares != anchor and source is None:
                raise ValueError(
                    f"transfer {transfer.name!s} shares the slots of {shares!s}, which has no transfer here"
                )
            self._host_slots.check(
                self.host_group.get_entry(transfer.name), slots, len(names), shared=shares is not None
            )
            stored = [name if isinstance(name, bytes) else name.encode() for name in names]
            name = str(transfer.name)
            slots = own_indices(slots)
            parts.append(StoragePart(name, stored, slots, parts[0].parents if whole else None, policy))
            page_size = int(self.host_group.get_pool(name).page_size)
            uses.append(Use(Place(name, Side.HOST), access, page_granules(slots, page_size)))
        return parts, uses

    def _resolve_host(
        self, pool_transfers: Sequence[PoolTransfer], host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> bool:
        if not pool_transfers:
            return True

        def resolve() -> object:
            return self.host_group.resolve_host_transfers(
                pool_transfers, primary_device_indices=device_indices, primary_host_indices=host_indices
            )

        resolved = resolve()
        if resolved is None and self._host_slots.reap():
            resolved = resolve()
        return resolved is not None and self._checked(pool_transfers, host=True)

    def _resolve_device(
        self, pool_transfers: Sequence[PoolTransfer], host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> bool:
        if not pool_transfers:
            return True
        resolved = self.host_group.resolve_device_transfers(
            pool_transfers, primary_device_indices=device_indices, primary_host_indices=host_indices
        )
        return resolved is not None and self._checked(pool_transfers, host=False)

    def _checked(self, pool_transfers: Sequence[PoolTransfer], *, host: bool) -> bool:
        """Raise, with everything released, where a transfer has one side only, or sides that do not fit."""
        try:
            for transfer in pool_transfers:
                self._check_sides(transfer, "write-back" if host else "load-back")
        except ValueError:
            self.host_group.release_transfers(pool_transfers)
            raise
        return True

    def _check_sides(self, transfer: PoolTransfer, what: str) -> None:
        host, device = transfer.host_indices, transfer.device_indices
        if host is None or device is None or host.numel() != device.numel():
            counts = [None if side is None else side.numel() for side in (host, device)]
            raise ValueError(
                f"transfer {transfer.name!s} has {counts[0]} host indices and {counts[1]} device indices; "
                f"a {what} needs as many of both"
            )
        if transfer.indices_from_pool is not None and host.numel():
            # Its own pool may have fewer slots than the one that it shares them with.
            entry = self.host_group.get_entry(transfer.name)
            self._host_slots.check(entry, host, shared=True)
            check_range(f"device_indices of pool {transfer.name!s}", device, device_slot_count(entry))

    def _transfers(self, operation: CacheOperation, *, load: bool) -> list[L2Transfer]:
        transfers = super()._transfers(operation, load=load)
        for part in operation.pool_transfers:
            if part.host_indices is None or part.device_indices is None:
                continue  # released by the engine, so that it has no slots; starting it is an error
            transfers += self._plan.transfers(
                self.host_group.get_entry(part.name),
                part.host_indices,
                part.device_indices,
                load=load,
                io_backend=self.io_backend,
                block_quota=self.load_block_quota if load else self.write_block_quota,
            )
        return transfers

    def _give_back_write(self, operation: CacheOperation) -> None:
        super()._give_back_write(operation)
        for transfer in operation.pool_transfers:
            indices = transfer.host_indices
            if transfer.host_from_group and indices is not None:
                transfer.host_indices, transfer.host_from_group = None, False
                if transfer.indices_from_pool is None:
                    self._host_slots.give_back(self.host_group.get_entry(transfer.name), indices)

    def _give_back_load(self, operation: CacheOperation) -> None:
        with FirstError() as errors:
            with errors.kept():
                super()._give_back_load(operation)
            for transfer in operation.pool_transfers:
                indices = transfer.device_indices
                if transfer.device_from_group and indices is not None:
                    transfer.device_indices, transfer.device_from_group = None, False
                    if transfer.indices_from_pool is None:
                        with errors.kept():
                            self.host_group.free_device(indices, transfer.name)


def _own_indices_of(transfers: Sequence[PoolTransfer]) -> None:
    for transfer in transfers:
        if transfer.host_indices is not None:
            transfer.host_indices = own_indices(transfer.host_indices)
        if transfer.device_indices is not None:
            transfer.device_indices = own_indices(transfer.device_indices)
