"""Operations and acks: what the controller queues, merges and returns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch

from hicache_kernels.staging import Direction
from hicache_pools.pool_transfer import PoolTransfer

from .events import Event

_operation_ids = itertools.count()


class OperationCancelledError(RuntimeError):
    """The operation was cancelled before it was complete."""


class SourceFailedError(RuntimeError):
    """The operation was not run, because the transfer that brings the bytes it moves has failed."""


class Ack(NamedTuple):
    """The outcome of a write or a load; each is returned once by ``poll_writes`` or ``poll_loads``.

    Attributes
    ----------
    node_ids
        Nodes whose slots moved together, without those that were cancelled.
    device_released
        Write: the device rows have been read and may be overwritten. Load: they are filled.
    host_ready
        Write: the host bytes are there. Load: they are no longer read.
    error
        None, or why it failed. The slots the controller allocated for a failed operation (host slots of a
        write, device slots of a load) are free again.
    """

    node_ids: tuple[int, ...]
    device_released: Event
    host_ready: Event
    error: BaseException | None = None


class StorageAck(NamedTuple):
    """The outcome of a backup.

    Attributes
    ----------
    node_id
        The node it was for.
    stored_pages
        Leading pages that are in storage.
    error
        None where that is all of them and the last pages of other pools, else why it is not.
    pool_pages
        For each pool that has no part for every page, how many of its last pages are stored, from the first of them.
    """

    node_id: int
    stored_pages: int
    error: BaseException | None = None
    pool_pages: Mapping[str, int] = MappingProxyType({})


@dataclass(eq=False)
class CacheOperation:
    """One write or load, or several merged into one transfer.

    Attributes
    ----------
    host_indices, device_indices
        int64 slot indices ``[n]`` of the anchor, whole pages in order.
    node_ids
        Nodes it serves.
    pool_transfers
        What moves in other pools, resolved.
    ready_events
        Events the transfer has to follow.
    parts
        The operations it was merged from, in order; none where it was not merged.
    cancelled
        Whether its slots go back instead of to the caller.
    direction
        Whether it is a write or a load.
    id
        Grows with creation.
    """

    host_indices: torch.Tensor
    device_indices: torch.Tensor
    node_ids: tuple[int, ...]
    pool_transfers: tuple[PoolTransfer, ...] = ()
    ready_events: tuple[Event, ...] = ()
    parts: tuple[CacheOperation, ...] = ()
    cancelled: bool = False
    direction: Direction = Direction.WRITE_BACK
    id: int = field(default_factory=lambda: next(_operation_ids))

    @staticmethod
    def merge_ops(operations: Sequence[CacheOperation]) -> CacheOperation:
        """Join operations into one that moves all their slots, pool by pool, in their order.

        Raises
        ------
        ValueError
            If there are none.
        """
        if not operations:
            raise ValueError("operations is empty; at least one is needed to merge")
        if len(operations) == 1:
            return operations[0]
        by_pool: dict[str, list[PoolTransfer]] = {}
        for operation in operations:
            for transfer in operation.pool_transfers:
                by_pool.setdefault(str(transfer.name), []).append(transfer)
        return CacheOperation(
            host_indices=join_indices([operation.host_indices for operation in operations]),
            device_indices=join_indices([operation.device_indices for operation in operations]),
            node_ids=tuple(node_id for operation in operations for node_id in operation.node_ids),
            pool_transfers=tuple(_merge_transfers(transfers) for transfers in by_pool.values()),
            ready_events=tuple(event for operation in operations for event in operation.ready_events),
            parts=tuple(operations),
            direction=operations[0].direction,
        )


def join_indices(indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate index tensors as int64; where only some are on a device, all go there, without waiting for it."""
    if len(indices) == 1:
        return indices[0]
    device = next((each.device for each in indices if not each.is_cpu), torch.device("cpu"))
    return torch.cat([each.to(device, torch.int64, non_blocking=True) for each in indices])


def _merge_transfers(transfers: Sequence[PoolTransfer]) -> PoolTransfer:
    if len(transfers) == 1:
        return transfers[0]
    host = [transfer.host_indices for transfer in transfers if transfer.host_indices is not None]
    device = [transfer.device_indices for transfer in transfers if transfer.device_indices is not None]
    return PoolTransfer(
        transfers[0].name,
        join_indices(host),
        join_indices(device),
        hit_policy=transfers[0].hit_policy,
        indices_from_pool=transfers[0].indices_from_pool,
    )
