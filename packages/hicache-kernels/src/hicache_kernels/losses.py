"""Measures what a model loses next to each way of moving bytes: graphs of matrix products next to all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

from .constants import Compute, DeviceConstants, ModelLoss
from .graphs import Transfers, replay_seconds, workloads
from .staging import Direction
from .transfer import PlaneTransfer
from .work import DIRECT, STAGED

PLAIN = "plain copy"
REPEATS = 3
REPLAYS = 2
TRANSFERS = 16
"""Transfers in a row, of 64 MiB each: 20 ms, more than two replays of 2 ms even where those take four times as long."""
PREFILL_PRODUCTS, DECODE_PRODUCTS = 10, 200
"""Products of the graphs: 2 ms each (on an H200)."""
MAX_SPREAD = 1.2
"""Slowest over fastest of a graph next to equal plain copies: where they differ more, others use the device."""
MAX_LOSS = 0.95
"""Share of its time that a model loses at most; a write-back by 8 CTAs takes 0.8 from a decode step (an H200)."""
MAX_STAGED_LOSS = 0.5
"""The same next to staged transfers, which take 0.03 on an H200."""


class Mover(NamedTuple):
    """A way to move bytes: plain copies, staged transfers, or direct ones of so many CTAs."""

    direction: Direction
    policy: str
    ctas: int | None = None


def with_losses(
    constants: DeviceConstants,
    seconds: Callable[[Compute, Mover], float],
    ctas: Sequence[int],
    *,
    repeats: int = REPEATS,
) -> DeviceConstants:
    """Return constants with the losses of a model as measured.

    Parameters
    ----------
    constants
        What else is known of the device.
    seconds
        Measures once: the time that what a model computes takes next to a mover.
    ctas
        Numbers of CTAs of direct transfers, rising.
    repeats
        Measurements of each. The movers take turns, so that a change of clocks meets all of them.

    Raises
    ------
    RuntimeError
        Where times next to equal plain copies differ: others use the device.
    """
    directions: dict[str, Any] = {}
    for direction in Direction:
        movers = [Mover(direction, PLAIN), Mover(direction, STAGED), *(Mover(direction, DIRECT, n) for n in ctas)]
        found = {compute: _losses(compute, movers, seconds, repeats) for compute in (Compute.PREFILL, Compute.DECODE)}
        pairs = zip(found[Compute.PREFILL], found[Compute.DECODE], strict=True)
        staged, *direct = (ModelLoss(prefill, decode) for prefill, decode in pairs)
        directions[direction.value] = dataclasses.replace(
            getattr(constants, direction.value),
            staged_loss=staged,
            direct_losses=tuple(zip(ctas, direct, strict=True)),
        )
    return dataclasses.replace(constants, **directions, losses_measured=True)


def _losses(
    compute: Compute, movers: Sequence[Mover], seconds: Callable[[Compute, Mover], float], repeats: int
) -> list[float]:
    """Measure the loss next to every mover but the first, a plain copy."""
    turns = [[seconds(compute, mover) for mover in movers] for _ in range(repeats)]
    plain = [times[0] for times in turns]
    if max(plain) > MAX_SPREAD * min(plain):
        raise RuntimeError(
            f"a {compute} graph next to equal copies took {min(plain) * 1e3:.3f} to {max(plain) * 1e3:.3f} ms: others "
            "use the device"
        )
    shares = ([1 - times[0] / times[index] for times in turns] for index in range(1, len(movers)))
    return [max(0.0, median(share)) for share in shares]


class GraphTimes:
    """Graphs, and transfers over the whole of one pool to time them next to.

    Parameters
    ----------
    transfer
        Transfers of the pool, whose device rows fill ``rows``.
    host, rows
        Its buffers, uint8, for plain copies of as many bytes.
    """

    def __init__(self, transfer: PlaneTransfer, host: torch.Tensor, rows: torch.Tensor) -> None:
        self._transfer = transfer
        self._host = host
        self._rows = rows
        self._host_slots = torch.arange(transfer.planes[0].host.pages * transfer.page_size, device="cpu")
        self._device_slots = self._host_slots.to(rows.device)
        made = workloads(rows.device, prefill_products=PREFILL_PRODUCTS, decode_products=DECODE_PRODUCTS)
        self._graphs = {workload.name: workload for workload in made}

    def seconds(self, compute: Compute, mover: Mover) -> float:
        """Time of the graph of what a model computes next to a mover."""
        graph, device = self._graphs[compute.value].graph, self._rows.device
        self._move(mover)  # what a first call prepares is not to disturb
        return replay_seconds(graph, device, REPLAYS, Transfers(device, lambda: self._move(mover), TRANSFERS))

    def _move(self, mover: Mover) -> torch.cuda.Event | None:
        load = mover.direction is Direction.LOAD
        if mover.policy == PLAIN:
            to, of = (self._rows, self._host) if load else (self._host, self._rows)
            to.copy_(of, non_blocking=True)
            return None
        # No layer of a staged load goes ahead by the SMs.
        quota = 0 if mover.policy == STAGED else mover.ctas
        slots = self._host_slots, self._device_slots
        if load:
            return self._transfer.load(*slots, policy=mover.policy, block_quota=quota, layer_events=True).host_ready
        return self._transfer.write_back(*slots, policy=mover.policy, block_quota=quota).host_ready


def wrong_loss(constants: DeviceConstants) -> str | None:
    """Say which loss cannot be true, in a few words; None where all can."""
    for direction in Direction:
        way = getattr(constants, direction.value)
        counts = [ctas for ctas, _ in way.direct_losses]
        if not counts or counts != sorted(set(counts)):
            return f"{direction}: direct_losses are for {counts} CTAs"
        for name, loss, most in (
            ("staged_loss", way.staged_loss, MAX_STAGED_LOSS),
            *((f"the loss next to {ctas} CTAs", loss, MAX_LOSS) for ctas, loss in way.direct_losses),
        ):
            if not (0 <= loss.prefill <= most and 0 <= loss.decode <= most):
                return f"{direction}: {name} is {loss.prefill:.3g} and {loss.decode:.3g}"
    return None
