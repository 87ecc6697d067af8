"""StorageLookup: asks a storage which prefixes it has, for callers that cannot wait for one that is slow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from hicache_pools.pool_transfer import PoolTransfer

from .failure_log import LogLimit
from .metrics import Metrics
from .storage.backoff import Backoff
from .storage.base import HiCacheStorage
from .storage_tasks import StorageTask
from .storage_worker import StorageBackend, StorageThread
from .wait_bound import WaitBound

logger = logging.getLogger(__name__)


class _Lookup(StorageTask):
    """A question to storage: which prefixes of some keys it can restore, in pages."""

    def __init__(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer]) -> None:
        super().__init__((), ())
        self.keys = keys
        self.transfers = transfers
        self.found: Sequence[int] = ()


class StorageLookup:
    """Lookups in one backend, on a thread of their own.

    While one that took too long is out, and in a pause behind it, callers that would wait no longer than it was waited
    for get a miss at once.

    Parameters
    ----------
    backend
        The storage that is asked.
    metrics, logs
        Where to count, and what keeps the log short.
    queue_pages, synchronous
        As :class:`StorageThread`.
    back_off_seconds
        Longest pause.
    """

    def __init__(
        self,
        backend: StorageBackend,
        metrics: Metrics,
        logs: LogLimit,
        *,
        queue_pages: int,
        synchronous: bool,
        back_off_seconds: float,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._logs = logs
        self._back_off_seconds = back_off_seconds
        nothing: Callable[[_Lookup], None] = lambda task: None  # noqa: E731
        self.thread: StorageThread[_Lookup] = StorageThread(
            "hicache-lookup", self._look_up, nothing, queue_pages=queue_pages, synchronous=synchronous
        )
        self._pause = Backoff(time.monotonic, first=min(0.1, back_off_seconds), limit=back_off_seconds)
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
        lookup = _Lookup(keys, transfers)
        if not self.thread.submit(lookup, timeout=0):
            return ()
        if not lookup.host_ready.synchronize(bound.left()):
            self._note_overdue(lookup, patience)
            return ()
        self._pause.succeeded()
        self._overdue, self._in_vain = None, 0.0
        if lookup.error is not None:
            self._metrics.count("storage_errors", operation="exists")
            return ()
        return lookup.found

    def _is_out(self, patience: float) -> bool:
        """Tell whether a lookup that took too long is still not answered, after waiting for it."""
        return self._overdue is not None and not self._overdue.host_ready.synchronize(patience)

    def _note_overdue(self, lookup: _Lookup, patience: float) -> None:
        self._overdue, self._in_vain = lookup, patience
        self._metrics.count("storage_timeouts", operation="exists")
        self._pause.failed()
        if self._logs.due("exists"):
            logger.warning(
                "storage did not answer within %s s; nothing is looked up for up to %s s",
                patience,
                self._back_off_seconds,
            )

    def _look_up(self, task: _Lookup) -> None:
        if not task.transfers:
            task.found = range(1, min(self._backend.batch_exists(task.keys), len(task.keys)) + 1)
        elif isinstance(self._backend, HiCacheStorage):
            # A generic backend knows no hit policies, so with further pools it has no hits.
            task.found = self._backend.restorable_lengths(task.keys, task.transfers)
