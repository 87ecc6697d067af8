"""L2TransferEngine: runs transfers between device and host pools in an order in which no race can corrupt a byte."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hicache_kernels.staging import Direction
from hicache_kernels.validation import seconds

from .devices import make_devices
from .events import COMPLETED, Event, wait_until_done
from .failure_log import FailureLog
from .forks import refuse_in_forks
from .in_flight import Access, InFlight, PageUse
from .interrupts import HeldInterrupts
from .metrics import Metrics
from .transfer_handle import Guards, L2Transfer, TransferHandle, Writer
from .worker import Worker

READ, WRITE, ANY = (Access.READ,), (Access.WRITE,), (Access.READ, Access.WRITE)
_THREAD_NAMES = {Direction.WRITE_BACK: "hicache-device-to-host", Direction.LOAD: "hicache-host-to-device"}


class Predecessors(NamedTuple):
    """What an operation has to follow: events, and the transfers in flight whose bytes it reads."""

    events: list[Event]
    writers: list[Writer]


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
    that closes the five hazards. Each direction has a worker of its own, also on CUDA, where queueing is all there is
    to do: it takes longer than a scheduler should be held up.

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
        devices = make_devices(self.device, synchronous=synchronous)
        self._workers = {
            direction: Worker(name, device, synchronous=synchronous)
            for (direction, name), device in zip(_THREAD_NAMES.items(), devices, strict=True)
        }

    def submission_event(self) -> Event | None:
        """Record an event for what the caller's stream holds now; None on CPU, where the caller computes itself."""
        return self._workers[Direction.WRITE_BACK].device.submission_event()

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
        return self.submit(Direction.WRITE_BACK, transfers, 0, ready_events, parts)

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
        return self.submit(Direction.LOAD, transfers, layers, ready_events, parts)

    def submit(
        self,
        direction: Direction,
        transfers: Sequence[L2Transfer],
        layers: int,
        ready_events: Sequence[Event],
        parts: Sequence[Sequence[L2Transfer]],
    ) -> TransferHandle:
        """Do what :meth:`submit_device_to_host` (``layers`` is 0) or :meth:`submit_host_to_device` says."""
        is_load, guards = direction is Direction.LOAD, self.guards
        worker = self._workers[direction]
        with HeldInterrupts():  # what moves is known to be in flight
            after: list[Event] = []
            if guards.load_follows_compute if is_load else guards.write_follows_compute:
                after += ready_events
                submitted = self.submission_event() if is_load or not after else None
                if submitted is not None:
                    after.append(submitted)
            uses = [] if self.synchronous else [use for transfer in transfers for use in transfer.uses(direction)]
            before = self.predecessors(uses)
            after += before.events
            handle = TransferHandle(
                direction, transfers, layers, worker.device, self.metrics, self.failures, before.writers, parts
            )
            if not (is_load or guards.overwrite_follows_read):
                handle.device_released = COMPLETED
            if uses:
                self.in_flight.add(handle, uses)
            try:
                inline = self._queue_inline and not worker.device.moves_on_cpu(transfers)
                worker.submit(handle, after, inline=inline)
            except BaseException:
                self.in_flight.remove(handle)
                raise
            return handle

    def predecessors(self, uses: Iterable[PageUse]) -> Predecessors:
        """Find what is in flight now that an operation which uses these pages has to follow."""
        events: dict[int, Event] = {}
        writers: list[Writer] = []
        for use in uses if self.in_flight else ():
            for owner in self.in_flight.users(use, self._conflicts(use)):
                event = owner.device_released if use.side.side == "device" else owner.host_ready
                if not event.query():
                    events[id(event)] = event
                # A reader waits for writers alone. Storage reports by itself what it has written.
                if use.access is Access.READ and isinstance(owner, TransferHandle):
                    writers.append(Writer(owner, use))
        return Predecessors(list(events.values()), writers)

    def _conflicts(self, use: PageUse) -> tuple[Access, ...]:
        """Return which accesses of others an operation has to follow: of a reader the writes, of a writer all."""
        if use.access is Access.READ:
            return WRITE if use.side.side == "device" or self.guards.read_follows_write else ()
        return ANY if use.side.side == "device" or self.guards.refill_follows_read else WRITE

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
        stopped = [worker.close(timeout) for worker in self._workers.values()]
        return all(stopped)
