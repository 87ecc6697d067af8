"""TransferHandle: one submitted transfer of several pools, from queueing its copies to the events that end it."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from hicache_kernels import Compute, TransferResult
from hicache_kernels.constants import checked_compute
from hicache_kernels.staging import Direction
from hicache_kernels.validation import MAX_BLOCKS, whole

from .devices import Clock, Device
from .events import COMPLETED, Event, Signal
from .failure_log import FailureLog
from .in_flight import Access, InFlight, PageUse
from .indices import transfer_uses
from .metrics import Labels, Metrics
from .operations import OperationCancelledError, SourceFailedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guards:
    """Which of the five hazards are closed: all of them, except in tests that show what each guard prevents.

    Attributes
    ----------
    write_follows_compute
        A write-back reads device rows only after they were computed.
    overwrite_follows_read
        Device rows count as released only once a write-back has read them.
    load_follows_compute
        A load fills device rows only after earlier compute has read them.
    read_follows_write
        A load or a backup reads host slots only after their write-back has landed.
    refill_follows_read
        Host slots are refilled only once no load or backup reads them.
    """

    write_follows_compute: bool = True
    overwrite_follows_read: bool = True
    load_follows_compute: bool = True
    read_follows_write: bool = True
    refill_follows_read: bool = True


@dataclass(eq=False, slots=True)
class L2Transfer:
    """One pool's part of a transfer.

    Attributes
    ----------
    name
        Of the pool.
    host_pool, device_pool
        Its two sides; for a packed draft, the owner's host pool and the draft's device pool.
    host_indices, device_indices
        Integer slot indices ``[n]``, whole pages in order; host indices on CPU.
    layer_map
        For each model layer the pool's layer, or None where the pool has no part of it.
    is_draft
        Whether the layers are the draft's tail layers of the host pool.
    io_backend
        ``"kernel"`` or ``"direct"``.
    block_quota
        Most CTAs that the transfer may hold; None leaves it to the pool, which then need not know the keyword.
    compute
        What the model computes meanwhile; None where that is not known, and the pool need not know the keyword.
    """

    name: str
    host_pool: Any
    device_pool: Any
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    layer_map: tuple[int | None, ...]
    is_draft: bool = False
    io_backend: str = "kernel"
    block_quota: int | None = None
    compute: Compute | str | None = None

    def __post_init__(self) -> None:
        checked_compute(self.compute)
        if self.block_quota is not None:
            whole("block_quota", self.block_quota, least=0, most=MAX_BLOCKS)

    def uses(self, direction: Direction) -> list[PageUse]:
        """Return what it does with its pages; they are unknown where they are not on the CPU."""
        return transfer_uses(self, direction, self.host_indices, self.device_indices)

    @property
    def hints(self) -> dict[str, Any]:
        """Keywords of the pool's transfers, as far as they are given; pools that engines bring need not know them."""
        given = {"block_quota": self.block_quota, "compute": self.compute}
        return {name: value for name, value in given.items() if value is not None}


class Writer(NamedTuple):
    """A transfer in flight, and what another operation reads of the bytes that it writes."""

    handle: TransferHandle
    use: PageUse

    def check(self, use: PageUse) -> None:
        """Raise SourceFailedError where the transfer, or the part of it that writes any of ``use``, has failed."""
        error = self.handle.error_of(use)
        if error is not None:
            raise source_error(self.handle.direction, error) from error


