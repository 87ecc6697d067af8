"""OperationQueue: the writes, or the loads, of a controller from the call that queues them to their acks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hicache_kernels.staging import Direction
from hicache_pools.pool_transfer import PoolTransfer

from .agreement import Agreement
from .engine_calls import EngineCalls
from .events import COMPLETED, Event
from .indices import own_indices
from .interrupts import interruptibly
from .layer_done import NOTHING_TO_WAIT_FOR, LayerDoneCounter
from .layer_map import TransferPlan
from .operations import Ack, CacheOperation, OperationCancelledError
from .pool_transfers import SidecarPoolSpec, prepare_transfers, resolve, with_sidecars
from .slots import Slots
from .transfer_engine import L2TransferEngine
from .transfer_handle import InFlightOperation, L2Transfer, TransferHandle, words

logger = logging.getLogger(__name__)

Errors = dict[CacheOperation, BaseException]
"""Why parts of an operation that was started have failed."""


@dataclass(eq=False)
class StartedOperation:
    """Operations that were started together, merged where there are several.

    Attributes
    ----------
    parts
        The operations, those that were refused included.
    refused
        Why parts were not submitted.
    handle
        The transfer of the others; None where there are none.
    consumer
        Id in the layer counter, for loads.
    cut
        Whether parts of it were cancelled.
    """

    parts: tuple[CacheOperation, ...]
    refused: Errors = field(default_factory=dict)
    handle: TransferHandle | None = None
    consumer: int = NOTHING_TO_WAIT_FOR
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

    def failures(self) -> Errors:
        """Return why parts have failed or were cancelled on this rank so far."""
        found = dict(self.refused)
        if self.handle is not None and self.handle.has_failed:
            submitted = (part for part in self.parts if part not in self.refused)
            errors = ((part, self.handle.part_error(number)) for number, part in enumerate(submitted))
            found |= {part: error for part, error in errors if error is not None}
        return found

    def errors(self) -> Errors:
        """Return why parts failed; final once :attr:`done`. Where all were cancelled, that is no failure."""
        failures = self.failures()
        if failures and all(part.cancelled for part in self.parts):
            return {part: error for part, error in failures.items() if not isinstance(error, OperationCancelledError)}
        return failures

    def error(self) -> BaseException | None:
        """Why some of it failed."""
        return next(iter(self.errors().values()), None)

    def ack(self, parts: Iterable[CacheOperation], error: BaseException | None) -> Ack:
        """Make the ack of some parts."""
        node_ids = tuple(node_id for part in parts for node_id in part.node_ids)
        ends = self.handle or InFlightOperation()
        return Ack(node_ids, ends.device_released, ends.host_ready, error)

    def first_ack(self) -> Ack:
        """Make the ack of all parts before the outcome is known; it has an error only where nothing was submitted."""
        return self.ack(self.parts, self.error() if self.handle is None else None)


class OperationQueue:
    """Operations of one direction: waiting to be started, started, and done.

    Parameters
    ----------
    direction
        Whether these are writes or loads.
    plan
        Makes their transfers.
    engine
        Runs their transfers.
    slots
        Frees the slots of what fails or is cancelled.
    counter
        Counts the layers of loads.
    agreement
        Of the ranks: an operation counts as done once it is on all of them, and as failed if it has on one. What was
        merged fails one by one, unless the ranks have merged unequal numbers of operations: then all of it does.
    calls
        Where errors of the engine's callbacks go.

    Attributes
    ----------
    waiting
        Operations to be started.
    started
        What was started and is not settled, oldest first.
    """

    def __init__(
        self,
        direction: Direction,
        plan: TransferPlan,
        engine: L2TransferEngine,
        slots: Slots,
        counter: LayerDoneCounter,
        agreement: Agreement,
        calls: EngineCalls,
    ) -> None:
        self._direction = direction
        self._plan = plan
        self._engine = engine
        self._slots = slots
        self._counter = counter
        self._agreement = agreement
        self._calls = calls
        self.waiting: list[CacheOperation] = []
        self.started: deque[StartedOperation] = deque()
        self._acks: list[Ack] = []
        slots.queues[direction] = self

    @property
    def busy(self) -> bool:
        """Whether an operation waits or was started, an ack is kept, or slots wait to be freed."""
        return bool(self.waiting or self.started or self._acks or self._slots.deferred)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.started)

    # Start

    def add(
        self,
        indices: torch.Tensor,
        node_id: int,
        event: Event | None,
        pool_transfers: Sequence[PoolTransfer],
        sidecars: Sequence[SidecarPoolSpec],
    ) -> torch.Tensor | None:
        """Check the slots of an operation, take those of the other side, and let it wait to be started.

        Returns the caller's copy of the anchor's slots that were taken; None where a pool has no room. Then, and where
        this raises, what was taken for the operation is free again.
        """
        is_load, count, group = self._direction is Direction.LOAD, indices.numel(), self._slots.group
        transfers = with_sidecars(group, sidecars, pool_transfers, anchor_moves=count > 0)
        name = group.anchor_entry.name
        anchor = PoolTransfer(name, host_indices=indices) if is_load else PoolTransfer(name, device_indices=indices)
        prepare_transfers(self._slots, [anchor, *transfers] if count or not transfers else transfers, self._direction)
        if not count:
            anchor.host_indices = anchor.device_indices = indices
        elif is_load:
            anchor.device_indices = group.alloc_device(count)
        else:
            anchor.host_indices = self._slots.alloc_host(count)
        host, device = anchor.host_indices, anchor.device_indices
        if host is None or device is None:
            return None
        events = () if event is None else (event,)
        operation = CacheOperation(host, device, (node_id,), tuple(transfers), events, direction=self._direction)
        try:
            if not transfers or resolve(self._slots, operation):
                copied = own_indices(device if is_load else host)
                self.waiting.append(operation)
                return copied
        except BaseException:
            self._slots.give_back(operation)
            raise
        self._slots.give_back(operation)
        return None

    def start(self) -> StartedOperation:
        """Submit everything that waits as one operation. A failure is kept for the ack."""
        started = StartedOperation(tuple(self.waiting))
        # First, so that its slots are freed after its ack, whatever interrupts the submission.
        self.started.append(started)
        self.waiting = []
        self._slots.stop_waiting(started.parts)
        made = self._make_transfers(started)
        if made:
            parts = list(made.values()) if len(made) > 1 else []
            try:
                merged = CacheOperation.merge_ops(list(made))
                transfers = self._plan.transfers(merged) if parts else made[merged]
                layers = self._plan.layers if self._direction is Direction.LOAD else 0
                started.handle = self._engine.submit(self._direction, transfers, layers, merged.ready_events, parts)
            except BaseException as error:
                started.refused |= dict.fromkeys(made, error)
                self._engine.failures.note(words(self._direction), error)
                if not isinstance(error, Exception):
                    raise
        if self._direction is Direction.LOAD:
            handle = started.handle
            layer_events: Sequence[Event] = (COMPLETED,) * self._plan.layers if handle is None else handle.layer_events
            started.consumer = self._counter.register(layer_events, started.error)
        return started

    def _make_transfers(self, started: StartedOperation) -> dict[CacheOperation, list[L2Transfer]]:
        """Make the transfers of each part; one that cannot be started is refused."""
        made: dict[CacheOperation, list[L2Transfer]] = {}
        for part in started.parts:
            try:
                self._slots.check_filled(part)
                made[part] = self._plan.transfers(part)
            except Exception as error:
                started.refused[part] = error
                self._engine.failures.note(words(self._direction), error)
        return made

    # Poll

    def poll(self, wait: bool) -> list[Ack]:
        """Settle what is done on every rank, in order, and return its acks.

        All of it is settled before the first error of a callback is raised. With ``wait``, where no ack is kept, this
        waits for the first that is done, and on if all that came of that was cancelled.
        """
        self._calls.check_thread()
        if not (self.started or self._acks or self._slots.deferred):
            return []
        with self._calls:
            self._settle(wait)
            self._slots.reap()
            self._calls.raise_first()
            acks, self._acks = self._acks, []
            return acks

    def _settle(self, wait: bool) -> None:
        # Whether it goes round again is the same on all ranks, whatever one of them keeps or raises.
        while self.started:
            if wait and not (self._acks or self.started[0].done):
                interruptibly(self.started[0].wait)
            known, taken = len(self._acks), self._take_done()
            for started, errors in taken:
                self._finish(started, errors)
            if not wait or not taken or len(self._acks) > known:
                break

    def settle_here(self) -> None:
        """Settle what is done without asking other ranks, and keep the acks for the next poll."""
        while self.started and self.started[0].done:
            started = self.started.popleft()
            self._finish(started, started.errors())

    def _finish(self, started: StartedOperation, errors: Errors) -> None:
        """Keep an ack for each outcome, without what was cancelled, and free the slots of what does not count."""
        by_outcome: dict[int, list[CacheOperation]] = {}
        for part in started.parts:
            if not part.cancelled:
                by_outcome.setdefault(id(errors.get(part)), []).append(part)
        self._acks += [started.ack(parts, errors.get(parts[0])) for parts in by_outcome.values()]
        logger.debug("finished operations=%d errors=%d", len(started.parts), len(errors))
        if started.handle is not None:
            self._calls.call(self._engine.release, started.handle)
        if started.consumer != NOTHING_TO_WAIT_FOR:
            self._counter.forget(started.consumer, next(iter(errors.values()), None))
        for part in started.parts:
            if part in errors or part.cancelled:
                self._slots.give_back(part)

    # What others have to know

    def unsettled(self) -> Iterator[CacheOperation]:
        """Yield operations that are done and whose slots the next poll may give back."""
        for started in self.started:
            # An error is there before its operation is done, so what is done without one has not failed on this rank.
            failed = started.failures()
            if (self._agreement.needed or failed or started.cut) and started.done:
                for part in started.parts:
                    if self._agreement.needed or part.cancelled or part in failed:
                        yield part

    def failed(self) -> Iterator[tuple[CacheOperation, BaseException]]:
        """Yield operations that have failed, and that no poll has reported yet, with their errors."""
        for started in self.started:
            yield from started.failures().items()

    # Cancel

    def cancel(self, node_id: int) -> bool:
        """Cancel a node's operations, and return whether there were any. Slots of started ones are freed when done."""
        found = self._withdraw([operation for operation in self.waiting if node_id in operation.node_ids])
        for started in self.started:
            for part in started.parts:
                if node_id in part.node_ids and not part.cancelled:
                    part.cancelled = started.cut = found = True
            if started.handle is not None and all(part.cancelled for part in started.parts):
                started.handle.cancel()
        return found

    def cancel_waiting(self) -> None:
        """Cancel everything that was not started."""
        self._withdraw(list(self.waiting))

    def clear(self) -> None:
        """Cancel and settle everything, once nothing of it moves any more, and drop the acks."""
        self.cancel_waiting()
        for started in self.started:
            started.cut = True
            for part in started.parts:
                part.cancelled = True
        self.settle_here()
        self._acks.clear()

    def _withdraw(self, operations: Sequence[CacheOperation]) -> bool:
        self.waiting = [operation for operation in self.waiting if operation not in operations]
        self._slots.stop_waiting(operations)
        for operation in operations:
            self._slots.give_back(operation)
        return bool(operations)

    # Ranks

    def _take_done(self) -> list[tuple[StartedOperation, Errors]]:
        """Take out what is done on every rank, oldest first, with the errors of the parts that failed on one."""
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

    def _agree_on_parts(self, failed: Sequence[tuple[StartedOperation, Errors]]) -> None:
        """Add the errors of other ranks to operations that have failed somewhere."""
        if not failed:
            return
        sizes = [len(started.parts) for started, _ in failed]
        # The smallest number of parts on any rank, and the largest as a negative.
        extremes = self._agreement.smallest([*sizes, *(-size for size in sizes)])
        ends = zip(sizes, extremes[: len(sizes)], extremes[len(sizes) :], strict=True)
        same = [size == least == -most for size, least, most in ends]
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
