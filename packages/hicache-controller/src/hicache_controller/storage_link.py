"""StorageLink: the controller's side of a storage, from attach to detach: backups, prefetches and lookups."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from hicache_pools.pool_transfer import PoolTransfer

from .agreement import Agreement
from .devices import CpuDevice
from .engine_calls import EngineCalls
from .events import Event
from .failure_log import LogLimit
from .in_flight import PageUse
from .interrupts import interruptibly
from .operations import StorageAck
from .policies import PrefetchPolicy
from .storage.base import ANCHOR, HiCacheStorage, RemovalListener
from .storage.generic import StorageBackend, TensorPages
from .storage_settings import StorageSettings
from .storage_tasks import BackupOperation, PrefetchOperation, StorageCalls, StorageLookup, StoragePart, StorageTask
from .transfer_engine import L2TransferEngine
from .wait_bound import WaitBound
from .worker import Worker

logger = logging.getLogger(__name__)

LOG_SECONDS = 60.0
"""How often it is logged that storage is too slow, at most."""


class _Attached(NamedTuple):
    """Everything that comes and goes with a backend."""

    backend: StorageBackend
    calls: StorageCalls
    backups: Worker
    prefetches: Worker
    lookup: StorageLookup

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them."""
        return self.backups, self.prefetches, self.lookup.worker


