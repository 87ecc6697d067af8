"""StorageLookup: asks a storage how many pages it has, for callers that cannot wait for one that is slow."""

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
    """A question to storage: how many leading keys it has."""

    def __init__(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer]) -> None:
        super().__init__((), ())
        self.keys = keys
        self.transfers = transfers
        self.found = 0


class StorageLookup:
    """Lookups in one backend, on a thread of their own.

    While one that took too long is out, and in a pause behind it, callers that would wait no longer than it was waited
    for get a miss at once.

    Parameters
    ----------
    backend
        Whom to ask.
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

    def exists(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer], bound: WaitBound) -> int:
        """Return the leading pages of which storage has all that the pools need; 0 where it does not say in time."""
        patience = bound.left()
        if patience <= self._in_vain and (self._pause.active or self._is_out(0)):
            return 0
        if self._is_out(patience):
            self._in_vain = patience
            return 0
        lookup = _Lookup(keys, transfers)
        if not self.thread.submit(lookup, timeout=0):
            return 0
        if not lookup.host_ready.synchronize(bound.left()):
            self._note_overdue(lookup, patience)
            return 0
        self._pause.succeeded()
        self._overdue, self._in_vain = None, 0.0
        if lookup.error is not None:
            self._metrics.count("storage_errors", operation="exists")
            return 0
        return min(lookup.found, len(keys))

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
            task.found = self._backend.batch_exists(task.keys)
        elif isinstance(self._backend, HiCacheStorage):
            # A generic backend knows no hit policies, so with further pools it has no hits.
            task.found = self._backend.batch_exists_pools(task.keys, task.transfers)
