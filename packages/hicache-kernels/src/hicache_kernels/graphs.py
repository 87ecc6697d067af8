"""Graphs of matrix products that stand for a model, and their time next to transfers; on a GPU only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

SPIN_CYCLES_PER_SECOND = 2e9
LEAD_SECONDS = 0.003
"""Head start of the transfers, so that the graph never runs alone."""
WIDTH = 4096
WEIGHTS = 8
"""Matrices of 32 MiB that the products take in turn: together they do not stay in the cache."""
PREFILL_TOKENS, DECODE_TOKENS = 4096, 64


@dataclass(frozen=True, eq=False)
class Workload:
    """A captured graph, and the tensors that it reads and that nothing else keeps alive."""

    name: str
    graph: torch.cuda.CUDAGraph
    tensors: tuple[torch.Tensor, ...]


def workloads(
    device: torch.device, *, prefill_products: int = 24, decode_products: int = 240
) -> tuple[Workload, Workload]:
    """Make a graph of products of many tokens, which the SMs bound, and one of few, which the device's memory bounds.

    Parameters
    ----------
    device
        A GPU.
    prefill_products, decode_products
        Products of each graph: 0.2 ms each, and 0.01 ms (on an H200).
    """
    weights = tuple(torch.randn(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(WEIGHTS))
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def workload(name: str, tokens: int, products: int) -> Workload:
        activations = torch.randn(tokens, WIDTH, device=device, dtype=torch.bfloat16)

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

    return (
        workload("prefill", PREFILL_TOKENS, prefill_products),
        workload("decode", DECODE_TOKENS, decode_products),
    )


def timing_event() -> torch.cuda.Event:
    """Make an event that keeps the time."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def spin(seconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(seconds * SPIN_CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


def replay_seconds(
    graph: torch.cuda.CUDAGraph, device: torch.device, replays: int, transfers: Callable[[], None] | None = None
) -> float:
    """Seconds of one of ``replays`` replays, next to what ``transfers`` queues on streams of its own."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    start, end = timing_event(), timing_event()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        spin(LEAD_SECONDS)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
    # Queued last: a transfer that keeps the thread busy for long would otherwise be over before the graph starts.
    if transfers is not None:
        transfers()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3 / replays


class Transfers:
    """The same transfer again and again on a stream of its own, timed.

    Parameters
    ----------
    device
        A GPU.
    move
        Queues one; returns the event of its end, None where that is on the current stream.
    count
        How often a call makes it.
    """

    def __init__(self, device: torch.device, move: Callable[[], torch.cuda.Event | None], count: int) -> None:
        self._move = move
        self._count = count
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._begin, self._done = timing_event(), timing_event()

    def __call__(self) -> None:
        """Queue them."""
        with torch.cuda.stream(self._stream):
            self._begin.record()
            for _ in range(self._count):
                ready = self._move()
            if ready is not None:
                self._stream.wait_event(ready)
            self._done.record()

    def seconds(self) -> float:
        """Seconds of one of the last call, once the device is through."""
        return float(self._begin.elapsed_time(self._done)) / 1e3 / self._count
