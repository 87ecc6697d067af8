"""Models direct transfers: what so many CTAs move, and how few of them are worth their cost."""

from __future__ import annotations

from collections.abc import Callable

from .constants import Compute, DirectionConstants
from .work import DIRECT, Plan, Work

BULK_MULTIPLE = 128
"""Rows of other lengths do not go by bulk copies: they would split the packets of the bus (``movers.py``)."""
BULK_LOAD_ROW_BYTES = 256
"""Rows from which a direct load goes by bulk copies: with 2 CTAs rows of 1024 bytes and more reach 0.92 of the bus,
where the row kernel makes 0.83; rows of 256 bytes reach 0.91 with 4, the row kernel 0.90. Rows of 576 bytes, which
split packets, reached 0.84 with 8, the row kernel 0.92 (tuning runs on an H200)."""
ROWS_PER_CTA_SECOND = 57e6
"""Rows that a CTA of a load names in a second: rows of 256 bytes reach 0.53 of the bus with 2 CTAs (on an H200)."""
ROW_KERNEL_LOSS = 0.2
"""Share of its rate that a load by the row kernel loses with one CTA, half of it with two, and so on (on an H200)."""
NEAR_BEST_COST = 1.05
"""A direct transfer takes the fewest CTAs whose cost is so close to the best: each more takes an SM from the model."""

LAYER_EVENT_SECONDS = 4e-6
"""What the event of one more layer costs the thread that queues a direct load (some 5 us on an H200's host)."""


def shares_one_event(plan: Plan, layers: int) -> bool:
    """Whether a direct load of so many layers is over before its thread could have queued an event for each of them."""
    return plan.expected_seconds <= layers * LAYER_EVENT_SECONDS


def direct_plan(
    work: Work,
    direction: DirectionConstants,
    launch_seconds: float,
    rate: Callable[[int], float],
    block_quota: int | None,
    compute: Compute | None,
) -> Plan:
    """Plan a direct transfer: of as many CTAs as the quota says, else of the fewest that cost hardly more than best.

    ``launch_seconds`` is the time of all its launches, ``rate`` the bytes per second of so many CTAs.
    """

    def cost(ctas: int) -> float:
        return (launch_seconds + work.bytes / rate(ctas)) * (1 + direction.loss(ctas).during(compute))

    ctas = block_quota
    if not ctas:
        costs = [(each, cost(each)) for each, _ in direction.direct_rates]
        enough = NEAR_BEST_COST * min(found for _, found in costs)
        ctas = next(each for each, found in costs if found <= enough)
    seconds = launch_seconds + work.bytes / rate(ctas)
    return Plan(DIRECT, "", seconds, ctas, model_loss=direction.loss(ctas).during(compute))


def direct_load_rate(work: Work, direction: DirectionConstants, ctas: int) -> float:
    """Bytes per second of a direct load of so many CTAs, which short rows and uneven ones hold back."""
    rate = direction.direct_rate(ctas)
    if work.row_bytes == 0:
        return rate
    if work.row_bytes < BULK_LOAD_ROW_BYTES or work.row_bytes % BULK_MULTIPLE:
        rate *= 1 - ROW_KERNEL_LOSS / ctas
    return min(rate, ctas * ROWS_PER_CTA_SECOND * work.row_bytes)
