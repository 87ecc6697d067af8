"""Lanes: ordered queues of transfers on a device; the one place of this package that knows devices.

A lane is to a CUDA transfer what a stream is, and gives CPU transfers the same order: jobs of one lane run one after
the other, each behind the events it has to wait for, and the caller goes on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .events import COMPLETED, Event, HostSignal, Signal, StreamSignal, is_queued, wait_until_done
from .forks import refuse_in_forks

logger = logging.getLogger(__name__)

_STOP_CHECK_SECONDS = 0.1


class LaneStoppedError(RuntimeError):
    """A transfer was dropped because its lane stopped before it ran."""


class Job(Protocol):
    """One unit of a lane's work. Neither method may raise."""

    def run(self) -> None:
        """Do the work (CPU) or queue it on the current stream (CUDA)."""
        ...

    def abandon(self, error: Exception) -> None:
        """Complete without the work having started."""
        ...


class TransferPart(Protocol):
    """What a device asks about one pool's part of a transfer."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def host_pool(self) -> Any: ...  # noqa: D102

    @property
    def io_backend(self) -> str: ...  # noqa: D102

    @property
    def block_quota(self) -> int | None: ...  # noqa: D102


def runs_on_cpu(*, staged: bool, direct: bool, io_backend: str, block_quota: int | None) -> bool:
    """Tell whether a pool of a device moves its rows in plain torch, by which the CPU touches host memory itself.

    Parameters
    ----------
    staged, direct
        Which compiled paths the pool has.
    io_backend, block_quota
        As the transfer hands them to the pool: ``"direct"`` and 0 both forbid the direct path, whose work SMs do.
    """
    return not staged and (not direct or block_quota == 0 or io_backend == "direct")


class Clock(Protocol):
    """Measures one transfer on the device's own clock."""

    def stop(self, events: Sequence[torch.cuda.Event]) -> None:
        """End with the given events and with what the current stream holds now."""
        ...

    def seconds(self) -> float:
        """Return the time between start and stop; blocks until that has come."""
        ...


class HostClock:
    """Times CPU work."""

    def __init__(self) -> None:
        self._start = self._end = time.perf_counter()

    def stop(self, events: Sequence[torch.cuda.Event]) -> None:
        """End now."""
        self._end = time.perf_counter()

    def seconds(self) -> float:
        """Return the time between start and stop."""
        return self._end - self._start


class StreamClock:
    """Times work of several streams, from the current stream's present on."""

    def __init__(self, end_stream: torch.cuda.Stream) -> None:
        self._end_stream = end_stream
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._start.record()

    def stop(self, events: Sequence[torch.cuda.Event]) -> None:
        """End behind the events, on a stream where nothing else waits for them."""
        for event in (*events, torch.cuda.current_stream().record_event()):
            self._end_stream.wait_event(event)
        self._end.record(self._end_stream)

    def seconds(self) -> float:
        """Return the time between start and stop; blocks until that has come."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


class Device(Protocol):
    """What lanes need to know of a device.

    Attributes
    ----------
    loads_whole_pools
        Whether a load of one pool is one call that records an event a layer, instead of a call a layer.
    """

    @property
    def loads_whole_pools(self) -> bool: ...  # noqa: D102

    def submission_event(self) -> Event | None:
        """Event of the work the caller's stream holds now; None where callers compute on their own thread."""
        ...

    def signal(self) -> Signal:
        """Make an event the jobs of this device fire."""
        ...

    def order(self, event: Event) -> None:
        """Let what the current scope does next follow ``event``."""
        ...

    def clock(self) -> Clock:
        """Start a clock behind what the lane's stream holds now."""
        ...

    def scope(self) -> AbstractContextManager[object]:
        """Make the lane's stream current."""
        ...

    def moves_on_cpu(self, transfers: Iterable[TransferPart]) -> bool:
        """Tell whether the CPU moves any of a transfer's parts itself."""
        ...

    def before_transfer(self, transfers: Iterable[TransferPart]) -> None:
        """Let those of a transfer's parts that the CPU does itself follow what the current scope was ordered behind."""
        ...

    def settle(self) -> None:
        """Block until nothing queued on the device moves any more: what a failed transfer leaves behind."""
        ...


