"""What transfers do to compute next to them, and both directions at once; on a GPU only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from ..layout import HostLayout
from ..planner import PathUnavailableError
from ..staging import Direction
from .cases import QUOTAS, SHAPES, Case, Pattern
from .measure import submit, timing_event
from .pool import BenchPool, Buffers

PLAIN = "plain copy"
REPLAYS = 4
DISTURBING = Case(SHAPES[0], 16, HostLayout.PAGE_FIRST_DIRECT, Pattern.RUN, Direction.WRITE_BACK, "staged")
LEAD_SECONDS = 0.001
"""Head start of the transfers, so that the graph never runs alone."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One workload during one transfer.

    Attributes
    ----------
    workload
        ``"prefill"`` or ``"decode"``.
    direction, policy, block_quota
        The transfer; policy ``"plain copy"`` is one copy of the whole buffer, which no transfer can disturb less than.
    slowdown
        Time of the graph during the transfer over its time alone; median over alternating measurements.
    ratio
        Bandwidth of the transfer during the graph, as a share of a plain copy alone.
    """

    workload: str
    direction: Direction
    policy: str
    block_quota: int | None
    slowdown: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Duplex:
    """Both directions at once.

    Attributes
    ----------
    plain_bytes_per_second, staged_bytes_per_second
        Both directions together: two plain copies, a staged write-back during a staged load-back.
    ratio
        Staged over plain.
    """

    plain_bytes_per_second: float
    staged_bytes_per_second: float
    ratio: float


@dataclass(frozen=True, eq=False)
class Workload:
    """A captured graph, and the tensors that it reads and that nothing else keeps alive."""

    name: str
    graph: torch.cuda.CUDAGraph
    tensors: tuple[torch.Tensor, ...]


def workloads(device: torch.device) -> tuple[Workload, ...]:
    """Make graphs of matrix products: of 4096 tokens, and of 64, with weights that do not stay in the cache."""
    weights = tuple(torch.randn(4096, 4096, device=device, dtype=torch.bfloat16) for _ in range(8))
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def workload(name: str, tokens: int, products: int) -> Workload:
        activations = torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16)

        def body() -> None:
            for index in range(products):
                torch.mm(activations, weights[index % len(weights)])

        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            body()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        return Workload(name, graph, (activations, *weights))

    return workload("prefill", 4096, 24), workload("decode", 64, 240)


def disturbances(
    buffers: Buffers,
    plain_seconds: dict[Direction, float],
    *,
    repeats: int = 7,
    operations: int = 5,
    quotas: Sequence[int] = QUOTAS,
) -> Iterator[Disturbance]:
    """Measure every workload during staged transfers of a run, and during direct ones by CTA quota."""
    device = buffers.device
    if device.type == "cpu":
        return
    pool = BenchPool.build(DISTURBING, buffers)
    movers = [(PLAIN, None), ("staged", None), *(("direct", quota) for quota in quotas)]
    for workload in workloads(device):
        for _ in range(REPLAYS):
            workload.graph.replay()
        for direction in Direction:
            for policy, quota in movers:
                operation = _operation(pool, buffers, direction, policy, quota)
                try:
                    operation()
                except PathUnavailableError:
                    continue
                samples = [_during(workload.graph, device, operation, operations) for _ in range(repeats)]
                yield Disturbance(
                    workload.name,
                    direction,
                    policy,
                    quota,
                    median(during / alone for alone, during, _ in samples),
                    median(plain_seconds[direction] * pool.bytes / buffers.size / moved for _, _, moved in samples),
                )


def _operation(
    pool: BenchPool, buffers: Buffers, direction: Direction, policy: str, quota: int | None
) -> Callable[[], torch.cuda.Event | None]:
    """Make a call that queues one transfer and gives the event of its end, if that is not the current stream's."""
    if policy == PLAIN:
        to, of = (buffers.host, buffers.rows) if direction is Direction.WRITE_BACK else (buffers.rows, buffers.host)

        def copy() -> None:
            to[: pool.bytes].copy_(of[: pool.bytes], non_blocking=True)

        return copy
    case = replace(DISTURBING, direction=direction, policy=policy, block_quota=quota)
    return lambda: submit(pool, case).host_ready


def _during(
    graph: torch.cuda.CUDAGraph,
    device: torch.device,
    operation: Callable[[], torch.cuda.Event | None],
    operations: int,
) -> tuple[float, float, float]:
    """Seconds of a replay alone, during transfers, and of one of these transfers."""
    compute, mover = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def replay(before: Callable[[], None] | None) -> float:
        start, end = timing_event(), timing_event()
        torch.cuda.synchronize(device)
        if before is not None:
            before()
            time.sleep(LEAD_SECONDS)
        with torch.cuda.stream(compute):
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3 / REPLAYS

    begin, done = timing_event(), timing_event()

    def move() -> None:
        with torch.cuda.stream(mover):
            begin.record()
            for _ in range(operations):
                ready = operation()
            if ready is not None:
                mover.wait_event(ready)
            done.record()

    alone = replay(None)
    during = replay(move)
    return alone, during, begin.elapsed_time(done) / 1e3 / operations


def measure_duplex(buffers: Buffers, *, repeats: int = 5, operations: int = 4) -> Duplex | None:
    """Measure both directions at once, in runs, by staged transfers and by plain copies; None on the CPU."""
    device = buffers.device
    if device.type == "cpu":
        return None
    halves = buffers.halves()
    pools = [BenchPool.build(DISTURBING, half) for half in halves]
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]

    def plain() -> None:
        with torch.cuda.stream(streams[0]):
            halves[0].host.copy_(halves[0].rows, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            halves[1].rows.copy_(halves[1].host, non_blocking=True)

    def staged() -> None:
        for direction, pool, stream in zip(Direction, pools, streams, strict=True):
            with torch.cuda.stream(stream):
                result = submit(pool, replace(DISTURBING, direction=direction))
                if result.host_ready is not None:
                    stream.wait_event(result.host_ready)

    def seconds(call: Callable[[], None]) -> float:
        found = []
        for _ in range(repeats + 1):
            start, end = timing_event(), timing_event()
            torch.cuda.synchronize(device)
            start.record()
            for stream in streams:
                stream.wait_event(start)
            for _ in range(operations):
                call()
            for stream in streams:
                torch.cuda.current_stream(device).wait_stream(stream)
            end.record()
            torch.cuda.synchronize(device)
            found.append(start.elapsed_time(end) / 1e3 / operations)
        return float(median(found[1:]))

    submit(pools[0], DISTURBING)
    submit(pools[1], replace(DISTURBING, direction=Direction.LOAD))
    plain_rate = sum(half.size for half in halves) / seconds(plain)
    staged_rate = sum(pool.bytes for pool in pools) / seconds(staged)
    return Duplex(plain_rate, staged_rate, staged_rate / plain_rate)
