"""Times one case: whole operation, submission, release of the device slots, first layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ..planner import PathUnavailableError
from ..staging import Direction, canonical_device
from ..streams import own_stream
from ..transfer import TransferResult
from .cases import Case
from .pool import BenchPool, Buffers

SLOW_SECONDS = 0.2
"""An operation that takes longer is measured once."""
SPIN_CYCLES_PER_SECOND = 2e9


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
        From the operation's start on the device until the host bytes are there or all rows are filled.
    ratio
        Bandwidth as a share of a plain pinned copy of the same direction.
    submit_seconds
        Time the caller's thread spends in the call.
    release_share
        Write-back: when the device rows have been read, as a share of ``seconds``. Load: 1.
    first_layer_share
        Load: when layer 0 is filled, as a share of the whole, on a stream that was busy while the load was queued.
        Write-back: 1.
    """

    path: str
    reason: str
    bytes: int
    copies: int
    seconds: float
    ratio: float
    submit_seconds: float
    release_share: float
    first_layer_share: float


@dataclass(frozen=True, slots=True)
class _Sample:
    seconds: float
    submit: float
    released: float


def plain_copy_seconds(buffers: Buffers, direction: Direction, *, repeats: int = 5) -> float:
    """Median time of one copy of the whole buffer: what every bandwidth is a share of."""
    return median(plain_copy_samples(buffers, direction, repeats + 1))


def plain_copy_samples(buffers: Buffers, direction: Direction, count: int) -> list[float]:
    """Time so many copies of the whole buffer, one by one."""
    to, of = (buffers.host, buffers.rows) if direction is Direction.WRITE_BACK else (buffers.rows, buffers.host)
    return [timed(lambda: to.copy_(of, non_blocking=True), buffers.device) for _ in range(count)]


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds between the start of a call on an idle device and the end of what it queued on the current stream."""
    if device.type == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    torch.cuda.synchronize(device)
    start, end = timing_event(), timing_event()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3


def timing_event() -> torch.cuda.Event:
    """Make an event that keeps the time."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def submit(pool: BenchPool, case: Case) -> TransferResult:
    """Call the transfer of a case; a load is one of all layers in order, with an event behind each."""
    if case.direction is Direction.WRITE_BACK:
        return pool.transfer.write_back(
            pool.host_indices, pool.device_indices, policy=case.policy, block_quota=case.block_quota
        )
    return pool.transfer.load(
        pool.host_indices,
        pool.device_indices,
        policy=case.policy,
        block_quota=case.block_quota,
        layer_events=case.layer_by_layer,
    )


def _sample_on_cpu(pool: BenchPool, case: Case) -> _Sample:
    begin = time.perf_counter()
    submit(pool, case)
    seconds = time.perf_counter() - begin
    return _Sample(seconds, seconds, seconds)


def _sample_on_gpu(pool: BenchPool, case: Case, side: torch.cuda.Stream, device: torch.device) -> _Sample:
    start, released, ready = (timing_event() for _ in range(3))
    torch.cuda.synchronize(device)
    start.record()
    begin = time.perf_counter()
    result = submit(pool, case)
    spent = time.perf_counter() - begin
    released.record()
    # The events of a result do not keep the time: events that do are recorded behind them.
    if result.host_ready is not None:
        side.wait_event(result.host_ready)
    side.wait_event(released)
    ready.record(side)
    torch.cuda.synchronize(device)
    seconds = start.elapsed_time(ready) / 1e3
    return _Sample(seconds, spent, start.elapsed_time(released) / 1e3)


def _first_layer_share(
    pool: BenchPool, case: Case, side: torch.cuda.Stream, device: torch.device, busy: float
) -> float:
    """Share of a load after which layer 0 is filled; ``busy`` seconds of spinning hide the time to queue it."""
    start, first, ready = (timing_event() for _ in range(3))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int(busy * SPIN_CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
    start.record()
    result = submit(pool, case)
    if not result.layer_done or result.host_ready is None:
        torch.cuda.synchronize(device)
        return 1.0
    side.wait_event(result.layer_done[0])
    first.record(side)
    side.wait_event(result.layer_done[-1])
    ready.record(side)
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(first) / start.elapsed_time(ready))


def measure_case(case: Case, pool: BenchPool, plain_bytes_per_second: float, *, repeats: int = 5) -> Measurement:
    """Measure a case; every repetition hands in fresh index tensors, so that nothing is checked or uploaded beforehand.

    Parameters
    ----------
    case, pool
        The operation, and the pool that :meth:`BenchPool.build` made for it.
    plain_bytes_per_second
        Rate of a plain copy in the same direction.
    repeats
        Measured repetitions, after one that is not.
    """
    device = pool.device_indices.device
    # One of torch's own could be the stream of the copies, behind which no event is seen before the last.
    side = own_stream(canonical_device(device), "timing") if device.type == "cuda" else None
    try:
        result = submit(pool, case)
    except PathUnavailableError as error:
        return Measurement("none", str(error), 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    samples: list[_Sample] = []
    for _ in range(repeats + 1):
        fresh = BenchPool(pool.transfer, pool.host_indices.clone(), pool.device_indices.clone(), pool.bytes)
        sample = _sample_on_cpu(fresh, case) if side is None else _sample_on_gpu(fresh, case, side, device)
        samples.append(sample)
        if sample.seconds > SLOW_SECONDS:
            break
    kept = samples[1:] or samples
    seconds = median(sample.seconds for sample in kept)
    is_load = case.direction is Direction.LOAD
    busy = median(sample.submit for sample in kept)
    first_layer = 1.0
    if is_load and case.layer_by_layer and side is not None and busy < SLOW_SECONDS:
        first_layer = median(_first_layer_share(pool, case, side, device, 4 * busy + 2e-3) for _ in range(5))
    return Measurement(
        result.path,
        result.reason,
        result.bytes,
        result.copies,
        seconds,
        pool.bytes / seconds / plain_bytes_per_second,
        median(sample.submit for sample in kept),
        1.0 if is_load else median(sample.released for sample in kept) / seconds,
        first_layer,
    )