class CpuDevice:
    """Transfers done by the thread that runs them; by layers, so that a forward pass need not wait for all."""

    loads_whole_pools = False

    def submission_event(self) -> Event | None:
        """Return None: what the caller computed is done when it calls."""
        return None

    def signal(self) -> Signal:
        """Make a :class:`HostSignal`."""
        return HostSignal()

    def order(self, event: Event) -> None:
        """Block until ``event`` has come."""
        event.synchronize()

    def clock(self) -> Clock:
        """Start a :class:`HostClock`."""
        return HostClock()

    def scope(self) -> AbstractContextManager[object]:
        """Return a scope that does nothing."""
        return contextlib.nullcontext()

    def moves_on_cpu(self, transfers: Iterable[TransferPart]) -> bool:
        """Tell that it does."""
        return True

    def before_transfer(self, transfers: Iterable[TransferPart]) -> None:
        """Return at once: this thread has waited already."""

    def settle(self) -> None:
        """Return at once: a CPU transfer has stopped when it raises."""


class InlineCpuDevice(CpuDevice):
    """Transfers done before the submitting call returns, so their events have always come."""

    def signal(self) -> Signal:
        """Return the event that has come."""
        return COMPLETED


class CudaDevice:
    """Transfers queued on one stream of a CUDA or ROCm device; in one call, as then the layers' copies overlap.

    Parameters
    ----------
    device
        The device.
    told
        Names of pools of which it has been said that they move in plain torch; shared by those who say it together.
    """

    loads_whole_pools = True

    def __init__(self, device: torch.device, told: set[str] | None = None) -> None:
        self.device = device
        self._told = told if told is not None else set()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._clock_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submission_event(self) -> Event | None:
        """Record an event on the caller's current stream."""
        event: Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def signal(self) -> Signal:
        """Make a :class:`StreamSignal`."""
        return StreamSignal()

    def order(self, event: Event) -> None:
        """Let the stream wait; for an event of CPU work the calling thread does."""
        event.wait(self.stream)

    def clock(self) -> Clock:
        """Start a :class:`StreamClock`."""
        return StreamClock(self._clock_stream)

    def scope(self) -> AbstractContextManager[object]:
        """Make the stream, and with it the device, current."""
        return torch.cuda.stream(self.stream)

    def moves_on_cpu(self, transfers: Iterable[TransferPart]) -> bool:
        """Tell whether a pool of the transfer moves its rows in plain torch."""
        return any(map(_moves_on_cpu, transfers))

    def before_transfer(self, transfers: Iterable[TransferPart]) -> None:
        """Synchronize the stream where a pool moves its rows in plain torch: the CPU reads host memory then, no stream.

        Said once for each pool whose direct path was forbidden; where it has none, the pool has said so itself.
        """
        on_cpu = [transfer for transfer in transfers if _moves_on_cpu(transfer)]
        for transfer in on_cpu:
            if transfer.host_pool.capabilities().direct and transfer.name not in self._told:
                self._told.add(transfer.name)
                logger.warning(
                    "transfers of pool %s run in plain torch: it has no staged path, and io_backend=%r with "
                    "block_quota=%s forbids the direct one",
                    transfer.name,
                    transfer.io_backend,
                    transfer.block_quota,
                )
        if on_cpu:
            self.stream.synchronize()

    def settle(self) -> None:
        """Synchronize the whole device: a failed transfer may have used streams that are not known here."""
        torch.cuda.synchronize(self.device)


def _moves_on_cpu(transfer: TransferPart) -> bool:
    pool = transfer.host_pool
    if pool.can_use_write_back_jit:
        return False
    direct = pool.capabilities().direct
    return runs_on_cpu(staged=False, direct=direct, io_backend=transfer.io_backend, block_quota=transfer.block_quota)


class Lane(Protocol):
    """An ordered queue of jobs."""

    def submit(self, job: Job, after: Sequence[Event], *, inline: bool = False) -> None:
        """Run ``job`` behind the jobs before it and behind the events ``after``; ``inline`` now, if that is at once."""
        ...

    def close(self, timeout: float) -> bool:
        """Stop; jobs that have not started are abandoned. Tell whether the running one ended in ``timeout`` seconds."""
        ...


