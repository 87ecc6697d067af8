"""What storage workers run: backups, prefetches and lookups, their calls, and the host pages that these use now."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch

from hicache_pools.pool_transfer import PoolHitPolicy, PoolTransfer

from .agreement import Agreement
from .events import HostSignal
from .failure_log import LogLimit
from .in_flight import InFlight, PageUse
from .metrics import Metrics
from .operations import OperationCancelledError, StorageAck
from .storage.backoff import Backoff
from .storage.base import HiCacheStorage
from .storage.generic import TensorPages
from .storage_settings import StorageSettings
from .transfer_handle import InFlightOperation, Writer
from .wait_bound import WaitBound, checked_timeout
from .worker import Worker

logger = logging.getLogger(__name__)


class StoragePart(NamedTuple):
    """One pool's pages in a storage operation.

    Attributes
    ----------
    name
        Of the pool in the storage.
    keys
        One a page.
    host_indices
        int64 or int32 slots on CPU, whole pages in the order of ``keys``.
    parents
        For each page the key of the page before it, None for a first page; None where pages are independent.
    hit_policy
        Whether there is a part for each of the anchor's pages, or one for the last pages only.
    """

    name: str
    keys: Sequence[bytes]
    host_indices: torch.Tensor
    parents: Sequence[bytes | None] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES

    @property
    def trailing(self) -> bool:
        """Whether it is for the last pages only."""
        return self.hit_policy is PoolHitPolicy.TRAILING_PAGES

    def batch(self, start: int, end: int) -> StoragePart:
        """Cut out a range of its pages."""
        page_size = len(self.host_indices) // max(1, len(self.keys))
        return self._replace(
            keys=self.keys[start:end],
            host_indices=self.host_indices[start * page_size : end * page_size],
            parents=None if self.parents is None else self.parents[start:end],
        )


@dataclass(eq=False)
class StorageCalls:
    """Calls to one storage, which the operations of both directions make: counted, timed and never raising.

    Attributes
    ----------
    store, metrics
        The storage, and where to count.
    agreement
        Of the ranks.
    settings
        Pages a call, and attempts at a page.
    skipped
        Called with the pages of a pool that a cancelled backup has not stored, and the pool's name.
    stopping
        Set once operations are to end after the call that runs.
    backups
        Calls to store pages that have ended, which shows whether storage makes progress.
    """

    store: HiCacheStorage | TensorPages
    metrics: Metrics
    agreement: Agreement
    settings: StorageSettings
    skipped: Callable[[int, str], None]
    stopping: threading.Event = field(default_factory=threading.Event)
    backups: int = 0

    def save(self, part: StoragePart) -> int:
        """Store pages; return how many leading ones are stored, 0 where the storage raises."""
        stored = self._leading("backup", self.store.batch_set, part, parents=part.parents)
        self.backups += 1
        return stored

    def fetch(self, part: StoragePart) -> int:
        """Fill host pages; return how many leading ones are there, 0 where the storage raises."""
        return self._leading("prefetch", self.store.batch_get, part)

    def _leading(self, operation: str, call: Callable[..., list[bool]], part: StoragePart, **options: Any) -> int:
        began = time.perf_counter()
        try:
            moved = call(part.keys, part.host_indices, name=part.name, **options)
        except Exception:
            self.metrics.count("storage_errors", operation=operation)
            logger.debug("storage failed to %s pages", operation, exc_info=True)
            return 0
        finally:
            self.metrics.observe("storage_seconds", time.perf_counter() - began, operation=operation)
        pages = moved.index(False) if False in moved else len(moved)
        self.metrics.count("storage_pages", pages, operation=operation, pool=part.name)
        return pages


@dataclass(eq=False, kw_only=True, repr=False)
class StorageTask(InFlightOperation):
    """Host pages that a storage worker reads or writes; in flight until its signal fires.

    Once it is cancelled, only the pages of the call that runs are in flight: it makes no other.

    Attributes
    ----------
    calls, worker
        To the storage, and what makes them.
    parts
        One a pool, the anchor's first; none where this rank had no room.
    uses
        What each part does with its slots.
    writers
        Transfers that write what it reads.
    error
        What ended it, or None.
    cancelled
        Whether it is to stop after the batch that moves now.
    moved_pages, moved_at
        Leading pages moved so far, in every pool that has a part for each; and when the last came, in
        ``time.monotonic``.
    """

    calls: StorageCalls
    worker: Worker
    parts: Sequence[StoragePart] = ()
    uses: Sequence[PageUse] = ()
    writers: InitVar[Sequence[Writer]] = ()
    host_ready: HostSignal = field(default_factory=HostSignal, init=False)
    error: BaseException | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)
    moved_pages: int = field(default=0, init=False)
    moved_at: float = field(default_factory=time.monotonic, init=False)
    _in_flight: InFlight[Any] | None = field(default=None, init=False)
    _running: slice | None = field(default=None, init=False)

    def __post_init__(self, writers: Sequence[Writer]) -> None:
        super().__init__(writers)

    @property
    def whole_parts(self) -> list[StoragePart]:
        """Parts of the pools that have one for each page."""
        return [part for part in self.parts if not part.trailing]

    @property
    def trailing_parts(self) -> list[StoragePart]:
        """Parts of the pools that have one for the last pages."""
        return [part for part in self.parts if part.trailing]

    @property
    def pages(self) -> int:
        """Pages of the anchor."""
        return len(self.parts[0].keys) if self.parts else 0

    def put_in_flight(self, in_flight: InFlight[Any]) -> None:
        """Note its slots there until it ends."""
        in_flight.add(self, self.uses)
        self._in_flight = in_flight

    def run(self) -> None:
        """Do the work; what it raises becomes its error."""
        try:
            self.check_writers()
            self._move()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):
                raise
            logger.debug("a storage operation failed", exc_info=True)
        finally:
            self._end()

    def abandon(self, error: Exception) -> None:
        """End without having started."""
        self.cancelled = True
        self.error = error
        self._end()

    def cancel(self) -> None:
        """Let it make no more calls to storage; slots that the running call does not use are no longer in flight.

        No lock is needed, as this sets ``cancelled`` before it reads which call runs, and :meth:`_begin_call` the other
        way round: one of the two sees the other.
        """
        self.cancelled = True
        if self._in_flight is not None:
            self._in_flight.narrow(self, self._uses_of_call())

    def withdraw(self) -> bool:
        """End it where it was cancelled and still waits in its worker's queue; return whether it did."""
        waited = self.cancelled and self.worker.withdraw(self)
        if waited:
            self.abandon(OperationCancelledError("the operation was cancelled before it could start"))
        return waited

    def _move(self) -> None:
        """Make the calls to storage."""
        raise NotImplementedError

    def _move_pages(self, move: Callable[[StoragePart], int], count: Callable[[int], None]) -> bool:
        """Move pages in order, in every whole part, until it has to stop; return False at one that does not move."""
        calls = self.calls
        while self.moved_pages < self.pages and not calls.stopping.is_set():
            start = self.moved_pages
            end = min(start + calls.settings.batch_pages, self.pages)
            if not self._begin_call(slice(start, end)):
                break
            moved = min(move(part.batch(start, end)) for part in self.whole_parts)
            self.moved_pages += moved
            self.moved_at = time.monotonic()
            count(moved)
            if moved < end - start:
                return False
        return True

    def _begin_call(self, pages: slice) -> bool:
        """Note that storage is about to use these pages of every whole part; return False where it must not any more.

        ``slice(None)``: all pages of all parts.
        """
        self._running = pages
        return not self.cancelled

    def _uses_of_call(self) -> list[PageUse]:
        pages = self._running
        if pages is None:
            return []
        if pages == slice(None):
            return list(self.uses)
        return [
            use if use.pages is None else use._replace(pages=use.pages[pages])
            for part, use in zip(self.parts, self.uses, strict=True)
            if not part.trailing
        ]

    def _end(self) -> None:
        if self._in_flight is not None:
            self._in_flight.remove(self)
        self.host_ready.fire()


