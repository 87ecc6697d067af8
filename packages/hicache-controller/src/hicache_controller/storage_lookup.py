"""StorageLookup: asks a storage which prefixes it has, for callers that cannot wait for a slow one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_pools.pool_transfer import PoolTransfer

from .failure_log import LogLimit
from .storage.backoff import Backoff
from .storage_tasks import StorageCalls, StorageTask
from .wait_bound import WaitBound
from .worker import Worker

logger = logging.getLogger(__name__)


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