class InlineLane:
    """Runs each job before ``submit`` returns."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._closed = False

    def submit(self, job: Job, after: Sequence[Event], *, inline: bool = False) -> None:
        """Run ``job`` now."""
        if self._closed:
            job.abandon(LaneStoppedError("the transfer engine is closed"))
            return
        with self._device.scope():
            for event in after:
                self._device.order(event)
            job.run()

    def close(self, timeout: float) -> bool:
        """Refuse further jobs."""
        self._closed = True
        return True


class ThreadLane:
    """Runs jobs on a thread of its own, or where they are submitted.

    Invariant: a job waits only for events of jobs submitted before it and for events of callers, so two lanes never
    wait for each other in a circle. One job runs at a time.
    """

    def __init__(self, device: Device, name: str) -> None:
        refuse_in_forks(self)
        self._device = device
        self._jobs: deque[tuple[Job, tuple[Event, ...]]] = deque()
        self._changed = threading.Condition()
        self._running = False
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, after: Sequence[Event], *, inline: bool = False) -> None:
        """Queue ``job``; with ``inline`` run it now where no job is before it and it has to wait for no thread."""
        with self._changed:
            inline = inline and not (self._running or self._jobs or self._stopping)
            inline = inline and all(is_queued(event) for event in after)
            if inline:
                self._running = True
            elif not self._stopping:
                self._jobs.append((job, tuple(after)))
                self._changed.notify_all()
                return
        if not inline:
            job.abandon(LaneStoppedError("the transfer engine is closed"))
            return
        try:
            with self._device.scope():
                self._run(job, after)
        finally:
            self._ended()

    def close(self, timeout: float) -> bool:
        """Abandon what has not started and join the thread."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)
        with self._changed:
            return self._changed.wait_for(self._is_over, max(0.0, deadline - time.monotonic()))

    def _is_over(self) -> bool:
        return not (self._running or self._thread.is_alive())

    def _ended(self) -> None:
        with self._changed:
            self._running = False
            self._changed.notify_all()

    def _work(self) -> None:
        with self._device.scope():
            while True:
                with self._changed:
                    while self._running or not (self._jobs or self._stopping):
                        self._changed.wait()
                    if not self._jobs:
                        return
                    job, after = self._jobs.popleft()
                    self._running = True
                try:
                    self._run(job, after)
                except BaseException:  # the job has it as its error; those behind it are to be done
                    logger.exception("a transfer was ended by what is no Exception")
                finally:
                    self._ended()

    def _run(self, job: Job, after: Sequence[Event]) -> None:
        try:
            ready = self._wait_for(after)
        except Exception as error:  # as after a fault of the device: whoever waits for the job must be told
            job.abandon(error)
            return
        if ready:
            job.run()
        else:
            job.abandon(LaneStoppedError("the transfer engine closed before the transfer could start"))

    def _wait_for(self, events: Sequence[Event]) -> bool:
        """Order the job behind ``events``; False when the lane stops meanwhile."""
        for event in events:
            while isinstance(event, HostSignal) and not wait_until_done(event, _STOP_CHECK_SECONDS):
                if self._stopping:
                    return False
            if self._stopping:
                return False
            self._device.order(event)
        return not self._stopping


class LanePair:
    """The two directions of one device.

    Parameters
    ----------
    device
        Device of the pools.
    synchronous
        Complete every transfer before its submission returns; for CPU pools only.

    Raises
    ------
    ValueError
        For ``synchronous`` on a device other than CPU.
    """

    def __init__(self, device: torch.device, *, synchronous: bool) -> None:
        refuse_in_forks(self)
        self.device_to_host_device: Device
        self.host_to_device_device: Device
        self.device_to_host: Lane
        self.host_to_device: Lane
        if device.type == "cpu":
            shared = InlineCpuDevice() if synchronous else CpuDevice()
            self.device_to_host_device = self.host_to_device_device = shared
        elif synchronous:
            raise ValueError(f"synchronous is True with pools on {device}; only pools on cpu complete synchronously")
        else:
            told: set[str] = set()
            self.device_to_host_device, self.host_to_device_device = CudaDevice(device, told), CudaDevice(device, told)
        if synchronous:
            self.device_to_host = InlineLane(self.device_to_host_device)
            self.host_to_device = InlineLane(self.host_to_device_device)
        else:
            # Also on CUDA, where queueing is all there is to do: it takes longer than a scheduler should be held up.
            self.device_to_host = ThreadLane(self.device_to_host_device, "hicache-device-to-host")
            self.host_to_device = ThreadLane(self.host_to_device_device, "hicache-host-to-device")

    def submission_event(self) -> Event | None:
        """Event of the work the caller's stream holds now."""
        return self.device_to_host_device.submission_event()

    def close(self, timeout: float) -> bool:
        """Stop both."""
        stopped = self.device_to_host.close(timeout)
        return self.host_to_device.close(timeout) and stopped
