"""HiCacheController: transfers of a model's pages between device and host, and on to storage and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.pool_transfer import PoolTransfer

from .in_flight import Access, Place, Side, Use, page_granules
from .indices import own_indices
from .metrics import Metrics
from .operations import StorageAck
from .storage.base import ANCHOR
from .storage.generic import StorageBackend
from .storage_calls import StoragePart
from .storage_link import StorageLink
from .storage_settings import StorageSettings
from .storage_tasks import PrefetchOperation
from .transfer_controller import TransferController
from .transfer_handle import Guards
from .wait_bound import WaitBound, checked_timeout


class HiCacheController(TransferController):
    """Transfers of the anchor's pages between device, host and storage.

    Slots are the caller's once an operation is acked without an error. Until then they are in flight; of an operation
    that fails or is cancelled, the slots the controller took for it (host slots of a write, device slots of a load) go
    back by themselves, and the caller forgets them. Calls come from one thread, the engine's scheduler; none waits for
    storage longer than ``StorageSettings.max_wait_seconds``, except those that take a ``timeout``.

    Parameters
    ----------
    host_group
        The pools. The anchor's entry needs ``device_alloc_fn`` and ``device_free_fn`` for loads.
    synchronous
        Complete every operation before the call that starts it returns; for simulations on CPU pools.
    queue_inline
        Queue the transfers of pools on a GPU in the thread that starts them, unless they have to wait for another
        thread first. That saves the hand-over to a thread, and takes that thread's time: for engines without a
        scheduler that must not be held up. What the CPU moves itself goes by a thread all the same.
    io_backend
        ``"kernel"`` or ``"direct"``, handed to the pools.
    write_block_quota, load_block_quota
        Most CTAs that a write-back, and a load-back, may hold while bytes cross the bus; 0 forbids it, None leaves it
        to the pools. May be set between calls, such as to a small number while decoding: transfers started later keep
        it.
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
    ValueError, TypeError
        If the pools are on a device and ``synchronous`` is set, a layer mapper does not cover its pool, or a quota or
        the timeout is not a number in its range.
    """

    def __init__(
        self,
        host_group: HostPoolGroup,
        *,
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
        super().__init__(
            host_group,
            synchronous=synchronous,
            queue_inline=queue_inline,
            io_backend=io_backend,
            write_block_quota=write_block_quota,
            load_block_quota=load_block_quota,
            distributed_group=distributed_group,
            distributed_timeout=distributed_timeout,
            metrics=metrics,
            guards=guards,
        )
        self.storage = StorageLink(
            self.engine,
            self.agreement,
            settings=storage if storage is not None else StorageSettings(),
            synchronous=synchronous,
        )

    # Pools

    @property
    def storage_host_pool(self) -> Any:
        """The anchor's physical host pool."""
        return self.host_group.anchor_entry.host_pool

    def add_entry(self, entry: PoolEntry) -> None:
        """Add a pool to the group, and to the storage if one is attached.

        Raises
        ------
        ValueError, TypeError
            As :meth:`HostPoolGroup.add_entry`; or the layer mapper does not cover the pool, and nothing was changed.
        """
        super().add_entry(entry)
        self.storage.register_sidecar(str(entry.name), entry.host_pool)

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

    def detach_storage_backend(self, timeout: float | None = None) -> StorageBackend:
        """Finish the backups that wait, cancel the prefetches, and let go of the backend, which stays open.

        Parameters
        ----------
        timeout
            Seconds that this may take, by default the storage's ``timeout_seconds``; backups that wait then fail.

        Raises
        ------
        RuntimeError
            If there is none.
        """
        return self.storage.detach(checked_timeout(timeout))

    def storage_exists(self, keys: Sequence[bytes]) -> int:
        """Return how many leading pages are in the storage of every rank; 0 without, or where it fails or is slow."""
        return self.storage.exists(keys)

    def storage_restorable_lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Return the length in pages of every prefix that is in the storage of every rank, in ascending order.

        It asks storage once; ranks of a group have to ask with as many keys. Empty without storage, or where it fails.
        """
        return self.storage.restorable_lengths(keys)

    def backup(
        self,
        host_indices: torch.Tensor,
        keys: Sequence[bytes],
        *,
        parents: Sequence[bytes | None] | None = None,
        node_id: int,
    ) -> None:
        """Queue host pages for storage, behind the write-back that fills them.

        A backup that finds the queue full fails, and its pages are counted as skipped. ``poll_backups`` reports it.

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
            If counts do not match, or the indices are not whole pages of the host pool, each once, or were given back
            or never allocated.
        RuntimeError
            If the controller is closed or has no backend.
        """
        self._backup(host_indices, keys, parents, node_id, ())

    def cancel_backup(self, node_id: int) -> bool:
        """Cancel the node's backups, queued or running: no ack will name it, and pages not stored count as skipped.

        Pages that a call to storage is reading stay in flight until it ends; the others are free to be used again.

        Returns
        -------
        bool
            Whether there was any.
        """
        with self._lock:
            return self.storage.cancel_backup(node_id)

    def poll_backups(self, wait: bool = False) -> list[StorageAck]:
        """Return the acks of the backups that are done, in order.

        With ``wait`` this blocks for the first, where there is any and storage gets on with it.
        """
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
        return self._prefetch(host_indices, keys, request_id, ())

    def prefetch_ready(self, operation: PrefetchOperation) -> bool:
        """Tell whether, by the prefetch policy, the request may run now, on every rank; then call its ``wait``."""
        return self.storage.ready(operation)

    def finish_prefetch(self, operation: PrefetchOperation) -> int:
        """End a prefetch as its policy says, and return the leading pages that are there on every rank.

        What has not come when the policy's time or the scheduler's ``max_wait_seconds`` are over is cancelled. For all
        of it, call the operation's ``wait``, or this once :meth:`prefetch_ready` says so.
        """
        return self.storage.finish(operation)

    # End

    def reset(self, timeout: float | None = None) -> None:
        """Forget everything: cancel what is queued, wait for what runs, and make every host slot free.

        Device slots of loads that were not acked go back; everything else the caller holds on the host is void.

        Parameters
        ----------
        timeout
            Seconds to wait for what runs, by default the storage's ``timeout_seconds``.

        Raises
        ------
        TimeoutError
            As :meth:`quiesce`.
        """
        with self._lock:
            self.quiesce(timeout)
            self.storage.forget()
            super().reset()

    def quiesce(self, timeout: float | None = None) -> None:
        """Cancel backups and prefetches, and wait until nothing that was started uses slots.

        Raises
        ------
        TimeoutError
            If something does so for longer than ``timeout`` seconds, by default the storage's ``timeout_seconds``. No
            slot was freed; call it again.
        """
        self._check_open()
        timeout = checked_timeout(timeout)
        seconds = self.storage.settings.timeout_seconds if timeout is None else timeout
        bound = WaitBound(seconds)
        with self._lock:
            if not (self.storage.give_up(bound.left()) and self.engine.drain(bound.left())):
                raise TimeoutError(
                    f"a transfer or a call to storage still uses slots after {seconds} s; backups and prefetches were "
                    "cancelled, nothing was freed, and this can be called again"
                )

    # Inside

    def _stop(self, timeout: float) -> bool:
        stopped = self.storage.close(timeout)
        return super()._stop(timeout) and stopped

    def _backup(
        self,
        host_indices: torch.Tensor,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None] | None,
        node_id: int,
        pool_transfers: Sequence[PoolTransfer],
    ) -> None:
        self._check_open()
        self.storage.need_backend()
        if parents is not None and len(parents) != len(keys):
            raise ValueError(f"parents has {len(parents)} entries for {len(keys)} keys; one a key is expected")
        with self._lock:
            parts, uses = self._storage_parts(host_indices, keys, parents, pool_transfers, Access.READ)
            self._order.start_writes_of(uses)
            self.storage.backup(parts, node_id, uses, self._order.failed_source(self._writes, uses))

    def _prefetch(
        self,
        host_indices: torch.Tensor | None,
        keys: Sequence[bytes],
        request_id: str,
        pool_transfers: Sequence[PoolTransfer],
    ) -> PrefetchOperation:
        self._check_open()
        self.storage.need_backend()
        if host_indices is None:
            return self.storage.prefetch((), request_id, ())
        with self._lock:
            parts, uses = self._storage_parts(host_indices, keys, None, pool_transfers, Access.WRITE)
            self._order.start_writes_of(uses)
            return self.storage.prefetch(parts, request_id, uses)

    def _storage_parts(
        self,
        host_indices: torch.Tensor,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None] | None,
        pool_transfers: Sequence[PoolTransfer],
        access: Access,
    ) -> tuple[list[StoragePart], list[Use]]:
        """Check what moves between host and storage, and say it as the storage threads and the books need it."""
        anchor = self.host_group.anchor_entry
        self._host_slots.check(anchor, host_indices, len(keys))
        host_indices = own_indices(host_indices)
        parts = [StoragePart(ANCHOR, list(keys), host_indices, None if parents is None else list(parents))]
        uses = [Use(Place(str(anchor.name), Side.HOST), access, page_granules(host_indices, self.page_size))]
        return parts, uses
