"""StorageLink: a controller's tie to a storage backend, from attach to detach."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hicache_kernels.validation import seconds, whole
from hicache_pools.pool_transfer import PoolTransfer

from .agreement import Agreement
from .failure_log import LogLimit
from .in_flight import Access, PageUse
from .interrupts import interruptibly
from .operations import StorageAck
from .storage.base import HiCacheStorage, RemovalListener
from .storage_lookup import StorageLookup
from .storage_tasks import BackupOperation, PrefetchOperation, StoragePart, StorageTask, given_up
from .storage_worker import (
    ANCHOR,
    PageGet,
    PageSet,
    PrefetchPolicy,
    StorageBackend,
    StorageMover,
    StorageThread,
    generic_page_functions,
    no_page_get,
    no_page_set,
    zero_copy_page_functions,
)
from .transfer_engine import L2TransferEngine
from .wait_bound import WaitBound

logger = logging.getLogger(__name__)

LOG_SECONDS = 60.0
"""How often it is logged that storage is too slow, at most."""


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
        Pages of one call to storage: what is in use until it ends, of a backup or prefetch that is given up.
    backup_queue_pages, prefetch_queue_pages
        Most pages waiting. A backup that finds no room within ``max_wait_seconds`` is dropped and counted; a prefetch
        that finds none ends with 0 pages.
    backup_retries, retry_seconds
        Further attempts at a page that could not be stored; pause before the first, doubled for each further one.
    max_wait_seconds
        Longest that one call of the scheduler's thread waits for storage, in sum; 0: it never waits. What storage has
        not answered by then is a miss, and what it has not taken is dropped where its place on the host is needed.
    timeout_seconds
        Longest that calls wait whose purpose it is, where they are given no ``timeout``. Backups are waited for as long
        as another page is stored within that time.
    back_off_seconds
        Longest pause in which nothing is looked up, behind a lookup that took too long. Pauses double up to that.
    """

    prefetch_policy: PrefetchPolicy | str = PrefetchPolicy.BEST_EFFORT
    prefetch_timeout_seconds: float = 1.0
    prefetch_timeout_seconds_per_page: float = 0.01
    batch_pages: int = 64
    backup_queue_pages: int = 16384
    prefetch_queue_pages: int = 65536
    backup_retries: int = 2
    retry_seconds: float = 0.05
    max_wait_seconds: float = 0.02
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
            "max_wait_seconds",
            "back_off_seconds",
        ):
            seconds(name, getattr(self, name))


