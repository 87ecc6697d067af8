"""TransferHandle: one submitted transfer of several pools, from queueing its copies to the events that end it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from hicache_kernels import TransferResult
from hicache_kernels.validation import MAX_BLOCKS, whole
from hicache_pools.device_pools.base import DevicePool

from .devices import Clock, Device
from .events import COMPLETED, Event, Signal
from .failure_log import FailureLog
from .in_flight import Access, Granules, InFlight, Place, Side, Use, page_granules
from .metrics import Metrics
from .operations import OperationCancelledError, SourceFailedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guards:
    """Which of the five hazards are closed; all of them, but in the tests that show what each guard prevents.

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


class Direction(Enum):
    """Way of a transfer."""

    DEVICE_TO_HOST = "write_back"
    HOST_TO_DEVICE = "load"

    @property
    def words(self) -> str:
        """As messages say it."""
        return "load" if self is Direction.HOST_TO_DEVICE else "write-back"


@dataclass(frozen=True, eq=False)
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
        Most CTAs the transfer may hold, as the pools take it. Only a pool's calls with a quota get the keyword.
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

    def __post_init__(self) -> None:
        if self.block_quota is not None:
            whole("block_quota", self.block_quota, least=0, most=MAX_BLOCKS)

    def device_granules(self) -> Granules | None:
        """Pages of the device side; None where they are not known on the CPU."""
        if isinstance(self.device_pool, DevicePool) and self.device_pool.index_translation is not None:
            return None
        return page_granules(self.device_indices, int(self.host_pool.page_size))

    def host_granules(self) -> Granules | None:
        """Pages of the host side."""
        return page_granules(self.host_indices, int(self.host_pool.page_size))

    def use(self, side: Side, access: Access) -> Use:
        """Describe what it does with its slots on one side."""
        granules = self.device_granules() if side is Side.DEVICE else self.host_granules()
        return Use(Place(self.name, side), access, granules)

    def write_back(self) -> TransferResult:
        """Queue or do the copy of every layer to the host."""
        result: TransferResult = self.host_pool.backup_from_device_all_layer(
            self.device_pool, self.host_indices, self.device_indices, self.io_backend, **self._quota()
        )
        return result

    def load_whole_pool(self) -> TransferResult:
        """Queue or do the copy of all layers to the device, those of packed drafts included."""
        result: TransferResult = self.host_pool.load_to_device_all_layer(
            self.device_pool,
            self.host_indices,
            self.device_indices,
            self.io_backend,
            layer_events=True,
            **self._quota(),
        )
        return result

    def load_layer(self, layer: int) -> TransferResult:
        """Queue or do the copy of one of the pool's layers to the device."""
        result: TransferResult = self.host_pool.load_to_device_per_layer(
            self.device_pool,
            self.host_indices,
            self.device_indices,
            layer,
            self.io_backend,
            is_draft=self.is_draft,
            **self._quota(),
        )
        return result

    def _quota(self) -> dict[str, int]:
        # Pools that engines bring need not know the keyword.
        return {} if self.block_quota is None else {"block_quota": self.block_quota}


class Source(NamedTuple):
    """A transfer in flight, and what another operation reads of what it brings."""

    handle: TransferHandle
    use: Use

    def check(self, use: Use) -> None:
        """Raise SourceFailedError where the transfer, or the part of it that brings any of ``use``, has failed."""
        error = self.handle.error_of(use)
        if error is not None:
            what = self.handle.direction.words
            raise source_error(what, error) from error


class InFlightOperation:
    """Anything that uses slots: events that tell when it no longer does.

    Attributes
    ----------
    device_released, host_ready
        Fired once its device slots, and its host slots, may be used by others.
    """

    device_released: Event = COMPLETED
    host_ready: Event = COMPLETED

    def __init__(self, sources: Sequence[Source] = ()) -> None:
        self._sources = tuple(sources)

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

    def check_sources(self) -> None:
        """Raise SourceFailedError if a transfer failed whose bytes this one moves, once they are waited for.

        On CUDA that is known of what failed when it was queued; what fails later on the device fails all behind it.
        """
        # Let go, or each transfer would keep all those before it.
        sources, self._sources = self._sources, ()
        for source in sources:
            source.check(source.use)

    @property
    def done(self) -> bool:
        """Whether all its slots are its no longer."""
        return self.device_released.query() and self.host_ready.query()


