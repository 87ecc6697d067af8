"""Times one case: whole operation, submission, release of the device slots, first layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from ..constants import Compute
from ..graphs import spin, timing_event
from ..planner import PathUnavailableError
from ..staging import Direction, canonical_device
from ..streams import own_stream
from ..transfer import TransferResult
from ..validation import whole
from .cases import Case
from .pool import BenchPool, Buffers

SLOW_SECONDS = 0.2
"""An operation that takes longer is measured once."""
MIN_SPIN_SECONDS = 2e-3


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians of one case.

    Attributes
    ----------
    path, reason
        What the transfer did, and why; ``"none"`` where the policy cannot be followed.
    bytes, copies
        Bytes moved, copies handed to the copy engine.
    seconds
        From the operation's start on the device until the host bytes are there or all rows are filled; on a stream that
        was busy while the operation was queued, except for operations that are measured once.
    ratio
        Bandwidth as a share of a plain pinned copy of the same direction.
    idle_seconds, idle_ratio
        The same from the call on an idle device: what the thread needs before the device has work is in it.
    submit_seconds
        Time the caller's thread spends in the call, on an idle device.
    release_share
        Write-back: when the device rows have been read, as a share of ``seconds``. Load: 1.
    first_layer_share
        Load: when layer 0 is filled, as a share of ``seconds``. Write-back: 1.
    """

    path: str
    reason: str
    bytes: int
    copies: int
    seconds: float
    ratio: float
    idle_seconds: float
    idle_ratio: float
    submit_seconds: float
    release_share: float
    first_layer_share: float

    def held_against(self, plain_bytes_per_second: float) -> Measurement:
        """Return it with shares of another plain copy, where they are of one of a byte a second."""
        ratio, idle_ratio = self.ratio / plain_bytes_per_second, self.idle_ratio / plain_bytes_per_second
        return replace(self, ratio=ratio, idle_ratio=idle_ratio)


@dataclass(frozen=True, slots=True)
class _Sample:
    seconds: float
    submit: float
    released: float
    first_layer: float


def plain_copy_seconds(buffers: Buffers, direction: Direction, *, repeats: int = 5) -> float:
    """Median time of one copy of the whole buffer: what every bandwidth is a share of."""
    return median(plain_copy_samples(buffers, direction, repeats + 1))


def plain_copy_samples(buffers: Buffers, direction: Direction, count: int) -> list[float]:
    """Time so many copies of the whole buffer, one by one."""
    to, of = (buffers.host, buffers.rows) if direction is Direction.WRITE_BACK else (buffers.rows, buffers.host)
    return [timed(lambda: to.copy_(of, non_blocking=True), buffers.device) for _ in range(count)]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that what a call queues on the current stream takes, of which nothing starts before all is queued."""
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    torch.cuda.synchronize(device)
    start, end = timing_event(), timing_event()
    spin(MIN_SPIN_SECONDS)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3


def submit(pool: BenchPool, case: Case, compute: Compute | str | None = None) -> TransferResult:
    """Call the transfer of a case; a load is one of all layers in order, with an event after each."""
    if case.direction is Direction.WRITE_BACK:
        return pool.transfer.write_back(
            pool.host_indices, pool.device_indices, policy=case.policy, block_quota=case.block_quota, compute=compute
        )
    return pool.transfer.load(
        pool.host_indices,
        pool.device_indices,
        policy=case.policy,
        block_quota=case.block_quota,
        compute=compute,
        layer_events=case.layer_by_layer,
    )


def _sample_on_cpu(pool: BenchPool, case: Case) -> _Sample:
    begin = time.perf_counter()
    submit(pool, case)
    seconds = time.perf_counter() - begin
    return _Sample(seconds, seconds, seconds, seconds)


def _sample_on_gpu(
    pool: BenchPool, case: Case, side: torch.cuda.Stream, device: torch.device, busy: float = 0.0
) -> _Sample:
    """Time an operation once; ``busy`` seconds of spinning hide the time to queue it."""
    start, first, released, ready = (timing_event() for _ in range(4))
    torch.cuda.synchronize(device)
    if busy:
        spin(busy)
    start.record()
    begin = time.perf_counter()
    result = submit(pool, case)
    spent = time.perf_counter() - begin
    released.record()
    # The events of a result do not keep the time: events that do are recorded after them.
    if result.layer_done:
        side.wait_event(result.layer_done[0])
        first.record(side)
    if result.host_ready is not None:
        side.wait_event(result.host_ready)
    side.wait_event(released)
    ready.record(side)
    torch.cuda.synchronize(device)
    seconds = start.elapsed_time(ready) / 1e3
    first_layer = start.elapsed_time(first) / 1e3 if result.layer_done else seconds
    return _Sample(seconds, spent, start.elapsed_time(released) / 1e3, first_layer)


def measure_case(case: Case, pool: BenchPool, plain_bytes_per_second: float, *, repeats: int = 5) -> Measurement:
    """Measure a case; every repetition hands in fresh index tensors, so that nothing is checked or uploaded beforehand.

    Parameters
    ----------
    case, pool
        The operation, and the pool that :meth:`BenchPool.build` made for it.
    plain_bytes_per_second
        Rate of a plain copy in the same direction.
    repeats
        Measured repetitions of each way, after one that is not; at least 1.
    """
    repeats = whole("repeats", repeats)
    device = pool.device_indices.device
    # One of torch's own could be the stream of the copies, where no event is seen before the last.
    side = own_stream(canonical_device(device), "timing") if device.type == "cuda" else None
    try:
        result = submit(pool, case)
    except PathUnavailableError as error:
        return Measurement("none", str(error), 0, 0, *[0.0] * 7)

    def sample(busy: float = 0.0) -> _Sample:
        fresh = BenchPool(pool.transfer, pool.host_indices.clone(), pool.device_indices.clone(), pool.bytes)
        return _sample_on_cpu(fresh, case) if side is None else _sample_on_gpu(fresh, case, side, device, busy)

    first = sample()
    idle: list[_Sample] = []
    kept: list[_Sample] = []
    # In turns, as the CPU has faster and slower moments.
    while first.seconds <= SLOW_SECONDS and len(idle) < repeats:
        idle.append(sample())
        if side is not None:
            kept.append(sample(4 * idle[-1].submit + MIN_SPIN_SECONDS))
    idle = idle or [first]
    kept = kept or idle
    seconds, idle_seconds = median(each.seconds for each in kept), median(each.seconds for each in idle)
    is_load = case.direction is Direction.LOAD
    return Measurement(
        result.path,
        result.reason,
        result.bytes,
        result.copies,
        seconds,
        pool.bytes / seconds / plain_bytes_per_second,
        idle_seconds,
        pool.bytes / idle_seconds / plain_bytes_per_second,
        median(each.submit for each in idle),
        1.0 if is_load else median(each.released for each in kept) / seconds,
        median(each.first_layer for each in kept) / seconds if is_load else 1.0,
    )
