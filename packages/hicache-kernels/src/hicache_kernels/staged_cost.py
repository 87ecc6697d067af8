"""Models staged transfers: how many copies they take, how many layers a copy, and how long it all lasts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .constants import Compute, DeviceConstants, DirectionConstants
from .layout import HostLayout
from .work import AT_ONCE_COST, STAGED, Plan, Work

FLAT_WIDTH_BYTES = 64 << 10
PITCHED_BYTES = 5 << 19
"""Copies of less, of rows at least this wide, go row by row in batches (``csrc/staged/gpu_backend.h``)."""
MAX_LAYERS_EACH = 16
"""Layers that a copy of a load takes at most: the later ones of them wait for all."""
LOAD_BUFFERS = 3
"""Buffers that the staging memory of loads makes (``staging.py``)."""
MIN_CHUNK_PAGES = 8
"""Pages that a staging buffer should still take of so many layers: copies of 8 layers, 32 KB wide, made 0.86 of the bus
where those of 16 make 0.93 (512 MiB of pages of 64 slots of 128 KiB, an H200)."""
NEAR_BEST = 1.01
"""Copies take no more layers once they are this close to the best."""
MIN_AHEAD_BYTES = 8 << 20
"""Smaller loads are over before more than their first copies could have been queued."""
DIRECT_SHARE = 4
"""At most one layer in so many goes directly ahead of the copies of a staged load."""
SUBMIT_MARGIN = 1.5
"""A thread whose code is not in the caches, or that shares its core, submits so much slower than it was measured to
(0.5 to 1.2 us a copy in calibration, 0.7 to 1.7 us in operations that came one at a time, on an H200)."""
CALLER_WEIGHT = 0.1
"""What a second of the caller's thread is worth, in seconds of a load."""


