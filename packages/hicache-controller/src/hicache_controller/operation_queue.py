"""OperationQueue: the writes, or the loads, of a controller from the call that queues them to their acks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .agreement import Agreement
from .events import COMPLETED
from .first_error import FirstError
from .in_flight import InFlight, Use
from .interrupts import interruptibly, interrupts_held_back
from .operations import Ack, CacheOperation, OperationCancelledError
from .transfer_handle import L2Transfer, TransferHandle

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StartedOperation:
    """Operations that were started together, merged where there are several.

    Attributes
    ----------
    parts
        The operations, those that were refused included.
    refused
        Why some were not submitted with the others.
    handle
        The transfer of the others; None where there are none, or submitting them failed.
    submit_error
        Why it did.
    consumer
        Id in the layer counter, for loads.
    cut
        Whether parts of it were cancelled.
    """

    parts: tuple[CacheOperation, ...]
    refused: dict[CacheOperation, BaseException] = field(default_factory=dict)
    handle: TransferHandle | None = None
    submit_error: BaseException | None = None
    consumer: int = -1
    cut: bool = False

    @property
    def done(self) -> bool:
        """Whether nothing of it moves any more."""
        return self.handle is None or self.handle.done

    def wait(self) -> None:
        """Block until :attr:`done`."""
        if self.handle is not None:
            self.handle.host_ready.synchronize()
            self.handle.device_released.synchronize()

    def failures(self) -> list[tuple[CacheOperation, BaseException]]:
        """Return the parts that have failed or were cancelled on this rank so far, and why."""
        if not self.refused and self.handle is not None and not self.handle.has_failed:
            return []
        found = list(self.refused.items())
        submitted = [part for part in self.parts if part not in self.refused]
        for number, part in enumerate(submitted):
            error = self.submit_error if self.handle is None else self.handle.part_error(number)
            if error is not None:
                found.append((part, error))
        return found

    def errors(self) -> dict[CacheOperation, BaseException]:
        """Return why parts failed; final once :attr:`done`. Where all were cancelled, that is no failure."""
        failures = self.failures()
        if failures and all(part.cancelled for part in self.parts):
            failures = [each for each in failures if not isinstance(each[1], OperationCancelledError)]
        return dict(failures)

    def error(self) -> BaseException | None:
        """Why some of it failed."""
        return next(iter(self.errors().values()), None)

    def ack(self, parts: Iterable[CacheOperation], error: BaseException | None) -> Ack:
        """Make the ack of some parts."""
        node_ids = tuple(node_id for part in parts for node_id in part.node_ids)
        if self.handle is None:
            return Ack(node_ids, COMPLETED, COMPLETED, error)
        return Ack(node_ids, self.handle.device_released, self.handle.host_ready, error)


class OperationQueue:
    """Operations of one direction: waiting to be started, started, and done.

    Parameters
    ----------
    prepare
        Makes the transfers of one operation, or raises why it cannot be started.
    submit
        Starts an operation, merged where the transfers are those of several.
    give_back
        Returns the slots that were taken for an operation that failed or was cancelled.
    finished
        Called for each operation that is taken out, with its error on any rank, once its slots are not in flight any
        more.
    agreement
        Of the ranks: an operation counts as done once it is on all of them, and as failed if it has on one. What was
        merged fails one by one, unless the ranks have merged unequal numbers of operations: then all of it does.
    log_failure
        Logs why an operation could not be submitted; one that fails later logs that itself.

    Invariant: an operation is in ``waiting_uses`` exactly while it is in ``waiting``, from the first time anyone asks.
    """

    def __init__(
        self,
        prepare: Callable[[CacheOperation], list[L2Transfer]],
        submit: Callable[[CacheOperation, Sequence[list[L2Transfer]]], TransferHandle],
        give_back: Callable[[CacheOperation], None],
        finished: Callable[[StartedOperation, BaseException | None], None],
        agreement: Agreement,
        log_failure: Callable[[BaseException], None],
    ) -> None:
        self._prepare = prepare
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
        started = StartedOperation(tuple(self.waiting))
        for part in started.parts:
            self._forget_uses(part)
        self.waiting.clear()
        # Whatever interrupts the submission, its slots go back by way of its ack.
        self.started.append(started)
        transfers: dict[CacheOperation, list[L2Transfer]] = {}
        for part in started.parts:
            try:
                transfers[part] = self._prepare(part)
            except Exception as error:
                started.refused[part] = error
                self._log_failure(error)
        try:
            if transfers:
                started.handle = self._submit(CacheOperation.merge_ops(list(transfers)), list(transfers.values()))
        except BaseException as error:
            started.submit_error = error
            self._log_failure(error)
            if not isinstance(error, Exception):
                raise
        logger.debug(
            "started nodes=%s slots=%d refused=%d",
            [part.node_ids for part in started.parts],
            sum(part.host_indices.numel() for part in started.parts),
            len(started.refused),
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
                for started, failed in taken:
                    with errors.kept():
                        self._finish(started, failed)
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
            failed = {part for part, _ in started.failures()}
            if (self._agreement.needed or failed or started.cut) and started.done:
                for part in started.parts:
                    if self._agreement.needed or part.cancelled or part in failed:
                        yield part

    def failed(self) -> Iterator[tuple[CacheOperation, BaseException]]:
        """Yield operations that have failed, and that no poll has reported yet, with their errors."""
        for started in self.started:
            yield from started.failures()

    def keep_acks(self) -> None:
        """Take out what is done, without asking other ranks, and keep the acks for the next poll."""
        with FirstError() as errors:
            while self.started and self.started[0].done:
                started = self.started.popleft()
                with errors.kept():
                    self._finish(started, started.errors())

    def cancel(self, node_id: int) -> bool:
        """Cancel a node's operations; tell whether there were any. Slots of started ones go back when they are done."""
        found = False
        for operation in [each for each in self.waiting if node_id in each.node_ids]:
            self._withdraw(operation)
            found = True
        for started in self.started:
            for part in started.parts:
                if node_id in part.node_ids and not part.cancelled:
                    part.cancelled = started.cut = found = True
            if started.handle is not None and all(part.cancelled for part in started.parts):
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
            for part in started.parts:
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

    def _outcomes(self) -> list[tuple[StartedOperation, dict[CacheOperation, BaseException]]]:
        """Take out what is done on every rank, with the errors of the parts that failed on one."""
        done = 0
        while done < len(self.started) and self.started[done].done:
            done += 1
        if self._agreement.needed:
            done = self._agreement.smallest([done])[0]
        taken = [self.started.popleft() for _ in range(done)]
        outcomes = [(started, started.errors()) for started in taken]
        if self._agreement.needed and taken:
            fine = self._agreement.smallest([int(not errors) for _, errors in outcomes])
            self._agree_on_parts([outcome for outcome, ok in zip(outcomes, fine, strict=True) if not ok])
        return outcomes

    def _agree_on_parts(self, failed: Sequence[tuple[StartedOperation, dict[CacheOperation, BaseException]]]) -> None:
        """Add the errors of other ranks to operations that have failed somewhere."""
        if not failed:
            return
        sizes = [len(started.parts) for started, _ in failed]
        # The least and, as negatives, the most parts on any rank.
        least_most = self._agreement.smallest([*sizes, *(-size for size in sizes)])
        same = [size == least == -most for size, least, most in zip(sizes, *_halves(least_most), strict=True)]
        flags = [
            int(part not in errors)
            for (started, errors), comparable in zip(failed, same, strict=True)
            if comparable
            for part in started.parts
        ]
        agreed = iter(self._agreement.smallest(flags) if flags else [])
        for (started, errors), comparable in zip(failed, same, strict=True):
            elsewhere = RuntimeError("the transfer failed on another rank")
            for part in started.parts:
                if not (comparable and next(agreed)):
                    errors.setdefault(part, elsewhere)

    def _finish(self, started: StartedOperation, errors: dict[CacheOperation, BaseException]) -> None:
        """Let the slots go where they have to, and keep acks, one for each outcome, unless all was cancelled."""
        by_outcome: dict[int, list[CacheOperation]] = {}
        for part in started.parts:
            if not part.cancelled:
                by_outcome.setdefault(id(errors.get(part)), []).append(part)
        self._acks += [started.ack(parts, errors.get(parts[0])) for parts in by_outcome.values()]
        logger.debug("finished nodes=%s errors=%s", [part.node_ids for part in started.parts], list(errors.values()))
        with FirstError() as raised:
            with raised.kept():
                self._finished(started, next(iter(errors.values()), None))
            for part in started.parts:
                if part in errors or part.cancelled:
                    with raised.kept():
                        self._give_back(part)


def _halves(values: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    middle = len(values) // 2
    return values[:middle], values[middle:]
