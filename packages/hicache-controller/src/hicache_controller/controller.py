"""HiCacheController: transfers of a model's pages between device, host and storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hicache_kernels import Compute
from hicache_kernels.constants import checked_compute
from hicache_kernels.staging import Direction
from hicache_kernels.validation import seconds
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.pool_transfer import PoolName, PoolTransfer

from .agreement import Agreement
from .engine_calls import EngineCalls
from .events import Event
from .forks import refuse_in_forks
from .in_flight import Access
from .interrupts import interruptibly
from .layer_done import NOTHING_TO_WAIT_FOR, LayerDoneCounter
from .layer_map import TransferPlan, checked_quota, device_of, layer_plan
from .metrics import Metrics
from .operation_queue import OperationQueue
from .operations import Ack, StorageAck
from .pool_transfers import SidecarPoolSpec, storage_parts, with_sidecars
from .slots import Slots
from .storage.generic import StorageBackend
from .storage_link import StorageLink
from .storage_settings import StorageSettings
from .storage_tasks import PrefetchOperation
from .transfer_engine import L2TransferEngine
from .transfer_handle import Guards
from .wait_bound import WaitBound, checked_timeout


class HiCacheController:
    """Transfers of a model's pages between device, host and storage.

    Slots are the caller's once an operation is acked without an error; until then they are in flight. Of one that fails
    or is cancelled, the slots the controller took (host slots of a write, device slots of a load) are freed, and the
    caller forgets them. No call waits for storage longer than ``StorageSettings.max_wait_seconds``, except those with a
    ``timeout``.

    One thread makes the calls: that of the first call, or of the last :meth:`adopt_thread`. Calls from others raise
    RuntimeError, except :meth:`shutdown`; ``metrics`` and the waits of ``layer_done_counter`` are for any thread. The
    first error of the engine's callbacks comes out at the end of the call, when all else is done.

    Indices are integer slots ``[n]``, whole pages in order. Those on CPU are checked and copied: the tensor is the
    caller's again at once. Those on a device are not read: transfers of all slots are then assumed to meet, and the
    tensor must stay as it is until the ack. ``pool_transfers`` are an operation's parts in pools other than the anchor,
    all or nothing: one a pool, with indices or the pool it derives them from. What is filled in is the caller's with an
    ack without error, and None again where the operation fails.

    Parameters
    ----------
    host_group
        The pools. Loads need ``device_alloc_fn`` and ``device_free_fn`` in the entries.
    sidecars
        Pools that take part in every operation without being named in it.
    synchronous
        Complete every operation before the call that starts it returns; for simulations on CPU pools.
    queue_inline
        Queue the transfers of pools on a GPU in the thread that starts them, unless they have to wait for another
        thread first: for engines without a scheduler that must not be held up.
    io_backend
        ``"kernel"`` or ``"direct"``, passed to the pools.
    write_block_quota, load_block_quota
        Most CTAs that a transfer may hold while bytes cross the bus; 0 forbids it, None leaves it to the pools. May be
        set between calls; transfers started later keep it.
    storage
        Sizes, limits and policies of backup and prefetch.
    distributed_group, distributed_timeout
        A torch.distributed group with CPU tensors whose ranks schedule the same requests: hit counts, and which acks
        are returned, are then the same on all of them. Seconds after which a silent rank counts as dead.
    metrics, guards
        Where to count, by default a new one; for tests, hazards left open.
    """

    def __init__(
        self,
        host_group: HostPoolGroup,
        *,
        sidecars: Sequence[SidecarPoolSpec] = (),
        synchronous: bool = False,
        queue_inline: bool = False,
        io_backend: str = "kernel",
        write_block_quota: int | None = None,
        load_block_quota: int | None = None,
        storage: StorageSettings | None = None,
        distributed_group: Any = None,
        distributed_timeout: float = 60.0,
        metrics: Metrics | None = None,
        guards: Guards | None = None,
    ) -> None:
        refuse_in_forks(self)
        self.mem_pool_host = self.host_group = host_group
        self.sidecars: tuple[SidecarPoolSpec, ...] = ()
        for spec in sidecars:
            self.add_sidecar(spec)
        self.metrics = metrics if metrics is not None else Metrics()
        self._plan = TransferPlan(host_group, io_backend)
        self.write_block_quota = write_block_quota
        self.load_block_quota = load_block_quota
        self.layer_done_counter = LayerDoneCounter(self._plan.layers)
        options = {"synchronous": synchronous, "queue_inline": queue_inline}
        self.engine = L2TransferEngine(device_of(host_group), metrics=self.metrics, guards=guards, **options)
        self.agreement = Agreement(distributed_group, timeout=distributed_timeout, metrics=self.metrics)
        self.engine_calls = EngineCalls("controller")
        self._slots = Slots(host_group, self.engine, self.engine_calls)
        parts = (self._plan, self.engine, self._slots, self.layer_done_counter, self.agreement, self.engine_calls)
        self._writes, self._loads = (OperationQueue(direction, *parts) for direction in Direction)
        settings = storage if storage is not None else StorageSettings()
        self.storage = StorageLink(
            self.engine, self.agreement, self.engine_calls, settings=settings, synchronous=synchronous
        )
        self._closed = self._stopped = False
        self.metrics.gauge("write_queue_operations", lambda: len(self._writes))
        self.metrics.gauge("load_queue_operations", lambda: len(self._loads))

    def adopt_thread(self) -> None:
        """Let the calling thread make the calls from now on; RuntimeError while another one is in a call."""
        self.engine_calls.adopt_thread()

    # Pools

    @property
    def write_block_quota(self) -> int | None:
        """Most CTAs of the write-backs started from now on."""
        return self._plan.quotas[Direction.WRITE_BACK]

    @write_block_quota.setter
    def write_block_quota(self, quota: int | None) -> None:
        self._plan.quotas[Direction.WRITE_BACK] = checked_quota("write_block_quota", quota)

    @property
    def load_block_quota(self) -> int | None:
        """Most CTAs of the load-backs started from now on."""
        return self._plan.quotas[Direction.LOAD]

    @load_block_quota.setter
    def load_block_quota(self, quota: int | None) -> None:
        self._plan.quotas[Direction.LOAD] = checked_quota("load_block_quota", quota)

    @property
    def compute(self) -> Compute | None:
        """What the model computes during the transfers that are started from now on: ``"prefill"``, ``"decode"``.

        The pools then choose paths that take less from it. ``"idle"`` lets them take all, None, at first, says that it
        is not known. May be set between calls; ValueError, with nothing changed, for anything else.
        """
        return self._plan.compute

    @compute.setter
    def compute(self, compute: Compute | str | None) -> None:
        self._plan.compute = checked_compute(compute)

    @property
    def page_size(self) -> int:
        """Slots a page of the anchor."""
        return self.host_group.page_size

    @property
    def layer_num(self) -> int:
        """Layers that ``layer_done_counter`` counts: the model's, then those of packed drafts."""
        return self._plan.layers

    @property
    def storage_host_pool(self) -> Any:
        """The anchor's physical host pool, which storage works on."""
        return self.host_group.anchor_entry.host_pool

    @property
    def idle(self) -> bool:
        """Whether a poll of writes or loads would find nothing to do, and no operation waits to be started."""
        return not (self._writes.busy or self._loads.busy)

    def add_entry(self, entry: PoolEntry) -> None:
        """Add a pool to the group, as its ``add_entry`` does, and to the storage if one is attached.

        ValueError, with nothing changed, where the layer mapper does not cover the pool.
        """
        self._check_open()
        layer_plan([entry])
        self.host_group.add_entry(entry)
        self._plan.update()
        self.layer_done_counter.layers = self._plan.layers
        self.storage.register_sidecar(str(entry.name), entry.host_pool)

    def add_sidecar(self, spec: SidecarPoolSpec) -> None:
        """Let a pool of the group take part in every operation from now on; KeyError if it is not in the group."""
        self.host_group.get_entry(spec.pool_name)
        self.host_group.get_entry(spec.indices_from_pool)
        self.sidecars = (*self.sidecars, spec)

    # Writes

    def write(
        self,
        device_indices: torch.Tensor,
        *,
        node_id: int,
        ready_event: Event | None = None,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> torch.Tensor | None:
        """Queue a write-back of slots of the anchor, or of none, and of other pools; :meth:`start_writing` starts it.

        Parameters
        ----------
        node_id
            Comes back in the ack.
        ready_event
            Event after which the rows are valid. By default: the work on the current stream at this call.

        Returns
        -------
        torch.Tensor or None
            The anchor's host slots, int64 ``[n]`` on CPU; None, with nothing changed, where a pool has no room.

        Raises
        ------
        ValueError, KeyError, RuntimeError
            If indices are not whole pages in range, each slot once; a pool is not in the group; the slots are those of
            a load that has not been started, or the controller is closed.
        """
        with self.engine_calls:
            self._check_open()
            event = ready_event if ready_event is not None else self.engine.submission_event()
            return self._writes.add(device_indices, node_id, event, pool_transfers, self.sidecars)

    def start_writing(self) -> Ack | None:
        """Start what is queued, merged into one transfer; None where nothing is.

        The ack has the events to wait for, but the outcome only where ``poll_writes`` returns it again.
        """
        self._check_open()
        if not self._writes.waiting:
            return None
        with self.engine_calls:
            return self._writes.start().first_ack()

    def poll_writes(self, wait: bool = False) -> list[Ack]:
        """Return the acks of the writes that are done, in the order they were started.

        With ``wait`` this blocks until at least one is done, where any was started and not cancelled. Where a callback
        of the engine has raised, that is raised once all is settled, and the next poll returns the acks.
        """
        return self._writes.poll(wait)

    # Loads

    def load(
        self,
        host_indices: torch.Tensor,
        *,
        node_id: int,
        ready_event: Event | None = None,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> torch.Tensor | None:
        """Queue a load-back of host slots, as :meth:`write` does a write-back; :meth:`start_loading` starts it.

        After ``ready_event``, besides the work on the current stream at :meth:`start_loading`, the rows may be
        overwritten. Transfers may come with both sides. Returns the anchor's device slots, or None.
        """
        with self.engine_calls:
            self._check_open()
            return self._loads.add(host_indices, node_id, ready_event, pool_transfers, self.sidecars)

    def start_loading(self) -> int:
        """Start what is queued, merged into one transfer; return the id for ``layer_done_counter``, -1 for nothing."""
        self._check_open()
        if not self._loads.waiting:
            return NOTHING_TO_WAIT_FOR
        with self.engine_calls:
            uses = (use for operation in self._loads.waiting for use in self._slots.uses_of(operation))
            self._slots.start_writes_of(uses)
            return self._loads.start().consumer

    def poll_loads(self, wait: bool = False) -> list[Ack]:
        """Return the acks of the loads that are done, in the order they were started; see :meth:`poll_writes`."""
        return self._loads.poll(wait)

    # Cancel and evict

    def cancel_write(self, node_id: int) -> bool:
        """Cancel the node's writes, queued or running; see :meth:`cancel_load`."""
        with self.engine_calls:
            return self._writes.cancel(node_id)

    def cancel_load(self, node_id: int) -> bool:
        """Cancel the node's loads, queued or running, and return whether there were any.

        No ack will name the node. Its device slots are freed; those of a running load by the poll that finds it done.
        """
        with self.engine_calls:
            return self._loads.cancel(node_id)

    def evict_device(self, device_indices: torch.Tensor, *, pool: PoolName | str | None = None) -> int:
        """Free device slots of a pool (by default the anchor) after the transfers that use them; return how many.

        On CUDA the current stream waits for these, so that the next user of the slots is safe on that stream; on CPU
        the calling thread waits. RuntimeError if the slots are those of a load that has not been started.
        """
        with self.engine_calls:
            return self._slots.free_device(self.host_group.get_entry(pool), device_indices)

    def evict_host(self, host_indices: torch.Tensor, *, pool: PoolName | str | None = None) -> int:
        """Free host slots of a pool (by default the anchor), in flight after their transfers; return how many now."""
        with self.engine_calls:
            return self._slots.free_host(self.host_group.get_entry(pool), host_indices)

    # Storage

    @property
    def has_storage(self) -> bool:
        """Whether a storage backend is attached."""
        return self.storage.attached

    def attach_storage_backend(self, backend: StorageBackend) -> None:
        """Let backups and prefetches use ``backend``, and start their threads.

        The anchor's physical pool is registered first, under the name ``kv``, then every other entry's by its name.
        """
        self._check_open()
        anchor = self.host_group.anchor_entry
        sidecars = {str(e.name): e.host_pool for e in self.host_group.entries if e is not anchor}
        self.storage.attach(backend, self.storage_host_pool, sidecars)

    def detach_storage_backend(self, timeout: float | None = None) -> StorageBackend:
        """Finish the backups that wait, within a timeout, cancel the prefetches, and return the backend, still open."""
        self.engine_calls.check_thread()
        return self.storage.detach(checked_timeout(timeout))

    def storage_exists(self, keys: Sequence[bytes], *, pool_transfers: Sequence[PoolTransfer] = ()) -> int:
        """Return the leading pages of which the storage of every rank has all that the pools' hit policies need.

        0 without storage, or where it fails or is slow. With the hit policy ``TRAILING_PAGES`` as many last pages are
        needed as a transfer has keys, one where it has none.
        """
        self.engine_calls.check_thread()
        return self.storage.exists(keys, with_sidecars(self.host_group, self.sidecars, pool_transfers))

    def storage_restorable_lengths(
        self, keys: Sequence[bytes], *, pool_transfers: Sequence[PoolTransfer] = ()
    ) -> list[int]:
        """Return the length in pages of every prefix of which the storage of every rank has all that the pools need.

        In ascending order. Prefixes between two of them cannot be restored: pages of a window, or a state, are missing.
        Storage is asked once; ranks of a group have to ask with as many keys.
        """
        self.engine_calls.check_thread()
        return self.storage.restorable_lengths(keys, with_sidecars(self.host_group, self.sidecars, pool_transfers))

    def backup(
        self,
        host_indices: torch.Tensor,
        keys: Sequence[bytes],
        *,
        parents: Sequence[bytes | None] | None = None,
        node_id: int,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> None:
        """Queue host pages for storage, after the write-back that fills them; ``poll_backups`` reports the outcome.

        A backup that finds the queue full fails, and its pages are counted as skipped.

        Parameters
        ----------
        keys, parents
            Storage key of each of the anchor's pages, and of the page before it (None: the first of a sequence).
        node_id
            Comes back in the ack.
        pool_transfers
            With host indices and keys; a pool that shares the anchor's slots needs neither. With the hit policy
            ``ALL_PAGES`` a page counts as stored once its part is, too.
        """
        with self.engine_calls:
            self._check_open()
            self.storage.need_backend()
            transfers = with_sidecars(self.host_group, self.sidecars, pool_transfers)
            parts, uses = storage_parts(self._slots, Access.READ, host_indices, keys, parents, transfers)
            self.storage.backup(parts, node_id, uses, self._slots.failed_writer(Direction.WRITE_BACK, uses))

    def cancel_backup(self, node_id: int) -> bool:
        """Cancel the node's backups, queued or running, and return whether there were any; see :meth:`cancel_load`."""
        with self.engine_calls:
            return self.storage.cancel_backup(node_id)

    def poll_backups(self, wait: bool = False) -> list[StorageAck]:
        """Return the acks of the backups that are done; ``wait`` for the first as long as storage makes progress."""
        self.engine_calls.check_thread()
        acks = self.storage.poll_backups(wait)
        self._slots.reap()
        return acks

    def prefetch(
        self,
        host_indices: torch.Tensor | None,
        keys: Sequence[bytes],
        *,
        request_id: str,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> PrefetchOperation:
        """Queue pages to come from storage; the host slots stay the caller's, in flight until the operation is done.

        Without slots, as on a rank that has no room, the operation has 0 pages and still takes part in the agreement of
        the ranks. Where a transfer has the hit policy ``TRAILING_PAGES``, either the whole prefix comes or none of it
        counts.
        """
        with self.engine_calls:
            self._check_open()
            self.storage.need_backend()
            transfers = with_sidecars(self.host_group, self.sidecars, pool_transfers)
            parts, uses = storage_parts(self._slots, Access.WRITE, host_indices, keys, None, transfers)
            return self.storage.prefetch(parts, request_id, uses)

    def prefetch_ready(self, operation: PrefetchOperation) -> bool:
        """Return whether, by the prefetch policy, the request may run now, on every rank; then call its ``wait``."""
        self.engine_calls.check_thread()
        return self.storage.ready(operation)

    def finish_prefetch(self, operation: PrefetchOperation) -> int:
        """End a prefetch as its policy says, and return the leading pages that are there on every rank.

        What has not come when the policy's time or the scheduler's ``max_wait_seconds`` are over is cancelled. For all
        of it, call the operation's ``wait``, or this once :meth:`prefetch_ready` returns True.
        """
        self.engine_calls.check_thread()
        return self.storage.finish(operation)

    # End

    def reset(self, timeout: float | None = None) -> None:
        """Forget everything: cancel what is queued, wait for what runs, and make every host slot free.

        Device slots of loads that were not acked are freed; everything else the caller holds on the host is void.
        Raises as :meth:`quiesce` does.
        """
        self.quiesce(timeout)
        with self.engine_calls:
            self.storage.forget()
            self._writes.clear()
            self._loads.clear()
            self.layer_done_counter.reset()
            self._slots.deferred.clear()
            self.host_group.clear()

    def quiesce(self, timeout: float | None = None) -> None:
        """Cancel backups and prefetches, and wait until nothing that was started uses slots.

        TimeoutError if something does so for longer than ``timeout`` seconds, by default the storage's
        ``timeout_seconds``. No slot was freed then; call it again.
        """
        self._check_open()
        timeout = checked_timeout(timeout)
        limit = self.storage.settings.timeout_seconds if timeout is None else timeout
        bound = WaitBound(limit)
        if not interruptibly(lambda: self.storage.give_up(bound.left()) and self.engine.drain(bound.left())):
            raise TimeoutError(
                f"a transfer or a call to storage still uses slots after {limit} s; backups and prefetches were "
                "cancelled, nothing was freed, and this can be called again"
            )

    def shutdown(self, timeout: float = 60.0) -> bool:
        """Cancel what is queued, finish what runs, stop every thread; acks can still be polled.

        Returns whether everything ended within ``timeout`` seconds each; what did not keeps its slots, and this can be
        called again. Any thread may call it while no other call is under way.
        """
        timeout = seconds("timeout", timeout)
        self._closed = True
        if not self._stopped:
            ended = [self.storage.close(timeout)]
            for queue in (self._writes, self._loads):
                queue.cancel_waiting()
            ended += [self.engine.drain(timeout), self.engine.close(timeout)]
            for queue in (self._writes, self._loads):
                queue.settle_here()  # slots of what failed are freed now, not by a poll that may never come
            self._slots.reap()
            self._stopped = all(ended)
            self.engine_calls.raise_first()
        return self._stopped

    def check_integrity(self) -> None:
        """Check that what is known of slots in use is consistent; RuntimeError names the fault."""
        self.engine_calls.check_thread()
        self.engine.in_flight.check_integrity()
        self._slots.check_integrity()

    def _check_open(self) -> None:
        self.engine_calls.check_thread()
        if self._closed:
            raise RuntimeError("the controller is closed; it was shut down")