def staged_write_back_seconds(work: Work, constants: DeviceConstants, staging_bytes: int) -> float:
    """Model the device time of a staged write-back through ``staging_bytes`` of staging memory, used in quarters."""
    chunk = max(work.page_bytes, min(work.bytes, staging_bytes // 4))
    chunks = math.ceil(work.bytes / chunk)
    pieces = work.layers * work.planes if work.layout is HostLayout.LAYER_FIRST else 1
    copies = (work.runs + chunks - 1) * pieces
    direction = constants.write_back
    moved = _copies_seconds(work.bytes, copies, direction, batched=constants.batched and copies > chunks)
    return 2 * constants.launch_seconds + chunk / constants.relayout_bytes_per_second + moved


def least_staged_write_back_cost(work: Work, constants: DeviceConstants, compute: Compute | None) -> float:
    """Cost below which no staged write-back gets, whatever its runs and its staging memory."""
    least = 2 * constants.launch_seconds + work.page_bytes / constants.relayout_bytes_per_second
    moved = work.bytes / constants.write_back.copy_bytes_per_second
    return (least + moved) * (1 + constants.write_back.staged_loss.during(compute))


@functools.lru_cache(maxsize=1024)
def layer_groups(first: int, end: int, most: int, moved: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Cut layers into stretches ``(first, end, each)`` that are moved ``each`` layers at a time.

    At a time go one, one, two, four layers and so on up to ``most``: no more than have gone before, ``moved`` of them
    ahead of the first.
    """
    sizes: list[int] = []
    start = first
    while start < end:
        sizes.append(min(most, max(1, start - first + moved), end - start))
        start += sizes[-1]
    groups = []
    start = first
    for size, same in itertools.groupby(sizes):
        stretch = size * len(list(same))
        groups.append((start, start + stretch, size))
        start += stretch
    return tuple(groups)


def layer_steps(first: int, end: int, most: int, moved: int = 0) -> list[int]:
    """Layers of each step of :func:`layer_groups`, in order."""
    groups = layer_groups(first, end, most, moved)
    return [each for start, stop, each in groups for _ in range((stop - start) // each)]


def moved_before(direct_layers: int, layers_each: int, layers: int) -> int:
    """Layers that count as gone before the copies of a staged load: all, where its plan takes the rest at once."""
    return layers if layers_each == layers else direct_layers


def copy_sizes(work: Work, staging_bytes: int) -> list[int]:
    """Layers that a copy of a load may take, powers of two: as many as staging memory holds of some pages."""
    sizes = [1]
    if work.layout is HostLayout.LAYER_FIRST:
        return sizes
    least_pages = min(MIN_CHUNK_PAGES, max(1, work.pages))
    while (
        2 * sizes[-1] <= min(MAX_LAYERS_EACH, work.layers // 2)
        and 2 * sizes[-1] * work.layer_page_bytes * least_pages <= staging_bytes // LOAD_BUFFERS
    ):
        sizes.append(2 * sizes[-1])
    return sizes


def staged_load_plan(
    work: Work,
    constants: DeviceConstants,
    staging_bytes: int,
    compute: Compute | None = None,
    direct: Plan | None = None,
    sizes: Sequence[int] | None = None,
) -> Plan:
    """Plan a staged load-back: the fewest layers a copy, and ahead of the copies, that cost hardly more than the best.

    Parameters
    ----------
    work, constants, staging_bytes, compute
        As in :func:`plan_write_back`.
    direct
        How all of it would go directly. If it is given, the first layers may go so; and where it is known that the
        model computes, all others may come at once.
    sizes
        Layers that a copy may take; by default :func:`copy_sizes`.
    """
    sizes = copy_sizes(work, staging_bytes) if sizes is None else sizes
    choices = [(0, most) for most in sizes]
    if direct is not None and work.bytes >= MIN_AHEAD_BYTES:
        few = [ahead for ahead in sizes[::2] if ahead <= work.layers // DIRECT_SHARE]
        choices += [(ahead, most) for ahead in few for most in sizes[-2:] if most >= ahead]
        known = compute in (Compute.PREFILL, Compute.DECODE) and work.layout is not HostLayout.LAYER_FIRST
        if known and 2 * work.page_bytes <= staging_bytes // LOAD_BUFFERS:
            # Slots of the page-first layout are whole only with the first layers in them.
            choices += [(0 if work.layout is HostLayout.PAGE_FIRST else ahead, work.layers) for ahead in few[:1]]
    step = functools.cache(functools.partial(_load_step, work, constants, staging_bytes))
    loss = constants.load.staged_loss.during(compute)
    buffer = staging_bytes / LOAD_BUFFERS

    def times(ahead: int, most: int) -> tuple[float, float, float]:
        """Return seconds of the whole, of what goes directly, and of the caller's thread."""
        done = by_sms = submit = 0.0
        if direct and ahead:
            launch = constants.launch_seconds
            by_sms = launch + (direct.expected_seconds - launch) * ahead / work.layers
            done = by_sms + launch  # the copies wait for the kernel's end, while the bus has nothing to do
        for start, end, each in layer_groups(ahead, work.layers, most, moved_before(ahead, most, work.layers)):
            last = step(each)
            submit += (end - start) // each * last.submit
            last_copies = min(last.seconds, buffer / constants.load.copy_bytes_per_second)
            done = max(done + (end - start) // each * last.seconds, submit + last_copies)
        behind = min(each * work.bytes / work.layers, buffer) / constants.relayout_bytes_per_second
        return constants.launch_seconds + behind + done, by_sms, submit

    def plan(ahead: int, most: int) -> Plan:
        seconds, by_sms, _ = times(ahead, most)
        lost = (loss * (seconds - by_sms) + (direct.model_loss if direct else 0.0) * by_sms) / seconds
        ctas = direct.block_quota if direct and ahead else 0
        return Plan(STAGED, "", seconds, ctas, most, lost, ahead, in_order=most < work.layers or work.layers == 1)

    def cost(ahead: int, most: int) -> float:
        seconds, by_sms, submit = times(ahead, most)
        sms = direct.model_loss if direct else 0.0
        unordered = AT_ONCE_COST if most == work.layers > 1 else 0.0
        return seconds * (1 + loss + unordered) + by_sms * (sms - loss) + CALLER_WEIGHT * submit

    costs = [cost(*choice) for choice in choices]
    enough = NEAR_BEST * min(costs)
    return plan(*next(choice for choice, found in zip(choices, costs, strict=True) if found <= enough))


def least_staged_load_cost(
    work: Work, constants: DeviceConstants, compute: Compute | None, sizes: Sequence[int]
) -> float:
    """Cost below which no staged load gets whose copies bring all layers in order: that of starting their steps.

    Parameters are those of :func:`staged_load_plan`. A direct load that costs less is the better one, without a search.
    """
    steps = sum((end - start) // each for start, end, each in layer_groups(0, work.layers, sizes[-1]))
    launch = constants.launch_seconds
    moved = max(steps * launch, work.bytes / constants.load.copy_bytes_per_second)
    return (launch + moved) * (1 + constants.load.staged_loss.during(compute))


class _Step(NamedTuple):
    """Copies of some layers: time of the copy engine, and of the thread that queues them."""

    seconds: float
    submit: float


def _load_step(work: Work, constants: DeviceConstants, staging_bytes: int, each: int) -> _Step:
    """Model the copies of ``each`` layers."""
    direction = constants.load
    size = work.bytes / work.layers * each
    chunks = math.ceil(size / max(each * work.layer_page_bytes, staging_bytes // LOAD_BUFFERS))
    runs = work.runs + chunks - 1
    width = work.layer_width * each
    in_order = each < work.layers
    copies, batched = runs, constants.batched and runs > 1
    if work.layout is HostLayout.LAYER_FIRST:
        copies *= work.planes
    elif in_order and (work.layout is not HostLayout.PAGE_FIRST_DIRECT or work.runs != work.pages):
        rows = 1 if work.layout is HostLayout.PAGE_FIRST_DIRECT else work.page_size
        rows_of_a_run = rows * work.pages / max(1, runs)
        size /= direction.efficiency(width)
        batched = constants.batched and rows_of_a_run * width < PITCHED_BYTES and width >= FLAT_WIDTH_BYTES
        if batched:
            copies = rows * work.pages + chunks - 1
        else:
            seconds = size / direction.copy_bytes_per_second + runs * direction.copy_2d_seconds
            return _Step(max(seconds, constants.launch_seconds), _submit_seconds(copies, direction))
    each_copy = direction.batch_copy_seconds if batched else direction.copy_seconds
    seconds = size / direction.copy_bytes_per_second + copies * each_copy
    return _Step(max(seconds, constants.launch_seconds), _submit_seconds(copies, direction))


def _copies_seconds(size: float, copies: int, direction: DirectionConstants, *, batched: bool) -> float:
    if not batched:
        return size / direction.copy_bytes_per_second + copies * direction.copy_seconds
    engine = size / direction.copy_bytes_per_second + copies * direction.batch_copy_seconds
    return max(engine, _submit_seconds(copies, direction))


def _submit_seconds(copies: int, direction: DirectionConstants) -> float:
    """Time of the thread that queues so many copies."""
    return SUBMIT_MARGIN * copies * direction.batch_submit_seconds
