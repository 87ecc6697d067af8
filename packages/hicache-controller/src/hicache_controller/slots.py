"""Slots: which pages operations use, and when slots that are given back are free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hicache_kernels.staging import Direction
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.pool_transfer import PoolName, PoolTransfer

from .engine_calls import EngineCalls
from .in_flight import Access, InFlight, Pages, PageUse, PoolSide, pages_of
from .indices import check_form, check_range, page_use, transfer_uses
from .operations import CacheOperation
from .transfer_engine import READ, WRITE, L2TransferEngine
from .transfer_handle import source_error

if TYPE_CHECKING:
    from .operation_queue import OperationQueue


class Slots:
    """The slots of a group's pools, as far as operations of one controller use them.

    Host slots that are given back while an operation uses them are deferred: they are freed by the first :meth:`reap`
    after it. Device slots are freed at once, after the current stream (CPU: the calling thread) has waited.

    Parameters
    ----------
    group
        The pools.
    engine
        Knows which slots are in flight. ``guards.refill_follows_read`` off frees host slots at once.
    calls
        Where errors of the engine's callbacks go.

    Attributes
    ----------
    group
        The pools.
    queues
        The queues of both directions, which know the operations that wait to be started, have failed, or may still give
        slots back.
    deferred
        Host pages to be freed, by pool.

    Invariant: a page that is deferred is allocated, and is deferred once.
    """

    def __init__(self, group: HostPoolGroup, engine: L2TransferEngine, calls: EngineCalls) -> None:
        self.group = group
        self._engine = engine
        self._calls = calls
        self.queues: dict[Direction, OperationQueue] = {}
        self.deferred: dict[str, Pages] = {}
        self._waiting: InFlight[CacheOperation] = InFlight()  # those whose uses somebody has asked for
        engine.metrics.gauge("deferred_host_pages", lambda: sum(map(len, list(self.deferred.values()))))

    # Who uses what

    def uses_of(self, operation: CacheOperation) -> list[PageUse]:
        """Return what an operation does with its pages."""
        anchor = PoolTransfer(self.group.anchor_entry.name, operation.host_indices, operation.device_indices)
        uses = []
        for part in (anchor, *operation.pool_transfers):
            host, device = part.host_indices, part.device_indices
            if host is not None and device is not None and host.numel():
                uses += transfer_uses(self.group.get_entry(part.name), operation.direction, host, device)
        return uses

    @property
    def waiting_uses(self) -> InFlight[CacheOperation]:
        """What the operations that wait to be started will do; found out when it is first asked for."""
        for queue in self.queues.values():
            for operation in queue.waiting:
                if operation not in self._waiting:
                    self._waiting.add(operation, self.uses_of(operation))
        return self._waiting

    def stop_waiting(self, operations: Iterable[CacheOperation]) -> None:
        """Forget the uses of operations that do not wait any more."""
        if self._waiting:
            for operation in operations:
                self._waiting.remove(operation)

    def start_writes_of(self, uses: Iterable[PageUse]) -> None:
        """Start the writes that wait, where they fill any of the host pages."""
        writes = self.queues[Direction.WRITE_BACK]
        if writes.waiting and any(self.waiting_uses.users(use, WRITE) for use in uses if use.side.side == "host"):
            writes.start()

    def failed_writer(self, direction: Direction, uses: Sequence[PageUse]) -> Exception | None:
        """Return why an operation has failed that should have filled what ``uses`` read, if no poll has reported it."""
        for operation, error in self.queues[direction].failed():
            filled: InFlight[CacheOperation] = InFlight()
            filled.add(operation, self.uses_of(operation))
            if any(filled.users(use, WRITE) for use in uses if use.access is Access.READ):
                return source_error(direction, error)
        return None

    def check_filled(self, operation: CacheOperation) -> None:
        """Raise SourceFailedError where another operation has failed that should have filled what this one reads."""
        other = Direction.WRITE_BACK if operation.direction is Direction.LOAD else Direction.LOAD
        if any(self.queues[other].failed()):
            error = self.failed_writer(other, self.uses_of(operation))
            if error is not None:
                raise error

    # Device slots

    def check_not_loading(self, entry: PoolEntry, device_indices: torch.Tensor) -> None:
        """Raise RuntimeError where slots are those of a load that was not started, and so have no contents yet."""
        if not self.queues[Direction.LOAD].waiting:
            return
        users = self.waiting_uses.users(page_use(entry, "device", Access.WRITE, device_indices), WRITE)
        if users:
            raise RuntimeError(
                f"device_indices are those of a load of node {users[0].node_ids[0]} that was not started; "
                "call start_loading or cancel_load first"
            )

    def free_device(self, entry: PoolEntry, device_indices: torch.Tensor) -> int:
        """Free slots after the transfers that use them, starting those that wait; return how many."""
        if entry.device_free_fn is None:
            raise ValueError(f"entry {entry.name!s} has no device_free_fn, which giving device slots back needs")
        self.check_not_loading(entry, device_indices)
        writes = self.queues[Direction.WRITE_BACK]
        if writes.waiting or self._engine.in_flight:
            use = page_use(entry, "device", Access.WRITE, device_indices)
            if writes.waiting and self.waiting_uses.users(use, READ):
                writes.start()
            for event in self._engine.predecessors([use]).events:
                event.wait()  # without interrupts: the caller has given the slots up, and nothing else would free them
        entry.device_free_fn(device_indices)
        return device_indices.numel()

    # Host slots

    def alloc_host(self, slots: int) -> torch.Tensor | None:
        """Take host slots of the anchor, after freeing what was deferred if that is needed."""
        indices = self.group.alloc(slots)
        if indices is None and self.reap():
            indices = self.group.alloc(slots)
        return indices

    def check_host(
        self, entry: PoolEntry, host_indices: torch.Tensor, pages: int | None = None, *, shared: bool = False
    ) -> None:
        """Raise ValueError unless these are allocated pages of the pool, each whole and once, and as many as ``pages``.

        Pages of a pool that shares another's slots (``shared``) are allocated in that one.
        """
        page_size = int(entry.host_pool.page_size)
        check_form("host_indices", host_indices, page_size)
        if not host_indices.is_cpu:
            raise ValueError(f"host_indices is on {host_indices.device}; host slots are named on cpu")
        if pages is not None and host_indices.numel() != pages * page_size:
            raise ValueError(
                f"host_indices has {host_indices.numel()} slots for {pages} keys; "
                f"{pages * page_size} are expected, {page_size} a page"
            )
        if shared:
            _whole_pages(entry, host_indices)
            check_range(f"host_indices of pool {entry.name!s}", host_indices, int(entry.host_pool.size))
            return
        try:
            owned = entry.host_pool.owned_pages(host_indices)
        except ValueError as error:
            check_range("host_indices", host_indices, int(entry.host_pool.size))
            raise ValueError(f"host_indices are not pages that are owned in pool {entry.name!s}: {error}") from None
        self._check_not_deferred(entry, owned)

    def free_host(self, entry: PoolEntry, host_indices: torch.Tensor) -> int:
        """Free slots of whole pages, or defer those in use; return how many are free now."""
        if not (self.deferred or self._engine.in_flight or any(map(len, self.queues.values()))):
            return int(entry.host_pool.free(host_indices))
        pages = _whole_pages(entry, host_indices)
        self._check_not_deferred(entry, pages)
        busy = self._busy(entry, pages)
        if not busy.any():
            return int(entry.host_pool.free(host_indices))
        if len(np.unique(pages)) != len(pages):
            raise ValueError(f"host_indices has {len(pages)} pages of pool {entry.name!s}, some of them twice")
        return self._free_idle(entry, pages, busy)

    def reap(self) -> int:
        """Free what was deferred and is not in use any more; return how many slots."""
        freed = 0
        for name, pages in list(self.deferred.items()):
            entry = self.group.get_entry(name)
            busy = self._busy(entry, pages)
            if busy.all():
                continue
            freed += int(entry.host_pool.free(_slots(entry, pages[~busy])))
            if busy.any():
                self.deferred[name] = pages[busy]
            else:
                del self.deferred[name]
        return freed

    # Both

    def give_back(self, operation: CacheOperation) -> None:
        """Free what was taken for an operation that does not count: host slots of a write, device slots of a load.

        The caller may have given back host slots already. Errors of the engine's callbacks are kept for the end.
        """
        is_load = operation.direction is Direction.LOAD
        taken = [(self.group.anchor_entry.name, operation.device_indices if is_load else operation.host_indices)]
        for transfer in operation.pool_transfers:
            filled_in = _taken_out(transfer, is_load)
            if filled_in is not None and transfer.indices_from_pool is None:
                taken.append((transfer.name, filled_in))
        for name, indices in taken:
            if indices.numel():
                self._calls.call(self.group.free_device if is_load else self._free_again, indices, name)

    def check_integrity(self) -> None:
        """Check what is known of waiting operations and of deferred pages; RuntimeError names the fault."""
        self.waiting_uses.check_integrity()
        waiting = sum(len(queue.waiting) for queue in self.queues.values())
        if len(self._waiting) != waiting:
            raise RuntimeError(f"{len(self._waiting)} operations count as waiting; the queues have {waiting}")
        for name, pages in self.deferred.items():
            if not len(pages) or len(np.unique(pages)) != len(pages):
                raise RuntimeError(f"pages of pool {name} are deferred twice, or none is")

    # Inside

    def _free_again(self, host_indices: torch.Tensor, pool: PoolName | str) -> None:
        """Free host slots that may have been given back, and so deferred, already."""
        entry = self.group.get_entry(pool)
        pages = _whole_pages(entry, host_indices)
        deferred = self.deferred.get(str(pool))
        if deferred is not None:
            pages = pages[~np.isin(pages, deferred)]
        self._free_idle(entry, pages, self._busy(entry, pages))

    def _free_idle(self, entry: PoolEntry, pages: Pages, busy: npt.NDArray[np.bool_]) -> int:
        """Free host pages, and defer those that are busy; return how many slots are free now."""
        freed = int(entry.host_pool.free(_slots(entry, pages[~busy]))) if not busy.all() else 0
        if busy.any():
            late = pages[busy]
            deferred = self.deferred.get(str(entry.name))
            self.deferred[str(entry.name)] = late if deferred is None else np.concatenate((deferred, late))
            self._engine.metrics.count("deferred_frees", len(late))
        return freed

    def _check_not_deferred(self, entry: PoolEntry, pages: Pages) -> None:
        """Raise ValueError where pages were given back and are deferred."""
        deferred = self.deferred.get(str(entry.name))
        if deferred is None:
            return
        gone = np.isin(pages, deferred)
        if gone.any():
            raise ValueError(f"host_indices has page {pages[gone][0]} of pool {entry.name!s}, which was given back")

    def _busy(self, entry: PoolEntry, pages: Pages) -> npt.NDArray[np.bool_]:
        """Return for each host page whether an operation uses it, or may still give it back."""
        if not self._engine.guards.refill_follows_read:
            return np.zeros(len(pages), dtype=np.bool_)
        side = PoolSide(str(entry.name), "host")
        self._engine.reap()
        busy = self._engine.in_flight.busy(side, pages) | self.waiting_uses.busy(side, pages)
        for operation in self.queues[Direction.WRITE_BACK].unsettled():
            for use in self.uses_of(operation):
                if use.side == side and use.pages is not None:
                    busy |= np.isin(pages, use.pages)
        return busy


def _taken_out(transfer: PoolTransfer, device: bool) -> torch.Tensor | None:
    """Take the slots that the group has filled in out of one side of a transfer."""
    indices = None
    if device and transfer.device_from_group:
        indices, transfer.device_indices, transfer.device_from_group = transfer.device_indices, None, False
    elif not device and transfer.host_from_group:
        indices, transfer.host_indices, transfer.host_from_group = transfer.host_indices, None, False
    return indices


def _whole_pages(entry: PoolEntry, host_indices: torch.Tensor) -> Pages:
    page_size = int(entry.host_pool.page_size)
    pages = pages_of(host_indices, page_size)
    if pages is None:
        raise ValueError(f"host_indices is on {host_indices.device}; host slots are named on cpu")
    if len(pages) * page_size != host_indices.numel():
        raise ValueError(
            f"host_indices has {host_indices.numel()} slots of {len(pages)} pages of pool {entry.name!s}; accepted are "
            f"whole pages of {page_size}, each once, with their slots in order"
        )
    return pages


def _slots(entry: PoolEntry, pages: Pages) -> torch.Tensor:
    page_size = int(entry.host_pool.page_size)
    return torch.from_numpy((pages[:, None] * page_size + np.arange(page_size)).reshape(-1))
