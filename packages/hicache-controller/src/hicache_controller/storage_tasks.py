"""What storage threads work on: backups and prefetches, and which of their host pages a call uses now."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hicache_pools.pool_transfer import PoolHitPolicy

from .agreement import Agreement
from .events import Event, HostSignal
from .in_flight import InFlight, PageUse
from .operations import StorageAck
from .transfer_handle import InFlightOperation, Writer
from .wait_bound import checked_timeout


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


class StorageTask(InFlightOperation):
    """Host pages that a storage thread reads or writes; in flight until its signal fires.

    Once it is cancelled, only the pages of the call that runs are in flight: storage begins no other.

    Attributes
    ----------
    parts
        One a pool, the anchor's first; none where this rank had no room.
    uses
        What each part does with its slots.
    after
        Events the work has to follow.
    error
        What ended it, or None.
    cancelled
        Whether it is to stop behind the batch that moves now.
    queued
        Whether a thread has it, or had it.
    """

    host_ready: HostSignal

    def __init__(
        self,
        parts: Sequence[StoragePart],
        after: Sequence[Event],
        writers: Sequence[Writer] = (),
        uses: Sequence[PageUse] = (),
    ) -> None:
        super().__init__(writers)
        self.parts = tuple(parts)
        self.uses = tuple(uses)
        self.after = tuple(after)
        self.host_ready = HostSignal()
        self.error: BaseException | None = None
        self.cancelled = False
        self.queued = False
        self._in_flight: InFlight[Any] | None = None
        self._running: slice | None = None
        self._lock = threading.Lock()  # guards cancelled, _running, and that what is in flight agrees with both

    def put_in_flight(self, in_flight: InFlight[Any]) -> None:
        """Note its slots there, all of them unless it is cancelled."""
        in_flight.add(self, self.uses)
        self._in_flight = in_flight

    def begin_call(self, pages: slice) -> bool:
        """Note that storage is about to use these pages of the parts that are whole; False where it must not any more.

        ``slice(None)``: all pages of all parts.
        """
        with self._lock:
            if not self.cancelled:
                self._running = pages
            return not self.cancelled

    def cancel(self) -> None:
        """Let storage begin no further call for it; slots that the call which runs does not use are free to go."""
        with self._lock:
            self.cancelled = True
            if self._in_flight is not None:
                self._in_flight.narrow(self, self._uses_of_call())

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

    @property
    def pages(self) -> int:
        """Pages of the anchor."""
        return len(self.parts[0].keys) if self.parts else 0

    @property
    def whole_parts(self) -> tuple[StoragePart, ...]:
        """Parts for every page of the anchor, which is the first."""
        return tuple(part for part in self.parts if not part.trailing)

    @property
    def trailing_parts(self) -> tuple[StoragePart, ...]:
        """Parts for the last pages."""
        return tuple(part for part in self.parts if part.trailing)


class BackupOperation(StorageTask):
    """Pages on their way to storage.

    Attributes
    ----------
    node_id
        As given to ``backup``.
    stored_pages
        Leading pages stored so far, in every pool that has a part for each.
    pool_pages
        Leading ones of the last pages stored so far of each other pool.
    """

    def __init__(
        self,
        parts: Sequence[StoragePart],
        node_id: int,
        after: Sequence[Event] = (),
        writers: Sequence[Writer] = (),
        uses: Sequence[PageUse] = (),
    ) -> None:
        super().__init__(parts, after, writers, uses)
        self.node_id = node_id
        self.stored_pages = 0
        self.pool_pages: dict[str, int] = {}

    def ack(self) -> StorageAck:
        """Say what to tell the caller."""
        error = self.error
        if error is None and self.stored_pages < self.pages:
            error = RuntimeError(f"storage took {self.stored_pages} of {self.pages} pages")
        return StorageAck(self.node_id, self.stored_pages, error, self.pool_pages)


class PrefetchOperation(StorageTask):
    """Pages on their way from storage to the host.

    Attributes
    ----------
    request_id
        As given to ``prefetch``.
    began, moved_at
        When it was queued and when pages last came, in ``time.monotonic``.
    """

    def __init__(
        self,
        parts: Sequence[StoragePart],
        request_id: str,
        *,
        agreement: Agreement,
        after: Sequence[Event] = (),
        uses: Sequence[PageUse] = (),
        deadline_seconds: float | None = None,
    ) -> None:
        super().__init__(parts, after, uses=uses)
        self.request_id = request_id
        self.began = self.moved_at = time.monotonic()
        self._agreement = agreement
        self._agreed: int | None = None
        self._loaded_pages = 0
        self._deadline_seconds = deadline_seconds

    @property
    def completed_pages(self) -> int:
        """Leading pages whose bytes are there, in every pool, up to a hole; once :meth:`wait` is over, of all ranks.

        Where a pool has a part for the last pages only, a shorter prefix is of no use: all pages count, or none.
        """
        return self._usable() if self._agreed is None else self._agreed

    @property
    def done(self) -> bool:
        """Whether storage is done with its host slots."""
        return self.host_ready.query()

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
            if not self.host_ready.synchronize(self._deadline_seconds if timeout is None else timeout):
                self.cancel()
            self._agreed = self._agreement.smallest([self._usable()])[0]
        return self._agreed

    def progress(self, pages: int) -> None:
        """Note that the next ``pages`` pages are there; for the prefetch thread."""
        self._loaded_pages += pages
        self.moved_at = time.monotonic()

    def _usable(self) -> int:
        return self._loaded_pages if self._loaded_pages == self.pages or not self.trailing_parts else 0


def given_up(backup: BackupOperation) -> BackupOperation:
    """Stand in for a backup that a storage which was let go is not done with: acks come in order."""
    failed = BackupOperation((), backup.node_id)
    failed.error = RuntimeError("the storage was detached before it had taken the pages")
    failed.host_ready.fire()
    return failed
