"""Devices: streams, events and clocks of the CPU and of CUDA; only this module knows which of them is used."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from .events import COMPLETED, Event, HostSignal, Signal, StreamSignal, wait_until_done

if TYPE_CHECKING:
    from .transfer_handle import L2Transfer

logger = logging.getLogger(__name__)

_NO_SCOPE = nullcontext()


class HostClock:
    """Times one transfer that the CPU does."""

    def __init__(self) -> None:
        self._start = self._end = time.perf_counter()

    def stop(self, events: Sequence[torch.cuda.Event]) -> None:
        """End now."""
        self._end = time.perf_counter()

    def seconds(self) -> float:
        """Return the time between start and stop."""
        return self._end - self._start


class StreamClock:
    """Times one transfer over several streams, from what the current stream holds now.

    Parameters
    ----------
    end_stream
        Stream on which nothing else waits for the transfer.
    """

    def __init__(self, end_stream: torch.cuda.Stream) -> None:
        self._end_stream = end_stream
        self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._start.record()

    def stop(self, events: Sequence[torch.cuda.Event]) -> None:
        """End after the events and after what the current stream holds now."""
        for event in (*events, torch.cuda.current_stream().record_event()):
            self._end_stream.wait_event(event)
        self._end.record(self._end_stream)

    def seconds(self) -> float:
        """Return the time between start and stop, once that has come."""
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


class CpuDevice:
    """Transfers done by the thread that runs them, layer by layer, so that a forward pass need not wait for all.

    Parameters
    ----------
    synchronous
        Whether transfers are done before the call that submits them returns, so that their events have always come.

    Attributes
    ----------
    loads_whole_pools
        Whether a load of one pool is one call that records an event a layer, instead of a call a layer.
    """

    loads_whole_pools = False

    def __init__(self, *, synchronous: bool = False) -> None:
        self._synchronous = synchronous

    def submission_event(self) -> Event | None:
        """Return None: what the caller computed is done when it calls."""
        return None

    def signal(self) -> Signal:
        """Make an event that a transfer fires."""
        return COMPLETED if self._synchronous else HostSignal()

    def order(self, event: Event, timeout: float) -> bool:
        """Block until ``event`` has come, at most ``timeout`` seconds; return whether it has."""
        return wait_until_done(event, timeout)

    def clock(self) -> HostClock:
        """Start a clock."""
        return HostClock()

    def scope(self) -> AbstractContextManager[object]:
        """Return a scope that does nothing."""
        return _NO_SCOPE

    def moves_on_cpu(self, transfers: Iterable[L2Transfer]) -> bool:
        """Return True: the CPU moves every transfer."""
        return True

    def before_transfer(self, transfers: Iterable[L2Transfer]) -> None:
        """Return at once: this thread has waited for the events already."""

    def settle(self) -> None:
        """Return at once: a CPU transfer has stopped when it raises."""


class CudaDevice:
    """Transfers queued on one stream of a CUDA or ROCm device; a pool is one call, so that its layers' copies overlap.

    Parameters
    ----------
    device
        The device.
    warned
        Names of the pools that a warning has named; shared by both directions of a device.
    """

    loads_whole_pools = True

    def __init__(self, device: torch.device, warned: set[str] | None = None) -> None:
        self.device = device
        self._warned = warned if warned is not None else set()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._clock_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submission_event(self) -> Event | None:
        """Record an event on the caller's current stream."""
        event: Event = torch.cuda.current_stream(self.device).record_event()
        return event

    def signal(self) -> Signal:
        """Make an event that a transfer fires."""
        return StreamSignal()

    def order(self, event: Event, timeout: float) -> bool:
        """Let the stream wait, and return True; for an event of CPU work, block as :meth:`CpuDevice.order` does."""
        if isinstance(event, HostSignal):
            return event.synchronize(timeout)
        event.wait(self.stream)
        return True

    def clock(self) -> StreamClock:
        """Start a clock after what the current stream holds now."""
        return StreamClock(self._clock_stream)

    def scope(self) -> AbstractContextManager[object]:
        """Make the stream, and with it the device, current."""
        return torch.cuda.stream(self.stream)

    def moves_on_cpu(self, transfers: Iterable[L2Transfer]) -> bool:
        """Return whether a pool of the transfer moves its rows in plain torch."""
        return any(map(_moves_on_cpu, transfers))

    def before_transfer(self, transfers: Iterable[L2Transfer]) -> None:
        """Synchronize the stream where a pool moves its rows in plain torch: the CPU reads host memory then, no stream.

        Warns once for each pool whose direct path was forbidden; a pool that has none has logged that itself.
        """
        on_cpu = [transfer for transfer in transfers if _moves_on_cpu(transfer)]
        for transfer in on_cpu:
            if transfer.host_pool.capabilities().direct and transfer.name not in self._warned:
                self._warned.add(transfer.name)
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


Device = CpuDevice | CudaDevice
Clock = HostClock | StreamClock


def make_devices(device: torch.device, *, synchronous: bool) -> tuple[Device, Device]:
    """Make what write-backs and what loads run on: streams of their own on a GPU.

    Raises
    ------
    ValueError
        For ``synchronous`` on a device other than CPU.
    """
    if device.type == "cpu":
        return (CpuDevice(synchronous=synchronous),) * 2
    if synchronous:
        raise ValueError(f"synchronous is True with pools on {device}; only pools on cpu complete synchronously")
    warned: set[str] = set()
    return CudaDevice(device, warned), CudaDevice(device, warned)


def _moves_on_cpu(transfer: L2Transfer) -> bool:
    """Return whether a pool on a GPU moves its rows in plain torch, by which the CPU touches host memory itself.

    ``io_backend`` ``"direct"`` and ``block_quota`` 0 both forbid the direct path, whose work SMs do.
    """
    pool = transfer.host_pool
    if pool.can_use_write_back_jit:
        return False
    return not pool.capabilities().direct or transfer.block_quota == 0 or transfer.io_backend == "direct"