@dataclass(eq=False, kw_only=True, repr=False)
class BackupOperation(StorageTask):
    """Pages on their way to storage.

    Attributes
    ----------
    node_id
        As given to ``backup``.
    pool_pages
        Leading ones of the last pages stored so far of each other pool.
    """

    node_id: int
    pool_pages: dict[str, int] = field(default_factory=dict, init=False)

    def ack(self, stored_pages: int) -> StorageAck:
        """Return what became of it, where the storage of every rank has so many of its pages."""
        error = self.error
        if error is None and stored_pages < self.pages:
            error = RuntimeError(f"storage took {stored_pages} of {self.pages} pages")
        return StorageAck(self.node_id, stored_pages, error, self.pool_pages)

    def detached(self) -> BackupOperation:
        """Return one that has failed, to replace it: acks come in order, and the storage it waits for was detached."""
        failed = BackupOperation(node_id=self.node_id, calls=self.calls, worker=self.worker)
        failed.abandon(RuntimeError("the storage was detached before it had taken the pages"))
        return failed

    def _move(self) -> None:
        """Store pages in order; none after a page that cannot be stored, as it could never be found."""
        self._move_pages(self._store, lambda pages: self.calls.metrics.count("backup_pages", pages))
        if self.moved_pages < self.pages:
            self._count_missing(self.parts[0], self.pages - self.moved_pages)
            return
        for part in self.trailing_parts:
            # In flight as a whole meanwhile: the slots of a pool that shares others' are free once those are.
            stored = self._store(part) if self._begin_call(slice(None)) else 0
            self.pool_pages[part.name] = stored
            if stored < len(part.keys):
                self._count_missing(part, len(part.keys))
                self.error = RuntimeError(f"storage did not take the last pages of pool {part.name}")

    def _store(self, part: StoragePart) -> int:
        """Store pages of one pool, and try again those that fail; return how many leading ones are stored."""
        calls = self.calls
        done = attempts = 0
        while True:
            stored = calls.save(part.batch(done, len(part.keys)))
            done += stored
            attempts = 1 if stored else attempts + 1
            if done == len(part.keys) or self.cancelled or attempts > calls.settings.backup_retries:
                return done
            if calls.stopping.wait(calls.settings.retry_seconds * 2 ** (attempts - 1)) or self.cancelled:
                return done
            calls.metrics.count("backup_retries")

    def _count_missing(self, part: StoragePart, pages: int) -> None:
        if self.cancelled:
            self.calls.skipped(pages, part.name)
        else:
            self.calls.metrics.count("backup_failed_pages", pages)


