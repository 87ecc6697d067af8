"""What storage workers run: backups and prefetches, and which of their host pages a call to storage uses now."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from .agreement import Agreement
from .events import HostSignal
from .in_flight import InFlight, PageUse
from .operations import StorageAck
from .storage_calls import StorageCalls, StoragePart
from .transfer_handle import InFlightOperation, Writer
from .wait_bound import checked_timeout

logger = logging.getLogger(__name__)


class StorageTask(InFlightOperation):
    """Host pages that a storage worker reads or writes; in flight until its signal fires.

    Once it is cancelled, only the pages of the call that runs are in flight: it makes no other.

    Attributes
    ----------
    parts
        One a pool, the anchor's first; none where this rank had no room.
    uses
        What each part does with its slots.
    error
        What ended it, or None.
    cancelled
        Whether it is to stop after the batch that moves now.
    """

    host_ready: HostSignal

    def __init__(
        self, parts: Sequence[StoragePart], *, writers: Sequence[Writer] = (), uses: Sequence[PageUse] = ()
    ) -> None:
        super().__init__(writers)
        self.parts = tuple(parts)
        self.whole_parts = tuple(part for part in self.parts if not part.trailing)
        self.trailing_parts = tuple(part for part in self.parts if part.trailing)
        self.uses = tuple(uses)
        self.host_ready = HostSignal()
        self.error: BaseException | None = None
        self.cancelled = False
        self._in_flight: InFlight[Any] | None = None
        self._running: slice | None = None

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

    def _move(self) -> None:
        """Make the calls to storage."""
        raise NotImplementedError

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
        calls: StorageCalls,
        *,
        writers: Sequence[Writer] = (),
        uses: Sequence[PageUse] = (),
    ) -> None:
        super().__init__(parts, writers=writers, uses=uses)
        self.node_id = node_id
        self.stored_pages = 0
        self.pool_pages: dict[str, int] = {}
        self._calls = calls

    def ack(self, stored_pages: int) -> StorageAck:
        """Return what became of it, where the storage of every rank has so many of its pages."""
        error = self.error
        if error is None and stored_pages < self.pages:
            error = RuntimeError(f"storage took {stored_pages} of {self.pages} pages")
        return StorageAck(self.node_id, stored_pages, error, self.pool_pages)

    def detached(self) -> BackupOperation:
        """Return one that has failed, to replace it: acks come in order, and the storage it waits for was detached."""
        failed = BackupOperation((), self.node_id, self._calls)
        failed.abandon(RuntimeError("the storage was detached before it had taken the pages"))
        return failed

    def _move(self) -> None:
        """Store pages in order; none after a page that cannot be stored, as it could never be found."""
        calls = self._calls
        while self.stored_pages < self.pages and not calls.stopping.is_set():
            start = self.stored_pages
            end = min(start + calls.settings.batch_pages, self.pages)
            if not self._begin_call(slice(start, end)):
                break
            stored = min(self._store(part.batch(start, end)) for part in self.whole_parts)
            self.stored_pages += stored
            calls.metrics.count("backup_pages", stored)
            if stored < end - start:
                break
        if self.stored_pages < self.pages:
            self._count_missing(self.parts[0], self.pages - self.stored_pages)
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
        calls = self._calls
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
            self._calls.skipped(pages, part.name)
        else:
            self._calls.metrics.count("backup_failed_pages", pages)


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
        calls: StorageCalls,
        *,
        agreement: Agreement,
        uses: Sequence[PageUse] = (),
    ) -> None:
        super().__init__(parts, uses=uses)
        self.request_id = request_id
        self.began = self.moved_at = time.monotonic()
        self._calls = calls
        self._agreement = agreement
        self._agreed: int | None = None
        self._loaded_pages = 0

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
            if not self.host_ready.synchronize(self._calls.settings.timeout_seconds if timeout is None else timeout):
                self.cancel()
            self._agreed = self._agreement.smallest([self._usable()])[0]
        return self._agreed

    def _move(self) -> None:
        """Fetch pages in order up to the first that is missing in any pool."""
        calls = self._calls
        done = 0
        # Without its last pages a prefix is of no use, so nothing else is fetched then.
        complete = all(
            self._begin_call(slice(None)) and calls.fetch(part) == len(part.keys) for part in self.trailing_parts
        )
        while complete and done < self.pages and not calls.stopping.is_set():
            end = min(done + calls.settings.batch_pages, self.pages)
            if not self._begin_call(slice(done, end)):
                break
            found = min(calls.fetch(part.batch(done, end)) for part in self.whole_parts)
            self._loaded_pages += found
            self.moved_at = time.monotonic()
            calls.metrics.count("prefetch_pages", found)
            complete = done + found == end
            done += found
        if not complete and not self.cancelled:
            calls.metrics.count("prefetch_missing_pages", self.pages - done)
        elif done < self.pages:
            calls.metrics.count("prefetch_cancelled")

    def _usable(self) -> int:
        return self._loaded_pages if self._loaded_pages == self.pages or not self.trailing_parts else 0
