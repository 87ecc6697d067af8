"""StorageLink: a controller's tie to a storage backend, from attach to detach."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hicache_kernels.validation import seconds, whole
from hicache_pools.pool_transfer import PoolTransfer

from .agreement import Agreement
from .in_flight import Access, Use
from .interrupts import interruptibly
from .operations import StorageAck
from .storage.base import HiCacheStorage, RemovalListener
from .storage_worker import (
    ANCHOR,
    BackupOperation,
    PageGet,
    PageSet,
    PrefetchOperation,
    PrefetchPolicy,
    StorageBackend,
    StorageMover,
    StoragePart,
    StorageTask,
    StorageThread,
    generic_page_functions,
    zero_copy_page_functions,
)
from .transfer_engine import L2TransferEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StorageSettings:
    """Sizes, limits and policies of backup and prefetch.

    Attributes
    ----------
    prefetch_policy
        See :class:`PrefetchPolicy`.
    prefetch_timeout_seconds, prefetch_timeout_seconds_per_page
        Time a prefetch has under the policy ``timeout``: the first, and the second for each of its pages.
    batch_pages
        Pages of one call to storage: what cancelling a prefetch may have to wait for.
    backup_queue_pages, prefetch_queue_pages
        Most pages waiting. A full backup queue blocks the caller of ``backup``; a prefetch that finds no room ends
        with 0 pages.
    backup_retries, retry_seconds
        Further attempts at a page that could not be stored; pause before the first, doubled for each further one.
    timeout_seconds
        Longest that storage may hold up a caller. A lookup that takes longer counts as a miss; a backup is waited for
        as long as another page is stored within that time.
    back_off_seconds
        How long nothing is looked up after that, and until the lookup has returned.
    """

    prefetch_policy: PrefetchPolicy | str = PrefetchPolicy.BEST_EFFORT
    prefetch_timeout_seconds: float = 1.0
    prefetch_timeout_seconds_per_page: float = 0.01
    batch_pages: int = 64
    backup_queue_pages: int = 16384
    prefetch_queue_pages: int = 65536
    backup_retries: int = 2
    retry_seconds: float = 0.05
    timeout_seconds: float = 30.0
    back_off_seconds: float = 5.0

    def __post_init__(self) -> None:
        PrefetchPolicy(self.prefetch_policy)
        for name in ("batch_pages", "backup_queue_pages", "prefetch_queue_pages"):
            whole(name, getattr(self, name))
        whole("backup_retries", self.backup_retries, least=0)
        seconds("timeout_seconds", self.timeout_seconds, above=True)
        for name in (
            "prefetch_timeout_seconds",
            "prefetch_timeout_seconds_per_page",
            "retry_seconds",
            "back_off_seconds",
        ):
            seconds(name, getattr(self, name))


class _Lookup(StorageTask):
    """A question to storage: how many leading keys it has."""

    def __init__(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer]) -> None:
        super().__init__((), ())
        self.keys = keys
        self.transfers = transfers
        self.found = 0


@dataclass(frozen=True, eq=False)
class _Attached:
    """Everything that comes and goes with a backend."""

    backend: StorageBackend
    mover: StorageMover
    backups: StorageThread[BackupOperation]
    prefetches: StorageThread[PrefetchOperation]
    lookups: StorageThread[_Lookup]

    @property
    def threads(self) -> tuple[StorageThread[Any], ...]:
        """All of them."""
        return self.backups, self.prefetches, self.lookups


def _given_up(backup: BackupOperation) -> BackupOperation:
    """Stand in for a backup that a storage which was let go is not done with: acks come in order."""
    failed = BackupOperation((), backup.node_id)
    failed.error = RuntimeError("the storage was detached before it had taken the pages")
    failed.host_ready.fire()
    return failed


def no_page_get(keys: Sequence[bytes], host_indices: torch.Tensor, name: str) -> list[bool]:
    """Find nothing: the page function without a backend."""
    return [False] * len(keys)


def no_page_set(
    keys: Sequence[bytes], host_indices: torch.Tensor, parents: Sequence[bytes | None] | None, name: str
) -> list[bool]:
    """Store nothing: the page function without a backend."""
    return [False] * len(keys)


class StorageLink:
    """Backup, prefetch and lookup, each on a thread of its own while a backend is attached.

    Parameters
    ----------
    engine
        Knows which host slots are in flight.
    agreement
        Of the ranks.
    settings
        See :class:`StorageSettings`.
    synchronous
        Do everything before the call that asks for it returns.

    Attributes
    ----------
    page_get_func, page_set_func
        How pages move: zero-copy for a :class:`HiCacheStorage`, by tensors for any other backend, not at all without.
    changes
        How many times a backend was attached or let go.
    """

    def __init__(
        self, engine: L2TransferEngine, agreement: Agreement, *, settings: StorageSettings, synchronous: bool
    ) -> None:
        self.settings = settings
        self.page_get_func: PageGet = no_page_get
        self.page_set_func: PageSet = no_page_set
        self._engine = engine
        self._metrics = engine.metrics
        self._agreement = agreement
        self._synchronous = synchronous
        self._lock = threading.RLock()
        self._attached: _Attached | None = None
        self._listener: RemovalListener | None = None
        self.changes = 0
        self._pools: dict[str, Any] = {}
        self._backups: deque[BackupOperation] = deque()
        self._prefetches: list[PrefetchOperation] = []
        self._quiet_until = 0.0
        self._overdue_lookup: _Lookup | None = None
        self._overdue_backup: BackupOperation | None = None
        self._metrics.gauge("backup_queue_pages", lambda: self._depth("backups"))
        self._metrics.gauge("prefetch_queue_pages", lambda: self._depth("prefetches"))

    # Backend

    @property
    def attached(self) -> bool:
        """Whether there is a backend."""
        return self._attached is not None

    @property
    def backend(self) -> StorageBackend | None:
        """The backend, or None."""
        attached = self._attached
        return None if attached is None else attached.backend

    def attach(self, backend: StorageBackend, anchor_pool: Any, sidecars: Mapping[str, Any]) -> None:
        """Register the pools with ``backend`` and start its threads; nothing changed where that raises.

        RuntimeError where there is one, or where this one tells its removals to somebody else than the tree.
        """
        with self._lock:
            if self._attached is not None:
                raise RuntimeError("a storage backend is attached; detach_storage_backend must come first")
            with ExitStack() as undo:
                if self._listener is not None and isinstance(backend, HiCacheStorage):
                    backend.set_removal_listener(self._listener)
                    undo.callback(backend.set_removal_listener, None)
                pools = {ANCHOR: anchor_pool, **sidecars}
                backend.register_mem_pool_host(anchor_pool)
                for name, pool in sidecars.items():
                    backend.register_mem_pool_host(pool, name=name)
                if isinstance(backend, HiCacheStorage):
                    page_get, page_set = zero_copy_page_functions(backend)
                else:
                    page_get, page_set = generic_page_functions(backend, pools.__getitem__)
                self._attached = self._start(backend, page_get, page_set)
                undo.pop_all()
            self._pools = pools
            self.page_get_func, self.page_set_func = page_get, page_set
            self._quiet_until, self._overdue_lookup = 0.0, None
            self.changes += 1

    def follow_removals(self, listener: RemovalListener) -> None:
        """Have a listener told what any backend removes on its own for as long as it is attached, this one and later.

        It takes the place of the one before, as no more than one tree uses a controller; but RuntimeError where a
        storage that is attached tells another.
        """
        with self._lock:
            if isinstance(self.backend, HiCacheStorage):
                self.backend.set_removal_listener(listener)
            self._listener = listener

    def register_sidecar(self, name: str, pool: Any) -> None:
        """Let an attached backend know a pool that came later."""
        with self._lock:
            if self._attached is not None:
                self._attached.backend.register_mem_pool_host(pool, name=name)
                self._pools[name] = pool

    def detach(self) -> StorageBackend:
        """Finish the backups that wait, cancel the prefetches, stop the threads, and return the backend."""
        with self._lock:
            attached = self._attached
            if attached is None:
                raise RuntimeError("no storage backend is attached")
            self._stop(attached, self.settings.timeout_seconds, finish_backups=True)
            return attached.backend

    def close(self, timeout: float) -> bool:
        """Stop; backups that have not started fail. Tell whether the threads ended in time."""
        with self._lock:
            return self._attached is None or self._stop(self._attached, timeout, finish_backups=False)

    def drain(self) -> None:
        """Wait until nothing waits or runs, at most the storage timeout; prefetches are cancelled."""
        with self._lock:
            if self._attached is not None:
                self._cancel_prefetches()
                for thread in self._attached.threads:
                    thread.drain(self.settings.timeout_seconds)

    def forget(self) -> None:
        """Drop the acks that nobody has asked for."""
        with self._lock:
            self._backups.clear()
            self._prefetches.clear()

    # Lookup

    def exists(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer] = ()) -> int:
        """Return the leading pages of which storage has all that the pools need, on every rank."""
        return self._agreement.smallest([self._exists(keys, transfers)])[0]

    def _exists(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer]) -> int:
        attached = self._attached
        if attached is None or not keys or time.monotonic() < self._quiet_until:
            return 0
        if self._overdue_lookup is not None and not self._overdue_lookup.host_ready.query():
            return 0
        self._overdue_lookup = None
        lookup = _Lookup(keys, transfers)
        if not attached.lookups.submit(lookup, timeout=0):
            return 0
        if not lookup.host_ready.synchronize(self.settings.timeout_seconds):
            self._metrics.count("storage_timeouts", operation="exists")
            self._quiet_until = time.monotonic() + self.settings.back_off_seconds
            self._overdue_lookup = lookup
            logger.warning(
                "storage did not answer within %s s; nothing is looked up for %s s",
                self.settings.timeout_seconds,
                self.settings.back_off_seconds,
            )
            return 0
        if lookup.error is not None:
            self._metrics.count("storage_errors", operation="exists")
            return 0
        return min(lookup.found, len(keys))

    # Backup

    def backup(
        self, parts: Sequence[StoragePart], node_id: int, uses: Sequence[Use], error: Exception | None = None
    ) -> None:
        """Queue pages for storage, or with an error only its ack; see :meth:`HiCacheController.backup`."""
        attached = self._need_backend()
        accesses = (Access.WRITE,) if self._engine.guards.read_follows_write else ()
        before = self._engine.predecessors([(use, accesses) for use in uses])
        operation = BackupOperation(parts, node_id, before.events, before.sources)
        self._backups.append(operation)
        try:
            if error is not None:
                operation.error = error
                operation.host_ready.fire()
            elif not self._submit(attached.backups, operation, uses, self.settings.timeout_seconds):
                self._metrics.count("backup_dropped_pages", operation.pages)
                operation.error = RuntimeError(
                    f"the backup queue of {self.settings.backup_queue_pages} pages stayed full for "
                    f"{self.settings.timeout_seconds} s"
                )
                operation.host_ready.fire()
        except BaseException:
            # Where waiting for room was interrupted, no ack comes.
            self._backups.remove(operation)
            raise

    def poll_backups(self, wait: bool) -> list[StorageAck]:
        """Return the acks of the backups that are done, in order, on every rank.

        ``wait`` blocks for the first of them, once, and no longer than pages get stored: the storage timeout for each
        batch.
        """
        if not self._backups:
            return []
        if wait:
            self._wait_for_backup(self._backups[0])
        done = 0
        while done < len(self._backups) and self._backups[done].done:
            done += 1
        if self._agreement.needed:
            done = self._agreement.smallest([done])[0]
        operations = [self._backups.popleft() for _ in range(done)]
        stored = [operation.stored_pages for operation in operations]
        if self._agreement.needed and done:
            stored = self._agreement.smallest(stored)
        for operation, pages in zip(operations, stored, strict=True):
            operation.stored_pages = pages
        return [operation.ack() for operation in operations]

    def _wait_for_backup(self, backup: BackupOperation) -> None:
        """Wait for a backup as long as pages get stored, but not again where none was within the storage timeout."""
        if backup is self._overdue_backup:
            return
        seen = -1
        while backup.stored_pages > seen:
            seen = backup.stored_pages
            if interruptibly(lambda: backup.host_ready.synchronize(self.settings.timeout_seconds)):
                return
        self._overdue_backup = backup
        self._metrics.count("storage_timeouts", operation="backup")
        logger.warning("storage took no page within %s s; its backup is not waited for", self.settings.timeout_seconds)

    # Prefetch

    def prefetch(self, parts: Sequence[StoragePart], request_id: str, uses: Sequence[Use]) -> PrefetchOperation:
        """Queue pages to come from storage; see :meth:`HiCacheController.prefetch`."""
        attached = self._need_backend()
        operation = PrefetchOperation(
            parts,
            request_id,
            agreement=self._agreement,
            after=self._engine.events_of_users([(use, (Access.READ, Access.WRITE)) for use in uses]),
            deadline_seconds=self.settings.timeout_seconds,
        )
        if not parts:
            operation.host_ready.fire()
        elif self._submit(attached.prefetches, operation, uses, 0):
            self._prefetches = [each for each in self._prefetches if not each.done]
            self._prefetches.append(operation)
        else:
            self._metrics.count("prefetch_dropped_pages", operation.pages)
            operation.error = RuntimeError(f"the prefetch queue of {self.settings.prefetch_queue_pages} pages is full")
            operation.host_ready.fire()
        return operation

    def ready(self, operation: PrefetchOperation) -> bool:
        """Tell whether the policy lets the request go now, on every rank."""
        policy = PrefetchPolicy(self.settings.prefetch_policy)
        if policy is PrefetchPolicy.BEST_EFFORT:
            return True
        over = operation.done
        if policy is PrefetchPolicy.TIMEOUT:
            over = over or time.monotonic() - operation.began >= self._time_of(operation)
        return bool(self._agreement.smallest([int(over)])[0])

    def finish(self, operation: PrefetchOperation) -> int:
        """Wait as long as the policy says, cancel what is left, and return the pages that came."""
        policy = PrefetchPolicy(self.settings.prefetch_policy)
        if policy is PrefetchPolicy.BEST_EFFORT:
            operation.cancel()
        elif policy is PrefetchPolicy.TIMEOUT:
            return operation.wait(max(0.0, operation.began + self._time_of(operation) - time.monotonic()))
        return operation.wait()

    # Inside

    def _time_of(self, operation: PrefetchOperation) -> float:
        settings = self.settings
        return settings.prefetch_timeout_seconds + settings.prefetch_timeout_seconds_per_page * operation.pages

    def _need_backend(self) -> _Attached:
        if self._attached is None:
            raise RuntimeError("no storage backend is attached; attach_storage_backend must come first")
        return self._attached

    def _submit(self, thread: StorageThread[Any], operation: StorageTask, uses: Sequence[Use], timeout: float) -> bool:
        if not self._synchronous:
            self._engine.in_flight.add(operation, uses)
        try:
            return thread.submit(operation, timeout=timeout)
        finally:
            if not operation.queued:
                self._engine.in_flight.remove(operation)

    def _start(self, backend: StorageBackend, page_get: PageGet, page_set: PageSet) -> _Attached:
        settings = self.settings
        mover = StorageMover(
            page_get,
            page_set,
            self._metrics,
            batch_pages=settings.batch_pages,
            retries=settings.backup_retries,
            retry_seconds=0 if self._synchronous else settings.retry_seconds,
        )

        def look_up(task: _Lookup) -> None:
            if not task.transfers:
                task.found = backend.batch_exists(task.keys)
            elif isinstance(backend, HiCacheStorage):
                # A generic backend knows no hit policies, so with further pools it has no hits.
                task.found = backend.batch_exists_pools(task.keys, task.transfers)

        backups: StorageThread[BackupOperation] = StorageThread(
            "hicache-backup",
            lambda task: mover.backup(task, backups.stopping),
            self._engine.in_flight.remove,
            queue_pages=settings.backup_queue_pages,
            synchronous=self._synchronous,
        )
        prefetches: StorageThread[PrefetchOperation] = StorageThread(
            "hicache-prefetch",
            lambda task: mover.prefetch(task, prefetches.stopping),
            self._engine.in_flight.remove,
            queue_pages=settings.prefetch_queue_pages,
            synchronous=self._synchronous,
        )
        lookups: StorageThread[_Lookup] = StorageThread(
            "hicache-lookup",
            look_up,
            lambda task: None,
            queue_pages=settings.prefetch_queue_pages,
            synchronous=self._synchronous,
        )
        return _Attached(backend, mover, backups, prefetches, lookups)

    def _stop(self, attached: _Attached, timeout: float, *, finish_backups: bool) -> bool:
        self._cancel_prefetches()
        if finish_backups:
            attached.backups.drain(timeout)
        stopped = [thread.close(timeout) for thread in attached.threads]
        self._backups = deque(each if each.done else _given_up(each) for each in self._backups)
        if self._listener is not None and isinstance(attached.backend, HiCacheStorage):
            attached.backend.set_removal_listener(None)
        self.changes += 1
        self._attached = None
        self._pools = {}
        self.page_get_func, self.page_set_func = no_page_get, no_page_set
        if not all(stopped):
            logger.warning("storage did not answer within %s s; its slots stay in flight until it does", timeout)
        return all(stopped)

    def _cancel_prefetches(self) -> None:
        for operation in self._prefetches:
            operation.cancel()
        self._prefetches = [each for each in self._prefetches if not each.done]

    def _depth(self, which: str) -> float:
        attached = self._attached
        if attached is None:
            return 0
        return attached.backups.depth if which == "backups" else attached.prefetches.depth
