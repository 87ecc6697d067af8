"""TransferController: queues, merges and acks the transfers of a model's pools between device and host."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from hicache_kernels.validation import MAX_BLOCKS, seconds, whole
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.pool_transfer import PoolName, PoolTransfer

from .agreement import Agreement
from .device_slots import DeviceSlots
from .events import COMPLETED, Event
from .first_error import FirstError
from .forks import refuse_in_forks
from .host_slots import HostSlots
from .in_flight import Access, Side, Use
from .indices import check_device_indices, own_indices
from .interrupts import interrupts_held_back
from .layer_done import NOTHING_TO_WAIT_FOR, LayerDoneCounter
from .layer_map import LayerPlan, layer_plan
from .metrics import Metrics
from .operation_order import OperationOrder
from .operation_queue import OperationQueue, StartedOperation
from .operations import Ack, CacheOperation
from .transfer_engine import L2TransferEngine
from .transfer_handle import Direction, Guards, L2Transfer, TransferHandle


class TransferController:
    """Writes and loads, from the call that queues them to their acks; parameters are those of its one subclass.

    That is :class:`HiCacheController`, which adds storage. Pools other than the anchor come with the hooks that
    :class:`HybridCacheController` overrides.
    """

    def __init__(
        self,
        host_group: HostPoolGroup,
        *,
        synchronous: bool,
        queue_inline: bool,
        io_backend: str,
        write_block_quota: int | None,
        load_block_quota: int | None,
        distributed_group: Any,
        distributed_timeout: float,
        metrics: Metrics | None,
        guards: Guards | None,
    ) -> None:
        refuse_in_forks(self)
        self.mem_pool_host = self.host_group = host_group
        self.metrics = metrics if metrics is not None else Metrics()
        self.io_backend = io_backend
        self.write_block_quota = write_block_quota
        self.load_block_quota = load_block_quota
        self._plan = self._layer_plan()
        self.layer_done_counter = LayerDoneCounter(self._plan.layers)
        self.engine = L2TransferEngine(
            _device_of(host_group),
            synchronous=synchronous,
            queue_inline=queue_inline,
            metrics=self.metrics,
            guards=guards,
        )
        self.agreement = Agreement(distributed_group, timeout=distributed_timeout, metrics=self.metrics)
        self._lock = threading.RLock()
        failures = self.engine.failures
        self._writes = OperationQueue(
            self._prepare_write,
            self._submit_write,
            self._give_back_write,
            self._finished,
            self.agreement,
            lambda error: failures.note(Direction.DEVICE_TO_HOST.words, error),
        )
        self._loads = OperationQueue(
            self._prepare_load,
            self._submit_load,
            self._give_back_load,
            self._finished,
            self.agreement,
            lambda error: failures.note(Direction.HOST_TO_DEVICE.words, error),
        )
        self._order = OperationOrder(self.engine, self._writes, self._loads, self._uses, self.start_writing)
        self._device_slots = DeviceSlots(self.engine, self._writes, self._loads, self.start_writing)
        self._host_slots = HostSlots(
            host_group,
            self._order.users_of_host,
            self._order.any_in_flight,
            guards=self.engine.guards,
            metrics=self.metrics,
        )
        self._closed = self._stopped = False
        self.metrics.gauge("write_queue_operations", lambda: len(self._writes))
        self.metrics.gauge("load_queue_operations", lambda: len(self._loads))

    # Pools

    @property
    def write_block_quota(self) -> int | None:
        """Most CTAs of the write-backs started from now on."""
        return self._write_block_quota

    @write_block_quota.setter
    def write_block_quota(self, quota: int | None) -> None:
        self._write_block_quota = _checked_quota("write_block_quota", quota)

    @property
    def load_block_quota(self) -> int | None:
        """Most CTAs of the load-backs started from now on."""
        return self._load_block_quota

    @load_block_quota.setter
    def load_block_quota(self, quota: int | None) -> None:
        self._load_block_quota = _checked_quota("load_block_quota", quota)

    @property
    def page_size(self) -> int:
        """Slots a page of the anchor."""
        return self.host_group.page_size

    @property
    def layer_num(self) -> int:
        """Layers that ``layer_done_counter`` counts: the model's, then those of packed drafts."""
        return self._plan.layers

    def add_entry(self, entry: PoolEntry) -> None:
        """Add a pool to the group."""
        self._check_open()
        layer_plan([entry])
        self.host_group.add_entry(entry)
        self._plan = self._layer_plan()
        self.layer_done_counter.layers = self._plan.layers

    # Writes

    def write(
        self, device_indices: torch.Tensor, *, node_id: int, ready_event: Event | None = None
    ) -> torch.Tensor | None:
        """Queue a write-back; :meth:`start_writing` starts it.

        Parameters
        ----------
        device_indices
            Integer slot indices ``[n]``, whole pages in order. On CPU they are checked and tracked slot by slot, and
            copied: the tensor is the caller's again at once. On a device that would mean to wait for it, so transfers
            of all slots are then assumed to meet, and the tensor must stay as it is until the ack.
        node_id
            Comes back in the ack.
        ready_event
            Event after which the rows are valid. By default: the work on the current stream at this call.

        Returns
        -------
        torch.Tensor or None
            The host slots, int64 ``[n]`` on CPU, in flight until the ack; None where the host pool has no room.

        Raises
        ------
        ValueError
            If the indices are not of whole pages, are out of range, or have a slot twice.
        RuntimeError
            If the controller is closed, or the slots are those of a load that has not been started.
        """
        return self._write(device_indices, node_id, ready_event, ())

    def start_writing(self) -> Ack | None:
        """Start what is queued, merged into one transfer.

        Returns
        -------
        Ack or None
            Events to wait for, before the outcome is known: ``poll_writes`` will return the ack again, with its error
            if it has one. None where nothing was queued.
        """
        self._check_open()
        # Ctrl-C between two steps would leave slots in no book, or copies on a stream without their handle.
        with self._lock, interrupts_held_back():
            started = self._writes.start()
            if started is None:
                return None
            return started.ack(started.parts, started.error() if started.handle is None else None)

    def poll_writes(self, wait: bool = False) -> list[Ack]:
        """Return the acks of the writes that are done, in the order they were started.

        Parameters
        ----------
        wait
            Block until at least one is done, where any was started and not cancelled.

        Raises
        ------
        Exception
            The first that a callback of the engine raised, once all that is done was taken in; the next poll returns
            the acks.
        """
        return self._poll(self._writes, wait)

    # Loads

    def load(
        self, host_indices: torch.Tensor, *, node_id: int, ready_event: Event | None = None
    ) -> torch.Tensor | None:
        """Queue a load-back; :meth:`start_loading` starts it.

        Parameters
        ----------
        host_indices
            Integer slot indices ``[n]`` on CPU, whole pages in order; copied, the tensor is the caller's again at once.
        node_id
            Comes back in the ack.
        ready_event
            Event after which the rows may be overwritten, besides the work on the current stream at
            :meth:`start_loading`.

        Returns
        -------
        torch.Tensor or None
            The device slots, in flight until the ack; None where the device has no room. A tensor on a device must
            stay as it is until then.

        Raises
        ------
        ValueError
            If the indices are not whole pages of the host pool, each once, or were given back or never allocated.
        RuntimeError
            If the controller is closed.
        """
        return self._load(host_indices, node_id, ready_event, ())

    def start_loading(self) -> int:
        """Start what is queued, merged into one transfer.

        Returns
        -------
        int
            Consumer id for ``layer_done_counter.set_consumer``; -1 where nothing was queued.
        """
        self._check_open()
        with self._lock, interrupts_held_back():
            for operation in self._loads.waiting:
                if not self._writes.waiting:
                    break
                # A write of these slots that only waits to be started has to go first.
                self._order.start_writes_of(self._uses(operation, host=Access.READ))
            started = self._loads.start()
            if started is None:
                return NOTHING_TO_WAIT_FOR
            handle = started.handle
            events: Sequence[Event] = (COMPLETED,) * self._plan.layers if handle is None else handle.layer_events
            started.consumer = self.layer_done_counter.register(events, started.error)
            return started.consumer

    def poll_loads(self, wait: bool = False) -> list[Ack]:
        """Return the acks of the loads that are done, in the order they were started; see :meth:`poll_writes`."""
        return self._poll(self._loads, wait)

    def kept_acks(self) -> tuple[list[Ack], list[Ack]]:
        """Return, at once, the acks of writes and of loads that a poll which raised has kept for the next."""
        with self._lock:
            return self._writes.take_acks(), self._loads.take_acks()

    # Cancel and evict

    def cancel_write(self, node_id: int) -> bool:
        """Cancel the node's writes, queued or running; see :meth:`cancel_load`."""
        with self._lock:
            return self._writes.cancel(node_id)

    def cancel_load(self, node_id: int) -> bool:
        """Cancel the node's loads, queued or running: no ack will name it, and the device slots go back.

        The slots of a running one go back at the poll that sees it done.

        Returns
        -------
        bool
            Whether there was any.
        """
        with self._lock:
            return self._loads.cancel(node_id)

    def evict_device(self, device_indices: torch.Tensor, *, pool: PoolName | str | None = None) -> int:
        """Give device slots of a pool (by default the anchor) back, behind the transfers that use them.

        On CUDA the current stream waits for these, so that whoever gets the slots next and works behind that stream is
        safe; on CPU the calling thread waits.

        Returns
        -------
        int
            Slots given back.

        Raises
        ------
        ValueError
            If the pool's entry has no ``device_free_fn``.
        RuntimeError
            If the slots are those of a load that has not been started.
        """
        with self._lock:
            return self._device_slots.evict(self.host_group.get_entry(pool), device_indices)

    def evict_host(self, host_indices: torch.Tensor, *, pool: PoolName | str | None = None) -> int:
        """Give host slots of a pool (by default the anchor) back; those in flight go once their transfers are done.

        Returns
        -------
        int
            Slots that are free now.

        Raises
        ------
        ValueError
            If the indices are no whole pages, or were given back before. Nothing was changed.
        """
        with self._lock:
            return self._host_slots.evict(self.host_group.get_entry(pool), host_indices)

    # End

    def reset(self) -> None:
        """Cancel what is queued, wait for what runs, and make every host slot free."""
        self._check_open()
        with self._lock:
            self.engine.drain()
            for queue in (self._writes, self._loads):
                queue.cancel_waiting()
                queue.cancel_started()
                queue.keep_acks()
                queue.forget_acks()
            self.layer_done_counter.reset()
            self._host_slots.forget()
            self.host_group.clear()

    def shutdown(self, timeout: float = 60.0) -> bool:
        """Cancel what is queued, finish what runs, stop every thread. Idempotent; acks can still be polled.

        Returns
        -------
        bool
            Whether everything ended within ``timeout`` seconds each; what did not keeps its slots.
        """
        timeout = seconds("timeout", timeout)
        with self._lock:
            self._closed = True
            self._stopped = self._stopped or self._stop(timeout)
            return self._stopped

    def check_integrity(self) -> None:
        """Check that the books of slots in flight are right, once no other call is under way.

        RuntimeError names the fault.
        """
        with self._lock:
            self.engine.in_flight.check_integrity()
            self._writes.waiting_uses.check_integrity()
            self._loads.waiting_uses.check_integrity()
            self._host_slots.check_integrity()

    # Inside

    def _poll(self, queue: OperationQueue, wait: bool) -> list[Ack]:
        with self._lock:
            try:
                queue.settle(wait)
            finally:
                self._host_slots.reap()
            return queue.take_acks()

    def _layer_plan(self) -> LayerPlan:
        return layer_plan([self.host_group.anchor_entry])

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the controller is closed; it was shut down")

    def _stop(self, timeout: float) -> bool:
        """Cancel and finish; tell whether that was done in time."""
        with FirstError() as errors:
            for queue in (self._writes, self._loads):
                with errors.kept():
                    queue.cancel_waiting()
            stopped = self.engine.drain(timeout)
            stopped = self.engine.close(timeout) and stopped
            for queue in (self._writes, self._loads):
                # Slots of what failed go back now, not at a poll that may never come.
                with errors.kept():
                    queue.keep_acks()
            self._host_slots.reap()
        return stopped

    def _write(
        self,
        device_indices: torch.Tensor,
        node_id: int,
        ready_event: Event | None,
        pool_transfers: Sequence[PoolTransfer],
    ) -> torch.Tensor | None:
        self._check_open()
        anchor = self.host_group.anchor_entry
        # Further pools can move without the anchor, whose indices are then empty.
        if device_indices.numel() or not pool_transfers:
            check_device_indices("device_indices", device_indices, anchor)
        device_indices = own_indices(device_indices)
        event = ready_event if ready_event is not None else self.engine.submission_event()
        with self._lock:
            self._device_slots.check_not_loading(anchor, device_indices)
            host_indices = self._host_slots.alloc(device_indices.numel()) if device_indices.numel() else device_indices
            if host_indices is None:
                return None
            with ExitStack() as undo:
                if device_indices.numel():
                    undo.callback(self.host_group.free, host_indices)
                if not self._resolve_host(pool_transfers, host_indices, device_indices):
                    return None
                undo.pop_all()
            operation = CacheOperation(
                host_indices,
                device_indices,
                (node_id,),
                tuple(pool_transfers),
                () if event is None else (event,),
            )
            try:
                transfers = self._transfers(operation, load=False)
                callers = own_indices(host_indices)
            except BaseException:
                self._give_back_write(operation)
                raise
            self._writes.add(operation, lambda: _uses_of(transfers, device=Access.READ, host=Access.WRITE))
            return callers

    def _load(
        self,
        host_indices: torch.Tensor,
        node_id: int,
        ready_event: Event | None,
        pool_transfers: Sequence[PoolTransfer],
    ) -> torch.Tensor | None:
        self._check_open()
        anchor_moves = host_indices.numel() > 0 or not pool_transfers
        with self._lock:
            if anchor_moves:
                self._host_slots.check(self.host_group.anchor_entry, host_indices)
            host_indices = own_indices(host_indices)
            device_indices = self.host_group.alloc_device(host_indices.numel()) if anchor_moves else host_indices
            if device_indices is None:
                return None
            with ExitStack() as undo:
                if anchor_moves:
                    undo.callback(self.host_group.free_device, device_indices)
                if not self._resolve_device(pool_transfers, host_indices, device_indices):
                    return None
                undo.pop_all()
            operation = CacheOperation(
                host_indices,
                device_indices,
                (node_id,),
                tuple(pool_transfers),
                () if ready_event is None else (ready_event,),
            )
            try:
                transfers = self._transfers(operation, load=False)
                callers = own_indices(device_indices)
            except BaseException:
                self._give_back_load(operation)
                raise
            self._loads.add(operation, lambda: _uses_of(transfers, device=Access.WRITE, host=Access.READ))
            return callers

    def _resolve_host(
        self, pool_transfers: Sequence[PoolTransfer], host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> bool:
        """Take the host slots of further pools; False, with nothing taken, where one has no room."""
        return True

    def _resolve_device(
        self, pool_transfers: Sequence[PoolTransfer], host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> bool:
        """Take the device slots of further pools; False, with nothing taken, where one has no room."""
        return True

    def _transfers(self, operation: CacheOperation, *, load: bool) -> list[L2Transfer]:
        if not operation.host_indices.numel():
            return []
        return list(
            self._plan.transfers(
                self.host_group.anchor_entry,
                operation.host_indices,
                operation.device_indices,
                load=load,
                io_backend=self.io_backend,
                block_quota=self.load_block_quota if load else self.write_block_quota,
            )
        )

    def _uses(
        self, operation: CacheOperation, *, device: Access | None = None, host: Access | None = None
    ) -> list[Use]:
        """Say what an operation does on the sides that are given."""
        return _uses_of(self._transfers(operation, load=False), device=device, host=host)

    def _prepare_write(self, operation: CacheOperation) -> list[L2Transfer]:
        operation.check_resolved()
        transfers = self._transfers(operation, load=False)
        self._order.check_source(self._loads, operation, device=Access.READ)
        return transfers

    def _prepare_load(self, operation: CacheOperation) -> list[L2Transfer]:
        operation.check_resolved()
        transfers = self._transfers(operation, load=True)
        self._order.check_source(self._writes, operation, host=Access.READ)
        return transfers

    def _submit_write(self, operation: CacheOperation, parts: Sequence[list[L2Transfer]]) -> TransferHandle:
        merged = len(parts) > 1
        return self.engine.submit_device_to_host(
            self._transfers(operation, load=False) if merged else parts[0],
            parts=parts if merged else (),
            ready_events=operation.ready_events,
        )

    def _submit_load(self, operation: CacheOperation, parts: Sequence[list[L2Transfer]]) -> TransferHandle:
        merged = len(parts) > 1
        return self.engine.submit_host_to_device(
            self._transfers(operation, load=True) if merged else parts[0],
            parts=parts if merged else (),
            layers=self._plan.layers,
            ready_events=operation.ready_events,
        )

    def _finished(self, started: StartedOperation, error: BaseException | None) -> None:
        if started.handle is not None:
            self.engine.release(started.handle)
        self.layer_done_counter.forget(started.consumer, error)

    def _give_back_write(self, operation: CacheOperation) -> None:
        """Return the host slots of a write that does not count."""
        if operation.host_indices.numel():
            self._host_slots.give_back(self.host_group.anchor_entry, operation.host_indices)

    def _give_back_load(self, operation: CacheOperation) -> None:
        """Return the device slots of a load that does not count."""
        if operation.device_indices.numel():
            self.host_group.free_device(operation.device_indices)


def _checked_quota(name: str, quota: int | None) -> int | None:
    return None if quota is None else whole(name, quota, least=0, most=MAX_BLOCKS)


def _device_of(group: HostPoolGroup) -> torch.device:
    """Device of the pools; an anchor that keeps no bytes has none of its own."""
    pools = [entry.device_pool for entry in (group.anchor_entry, *group.entries) if entry.device_pool is not None]
    return torch.device(pools[0].device) if pools else torch.device("cpu")


def _uses_of(transfers: Iterable[L2Transfer], *, device: Access | None = None, host: Access | None = None) -> list[Use]:
    """Say what transfers do on the sides that are given."""
    sides = [(side, access) for side, access in ((Side.DEVICE, device), (Side.HOST, host)) if access is not None]
    return [transfer.use(side, access) for transfer in transfers for side, access in sides]