@dataclass(eq=False, kw_only=True, repr=False)
class PrefetchOperation(StorageTask):
    """Pages on their way from storage to the host.

    Attributes
    ----------
    request_id
        As given to ``prefetch``.
    began
        When it was queued, in ``time.monotonic``.
    """

    request_id: str
    began: float = field(default_factory=time.monotonic, init=False)
    _agreed: int | None = field(default=None, init=False)

    @property
    def completed_pages(self) -> int:
        """Leading pages whose bytes are there, in every pool, up to a hole; once :meth:`wait` is over, of all ranks.

        Where a pool has a part for the last pages only, a shorter prefix is of no use: all pages count, or none.
        """
        return self._usable() if self._agreed is None else self._agreed

    def wait(self, timeout: float | None = None) -> int:
        """Block until it is over, agree with the other ranks, and return :attr:`completed_pages`.

        Each rank of a group has to call this, once, for each of its prefetches, in one order.

        Parameters
        ----------
        timeout
            Seconds to wait for this rank's storage, by default its ``timeout_seconds``; then it is cancelled, and what
            has come counts. Of a storage that hangs, the slots of its call stay in flight until that ends.
        """
        if self._agreed is None:
            timeout = checked_timeout(timeout)
            if not self.host_ready.synchronize(self.calls.settings.timeout_seconds if timeout is None else timeout):
                self.cancel()
            self._agreed = self.calls.agreement.smallest([self._usable()])[0]
        return self._agreed

    def _move(self) -> None:
        """Fetch pages in order up to the first that is missing in any pool."""
        calls = self.calls
        # Without its last pages a prefix is of no use, so nothing else is fetched then.
        complete = all(
            self._begin_call(slice(None)) and calls.fetch(part) == len(part.keys) for part in self.trailing_parts
        )
        complete = complete and self._move_pages(
            calls.fetch, lambda pages: calls.metrics.count("prefetch_pages", pages)
        )
        left = self.pages - self.moved_pages
        if not complete and not self.cancelled:
            calls.metrics.count("prefetch_missing_pages", left)
        elif left:
            calls.metrics.count("prefetch_cancelled")

    def _usable(self) -> int:
        return self.moved_pages if self.moved_pages == self.pages or not self.trailing_parts else 0


