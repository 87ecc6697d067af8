"""HiCacheController: queues, merges and acks the transfers of a model's pools, and feeds storage."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hicache_pools.device_pools.base import DevicePool
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.pool_transfer import PoolName, PoolTransfer

from .agreement import Agreement
from .events import COMPLETED, Event
from .host_slots import HostSlots
from .in_flight import Access, InFlight, Place, Side, Use, page_granules
from .layer_done import NOTHING_TO_WAIT_FOR, LayerDoneCounter
from .layer_map import LayerPlan, layer_plan
from .metrics import Metrics
from .operations import Ack, CacheOperation, OperationCancelledError, StorageAck
from .storage_link import StorageLink, StorageSettings
from .storage_worker import PrefetchOperation, StorageBackend
from .transfer_engine import Direction, Guards, L2Transfer, L2TransferEngine, TransferHandle

logger = logging.getLogger(__name__)


class _Started(NamedTuple):
    """A submitted operation; without a handle its submission failed, and ``error`` says why."""

    operation: CacheOperation
    handle: TransferHandle | None
    error: BaseException | None
    consumer: int


class HiCacheController:
    """Transfers of the anchor's pages between device, host and storage.

    Slots are the caller's once an operation is acked without an error. Until then they are in flight; of an operation
    that fails or is cancelled, the slots the controller took for it (host slots of a write, device slots of a load) go
    back by themselves, and the caller forgets them. Calls come from one thread, the engine's scheduler.

    Parameters
    ----------
    host_group
        The pools. The anchor's entry needs ``device_alloc_fn`` and ``device_free_fn`` for loads.
    synchronous
        Complete every operation before the call that starts it returns; for simulations on CPU pools.
    io_backend
        ``"kernel"`` or ``"direct"``, handed to the pools.
    storage
        Sizes, limits and policies of backup and prefetch.
    distributed_group
        A torch.distributed group with CPU tensors whose ranks schedule the same requests: hit counts, and which acks
        are returned, are then the same on all of them.
    distributed_timeout
        Seconds after which a silent rank counts as dead.
    metrics
        Where to count; a new one by default.
    guards
        For tests: hazards left open.

    Attributes
    ----------
    mem_pool_host, host_group
        The group.
    storage_host_pool
        The anchor's physical pool, which storage works on.
    layer_done_counter
        Where a forward pass waits for the layers of a load.
    metrics, engine, storage
        Parts an engine may read.

    Raises
    ------
    ValueError
        If the pools are on a device and ``synchronous`` is set, or a layer mapper does not cover its pool.
    """

    def __init__(
        self,
        host_group: HostPoolGroup,
        *,
        synchronous: bool = False,
        io_backend: str = "kernel",
        storage: StorageSettings | None = None,
        distributed_group: Any = None,
        distributed_timeout: float = 60.0,
        metrics: Metrics | None = None,
        guards: Guards | None = None,
    ) -> None:
        self.mem_pool_host = self.host_group = host_group
        self.metrics = metrics if metrics is not None else Metrics()
        self.io_backend = io_backend
        self._plan = self._layer_plan()
        self.layer_done_counter = LayerDoneCounter(self._plan.layers)
        self.engine = L2TransferEngine(
            _device_of(host_group.anchor_entry), synchronous=synchronous, metrics=self.metrics, guards=guards
        )
        self.agreement = Agreement(distributed_group, timeout=distributed_timeout, metrics=self.metrics)
        self._host_slots = HostSlots(host_group, self._users_of_host, guards=self.engine.guards, metrics=self.metrics)
        self.storage = StorageLink(
            self.engine,
            self.agreement,
            settings=storage if storage is not None else StorageSettings(),
            synchronous=synchronous,
        )
        self._lock = threading.RLock()
        self._queued: InFlight[CacheOperation] = InFlight()
        self._write_queue: list[CacheOperation] = []
        self._load_queue: list[CacheOperation] = []
        self._writes: deque[_Started] = deque()
        self._loads: deque[_Started] = deque()
        self._acked_writes: list[Ack] = []
        self._acked_loads: list[Ack] = []
        self._closed = False
        self.metrics.gauge("write_queue_operations", lambda: len(self._write_queue) + len(self._writes))
        self.metrics.gauge("load_queue_operations", lambda: len(self._load_queue) + len(self._loads))

    # Pools

    @property
    def storage_host_pool(self) -> Any:
        """The anchor's physical host pool."""
        return self.host_group.anchor_entry.host_pool

    @property
    def page_size(self) -> int:
        """Slots a page of the anchor."""
        return self.host_group.page_size

    @property
    def layer_num(self) -> int:
        """Layers that ``layer_done_counter`` counts: the model's, then those of packed drafts."""
        return self._plan.layers

    def add_entry(self, entry: PoolEntry) -> None:
        """Add a pool to the group, and to the storage if one is attached.

        Raises
        ------
        ValueError, TypeError
            As :meth:`HostPoolGroup.add_entry`; or the layer mapper does not cover the pool, and nothing was changed.
        """
        self._check_open()
        layer_plan([entry])
        self.host_group.add_entry(entry)
        self._plan = self._layer_plan()
        self.layer_done_counter.layers = self._plan.layers
        self.storage.register_sidecar(str(entry.name), entry.host_pool)

    # Writes

    def write(
        self, device_indices: torch.Tensor, *, node_id: int, ready_event: Event | None = None
    ) -> torch.Tensor | None:
        """Queue a write-back; :meth:`start_writing` starts it.

        Parameters
        ----------
        device_indices
            Integer slot indices ``[n]``, whole pages in order. On CPU they are checked and tracked slot by slot; on a
            device that would mean to wait for it, so transfers of all slots are then assumed to meet.
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
            If the indices are no whole pages, or out of range.
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
        with self._lock:
            started = self._start(self._write_queue, Direction.DEVICE_TO_HOST)
            if started is None:
                return None
            self._writes.append(started)
            return _pending_ack(started)

    def poll_writes(self, wait: bool = False) -> list[Ack]:
        """Return the acks of the writes that are done, in the order they were started.

        Parameters
        ----------
        wait
            Block until at least one is done, where any was started.
        """
        with self._lock:
            return [*_taken(self._acked_writes), *self._poll(self._writes, wait and not self._closed)]

    # Loads

    def load(
        self, host_indices: torch.Tensor, *, node_id: int, ready_event: Event | None = None
    ) -> torch.Tensor | None:
        """Queue a load-back; :meth:`start_loading` starts it.

        Parameters
        ----------
        host_indices
            Integer slot indices ``[n]`` on CPU, whole pages in order.
        node_id
            Comes back in the ack.
        ready_event
            Event after which the rows may be overwritten, besides the work on the current stream at
            :meth:`start_loading`.

        Returns
        -------
        torch.Tensor or None
            The device slots, in flight until the ack; None where the device has no room.

        Raises
        ------
        ValueError
            If the indices are no whole pages of the host pool, or were given back.
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
        with self._lock:
            for operation in self._load_queue:
                # A write of these slots that only waits to be started has to go first.
                self._start_writes_of(self._host_uses(operation, Access.READ))
            started = self._start(self._load_queue, Direction.HOST_TO_DEVICE)
            if started is None:
                return NOTHING_TO_WAIT_FOR
            handle = started.handle
            events: Sequence[Event] = (
                handle.layer_events if handle is not None else (COMPLETED,) * self.layer_done_counter.layers
            )
            consumer = self.layer_done_counter.register(
                events, lambda: started.error if handle is None else handle.error
            )
            self._loads.append(started._replace(consumer=consumer))
            return consumer

    def poll_loads(self, wait: bool = False) -> list[Ack]:
        """Return the acks of the loads that are done, in the order they were started; see :meth:`poll_writes`."""
        with self._lock:
            return [*_taken(self._acked_loads), *self._poll(self._loads, wait and not self._closed)]

    # Cancel and evict

    def cancel_write(self, node_id: int) -> bool:
        """Cancel the node's writes, queued or running; see :meth:`cancel_load`."""
        with self._lock:
            return self._cancel(node_id, self._write_queue, self._writes)

    def cancel_load(self, node_id: int) -> bool:
        """Cancel the node's loads, queued or running: no ack will name it, and the device slots go back.

        The slots of a running one go back at the poll that sees it done.

        Returns
        -------
        bool
            Whether there was any.
        """
        with self._lock:
            return self._cancel(node_id, self._load_queue, self._loads)

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
        return self._evict_device(self.host_group.get_entry(pool), device_indices)

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

    # Storage

    @property
    def has_storage(self) -> bool:
        """Whether a storage backend is attached."""
        return self.storage.attached

    def attach_storage_backend(self, backend: StorageBackend) -> None:
        """Let backups and prefetches use ``backend``, and start their threads.

        The anchor's physical pool is registered first, under the name ``kv``, then every other entry's by its name.

        Raises
        ------
        RuntimeError
            If the controller is closed or has a backend.
        """
        self._check_open()
        anchor = self.host_group.anchor_entry
        sidecars = {str(e.name): e.host_pool for e in self.host_group.entries if e is not anchor}
        self.storage.attach(backend, self.storage_host_pool, sidecars)

    def detach_storage_backend(self) -> StorageBackend:
        """Finish the backups that wait, cancel the prefetches, and let go of the backend, which stays open.

        Raises
        ------
        RuntimeError
            If there is none.
        """
        return self.storage.detach()

    def storage_exists(self, keys: Sequence[bytes]) -> int:
        """Return how many leading pages are in the storage of every rank; 0 without storage, or where it fails."""
        return self.storage.exists(keys)

    def backup(
        self,
        host_indices: torch.Tensor,
        keys: Sequence[bytes],
        *,
        parents: Sequence[bytes | None] | None = None,
        node_id: int,
    ) -> None:
        """Queue host pages for storage, behind the write-back that fills them.

        While the queue is full this blocks, at most the storage timeout; then the backup fails. ``poll_backups`` tells.

        Parameters
        ----------
        host_indices
            Integer slot indices on CPU, whole pages in the order of ``keys``.
        keys, parents
            Storage key of each page, and of the page before it (None: the first of a sequence).
        node_id
            Comes back in the ack.

        Raises
        ------
        ValueError
            If counts do not match, or the indices are no whole pages of the host pool.
        RuntimeError
            If the controller is closed or has no backend.
        """
        self._check_open()
        self._check_host_slots(host_indices, len(keys))
        with self._lock:
            use = self._anchor_host_use(host_indices, Access.READ)
            self._start_writes_of([use])
            self.storage.backup(host_indices, keys, parents, node_id, use)

    def poll_backups(self, wait: bool = False) -> list[StorageAck]:
        """Return the acks of the backups that are done, in order; with ``wait`` at least one, where there is any."""
        acks = self.storage.poll_backups(wait)
        with self._lock:
            self._host_slots.reap()
        return acks

    def prefetch(
        self, host_indices: torch.Tensor | None, keys: Sequence[bytes], *, request_id: str
    ) -> PrefetchOperation:
        """Queue pages to come from storage.

        Parameters
        ----------
        host_indices
            Host slots the caller allocated, whole pages in the order of ``keys``; they stay the caller's, and are in
            flight until the operation is done. None where this rank had no room: the operation then has 0 pages, and
            still takes part in the agreement of the ranks.
        keys
            Storage key of each page.
        request_id
            For the caller.

        Raises
        ------
        ValueError, RuntimeError
            As :meth:`backup`.
        """
        self._check_open()
        if host_indices is None:
            return self.storage.prefetch(None, keys, request_id, None)
        self._check_host_slots(host_indices, len(keys))
        with self._lock:
            use = self._anchor_host_use(host_indices, Access.WRITE)
            return self.storage.prefetch(host_indices, keys, request_id, use)

    def prefetch_ready(self, operation: PrefetchOperation) -> bool:
        """Tell whether, by the prefetch policy, the request may run now, on every rank; then call its ``wait``."""
        return self.storage.ready(operation)

    def finish_prefetch(self, operation: PrefetchOperation) -> int:
        """End a prefetch as its policy says, and return the leading pages that are there on every rank."""
        return self.storage.finish(operation)

    # End

    def reset(self) -> None:
        """Forget everything: cancel what is queued, wait for what runs, and make every host slot free.

        Device slots of loads that were not acked go back; everything else the caller holds on the host is void.
        """
        self._check_open()
        with self._lock:
            self.storage.drain()
            self._cancel_queued()
            self.engine.drain()
            while self._writes or self._loads:
                self._poll(self._writes, True)
                self._give_device_back(self._poll_operations(self._loads, True))
            self._acked_writes.clear()
            self._acked_loads.clear()
            self.storage.forget()
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
        with self._lock:
            if self._closed:
                return True
            self._closed = True
            stopped = self.storage.close(timeout)
            self._cancel_queued()
            stopped = self.engine.drain(timeout) and stopped
            stopped = self.engine.close(timeout) and stopped
            # Slots of what failed go back now, not at a poll that may never come.
            self._acked_writes += self._poll(self._writes, False)
            self._acked_loads += self._poll(self._loads, False)
            return stopped

    def check_integrity(self) -> None:
        """Check that the books of slots in flight are right; RuntimeError names the fault."""
        self.engine.in_flight.check_integrity()
        self._queued.check_integrity()
        self._host_slots.check_integrity()

    # Inside

    def _layer_plan(self) -> LayerPlan:
        return layer_plan([self.host_group.anchor_entry])

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the controller is closed; it was shut down")

    def _write(
        self,
        device_indices: torch.Tensor,
        node_id: int,
        ready_event: Event | None,
        pool_transfers: Sequence[PoolTransfer],
    ) -> torch.Tensor | None:
        self._check_open()
        anchor = self.host_group.anchor_entry
        check_indices("device_indices", device_indices, self.page_size, device_slots(anchor))
        with self._lock:
            self._check_no_queued_load(anchor, device_indices)
            host_indices = self._host_slots.alloc(device_indices.numel())
            if host_indices is None:
                return None
            try:
                resolved = self._resolve_host(pool_transfers, host_indices, device_indices)
            except BaseException:
                self.host_group.free(host_indices)
                raise
            if not resolved:
                self.host_group.free(host_indices)
                return None
            event = ready_event if ready_event is not None else self.engine.submission_event()
            operation = CacheOperation(
                host_indices,
                device_indices,
                (node_id,),
                tuple(pool_transfers),
                () if event is None else (event,),
            )
            self._queue(operation, self._write_queue, Access.READ, Access.WRITE)
            return host_indices

    def _load(
        self,
        host_indices: torch.Tensor,
        node_id: int,
        ready_event: Event | None,
        pool_transfers: Sequence[PoolTransfer],
    ) -> torch.Tensor | None:
        self._check_open()
        self._check_host_slots(host_indices)
        with self._lock:
            device_indices = self.host_group.alloc_device(host_indices.numel())
            if device_indices is None:
                return None
            try:
                resolved = self._resolve_device(pool_transfers, host_indices, device_indices)
            except BaseException:
                self.host_group.free_device(device_indices)
                raise
            if not resolved:
                self.host_group.free_device(device_indices)
                return None
            operation = CacheOperation(
                host_indices,
                device_indices,
                (node_id,),
                tuple(pool_transfers),
                () if ready_event is None else (ready_event,),
            )
            self._queue(operation, self._load_queue, Access.WRITE, Access.READ)
            return device_indices

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

    def _queue(
        self, operation: CacheOperation, queue: list[CacheOperation], device_access: Access, host_access: Access
    ) -> None:
        uses = [*self._device_uses(operation, device_access), *self._host_uses(operation, host_access)]
        self._queued.add(operation, uses)
        queue.append(operation)

    def _transfers(self, operation: CacheOperation, *, load: bool) -> list[L2Transfer]:
        return list(
            self._plan.transfers(
                self.host_group.anchor_entry,
                operation.host_indices,
                operation.device_indices,
                io_backend=self.io_backend,
                load=load,
            )
        )

    def _device_uses(self, operation: CacheOperation, access: Access) -> list[Use]:
        transfers = self._transfers(operation, load=False)
        return [Use(Place(each.name, Side.DEVICE), access, each.device_granules()) for each in transfers]

    def _host_uses(self, operation: CacheOperation, access: Access) -> list[Use]:
        transfers = self._transfers(operation, load=False)
        return [Use(Place(each.name, Side.HOST), access, each.host_granules()) for each in transfers]

    def _anchor_host_use(self, host_indices: torch.Tensor, access: Access) -> Use:
        name = str(self.host_group.anchor_entry.name)
        return Use(Place(name, Side.HOST), access, page_granules(host_indices, self.page_size))

    def _users_of_host(self, use: Use) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Tell for each page whether anything queued or submitted uses it."""
        granules = use.granules if use.granules is not None else np.empty(0, dtype=np.int64)
        self.engine.reap()
        return self.engine.in_flight.busy(use.place, granules) | self._queued.busy(use.place, granules)

    def _start_writes_of(self, uses: Iterable[Use]) -> None:
        if self._write_queue and any(self._queued.users(use, (Access.WRITE,)) for use in uses):
            self.start_writing()

    def _check_no_queued_load(self, entry: PoolEntry, device_indices: torch.Tensor) -> None:
        if not self._load_queue:
            return
        use = Use(Place(str(entry.name), Side.DEVICE), Access.READ, page_granules(device_indices, self.page_size))
        users = self._queued.users(use, (Access.WRITE,))
        if users:
            raise RuntimeError(
                f"device_indices are those of a load of node {users[0].node_ids[0]} that was not started; "
                "call start_loading or cancel_load first"
            )

    def _check_host_slots(
        self, host_indices: torch.Tensor, pages: int | None = None, *, pool: PoolName | str | None = None
    ) -> None:
        entry = self.host_group.get_entry(pool)
        check_indices("host_indices", host_indices, int(entry.host_pool.page_size), int(entry.host_pool.size))
        if host_indices.device.type != "cpu":
            raise ValueError(f"host_indices is on {host_indices.device}; host slots are named on cpu")
        if pages is not None and host_indices.numel() != pages * self.page_size:
            raise ValueError(
                f"host_indices has {host_indices.numel()} slots for {pages} keys; "
                f"{pages * self.page_size} are expected, {self.page_size} a page"
            )
        self._host_slots.check_owned(entry, host_indices)

    def _start(self, queue: list[CacheOperation], direction: Direction) -> _Started | None:
        if not queue:
            return None
        operation = CacheOperation.merge_ops(queue)
        for part in queue:
            self._queued.remove(part)
        queue.clear()
        try:
            transfers = self._transfers(operation, load=direction is Direction.HOST_TO_DEVICE)
            if direction is Direction.DEVICE_TO_HOST:
                handle = self.engine.submit_device_to_host(transfers, ready_events=operation.ready_events)
            else:
                handle = self.engine.submit_host_to_device(
                    transfers, layers=self._plan.layers, ready_events=operation.ready_events
                )
        except Exception as error:
            logger.debug("submitting a transfer failed", exc_info=True)
            return _Started(operation, None, error, NOTHING_TO_WAIT_FOR)
        return _Started(operation, handle, None, NOTHING_TO_WAIT_FOR)

    def _poll(self, started: deque[_Started], wait: bool) -> list[Ack]:
        acks = []
        for operation, ack in self._poll_operations(started, wait):
            if ack.node_ids or not operation.node_ids:
                acks.append(ack)
        return acks

    def _poll_operations(self, started: deque[_Started], wait: bool) -> list[tuple[CacheOperation, Ack]]:
        """Take what is done out of ``started``, in order, and let its slots go where they have to."""
        if not started:
            self._host_slots.reap()
            return []
        if wait:
            _wait(started[0])
        done = 0
        while done < len(started) and _done(started[done]):
            done += 1
        errors = [_error(each) for each in list(started)[:done]]
        if self.agreement.needed and not self._closed:
            done = self.agreement.smallest([done])[0]
            for each in list(started)[:done]:
                _wait(each)
            errors = [_error(each) for each in list(started)[:done]]
            fine = self.agreement.smallest([int(error is None) for error in errors]) if done else []
            errors = [
                error if error is not None or ok else RuntimeError("the transfer failed on another rank")
                for error, ok in zip(errors, fine, strict=True)
            ]
        finished = []
        for error in errors[:done]:
            finished.append(self._finish(started.popleft(), error, writes=started is self._writes))
        self._host_slots.reap()
        return finished

    def _finish(self, started: _Started, error: BaseException | None, *, writes: bool) -> tuple[CacheOperation, Ack]:
        operation, handle = started.operation, started.handle
        if handle is not None:
            self.engine.in_flight.remove(handle)
        self.layer_done_counter.forget(started.consumer)
        kept = [part for part in operation.parts if not part.cancelled]
        for part in operation.parts:
            if error is not None or part.cancelled:
                self._give_back(part, writes=writes)
        pending = _pending_ack(started)
        node_ids = tuple(node_id for part in kept for node_id in part.node_ids)
        return operation, pending._replace(node_ids=node_ids, error=error)

    def _give_back(self, operation: CacheOperation, *, writes: bool) -> None:
        """Return the slots that were taken for an operation that does not count."""
        anchor = self.host_group.anchor_entry
        if writes:
            self._host_slots.give_back(anchor, operation.host_indices)
        else:
            self.host_group.free_device(operation.device_indices)

    def _give_device_back(self, finished: Sequence[tuple[CacheOperation, Ack]]) -> None:
        for operation, ack in finished:
            for part in operation.parts:
                if ack.error is None and not part.cancelled:
                    self._give_back(part, writes=False)

    def _cancel(self, node_id: int, queue: list[CacheOperation], started: deque[_Started]) -> bool:
        found = False
        for operation in [each for each in queue if node_id in each.node_ids]:
            queue.remove(operation)
            self._queued.remove(operation)
            self._give_back(operation, writes=queue is self._write_queue)
            found = True
        for each in started:
            for part in each.operation.parts:
                if node_id in part.node_ids and not part.cancelled:
                    part.cancelled = found = True
            if each.handle is not None and all(part.cancelled for part in each.operation.parts):
                each.handle.cancel()
        return found

    def _cancel_queued(self) -> None:
        for queue in (self._write_queue, self._load_queue):
            for operation in list(queue):
                for node_id in operation.node_ids:
                    self._cancel(node_id, queue, deque())

    def _evict_device(self, entry: PoolEntry, device_indices: torch.Tensor) -> int:
        if entry.device_free_fn is None:
            raise ValueError(f"entry {entry.name!s} has no device_free_fn, which giving device slots back needs")
        with self._lock:
            self._check_no_queued_load(entry, device_indices)
            place = Place(str(entry.name), Side.DEVICE)
            use = Use(place, Access.WRITE, page_granules(device_indices, int(entry.host_pool.page_size)))
            if self._write_queue and self._queued.users(use, (Access.READ,)):
                self.start_writing()
            for event in self.engine.events_of_users([(use, (Access.READ, Access.WRITE))]):
                event.wait()
            entry.device_free_fn(device_indices)
            return device_indices.numel()


def _taken(acks: list[Ack]) -> list[Ack]:
    taken = acks[:]
    acks.clear()
    return taken


def _pending_ack(started: _Started) -> Ack:
    if started.handle is None:
        return Ack(started.operation.node_ids, COMPLETED, COMPLETED, started.error)
    return Ack(started.operation.node_ids, started.handle.device_released, started.handle.host_ready)


def _done(started: _Started) -> bool:
    return started.handle is None or started.handle.done


def _wait(started: _Started) -> None:
    if started.handle is not None:
        started.handle.host_ready.synchronize()
        started.handle.device_released.synchronize()


def _error(started: _Started) -> BaseException | None:
    error = started.error if started.handle is None else started.handle.error
    if isinstance(error, OperationCancelledError):
        return error if not all(part.cancelled for part in started.operation.parts) else None
    return error


def _device_of(entry: PoolEntry) -> torch.device:
    return torch.device("cpu") if entry.device_pool is None else torch.device(entry.device_pool.device)


def device_slots(entry: PoolEntry) -> int | None:
    """Slots that device indices may name; None where that is not known."""
    return entry.device_pool.index_size if isinstance(entry.device_pool, DevicePool) else None


def check_indices(name: str, indices: torch.Tensor, page_size: int, slots: int | None) -> None:
    """Raise ValueError unless these are whole pages in range, as far as can be told without waiting for a device."""
    if indices.ndim != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} has shape {tuple(indices.shape)} and dtype {indices.dtype}; accepted is [n] of int64 or int32"
        )
    count = indices.numel()
    if not count or count % page_size:
        raise ValueError(f"{name} has {count} slots; accepted is a positive multiple of the page size {page_size}")
    if indices.device.type == "cpu":
        low, high = (int(each) for each in torch.aminmax(indices))
        if low < 0 or (slots is not None and high >= slots):
            raise ValueError(f"{name} runs from {low} to {high}; accepted is 0..{'' if slots is None else slots - 1}")
