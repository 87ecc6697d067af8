"""L2TransferEngine: runs transfers between device and host pools in an order in which no race can corrupt a byte."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hicache_kernels.staging import Direction
from hicache_kernels.validation import seconds

from .devices import Device, make_devices
from .events import COMPLETED, Event, wait_until_done
from .failure_log import FailureLog
from .forks import refuse_in_forks
from .in_flight import Access, InFlight, PageUse
from .interrupts import interrupts_held_back
from .metrics import Metrics
from .transfer_handle import Guards, L2Transfer, TransferHandle, Writer
from .worker import Worker

READ, WRITE = (Access.READ,), (Access.WRITE,)
_THREAD_NAMES = {Direction.WRITE_BACK: "hicache-device-to-host", Direction.LOAD: "hicache-host-to-device"}


class Predecessors(NamedTuple):
    """What an operation has to follow: events, and the transfers in flight whose bytes it reads."""

    events: list[Event]
    writers: list[Writer]


class Lane(NamedTuple):
    """One direction of a device: what its transfers run on, and the worker that runs them one after the other.

    Also on CUDA, where queueing is all there is to do: it takes longer than a scheduler should be held up.
    """

    device: Device
    worker: Worker


class L2TransferEngine:
    """Both directions of one device, and everything in flight between its pools and their host memory.

    An operation waits, on its own stream or thread and never on the caller's, for the events of the operations in
    flight that touch the same physical slots:

    ====================  =============================================================================================
    write-back            the caller's ``ready_event``; loads that fill its device rows; users of its host slots
    load                  the caller's ``ready_event``; users of its device rows; writers of its host slots
    backup, prefetch      writers of its host slots (and, as it writes, readers of them)
    ====================  =============================================================================================

    An operation that reads what another one was to write fails where that one has failed.

    With what the controller does (slots in flight are not freed, device slots are freed after ``device_released``),
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
        devices = zip(_THREAD_NAMES.items(), make_devices(self.device, synchronous=synchronous), strict=True)
        self._lanes = {
            direction: Lane(device, Worker(name, device, synchronous=synchronous))
            for (direction, name), device in devices
        }

    def submission_event(self) -> Event | None:
        """Record an event for what the caller's stream holds now; None on CPU, where the caller computes itself."""
        return self._lanes[Direction.WRITE_BACK].device.submission_event()

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
        with interrupts_held_back():  # what moves is known to be in flight
            after: list[Event] = []
            if self.guards.write_follows_compute:
                submitted = None if ready_events else self.submission_event()
                after = list(ready_events) if submitted is None else [submitted]
            uses: list[PageUse] = []
            before: list[tuple[PageUse, tuple[Access, ...]]] = []
            if not self.synchronous:
                host_accesses = (Access.WRITE, Access.READ) if self.guards.refill_follows_read else WRITE
                for transfer in transfers:
                    device, host = transfer.use("device", Access.READ), transfer.use("host", Access.WRITE)
                    uses += (device, host)
                    before += ((device, WRITE), (host, host_accesses))
            handle = self._handle(Direction.WRITE_BACK, transfers, 0, parts, before, after)
            if not self.guards.overwrite_follows_read:
                handle.device_released = COMPLETED
            worker = self._lanes[Direction.WRITE_BACK].worker
            if uses:
                self.in_flight.add(handle, uses)
            try:
                worker.submit(handle, after, inline=self._queue_inline and not handle.moves_on_cpu)
            except BaseException:
                self.in_flight.remove(handle)
                raise
            return handle

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
        with interrupts_held_back():
            after: list[Event] = []
            if self.guards.load_follows_compute:
                submitted = self.submission_event()
                after = list(ready_events) if submitted is None else [*ready_events, submitted]
            uses: list[PageUse] = []
            before: list[tuple[PageUse, tuple[Access, ...]]] = []
            if not self.synchronous:
                for transfer in transfers:
                    device, host = transfer.use("device", Access.WRITE), transfer.use("host", Access.READ)
                    uses += (device, host)
                    before.append((device, (Access.READ, Access.WRITE)))
                    if self.guards.read_follows_write:
                        before.append((host, WRITE))
            handle = self._handle(Direction.LOAD, transfers, layers, parts, before, after)
            worker = self._lanes[Direction.LOAD].worker
            if uses:
                self.in_flight.add(handle, uses)
            try:
                worker.submit(handle, after, inline=self._queue_inline and not handle.moves_on_cpu)
            except BaseException:
                self.in_flight.remove(handle)
                raise
            return handle

    def predecessors(self, uses: Iterable[tuple[PageUse, tuple[Access, ...]]]) -> Predecessors:
        """Find what is in flight now and uses the pages in those ways."""
        events: dict[int, Event] = {}
        writers: list[Writer] = []
        if not self.in_flight:
            return Predecessors([], writers)
        for use, accesses in uses:
            for owner in self.in_flight.users(use, accesses):
                event = owner.device_released if use.side.side == "device" else owner.host_ready
                if not event.query():
                    events[id(event)] = event
                # A reader waits for writers alone. Storage reports by itself what it has written.
                if use.access is Access.READ and isinstance(owner, TransferHandle):
                    writers.append(Writer(owner, use))
        return Predecessors(list(events.values()), writers)

    def events_of_users(self, uses: Iterable[tuple[PageUse, tuple[Access, ...]]]) -> list[Event]:
        """Return events after which none of the pages is used any more in those ways by what is in flight now."""
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
        """Stop both lanes; what has not started ends with an error. Return whether they stopped in time."""
        timeout = seconds("timeout", timeout)
        stopped = [lane.worker.close(timeout) for lane in self._lanes.values()]
        return all(stopped)

    def _handle(
        self,
        direction: Direction,
        transfers: Sequence[L2Transfer],
        layers: int,
        parts: Sequence[Sequence[L2Transfer]],
        before: Iterable[tuple[PageUse, tuple[Access, ...]]],
        after: list[Event],
    ) -> TransferHandle:
        """Make the handle of a transfer, and add the events of its predecessors to ``after``."""
        events, writers = self.predecessors(before)
        after += events
        device = self._lanes[direction].device
        return TransferHandle(direction, transfers, layers, device, self.metrics, self.failures, writers, parts)
