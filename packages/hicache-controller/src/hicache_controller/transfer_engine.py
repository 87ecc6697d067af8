"""L2TransferEngine: runs transfers between device and host pools in an order in which no race can corrupt a byte."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hicache_kernels.validation import seconds

from .devices import Device, make_devices
from .events import Event, wait_until_done
from .failure_log import FailureLog
from .forks import refuse_in_forks
from .in_flight import Access, Granules, InFlight, Place, Side, Use
from .interrupts import interrupts_held_back
from .metrics import Metrics
from .transfer_handle import Direction, Guards, L2Transfer, Source, TransferHandle
from .worker import Worker


class Predecessors(NamedTuple):
    """What an operation has to follow: events, and transfers in flight that bring the bytes it reads."""

    events: list[Event]
    sources: list[Source]


class Lane(NamedTuple):
    """One direction of a device: what its transfers run on, and the worker that runs them one after the other.

    Also on CUDA, where queueing is all there is to do: it takes longer than a scheduler should be held up.
    """

    device: Device
    worker: Worker


class PendingPages(NamedTuple):
    """Result of asking for pages: which nothing uses, and which something still does."""

    idle: Granules
    busy: Granules


class L2TransferEngine:
    """Both directions of one device, and everything in flight between its pools and their host memory.

    An operation waits, on its own stream or thread and never on the caller's, for the events of the operations in
    flight that touch the same physical slots:

    ====================  =============================================================================================
    write-back            the caller's ``ready_event``; loads that fill its device rows; whoever uses its host slots
    load                  the caller's ``ready_event``; whoever uses its device rows; writers of its host slots
    backup, prefetch      writers of its host slots (and, as it writes, readers of them)
    ====================  =============================================================================================

    An operation that reads what another one was to write fails where that one has failed.

    With what the controller does (slots in flight are not freed, device slots are freed behind ``device_released``),
    that closes the five hazards.

    Parameters
    ----------
    device
        Device of the pools.
    synchronous
        Complete each transfer before its submission returns (CPU pools only), as a simulation wants it.
    queue_inline
        Queue a transfer of a GPU in the submitting thread, unless it has to wait for another thread first, or the CPU
        moves some of it.
    metrics
        Where to count.
    guards
        For tests.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        synchronous: bool = False,
        queue_inline: bool = False,
        metrics: Metrics | None = None,
        guards: Guards | None = None,
    ) -> None:
        refuse_in_forks(self)
        self.device = torch.device(device)
        self.synchronous = synchronous
        self._queue_inline = queue_inline
        self.metrics = metrics if metrics is not None else Metrics()
        self.guards = guards if guards is not None else Guards()
        self.in_flight: InFlight[Any] = InFlight()
        self.failures = FailureLog()
        devices = dict(zip(Direction, make_devices(self.device, synchronous=synchronous), strict=True))
        self._lanes = {
            direction: Lane(device, Worker(_thread_name(direction), device, synchronous=synchronous))
            for direction, device in devices.items()
        }

    def submission_event(self) -> Event | None:
        """Record an event for what the caller's stream holds now; None on CPU, where the caller computes itself."""
        return self._lanes[Direction.DEVICE_TO_HOST].device.submission_event()

    @interrupts_held_back()  # what is on its way stays in the books
    def submit_device_to_host(
        self,
        transfers: Sequence[L2Transfer],
        *,
        ready_events: Sequence[Event] = (),
        parts: Sequence[Sequence[L2Transfer]] = (),
    ) -> TransferHandle:
        """Write device rows back to host slots.

        Parameters
        ----------
        transfers
            One a pool.
        parts
            The same rows as the transfers of the operations that were merged, which then fail one by one.
        ready_events
            Events after which the rows are valid; on CUDA, with none, the caller's current stream as it is now.

        Returns
        -------
        TransferHandle
            Its ``device_released`` and ``host_ready``, its error.
        """
        after = self._ready(ready_events) if self.guards.write_follows_compute else []
        if self.synchronous:
            return self._submit(self._handle(Direction.DEVICE_TO_HOST, transfers, 0, parts), (), after)
        uses: list[Use] = []
        others: list[tuple[Use, tuple[Access, ...]]] = []
        for transfer in transfers:
            device = transfer.use(Side.DEVICE, Access.READ)
            host = transfer.use(Side.HOST, Access.WRITE)
            uses += [device, host]
            others += [(device, (Access.WRITE,)), (host, (Access.WRITE,))]
            if self.guards.refill_follows_read:
                others.append((host, (Access.READ,)))
        before = self.predecessors(others)
        handle = self._handle(Direction.DEVICE_TO_HOST, transfers, 0, parts, before.sources)
        return self._submit(handle, uses, [*after, *before.events])

    @interrupts_held_back()  # what is on its way stays in the books
    def submit_host_to_device(
        self,
        transfers: Sequence[L2Transfer],
        *,
        layers: int,
        ready_events: Sequence[Event] = (),
        parts: Sequence[Sequence[L2Transfer]] = (),
    ) -> TransferHandle:
        """Load host slots into device rows, layer by layer.

        Parameters
        ----------
        transfers, parts
            As in :meth:`submit_device_to_host`.
        layers
            Model layers; the handle has an event for each.
        ready_events
            Events after which the rows may be overwritten; on CUDA the caller's current stream counts as well.
        """
        after: list[Event] = []
        if self.guards.load_follows_compute:
            submitted = self.submission_event()
            after = [*ready_events, *([submitted] if submitted is not None else [])]
        if self.synchronous:
            return self._submit(self._handle(Direction.HOST_TO_DEVICE, transfers, layers, parts), (), after)
        uses: list[Use] = []
        others: list[tuple[Use, tuple[Access, ...]]] = []
        for transfer in transfers:
            device = transfer.use(Side.DEVICE, Access.WRITE)
            host = transfer.use(Side.HOST, Access.READ)
            uses += [device, host]
            others.append((device, (Access.READ, Access.WRITE)))
            if self.guards.read_follows_write:
                others.append((host, (Access.WRITE,)))
        before = self.predecessors(others)
        handle = self._handle(Direction.HOST_TO_DEVICE, transfers, layers, parts, before.sources)
        return self._submit(handle, uses, [*after, *before.events])

    def predecessors(self, uses: Iterable[tuple[Use, tuple[Access, ...]]]) -> Predecessors:
        """Find what is in flight now and uses the pages in those ways."""
        events: dict[int, Event] = {}
        sources: list[Source] = []
        for use, accesses in uses:
            for owner in self.in_flight.users(use, accesses):
                event = owner.device_released if use.place.side is Side.DEVICE else owner.host_ready
                if not event.query():
                    events[id(event)] = event
                # A reader waits for writers alone, so these are what it reads. Storage says by itself what it brought.
                if use.access is Access.READ and isinstance(owner, TransferHandle):
                    sources.append(Source(owner, use))
        return Predecessors(list(events.values()), sources)

    def events_of_users(self, uses: Iterable[tuple[Use, tuple[Access, ...]]]) -> list[Event]:
        """Events after which none of the pages is used any more in those ways by what is in flight now."""
        return self.predecessors(uses).events

    def release(self, handle: TransferHandle) -> None:
        """Let the slots of a transfer that is done go, and count its time."""
        self.in_flight.remove(handle)
        handle.observe()

    def reap(self) -> None:
        """Let the slots of everything that is done go."""
        for owner in self.in_flight.owners():
            if owner.done:
                self.in_flight.remove(owner)

    def idle_pages(self, place: Place, pages: Granules) -> PendingPages:
        """Split pages by whether something in flight uses them."""
        self.reap()
        busy = self.in_flight.busy(place, pages)
        if not busy.any():
            return PendingPages(pages, pages[:0])
        return PendingPages(pages[~busy], pages[busy])

    def drain(self, timeout: float | None = None) -> bool:
        """Block until what is in flight now is done; False when ``timeout`` seconds pass first."""
        deadline = None if timeout is None else time.monotonic() + seconds("timeout", timeout)
        for owner in self.in_flight.owners():
            for event in (owner.device_released, owner.host_ready):
                if deadline is None:
                    event.synchronize()
                elif not wait_until_done(event, max(0.0, deadline - time.monotonic())):
                    return False
        self.reap()
        return True

    def close(self, timeout: float) -> bool:
        """Stop both lanes; what has not started ends with an error. Tell whether they stopped in time."""
        timeout = seconds("timeout", timeout)
        stopped = [lane.worker.close(timeout) for lane in self._lanes.values()]
        return all(stopped)

    def _ready(self, ready_events: Sequence[Event]) -> list[Event]:
        if ready_events:
            return list(ready_events)
        submitted = self.submission_event()
        return [] if submitted is None else [submitted]

    def _handle(
        self,
        direction: Direction,
        transfers: Sequence[L2Transfer],
        layers: int,
        parts: Sequence[Sequence[L2Transfer]],
        sources: Sequence[Source] = (),
    ) -> TransferHandle:
        device = self._lanes[direction].device
        return TransferHandle(
            direction, transfers, layers, device, self.metrics, self.guards, self.failures, sources, parts
        )

    def _submit(self, handle: TransferHandle, uses: Sequence[Use], after: Sequence[Event]) -> TransferHandle:
        worker = self._lanes[handle.direction].worker
        if not uses:
            worker.submit(handle, after)
            return handle
        inline = self._queue_inline and not handle.moves_on_cpu
        self.in_flight.add(handle, uses)
        try:
            worker.submit(handle, after, inline=inline)
        except BaseException:
            self.in_flight.remove(handle)
            raise
        return handle


def _thread_name(direction: Direction) -> str:
    return f"hicache-{direction.name.lower().replace('_', '-')}"
