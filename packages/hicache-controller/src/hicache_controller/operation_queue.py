"""OperationQueue: the writes, or the loads, of a controller from the call that queues them to their acks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from .agreement import Agreement
from .events import COMPLETED
from .first_error import FirstError
from .in_flight import InFlight, Use
from .interrupts import interruptibly, interrupts_held_back
from .operations import Ack, CacheOperation, OperationCancelledError
from .transfer_handle import TransferHandle

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StartedOperation:
    """An operation, merged where several were queued, that was submitted.

    Attributes
    ----------
    operation
        What moves.
    handle
        Its transfer; None where submitting failed.
    submit_error
        Why it did.
    consumer
        Id in the layer counter, for loads.
    cut
        Whether parts of it were cancelled.
    """

    operation: CacheOperation
    handle: TransferHandle | None
    submit_error: BaseException | None = None
    consumer: int = -1
    cut: bool = False

    @property
    def failure(self) -> BaseException | None:
        """Why it failed or was cancelled on this rank; None so far otherwise."""
        return self.submit_error if self.handle is None else self.handle.error

    @property
    def done(self) -> bool:
        """Whether nothing of it moves any more."""
        return self.handle is None or self.handle.done

    def wait(self) -> None:
        """Block until :attr:`done`."""
        if self.handle is not None:
            self.handle.host_ready.synchronize()
            self.handle.device_released.synchronize()

    def error(self) -> BaseException | None:
        """Why it failed; final once :attr:`done`. An operation all of which was cancelled has not failed."""
        error = self.failure
        cancelled = all(part.cancelled for part in self.operation.parts)
        return None if cancelled and isinstance(error, OperationCancelledError) else error

    def ack(self, node_ids: tuple[int, ...], error: BaseException | None) -> Ack:
        """Make its ack."""
        if self.handle is None:
            return Ack(node_ids, COMPLETED, COMPLETED, error)
        return Ack(node_ids, self.handle.device_released, self.handle.host_ready, error)


class OperationQueue:
    """Operations of one direction: waiting to be started, started, and done.

    Parameters
    ----------
    submit
        Starts a merged operation.
    give_back
        Returns the slots that were taken for an operation that failed or was cancelled.
    finished
        Called for each operation that is taken out, with its error on any rank, once its slots are not in flight any
        more.
    agreement
        Of the ranks: an operation counts as done once it is on all of them, and as failed if it has on one.
    log_failure
        Logs why an operation could not be submitted; one that fails later logs that itself.

    Invariant: an operation is in ``waiting_uses`` exactly while it is in ``waiting``, from the first time anyone asks.
    """

    def __init__(
        self,
        submit: Callable[[CacheOperation], TransferHandle],
        give_back: Callable[[CacheOperation], None],
        finished: Callable[[StartedOperation, BaseException | None], None],
        agreement: Agreement,
        log_failure: Callable[[BaseException], None],
    ) -> None:
        self._submit = submit
        self._give_back = give_back
        self._finished = finished
        self._agreement = agreement
        self._log_failure = log_failure
        self.waiting: list[CacheOperation] = []
        self._waiting_uses: InFlight[CacheOperation] = InFlight()
        self._unnoted: dict[CacheOperation, Callable[[], Iterable[Use]]] = {}
        self.started: deque[StartedOperation] = deque()
        self._acks: list[Ack] = []

    def __len__(self) -> int:
        return len(self.waiting) + len(self.started)

    def add(self, operation: CacheOperation, uses: Callable[[], Iterable[Use]]) -> None:
        """Let an operation wait to be started; ``uses`` says what it does, should anyone ask before that."""
        self._unnoted[operation] = uses
        self.waiting.append(operation)

    @property
    def waiting_uses(self) -> InFlight[CacheOperation]:
        """What the operations that wait will do; under the lock of whoever adds them, as asking takes note of them."""
        if self._unnoted:
            with interrupts_held_back():
                while self._unnoted:
                    operation, uses = next(iter(self._unnoted.items()))
                    self._waiting_uses.add(operation, uses())
                    del self._unnoted[operation]
        return self._waiting_uses

    def _forget_uses(self, operation: CacheOperation) -> None:
        self._unnoted.pop(operation, None)
        self._waiting_uses.remove(operation)

    def start(self) -> StartedOperation | None:
        """Submit everything that waits as one operation; None where nothing does. A failure is kept for the ack."""
        if not self.waiting:
            return None
        operation = CacheOperation.merge_ops(self.waiting)
        for part in self.waiting:
            self._forget_uses(part)
        self.waiting.clear()
        started = StartedOperation(operation, None)
        # Whatever interrupts the submission, its slots go back by way of its ack.
        self.started.append(started)
        try:
            started.handle = self._submit(operation)
        except BaseException as error:
            started.submit_error = error
            self._log_failure(error)
            if not isinstance(error, Exception):
                raise
        logger.debug(
            "started operation=%d nodes=%s slots=%d pools=%d",
            operation.id,
            operation.node_ids,
            operation.host_indices.numel(),
            len(operation.pool_transfers) + 1,
        )
        return started

    def settle(self, wait: bool) -> None:
        """Take out what is done, in order, and keep the acks for :meth:`take_acks`.

        All of it is taken out before the first error of a callback is raised. With ``wait``, where no ack is kept, this
        waits for the first that is done, and on if all that came of that was cancelled.
        """
        with interrupts_held_back(), FirstError() as errors:
            # Whether it goes round again is the same on all ranks, whatever one of them keeps or raises.
            while self.started:
                if wait and not self._acks:
                    interruptibly(self.started[0].wait)
                known, taken = len(self._acks), self._outcomes()
                for started, error in taken:
                    with errors.kept():
                        self._finish(started, error)
                if not wait or not taken or len(self._acks) > known:
                    break

    def take_acks(self) -> list[Ack]:
        """Hand out the acks that are kept."""
        acks, self._acks = self._acks, []
        return acks

    def unsettled(self) -> Iterator[CacheOperation]:
        """Yield operations that are done and whose slots the next poll may give back."""
        for started in self.started:
            # An error is there before its operation is done, so what is done without one has not failed on this rank.
            lost = self._agreement.needed or started.failure is not None
            if (lost or started.cut) and started.done:
                yield from (part for part in started.operation.parts if lost or part.cancelled)

    def failed(self) -> list[tuple[CacheOperation, BaseException]]:
        """Operations that have failed, and of which no poll has told yet, with their errors."""
        failures = ((started.operation, started.failure) for started in self.started)
        return [(operation, error) for operation, error in failures if error is not None]

    def keep_acks(self) -> None:
        """Take out what is done, without asking other ranks, and keep the acks for the next poll."""
        with FirstError() as errors:
            while self.started and self.started[0].done:
                started = self.started.popleft()
                with errors.kept():
                    self._finish(started, started.error())

    def cancel(self, node_id: int) -> bool:
        """Cancel a node's operations; tell whether there were any. Slots of started ones go back when they are done."""
        found = False
        for operation in [each for each in self.waiting if node_id in each.node_ids]:
            self._withdraw(operation)
            found = True
        for started in self.started:
            for part in started.operation.parts:
                if node_id in part.node_ids and not part.cancelled:
                    part.cancelled = started.cut = found = True
            if started.handle is not None and all(part.cancelled for part in started.operation.parts):
                started.handle.cancel()
        return found

    def cancel_waiting(self) -> None:
        """Cancel everything that was not started."""
        with FirstError() as errors:
            for operation in list(self.waiting):
                with errors.kept():
                    self._withdraw(operation)

    def cancel_started(self) -> None:
        """Cancel everything that was started."""
        for started in self.started:
            started.cut = True
            for part in started.operation.parts:
                part.cancelled = True
            if started.handle is not None:
                started.handle.cancel()

    def forget_acks(self) -> None:
        """Drop the acks that are kept."""
        self._acks.clear()

    def _withdraw(self, operation: CacheOperation) -> None:
        self.waiting.remove(operation)
        self._forget_uses(operation)
        self._give_back(operation)

    def _outcomes(self) -> list[tuple[StartedOperation, BaseException | None]]:
        """Take out what is done on every rank, with an error where it failed on one."""
        done = 0
        while done < len(self.started) and self.started[done].done:
            done += 1
        if not self._agreement.needed:
            taken = [self.started.popleft() for _ in range(done)]
            return [(started, started.error()) for started in taken]
        done = self._agreement.smallest([done])[0]
        taken = [self.started.popleft() for _ in range(done)]
        fine = self._agreement.smallest([int(started.error() is None) for started in taken]) if taken else []
        return [
            (started, started.error() or (None if ok else RuntimeError("the transfer failed on another rank")))
            for started, ok in zip(taken, fine, strict=True)
        ]

    def _finish(self, started: StartedOperation, error: BaseException | None) -> None:
        """Let the slots go where they have to, and keep the ack unless all of it was cancelled."""
        parts: Sequence[CacheOperation] = started.operation.parts
        kept = [part for part in parts if not part.cancelled]
        if kept:
            self._acks.append(started.ack(tuple(node_id for part in kept for node_id in part.node_ids), error))
        logger.debug("finished operation=%d nodes=%s error=%r", started.operation.id, started.operation.node_ids, error)
        with FirstError() as errors:
            with errors.kept():
                self._finished(started, error)
            for part in parts:
                if error is not None or part.cancelled:
                    with errors.kept():
                        self._give_back(part)
