"""OperationOrder: what queued, running and failed operations mean for who wants to use their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .in_flight import Access, InFlight, Use
from .operation_queue import OperationQueue
from .operations import CacheOperation
from .transfer_engine import L2TransferEngine
from .transfer_handle import source_error


class UsesOf(Protocol):
    """Says what an operation does on the sides that are given."""

    def __call__(
        self, operation: CacheOperation, *, device: Access | None = None, host: Access | None = None
    ) -> list[Use]:
        """Return its uses."""


class OperationOrder:
    """Asks the engine and both queues about slots.

    Parameters
    ----------
    engine
        Knows what is in flight.
    writes, loads
        Know what waits to be started, has failed, or is not settled.
    uses_of
        Says what an operation does.
    start_writing
        Starts the writes that wait.
    """

    def __init__(
        self,
        engine: L2TransferEngine,
        writes: OperationQueue,
        loads: OperationQueue,
        uses_of: UsesOf,
        start_writing: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._writes = writes
        self._loads = loads
        self._uses_of = uses_of
        self._start_writing = start_writing

    def users_of_host(self, use: Use) -> npt.NDArray[np.bool_]:
        """Tell for each page whether anything queued or submitted uses it, or may still give it back."""
        granules = use.granules if use.granules is not None else np.empty(0, dtype=np.int64)
        self._engine.reap()
        busy = self._engine.in_flight.busy(use.place, granules)
        for queue in (self._writes, self._loads):
            if queue.waiting:
                busy |= queue.waiting_uses.busy(use.place, granules)
        for operation in self._writes.unsettled():
            for own in self._uses_of(operation, host=Access.WRITE):
                if own.place == use.place and own.granules is not None:
                    busy |= np.isin(granules, own.granules)
        return busy

    def any_in_flight(self) -> bool:
        """Whether anything queued or submitted uses any slot, or may still give some back."""
        if self._engine.in_flight or self._writes.waiting or self._loads.waiting:
            return True
        return any(True for _ in self._writes.unsettled())

    def start_writes_of(self, uses: Iterable[Use]) -> None:
        """Start the writes that wait, where they bring what somebody is about to use."""
        if self._writes.waiting and any(self._writes.waiting_uses.users(use, (Access.WRITE,)) for use in uses):
            self._start_writing()

    def failed_source(self, queue: OperationQueue, reads: Sequence[Use]) -> Exception | None:
        """Tell of an operation that was to bring what is read and has failed, where its caller cannot know that yet."""
        for operation, error in queue.failed():
            brought: InFlight[CacheOperation] = InFlight()
            brought.add(operation, self._uses_of(operation, device=Access.WRITE, host=Access.WRITE))
            if any(brought.users(use, (Access.WRITE,)) for use in reads):
                return source_error("write-back" if queue is self._writes else "load", error)
        return None

    def check_source(self, queue: OperationQueue, operation: CacheOperation, **reads: Access) -> None:
        """Raise where what an operation reads was to be brought by one that has failed."""
        if any(queue.failed()):
            error = self.failed_source(queue, self._uses_of(operation, **reads))
            if error is not None:
                raise error
