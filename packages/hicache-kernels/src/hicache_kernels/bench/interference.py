"""What transfers do to compute next to them, and both directions at once; on a GPU only."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch

from ..graphs import Transfers, Workload, replay_seconds, timing_event, workloads
from ..layout import HostLayout
from ..planner import PathUnavailableError
from ..staging import Direction
from .cases import PLAIN, SHAPES, Case, Pattern, pool_of
from .measure import submit
from .pool import BenchPool, Buffers

REPLAYS = 4
OPERATIONS = 5
"""Transfers in a row, which last longer than the replays of a graph next to them."""
DISTURBING = Case(SHAPES[0], 16, HostLayout.PAGE_FIRST_DIRECT, Pattern.RUN, Direction.WRITE_BACK, "staged")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One workload during one transfer.

    Attributes
    ----------
    workload
        ``"prefill"`` or ``"decode"``.
    case, path
        The transfer, and the path it took; the policy of a case may be :data:`~hicache_kernels.bench.cases.PLAIN`.
    slowdown
        Time of the graph during the transfer over its time alone; median over alternating measurements.
    of_plain
        Time of the graph during the transfer over its time during plain copies of the same bytes. A graph alone may run
        at other clocks.
    ratio
        Bandwidth of the transfer during the graph, as a share of a plain copy alone.
    """

    workload: str
    case: Case
    path: str
    slowdown: float
    of_plain: float
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


def disturbances(
    buffers: Buffers, plain_seconds: dict[Direction, float], cases: Iterable[Case], *, repeats: int = 7
) -> Iterator[Disturbance]:
    """Measure every workload during transfers; the cases of a pool follow each other, a plain copy first."""
    device = buffers.device
    if device.type == "cpu":
        return
    graphs = workloads(device)
    for workload in graphs:
        for _ in range(REPLAYS):
            workload.graph.replay()
    for (_, direction), group in itertools.groupby(cases, lambda case: (pool_of(case), case.direction)):
        of_pool = list(group)
        pool = BenchPool.build(of_pool[0], buffers)
        for workload in graphs:
            yield from _beside(workload, of_pool, pool, buffers, plain_seconds[direction], repeats)


def _beside(
    workload: Workload, cases: list[Case], pool: BenchPool, buffers: Buffers, plain_seconds: float, repeats: int
) -> Iterator[Disturbance]:
    """Measure a workload next to each case of a pool, in turns."""
    paths: dict[Case, str] = {}
    for case in cases:
        with contextlib.suppress(PathUnavailableError):
            paths[case] = PLAIN if case.policy == PLAIN else submit(pool, case, workload.name).path
    samples: dict[Case, list[tuple[float, float, float]]] = {case: [] for case in paths}
    for _ in range(repeats):
        for case, found in samples.items():
            move = functools.partial(_move, case, pool, buffers, workload.name)
            transfers = Transfers(buffers.device, move, OPERATIONS)
            alone = replay_seconds(workload.graph, buffers.device, REPLAYS)
            during = replay_seconds(workload.graph, buffers.device, REPLAYS, transfers)
            found.append((alone, during, transfers.seconds()))
    plain = samples[cases[0]]
    for case, found in samples.items():
        yield Disturbance(
            workload.name,
            case,
            paths[case],
            median(during / alone for alone, during, _ in found),
            median(mine[1] / other[1] for mine, other in zip(found, plain, strict=True)),
            median(plain_seconds * pool.bytes / buffers.size / moved for _, _, moved in found),
        )


def _move(case: Case, pool: BenchPool, buffers: Buffers, compute: str) -> torch.cuda.Event | None:
    """Queue one transfer; return the event of its end where that is not on the current stream."""
    if case.policy == PLAIN:
        load = case.direction is Direction.LOAD
        to, of = (buffers.rows, buffers.host) if load else (buffers.host, buffers.rows)
        to[: pool.bytes].copy_(of[: pool.bytes], non_blocking=True)
        return None
    return submit(pool, case, compute).host_ready


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