@dataclass(eq=False, kw_only=True, repr=False)
class _Lookup(StorageTask):
    """A question to storage: which prefixes of some keys it can restore, in pages."""

    keys: Sequence[bytes]
    transfers: Sequence[PoolTransfer]
    found: Sequence[int] = ()

    def _move(self) -> None:
        self.found = self.calls.store.restorable_lengths(self.keys, self.transfers)


class StorageLookup:
    """Lookups in one storage, on a worker of their own.

    While a lookup that took too long has no answer, and in a pause after it, callers that would wait no longer than it
    was waited for get a miss at once.

    Parameters
    ----------
    calls
        The storage that is asked, and the settings.
    worker
        Where it is asked.
    logs
        What keeps the log short.
    """

    def __init__(self, calls: StorageCalls, worker: Worker, logs: LogLimit) -> None:
        self._calls = calls
        self.worker = worker
        self._logs = logs
        limit = calls.settings.back_off_seconds
        self._pause = Backoff(time.monotonic, first=min(0.1, limit), limit=limit)
        self._overdue: _Lookup | None = None
        self._in_vain = 0.0

    def lengths(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer], bound: WaitBound) -> Sequence[int]:
        """Return every number of leading pages of which storage has all that the pools need; none if it is too slow."""
        patience = bound.left()
        if patience <= self._in_vain and (self._pause.active or self._is_out(0)):
            return ()
        if self._is_out(patience):
            self._in_vain = patience
            return ()
        lookup = _Lookup(calls=self._calls, worker=self.worker, keys=keys, transfers=transfers)
        if not self.worker.submit(lookup):
            return ()
        if not lookup.host_ready.synchronize(bound.left()):
            self._note_overdue(lookup, patience)
            return ()
        self._pause.succeeded()
        self._overdue, self._in_vain = None, 0.0
        if lookup.error is not None:
            self._calls.metrics.count("storage_errors", operation="exists")
            return ()
        return lookup.found

    def _is_out(self, patience: float) -> bool:
        """Return whether a lookup that took too long still has no answer, after waiting for it."""
        return self._overdue is not None and not self._overdue.host_ready.synchronize(patience)

    def _note_overdue(self, lookup: _Lookup, patience: float) -> None:
        self._overdue, self._in_vain = lookup, patience
        self._calls.metrics.count("storage_timeouts", operation="exists")
        self._pause.failed()
        if self._logs.due("exists"):
            pause = self._calls.settings.back_off_seconds
            logger.warning("storage did not answer within %s s; nothing is looked up for up to %s s", patience, pause)