class TransferHandle(InFlightOperation):
    """A submitted transfer; a job of its lane, and what its submitter watches.

    One that was merged from several ``parts`` is tried at once. Where that fails, each part is tried by itself before
    any event fires that would say that it is over, so that a bad one fails alone.

    Attributes
    ----------
    layer_events
        For a load, one event a model layer; empty for a write-back.
    error
        Why all of it failed; final once :attr:`done`.
    part_errors
        Why parts of it failed, by number.
    results
        What each pool's transfer reported.
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
        guards: Guards,
        failures: FailureLog,
        sources: Sequence[Source] = (),
        parts: Sequence[Sequence[L2Transfer]] = (),
    ) -> None:
        super().__init__(sources)
        self.direction = direction
        # Kept until the handle goes: what an asynchronous copy reads belongs to its operation.
        self.transfers = tuple(transfers)
        self._parts = tuple(parts)
        self._apart: list[int] | None = None  # numbers of the parts that go on, once they are tried one by one
        self.device_released = device.signal()
        self.host_ready = device.signal()
        self.layer_events: tuple[Signal, ...] = tuple(device.signal() for _ in range(layers))
        self.error: BaseException | None = None
        self.part_errors: dict[int, BaseException] = {}
        self.results: list[TransferResult] = []
        self._pools: list[str] = []
        self._counted: set[int] = set()
        self._device = device
        self._metrics = metrics
        self._failures = failures
        self._cancelled = False
        self._clock: Clock | None = None
        if direction is Direction.DEVICE_TO_HOST and not guards.overwrite_follows_read:
            self.device_released = COMPLETED

    @property
    def moves_on_cpu(self) -> bool:
        """Whether the thread that runs it moves bytes itself, instead of queueing copies."""
        return self._device.moves_on_cpu(self.transfers)

    @property
    def has_failed(self) -> bool:
        """Whether all or a part of it has failed."""
        return self.error is not None or bool(self.part_errors)

    def part_error(self, number: int) -> BaseException | None:
        """Why one of the parts failed."""
        return self.part_errors.get(number, self.error)

    def error_of(self, use: Use) -> BaseException | None:
        """Why some of ``use`` did not get its bytes, as far as they were to come with this transfer."""
        if self.error is not None or not self.part_errors:
            return self.error
        brought: InFlight[int] = InFlight()
        for number in self.part_errors:
            brought.add(number, [each.use(use.place.side, Access.WRITE) for each in self._parts[number]])
        return next((self.part_errors[number] for number in brought.users(use, (Access.WRITE,))), None)

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
        released: tuple[torch.cuda.Event, ...] | None = None
        ready: tuple[torch.cuda.Event, ...] | None = None
        try:
            self._attempt(self._check_sources_of)
            self._sources = ()
            self._device.before_transfer(self.transfers)
            self._clock = self._device.clock()
            if self.direction is Direction.DEVICE_TO_HOST:
                self._attempt(self._write_back)
                released = _cuda_events(result.device_released for result in self.results)
                ready = _cuda_events(result.host_ready for result in self.results)
            else:
                self._load()
            if self._apart is not None:
                self._settle()
            self._stop_clock()
        except BaseException as error:
            self.error = error
            self._sources = ()
            if not isinstance(error, SourceFailedError):
                self._settle()
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, OperationCancelledError) and not self.part_errors:
                self._count_failure(error)
        finally:
            # Who sees that it is over finds it counted.
            try:
                self._record(time.perf_counter() - began)
            finally:
                self._fire_all(released, ready)

    def abandon(self, error: Exception) -> None:
        """End without having started."""
        self._sources = ()
        self.error = error
        self._fire_all()

    def _attempt(self, step: Callable[[Sequence[L2Transfer]], None]) -> None:
        """Do a step for all transfers or, where that has failed, for each part that has not failed; raise if all have.

        A step may be repeated for rows that it has moved already, as nobody can have seen these yet.
        """
        repeated: Exception | None = None
        if self._apart is None:
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
                self._apart = list(range(len(self._parts)))
                repeated = error
        for number in self._apart:
            try:
                step(self._parts[number])
            except OperationCancelledError:
                raise
            except Exception as error:
                self.part_errors[number] = error
                self._count_failure(error)
        if repeated is not None and not self.part_errors:
            self._count_failure(repeated)  # no part is to blame, but the time it cost is to be seen
        self._apart = [number for number in self._apart if number not in self.part_errors]
        if not self._apart:
            raise next(iter(self.part_errors.values()))

    def _count_failure(self, error: BaseException) -> None:
        self._metrics.count("transfer_failures", direction=self.direction.value)
        self._failures.note(self.direction.words, error)

    def _check_sources_of(self, transfers: Sequence[L2Transfer]) -> None:
        for source in self._sources:
            if not source.handle.has_failed:
                continue
            for transfer in transfers:
                use = transfer.use(source.use.place.side, Access.READ)
                if use.place == source.use.place:
                    source.check(use)

    def _write_back(self, transfers: Sequence[L2Transfer]) -> None:
        for transfer in transfers:
            if self._cancelled:
                raise OperationCancelledError("the write was cancelled")
            self._note(transfer, transfer.write_back())

    def _load(self) -> None:
        if self._cancelled:
            raise OperationCancelledError("the load was cancelled")
        if self._device.loads_whole_pools and len({transfer.name for transfer in self.transfers}) == 1:
            self._attempt(self._load_whole_pool)
            return
        for layer, event in enumerate(self.layer_events):
            self._attempt(partial(self._load_layer, layer))
            event.fire()

    def _load_whole_pool(self, transfers: Sequence[L2Transfer]) -> None:
        """Load the only pool, whose transfer comes first, in one call; its drafts' transfers tell their layers."""
        owner = transfers[0]
        result = owner.load_whole_pool()
        self._note(owner, result)
        if not result.layer_done or self._apart is not None:  # the layers of one part are not those of all
            return
        local_layers = {layer: local for layer, local in enumerate(owner.layer_map) if local is not None}
        for draft in transfers[1:]:
            first = 1 + max(local_layers.values(), default=-1)
            own = [layer for layer, local in enumerate(draft.layer_map) if local is not None]
            local_layers |= {layer: first + number for number, layer in enumerate(own)}
        done: tuple[torch.cuda.Event, ...] = ()
        for layer, event in enumerate(self.layer_events):
            if layer in local_layers:
                done = (result.layer_done[local_layers[layer]],)
            event.fire(done)

    def _load_layer(self, layer: int, transfers: Sequence[L2Transfer]) -> None:
        for transfer in transfers:
            local = transfer.layer_map[layer] if layer < len(transfer.layer_map) else None
            if local is None:
                continue
            if self._cancelled:
                raise OperationCancelledError("the load was cancelled")
            result = transfer.load_layer(local)
            # Every layer moves the same runs of pages; they count once.
            self._note(transfer, dataclasses.replace(result, runs=0) if id(transfer) in self._counted else result)
            self._counted.add(id(transfer))

    def _stop_clock(self) -> None:
        if self._clock is not None:
            events = (event for result in self.results for event in (result.device_released, result.host_ready))
            self._clock.stop([event for event in events if event is not None])

    def _settle(self) -> None:
        """Nothing may still move when the slots go back."""
        try:
            self._device.settle()
        except Exception:
            logger.exception("waiting for the device after a failed transfer failed too")

    def _fire_all(
        self,
        released: tuple[torch.cuda.Event, ...] | None = None,
        ready: tuple[torch.cuda.Event, ...] | None = None,
    ) -> None:
        """Fire what has not fired: the ends with the given events, or with the work queued so far."""
        layers = ((event, None) for event in self.layer_events)
        for event, events in (*layers, (self.device_released, released), (self.host_ready, ready)):
            try:
                event.fire(events)
            except Exception as error:
                self.error = self.error or error

    def _note(self, transfer: L2Transfer, result: TransferResult) -> None:
        self.results.append(result)
        self._pools.append(transfer.name)

    def _record(self, seconds: float) -> None:
        direction = self.direction.value
        for pool, result in zip(self._pools, self.results, strict=True):
            path = result.path
            self._metrics.count("transfer_bytes", result.bytes, path=path, direction=direction, pool=pool)
            self._metrics.count("transfer_runs", result.runs, path=path, direction=direction, pool=pool)
            self._metrics.count("transfer_operations", path=path, direction=direction, pool=pool)
            if path == "reference":
                self._metrics.count("fallbacks", reason=result.reason, direction=direction)
        self._metrics.observe("transfer_submit_seconds", seconds, direction=direction)


def _cuda_events(events: Iterable[torch.cuda.Event | None]) -> tuple[torch.cuda.Event, ...] | None:
    """Return the events; where one is missing, what the current stream holds now stands for it (None: for all)."""
    listed = list(events)
    known = tuple(event for event in listed if event is not None)
    if not known:
        return None
    return known if len(known) == len(listed) else (*known, torch.cuda.current_stream().record_event())


def source_error(what: str, error: BaseException) -> SourceFailedError:
    """Make the error of an operation on bytes that a write-back or load (``what``) was to bring, and did not."""
    return SourceFailedError(f"the {what} of its bytes failed: {error}")