class InFlightOperation:
    """Anything that uses slots, with the events after which it no longer does.

    Attributes
    ----------
    device_released, host_ready
        Fired once its device slots, and its host slots, may be used by others.
    """

    device_released: Event = COMPLETED
    host_ready: Event = COMPLETED

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._writers = tuple(writers)

    def check_writers(self) -> None:
        """Raise SourceFailedError if a transfer failed whose bytes this operation reads, after waiting for it.

        On CUDA a transfer has failed here if it could not be queued; what fails later on the device fails all after it.
        """
        # Dropped, or each transfer would keep all those before it.
        writers, self._writers = self._writers, ()
        for writer in writers:
            writer.check(writer.use)

    @property
    def pages(self) -> int:
        """Pages that count for a queue that is bounded in pages."""
        return 0

    def run(self) -> None:
        """Do the work, or queue it on the current stream; errors are kept, not raised."""
        raise NotImplementedError

    def abandon(self, error: Exception) -> None:
        """End with an error without having started."""
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """Whether it uses no slot any more."""
        return self.device_released.query() and self.host_ready.query()


class TransferHandle(InFlightOperation):
    """A submitted transfer: the job of a worker, and what its submitter watches.

    One that was merged from several ``parts`` is tried as a whole. Where that fails, each part is tried by itself
    before any event fires that would say that it is over, so that a bad part fails alone.

    Parameters
    ----------
    direction, transfers, parts
        What moves; ``parts`` are the same rows as the transfers of each operation that was merged.
    layers
        Model layers of a load.
    device
        Where it runs.
    metrics, failures
        Where to count and log.
    writers
        Transfers whose bytes it reads.

    Attributes
    ----------
    layer_events
        For a load, one event a model layer; empty for a write-back.
    error
        Why all of it failed; final once :attr:`done`.
    part_errors
        Why parts of it failed, by number.
    results
        What each call of a pool reported.
    """

    device_released: Signal
    host_ready: Signal

    def __init__(
        self,
        direction: Direction,
        transfers: Sequence[L2Transfer],
        layers: int,
        device: Device,
        metrics: Metrics,
        failures: FailureLog,
        writers: Sequence[Writer] = (),
        parts: Sequence[Sequence[L2Transfer]] = (),
    ) -> None:
        super().__init__(writers)
        self.direction = direction
        # Kept as long as the handle: what an asynchronous copy reads belongs to its operation.
        self.transfers = tuple(transfers)
        self._parts = tuple(parts)
        # The parts that go on, by number, once they are tried one by one.
        self._separate: dict[int, Sequence[L2Transfer]] | None = None
        self.device_released = device.signal()
        self.host_ready = device.signal()
        self.layer_events: tuple[Signal, ...] = tuple([device.signal() for _ in range(layers)])
        self.error: BaseException | None = None
        self.part_errors: dict[int, BaseException] = {}
        self._moved: list[tuple[L2Transfer, TransferResult]] = []
        self._device = device
        self._metrics = metrics
        self._failures = failures
        self._cancelled = False
        self._clock: Clock | None = None

    @property
    def results(self) -> list[TransferResult]:
        """What each call of a pool reported, in order."""
        return [result for _, result in self._moved]

    @property
    def has_failed(self) -> bool:
        """Whether all or a part of it has failed."""
        return self.error is not None or bool(self.part_errors)

    def part_error(self, number: int) -> BaseException | None:
        """Why one of the parts failed."""
        return self.part_errors.get(number, self.error)

    def error_of(self, use: PageUse) -> BaseException | None:
        """Why pages of ``use`` that this transfer was to fill are not filled."""
        if self.error is not None or not self.part_errors:
            return self.error
        filled: InFlight[int] = InFlight()
        for number in self.part_errors:
            filled.add(number, [part_use for each in self._parts[number] for part_use in each.uses(self.direction)])
        return next((self.part_errors[number] for number in filled.users(use, (Access.WRITE,))), None)

    def cancel(self) -> None:
        """Let it stop at the next layer; it is over when :attr:`done`."""
        self._cancelled = True

    def observe(self) -> None:
        """Count the time it took, once it is done."""
        clock, self._clock = self._clock, None
        if clock is not None and self.error is None:
            self._metrics.observe("transfer_seconds", clock.seconds(), direction=self.direction.value)

    def run(self) -> None:
        """Do or queue the copies; whatever happens, every event fires."""
        began = time.perf_counter()
        ends: _Ends = (None, None)
        try:
            if self._writers:
                self._attempt(self._check_writers_of)
                self._writers = ()
            self._device.before_transfer(self.transfers)
            clock = self._clock = self._device.clock()
            for step, event in self._steps():
                if self._parts:
                    self._attempt(step)
                else:
                    step(self.transfers)
                if event is not None:
                    event.fire()
            released = [result.device_released for _, result in self._moved]
            ready = [result.host_ready for _, result in self._moved]
            if self.direction is Direction.WRITE_BACK:
                ends = (_cuda_events(released), _cuda_events(ready))
            if self._separate is not None:
                self._settle()
            clock.stop([event for event in (*released, *ready) if event is not None])
        except BaseException as error:
            self.error = error
            self._writers = ()
            if not isinstance(error, SourceFailedError):
                self._settle()
            if not isinstance(error, Exception):
                raise
            if not (isinstance(error, OperationCancelledError) or self.part_errors):
                self._count_failure(error)
        finally:
            # Counted before anyone can see that it is over.
            try:
                self._record(time.perf_counter() - began)
            finally:
                self._fire_all(*ends)

    def abandon(self, error: Exception) -> None:
        """End without having started."""
        self._writers = ()
        self.error = error
        self._fire_all(None, None)

    # Steps

    def _steps(self) -> Iterator[tuple[_Step, Signal | None]]:
        """Yield what is done in turn, and the event that is fired after it."""
        if self.direction is Direction.WRITE_BACK:
            yield self._write_back, None
        elif self._device.loads_whole_pools and len({transfer.name for transfer in self.transfers}) == 1:
            yield self._load_whole_pool, None
        else:
            for layer, event in enumerate(self.layer_events):
                yield partial(self._load_layer, layer), event

    def _attempt(self, step: _Step) -> None:
        """Do a step for all transfers or, where that fails, for each part that has not failed; raise if all have.

        A step may be repeated for rows that it has moved already: no event has fired yet that would let them be read.
        """
        whole_error: Exception | None = None
        if self._separate is None:
            try:
                step(self.transfers)
                return
            except OperationCancelledError:
                raise
            except Exception as error:
                if not self._parts:
                    raise
                if not isinstance(error, SourceFailedError):
                    self._settle()
                whole_error, self._separate = error, dict(enumerate(self._parts))
        for number, part in list(self._separate.items()):
            try:
                step(part)
            except OperationCancelledError:
                raise
            except Exception as error:
                del self._separate[number]
                self.part_errors[number] = error
                self._count_failure(error)
        if not self._separate:
            raise next(iter(self.part_errors.values()))
        if whole_error is not None and not self.part_errors:
            self._count_failure(whole_error)  # no part is at fault, but the time it cost should be seen

    def _check_writers_of(self, transfers: Sequence[L2Transfer]) -> None:
        for writer in self._writers:
            if not writer.handle.has_failed:
                continue
            for use in (use for transfer in transfers for use in transfer.uses(self.direction)):
                if use.side == writer.use.side:
                    writer.check(use)

    def _write_back(self, transfers: Sequence[L2Transfer]) -> None:
        for each in transfers:
            if self._cancelled:
                raise OperationCancelledError("the write was cancelled")
            result = each.host_pool.backup_from_device_all_layer(
                each.device_pool, each.host_indices, each.device_indices, each.io_backend, **each.hints
            )
            self._moved.append((each, result))

    def _load_whole_pool(self, transfers: Sequence[L2Transfer]) -> None:
        """Load the only pool, whose transfer is first, in one call; the transfers of its drafts give their layers."""
        if self._cancelled:
            raise OperationCancelledError("the load was cancelled")
        owner = transfers[0]
        result = owner.host_pool.load_to_device_all_layer(
            owner.device_pool,
            owner.host_indices,
            owner.device_indices,
            owner.io_backend,
            layer_events=True,
            **owner.hints,
        )
        self._moved.append((owner, result))
        if result.layer_done and self._separate is None:  # the layers of one part are not those of all
            self._fire_layers(transfers, result.layer_done)

    def _fire_layers(self, transfers: Sequence[L2Transfer], layer_done: Sequence[torch.cuda.Event]) -> None:
        local_layers = {layer: local for layer, local in enumerate(transfers[0].layer_map) if local is not None}
        for draft in transfers[1:]:
            first = 1 + max(local_layers.values(), default=-1)
            own = [layer for layer, local in enumerate(draft.layer_map) if local is not None]
            local_layers |= {layer: first + number for number, layer in enumerate(own)}
        done: tuple[torch.cuda.Event, ...] = ()
        for layer, event in enumerate(self.layer_events):
            if layer in local_layers:
                done = (layer_done[local_layers[layer]],)
            event.fire(done)

    def _load_layer(self, layer: int, transfers: Sequence[L2Transfer]) -> None:
        for each in transfers:
            local = each.layer_map[layer] if layer < len(each.layer_map) else None
            if local is None:
                continue
            if self._cancelled:
                raise OperationCancelledError("the load was cancelled")
            result = each.host_pool.load_to_device_per_layer(
                each.device_pool,
                each.host_indices,
                each.device_indices,
                local,
                each.io_backend,
                is_draft=each.is_draft,
                **each.hints,
            )
            self._moved.append((each, result))

    # Ends

    def _settle(self) -> None:
        """Nothing may still move when the slots are freed."""
        try:
            self._device.settle()
        except Exception:
            logger.exception("waiting for the device after a failed transfer failed too")

    def _count_failure(self, error: BaseException) -> None:
        self._metrics.count("transfer_failures", direction=self.direction.value)
        self._failures.note(words(self.direction), error)

    def _fire_all(
        self, released: tuple[torch.cuda.Event, ...] | None, ready: tuple[torch.cuda.Event, ...] | None
    ) -> None:
        """Fire what has not fired: the ends with the given events, or with the work queued so far."""
        layers = ((event, None) for event in self.layer_events)
        for event, events in (*layers, (self.device_released, released), (self.host_ready, ready)):
            try:
                event.fire(events)
            except Exception as error:
                self.error = self.error or error

    def _record(self, seconds: float) -> None:
        direction = self.direction.value
        counts: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        seen: set[int] = set()
        for transfer, result in self._moved:
            labels = (("direction", direction), ("path", result.path), ("pool", transfer.name))
            counts["transfer_bytes", labels] += result.bytes
            counts["transfer_operations", labels] += 1
            # Every layer moves the same runs of pages; they count once.
            counts["transfer_runs", labels] += 0 if id(transfer) in seen else result.runs
            if result.path == "reference":
                counts["fallbacks", (("direction", direction), ("reason", result.reason))] += 1
            seen.add(id(transfer))
        self._metrics.add(counts)
        self._metrics.observe("transfer_submit_seconds", seconds, direction=direction)


_Step = Callable[[Sequence[L2Transfer]], None]
_Ends = tuple[tuple[torch.cuda.Event, ...] | None, tuple[torch.cuda.Event, ...] | None]


def _cuda_events(events: Sequence[torch.cuda.Event | None]) -> tuple[torch.cuda.Event, ...] | None:
    """Return the events, or None for none; where one is missing, also what the current stream holds now."""
    known = tuple(event for event in events if event is not None)
    if not known:
        return None
    return known if len(known) == len(events) else (*known, torch.cuda.current_stream().record_event())


def words(direction: Direction) -> str:
    """Return a direction as messages name it."""
    return direction.value.replace("_", "-")


def source_error(direction: Direction, error: BaseException) -> SourceFailedError:
    """Make the error of an operation that reads bytes which a write-back or a load has failed to bring."""
    return SourceFailedError(f"the {words(direction)} of its bytes failed: {error}")