class StorageLink:
    """Backups, prefetches and lookups, each on a worker of their own while a backend is attached.

    Its calls come from the controller's thread, except :meth:`close` and :meth:`skipped`. What storage removes is
    reported to the listener on any thread, so that one queues it.

    Parameters
    ----------
    engine
        Knows which host slots are in flight.
    agreement
        Of the ranks.
    calls
        The public calls, each with one bound for its waits.
    settings
        See :class:`StorageSettings`.
    synchronous
        Do everything before the call that asks for it returns.

    Attributes
    ----------
    settings
        As given.
    changes
        How many times a backend was attached or let go.
    """

    def __init__(
        self,
        engine: L2TransferEngine,
        agreement: Agreement,
        calls: EngineCalls,
        *,
        settings: StorageSettings,
        synchronous: bool,
    ) -> None:
        self.settings = settings
        self.changes = 0
        self._calls = calls
        self._engine = engine
        self._metrics = engine.metrics
        self._agreement = agreement
        self._synchronous = synchronous
        self._attached: _Attached | None = None
        self._listener: RemovalListener | None = None
        self._backups: deque[BackupOperation] = deque()
        self._prefetches: list[PrefetchOperation] = []
        self._in_vain = (0.0, -1)  # seconds that backups were waited for, and the calls that storage had ended by then
        self._logs = LogLimit(LOG_SECONDS)
        self._metrics.gauge("backup_queue_pages", lambda: self._depth(0))
        self._metrics.gauge("prefetch_queue_pages", lambda: self._depth(1))

    # Waiting

    @contextmanager
    def one_call(self, timeout: float | None = None) -> Iterator[WaitBound]:
        """Bound what is waited for storage in a ``with`` block, in sum, by ``timeout`` or ``max_wait_seconds``.

        Without ``timeout``, the bound of a block around this one, or of an earlier one in the same public call, holds.
        """
        bound = outer = self._calls.bound
        if bound is None or timeout is not None:
            bound = WaitBound(self.settings.max_wait_seconds if timeout is None else timeout)
        self._calls.bound = bound
        try:
            yield bound
        finally:
            if timeout is not None or not self._calls.depth:
                self._calls.bound = outer

    def skipped(self, pages: int, pool: str = ANCHOR) -> None:
        """Count pages that storage does not get as it was too slow for them, and log that once in a while."""
        self._metrics.count("backup_skipped_pages", pages, pool=pool)
        if pages and self._logs.due("skipped"):
            total = self._metrics.snapshot().total("backup_skipped_pages")
            logger.warning("storage is slower than pages come; %d were dropped so far before it had taken them", total)

    def _skip(self, backup: BackupOperation) -> None:
        for part in (*backup.parts[:1], *backup.trailing_parts):
            self.skipped(len(part.keys), part.name)

    def _patience(self, bound: WaitBound, calls: StorageCalls) -> float:
        """Seconds to wait for backups: none after as long a wait that ran out, until storage has ended another call."""
        seconds = min(bound.left(), self.settings.timeout_seconds)
        waited, ended = self._in_vain
        return 0.0 if ended == calls.backups and seconds <= waited else seconds

    def _depth(self, number: int) -> int:
        attached = self._attached
        return 0 if attached is None else attached.workers[number].depth

    # Attaching

    @property
    def attached(self) -> bool:
        """Whether there is a backend."""
        return self._attached is not None

    @property
    def backend(self) -> StorageBackend | None:
        """The backend, if one is attached."""
        attached = self._attached
        return None if attached is None else attached.backend

    def attach(self, backend: StorageBackend, anchor_pool: Any, sidecars: Mapping[str, Any]) -> None:
        """Register the pools with ``backend`` and start its workers; nothing changed where that raises.

        RuntimeError where there is one, or where this one reports its removals to another listener than the tree.
        """
        if self._attached is not None:
            raise RuntimeError("a storage backend is attached; detach_storage_backend must come first")
        store = backend if isinstance(backend, HiCacheStorage) else TensorPages(backend)
        settings = replace(self.settings, retry_seconds=0) if self._synchronous else self.settings
        with ExitStack() as undo:
            if self._listener is not None:
                store.set_removal_listener(self._listener)
                undo.callback(store.set_removal_listener, None)
            store.register_mem_pool_host(anchor_pool)
            for name, pool in sidecars.items():
                store.register_mem_pool_host(pool, name=name)
            calls = StorageCalls(store, self._metrics, self._agreement, settings, self.skipped)
            backups = self._worker("backup", settings.backup_queue_pages)
            prefetches, lookups = (self._worker(name, settings.prefetch_queue_pages) for name in ("prefetch", "lookup"))
            lookup = StorageLookup(calls, lookups, self._logs)
            self._attached = _Attached(backend, calls, backups, prefetches, lookup)
            undo.pop_all()
        self._in_vain = (0.0, -1)
        self.changes += 1

    def follow_removals(self, listener: RemovalListener) -> None:
        """Report to a listener what any backend removes on its own while it is attached, this one and later ones.

        It replaces the one before, as no more than one tree uses a controller; but RuntimeError where a storage that is
        attached reports to another.
        """
        if self._attached is not None:
            self._attached.calls.store.set_removal_listener(listener)
        self._listener = listener

    def register_sidecar(self, name: str, pool: Any) -> None:
        """Let an attached backend know a pool that came later."""
        if self._attached is not None:
            self._attached.calls.store.register_mem_pool_host(pool, name=name)

    def detach(self, timeout: float | None = None) -> StorageBackend:
        """Finish the backups that wait, cancel the prefetches, stop the workers, and return the backend."""
        attached = self.need_backend()
        self._stop(attached, self.settings.timeout_seconds if timeout is None else timeout, finish_backups=True)
        return attached.backend

    def close(self, timeout: float) -> bool:
        """Stop; backups that have not started fail. Return whether the workers ended in time."""
        attached = self._attached
        return attached is None or self._stop(attached, timeout, finish_backups=False)

    def give_up(self, timeout: float) -> bool:
        """Cancel all backups and prefetches, and wait for the calls that run; return whether they ended in time."""
        attached = self._attached
        if attached is None:
            return True
        bound = WaitBound(timeout)
        self._cancel_prefetches()
        for backup in list(self._backups):
            self.cancel_backup(backup.node_id)
        return all(worker.drain(bound.left()) for worker in (attached.backups, attached.prefetches))

    def forget(self) -> None:
        """Drop the acks that were not asked for."""
        self._backups.clear()
        self._prefetches.clear()

    def need_backend(self) -> _Attached:
        """Return what is attached; RuntimeError where there is no backend."""
        attached = self._attached
        if attached is None:
            raise RuntimeError("no storage backend is attached; attach_storage_backend must come first")
        return attached

    def _worker(self, name: str, max_pages: int) -> Worker:
        return Worker(f"hicache-{name}", CpuDevice(), synchronous=self._synchronous, max_pages=max_pages)

    def _stop(self, attached: _Attached, timeout: float, *, finish_backups: bool) -> bool:
        bound = WaitBound(timeout)
        self._cancel_prefetches()
        if finish_backups:
            attached.backups.drain(bound.left())
        attached.calls.stopping.set()
        for worker in attached.workers:
            worker.stop()
        stopped = [worker.close(bound.left()) for worker in attached.workers]
        self._backups = deque(each if each.done else each.detached() for each in self._backups)
        if self._listener is not None:
            attached.calls.store.set_removal_listener(None)
        self.changes += 1
        self._attached = None
        if not all(stopped):
            logger.warning("storage did not answer within %s s; its slots stay in flight until it does", timeout)
        return all(stopped)

    def _cancel_prefetches(self) -> None:
        for operation in self._prefetches:
            operation.cancel()
        self._prefetches = [each for each in self._prefetches if not each.done]

    # Lookup

    def exists(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer] = ()) -> int:
        """Return the leading pages of which storage has all that the pools need, on every rank."""
        return self._agreement.smallest([max(self._lengths(keys, transfers), default=0)])[0]

    def restorable_lengths(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer] = ()) -> list[int]:
        """Return every number of leading pages of which storage has all that the pools need, on every rank."""
        found = set(self._lengths(keys, transfers))
        agreed = self._agreement.smallest([int(length in found) for length in range(1, len(keys) + 1)])
        return [length for length, everywhere in enumerate(agreed, 1) if everywhere]

    def _lengths(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer]) -> Sequence[int]:
        attached = self._attached
        if attached is None or not keys:
            return ()
        with self.one_call() as bound:
            return attached.lookup.lengths(keys, transfers, bound)

    # Backup

    def backup(
        self, parts: Sequence[StoragePart], node_id: int, uses: Sequence[PageUse], error: Exception | None = None
    ) -> None:
        """Queue pages for storage, or with an error only its ack; see :meth:`HiCacheController.backup`."""
        attached = self.need_backend()
        before = self._engine.predecessors(uses)
        calls = attached.calls
        operation = BackupOperation(
            node_id=node_id, calls=calls, worker=attached.backups, parts=parts, uses=uses, writers=before.writers
        )
        self._backups.append(operation)
        try:
            if error is not None:
                operation.abandon(error)
                return
            with self.one_call() as bound:
                patience, ended = self._patience(bound, calls), calls.backups
                if self._submit(operation, before.events, patience):
                    return
            if patience:
                self._in_vain = (patience, ended)
            self._skip(operation)
            pages = self.settings.backup_queue_pages
            operation.abandon(RuntimeError(f"the backup queue of {pages} pages stayed full for {patience} s"))
        except BaseException:
            # Where waiting for room was interrupted, no ack comes.
            self._backups.remove(operation)
            raise

    def poll_backups(self, wait: bool) -> list[StorageAck]:
        """Return the acks of the backups that are done, in order, on every rank.

        ``wait`` blocks for the first of them, within the bound of :meth:`one_call` and only as long as storage makes
        progress.
        """
        if not self._backups:
            return []
        if wait:
            self._wait_for_backup(self._backups[0])
        done = len(list(takewhile(lambda backup: backup.done, self._backups)))
        done = self._agreement.smallest([done])[0]
        if not done:
            return []
        operations = [self._backups.popleft() for _ in range(done)]
        stored = self._agreement.smallest([operation.moved_pages for operation in operations])
        return [operation.ack(pages) for operation, pages in zip(operations, stored, strict=True)]

    def cancel_backup(self, node_id: int) -> bool:
        """Cancel a node's backups; see :meth:`HiCacheController.cancel_backup`."""
        found = [backup for backup in self._backups if backup.node_id == node_id]
        for backup in found:
            self._backups.remove(backup)
            backup.cancel()
            if backup.withdraw():
                self._skip(backup)
        return bool(found)

    def _wait_for_backup(self, backup: BackupOperation) -> None:
        """Wait for a backup while storage ends calls, each within the storage timeout, and the bound lets it."""
        with self.one_call() as bound:
            ended = -1
            while ended != backup.calls.backups:
                patience, ended = self._patience(bound, backup.calls), backup.calls.backups
                if backup.done or not patience:
                    return
                if interruptibly(partial(backup.host_ready.synchronize, patience)):
                    return
        self._in_vain = (patience, ended)
        self._metrics.count("storage_timeouts", operation="backup")
        if self._logs.due("backup"):
            logger.warning("storage took no page within %s s; its backup is not waited for", patience)

    # Prefetch

    def prefetch(self, parts: Sequence[StoragePart], request_id: str, uses: Sequence[PageUse]) -> PrefetchOperation:
        """Queue pages to come from storage; see :meth:`HiCacheController.prefetch`."""
        attached = self.need_backend()
        operation = PrefetchOperation(
            request_id=request_id, calls=attached.calls, worker=attached.prefetches, parts=parts, uses=uses
        )
        after = self._engine.predecessors(uses).events
        if not parts:
            operation.run()  # nothing to do
        elif self._submit(operation, after, 0):
            self._prefetches = [each for each in self._prefetches if not each.done]
            self._prefetches.append(operation)
        else:
            self._metrics.count("prefetch_dropped_pages", operation.pages)
            pages = self.settings.prefetch_queue_pages
            operation.abandon(RuntimeError(f"the prefetch queue of {pages} pages is full"))
        return operation

    def ready(self, operation: PrefetchOperation) -> bool:
        """Return whether the policy lets the request go now, on every rank."""
        if self.settings.prefetch_policy == PrefetchPolicy.BEST_EFFORT:
            return True
        idle = time.monotonic() - operation.moved_at
        over = operation.done or idle >= self.settings.timeout_seconds or not self._time_left(operation)
        return bool(self._agreement.smallest([int(over)])[0])

    def finish(self, operation: PrefetchOperation) -> int:
        """Wait as long as policy and bound say, cancel what is left, and return the pages that came."""
        if self.settings.prefetch_policy == PrefetchPolicy.BEST_EFFORT:
            operation.cancel()
            operation.withdraw()
        with self.one_call() as bound:
            pages = operation.wait(min(bound.left(), self._time_left(operation)))
        operation.withdraw()
        return pages

    # Inside

    def _time_left(self, operation: PrefetchOperation) -> float:
        """Seconds that the policy still gives a prefetch."""
        settings = self.settings
        if settings.prefetch_policy != PrefetchPolicy.TIMEOUT:
            return math.inf
        seconds = settings.prefetch_timeout_seconds + settings.prefetch_timeout_seconds_per_page * operation.pages
        return max(0.0, operation.began + seconds - time.monotonic())

    def _submit(self, operation: StorageTask, after: Sequence[Event], timeout: float) -> bool:
        """Give an operation to its worker; its slots are in flight exactly while that has it."""
        accepted = False
        if not self._synchronous:
            operation.put_in_flight(self._engine.in_flight)
        try:
            accepted = operation.worker.submit(operation, after, timeout=timeout)
        finally:
            if not accepted:
                self._engine.in_flight.remove(operation)
        return accepted