@dataclass(frozen=True, eq=False)
class _Attached:
    """Everything that comes and goes with a backend."""

    backend: StorageBackend
    mover: StorageMover
    backups: StorageThread[BackupOperation]
    prefetches: StorageThread[PrefetchOperation]
    lookup: StorageLookup

    @property
    def threads(self) -> tuple[StorageThread[Any], ...]:
        """All of them."""
        return self.backups, self.prefetches, self.lookup.thread


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
        self._bound: WaitBound | None = None
        self._in_vain = (0.0, -1)  # seconds that backups were waited for, and the calls that storage had ended by then
        self._logs = LogLimit(LOG_SECONDS)
        self._metrics.gauge("backup_queue_pages", lambda: self._depth("backups"))
        self._metrics.gauge("prefetch_queue_pages", lambda: self._depth("prefetches"))

    # Waiting

    @contextmanager
    def one_call(self, timeout: float | None = None) -> Iterator[WaitBound]:
        """Bound what is waited for storage in this block, in sum, by ``timeout`` or the setting ``max_wait_seconds``.

        Without ``timeout``, the bound of a block around this one holds.
        """
        outer = self._bound
        bound = outer
        if bound is None or timeout is not None:
            bound = WaitBound(self.settings.max_wait_seconds if timeout is None else timeout)
        try:
            self._bound = bound
            yield bound
        finally:
            self._bound = outer

    def skipped(self, pages: int, pool: str = ANCHOR) -> None:
        """Count pages that storage does not get as it was too slow for them, and log that once in a while."""
        self._metrics.count("backup_skipped_pages", pages, pool=pool)
        if pages and self._logs.due("skipped"):
            total = self._metrics.snapshot().total("backup_skipped_pages")
            logger.warning("storage is slower than pages come; %d were dropped so far before it had taken them", total)

    def _skip(self, backup: BackupOperation) -> None:
        for part in backup.parts[:1] + backup.trailing_parts:
            self.skipped(len(part.keys), part.name)

    def _patience(self, bound: WaitBound) -> float:
        """Seconds to wait for backups: none after as long a wait that ran out, until storage has ended another call."""
        seconds = min(bound.left(), self.settings.timeout_seconds)
        waited, calls = self._in_vain
        return 0.0 if calls == self._backup_calls() and seconds <= waited else seconds

    def _backup_calls(self) -> int:
        return 0 if self._attached is None else self._attached.mover.backup_calls

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
            self._in_vain = (0.0, -1)
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

    def detach(self, timeout: float | None = None) -> StorageBackend:
        """Finish the backups that wait, cancel the prefetches, stop the threads, and return the backend."""
        with self._lock:
            attached = self._attached
            if attached is None:
                raise RuntimeError("no storage backend is attached")
            self._stop(attached, self.settings.timeout_seconds if timeout is None else timeout, finish_backups=True)
            return attached.backend

    def close(self, timeout: float) -> bool:
        """Stop; backups that have not started fail. Tell whether the threads ended in time."""
        with self._lock:
            return self._attached is None or self._stop(self._attached, timeout, finish_backups=False)

    def give_up(self, timeout: float) -> bool:
        """Cancel all backups and prefetches, and wait for the calls that run; tell whether they ended in time."""
        with self._lock:
            if self._attached is None:
                return True
            bound = WaitBound(timeout)
            self._cancel_prefetches()
            for backup in list(self._backups):
                self.cancel_backup(backup.node_id)
            return all(thread.drain(bound.left()) for thread in (self._attached.backups, self._attached.prefetches))

    def forget(self) -> None:
        """Drop the acks that nobody has asked for."""
        with self._lock:
            self._backups.clear()
            self._prefetches.clear()

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
        attached = self._need_backend()
        accesses = (Access.WRITE,) if self._engine.guards.read_follows_write else ()
        before = self._engine.predecessors([(use, accesses) for use in uses])
        operation = BackupOperation(parts, node_id, before.events, before.writers, uses)
        self._backups.append(operation)
        try:
            if error is not None:
                operation.error = error
                operation.host_ready.fire()
                return
            with self.one_call() as bound:
                patience, calls = self._patience(bound), self._backup_calls()
                if self._submit(attached.backups, operation, patience):
                    return
            if patience:
                self._in_vain = (patience, calls)
            self._skip(operation)
            operation.error = RuntimeError(
                f"the backup queue of {self.settings.backup_queue_pages} pages stayed full for {patience} s"
            )
            operation.host_ready.fire()
        except BaseException:
            # Where waiting for room was interrupted, no ack comes.
            self._backups.remove(operation)
            raise

    def poll_backups(self, wait: bool) -> list[StorageAck]:
        """Return the acks of the backups that are done, in order, on every rank.

        ``wait`` blocks for the first of them, within the bound of :meth:`one_call` and only as long as storage gets on.
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

    def cancel_backup(self, node_id: int) -> bool:
        """Cancel a node's backups; see :meth:`HiCacheController.cancel_backup`."""
        found = [backup for backup in self._backups if backup.node_id == node_id]
        for backup in found:
            self._backups.remove(backup)
            backup.cancel()
            if self._attached is not None and self._attached.backups.withdraw(backup):
                self._skip(backup)
        return bool(found)

    def _wait_for_backup(self, backup: BackupOperation) -> None:
        """Wait for a backup while storage ends calls, each within the storage timeout, and the bound lets it."""
        with self.one_call() as bound:
            calls = -1
            while calls != self._backup_calls():
                patience, calls = self._patience(bound), self._backup_calls()
                if backup.done or not patience:
                    return
                if interruptibly(partial(backup.host_ready.synchronize, patience)):
                    return
        self._in_vain = (patience, calls)
        self._metrics.count("storage_timeouts", operation="backup")
        if self._logs.due("backup"):
            logger.warning("storage took no page within %s s; its backup is not waited for", patience)

    # Prefetch

    def prefetch(self, parts: Sequence[StoragePart], request_id: str, uses: Sequence[PageUse]) -> PrefetchOperation:
        """Queue pages to come from storage; see :meth:`HiCacheController.prefetch`."""
        attached = self._need_backend()
        operation = PrefetchOperation(
            parts,
            request_id,
            agreement=self._agreement,
            after=self._engine.events_of_users([(use, (Access.READ, Access.WRITE)) for use in uses]),
            uses=uses,
            deadline_seconds=self.settings.timeout_seconds,
        )
        if not parts:
            operation.host_ready.fire()
        elif self._submit(attached.prefetches, operation, 0):
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
        now = time.monotonic()
        over = operation.done or now - operation.moved_at >= self.settings.timeout_seconds
        if policy is PrefetchPolicy.TIMEOUT:
            over = over or now - operation.began >= self._time_of(operation)
        return bool(self._agreement.smallest([int(over)])[0])

    def finish(self, operation: PrefetchOperation) -> int:
        """Wait as long as policy and bound say, cancel what is left, and return the pages that came."""
        policy = PrefetchPolicy(self.settings.prefetch_policy)
        if policy is PrefetchPolicy.BEST_EFFORT:
            operation.cancel()
            self._withdraw(operation)
        with self.one_call() as bound:
            seconds = bound.left()
            if policy is PrefetchPolicy.TIMEOUT:
                time_left = operation.began + self._time_of(operation) - time.monotonic()
                seconds = min(seconds, max(0.0, time_left))
            pages = operation.wait(seconds)
        self._withdraw(operation)
        return pages

    # Inside

    def _time_of(self, operation: PrefetchOperation) -> float:
        settings = self.settings
        return settings.prefetch_timeout_seconds + settings.prefetch_timeout_seconds_per_page * operation.pages

    def _need_backend(self) -> _Attached:
        if self._attached is None:
            raise RuntimeError("no storage backend is attached; attach_storage_backend must come first")
        return self._attached

    def _withdraw(self, operation: PrefetchOperation) -> None:
        """Take a prefetch that was cancelled out of the queue, if it is there still."""
        if self._attached is not None and operation.cancelled:
            self._attached.prefetches.withdraw(operation)

    def _submit(self, thread: StorageThread[Any], operation: StorageTask, timeout: float) -> bool:
        if not self._synchronous:
            operation.put_in_flight(self._engine.in_flight)
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
            skipped=self.skipped,
        )

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
        lookup = StorageLookup(
            backend,
            self._metrics,
            self._logs,
            queue_pages=settings.prefetch_queue_pages,
            synchronous=self._synchronous,
            back_off_seconds=settings.back_off_seconds,
        )
        return _Attached(backend, mover, backups, prefetches, lookup)

    def _stop(self, attached: _Attached, timeout: float, *, finish_backups: bool) -> bool:
        bound = WaitBound(timeout)
        self._cancel_prefetches()
        if finish_backups:
            attached.backups.drain(bound.left())
        for thread in attached.threads:
            thread.stop()
        stopped = [thread.close(bound.left()) for thread in attached.threads]
        self._backups = deque(each if each.done else given_up(each) for each in self._backups)
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
