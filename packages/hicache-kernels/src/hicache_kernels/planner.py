"""Chooses the path of one transfer, and says why: a small cost model over measured constants, with no device in it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from .constants import H200, Compute, DeviceConstants, DirectionConstants
from .layout import HostLayout
from .validation import MAX_BLOCKS, whole

STAGED = "staged"
DIRECT = "direct"
REFERENCE = "reference"
POLICIES = ("auto", STAGED, DIRECT, REFERENCE)


class PathUnavailableError(RuntimeError):
    """A policy demands a path that this transfer cannot take; raised before anything was queued."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Which compiled paths a transfer could take; a reason, where it is given, says why that path is missing."""

    staged: bool = True
    direct: bool = True
    staged_reason: str = ""
    direct_reason: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """One operation as the planner sees it.

    Attributes
    ----------
    layout
        Host layout of the pool.
    pages, runs
        Host pages to move, and the runs of neighbouring pages they form (after cuts at registration boundaries).
    page_bytes
        Bytes of one page, all layers and planes.
    page_size
        Slots of a page.
    layers
        Model layers of the pool.
    planes
        Planes whose rows lie in separate pieces in a ``layer_first`` buffer: 2 for K and V.
    row_bytes
        Shortest device row.
    """

    layout: HostLayout
    pages: int
    runs: int
    page_bytes: int
    page_size: int
    layers: int
    planes: int = 1
    row_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the whole operation."""
        return self.pages * self.page_bytes

    @property
    def layer_page_bytes(self) -> int:
        """One layer's share of a page."""
        return self.page_bytes // self.layers

    @property
    def layer_width(self) -> int:
        """Longest piece of one layer that is contiguous in a run of pages: the width of its 2-D copies."""
        if self.layout is HostLayout.PAGE_FIRST:
            return self.layer_page_bytes // self.page_size
        if self.layout is HostLayout.PAGE_FIRST_DIRECT:
            return self.layer_page_bytes
        return self.layer_page_bytes // self.planes * self.pages // max(1, self.runs)


@dataclass(frozen=True, slots=True)
class Plan:
    """The path of one operation.

    Attributes
    ----------
    path
        ``"staged"``, ``"direct"`` or ``"reference"``.
    reason
        One sentence: why this path.
    expected_seconds
        What the model expects on the device; 0.0 for the reference, which it does not model.
    block_quota
        CTAs a direct transfer holds; 0 on the other paths.
    layers_each
        Layers that a copy of a staged load-back takes at most.
    model_loss
        Share of its time that the model loses meanwhile, on top of what a plain copy takes from it.
    """

    path: str
    reason: str
    expected_seconds: float
    block_quota: int
    layers_each: int = 1
    model_loss: float = 0.0

    @property
    def cost(self) -> float:
        """Seconds that decide: those of the bus, and those that the model loses meanwhile."""
        return self.expected_seconds * (1 + self.model_loss)


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
SUBMIT_MARGIN = 1.5
"""A thread whose code is not in the caches, or that shares its core, submits so much slower than it was measured to
(0.5 to 1.2 us a copy in calibration, 0.7 to 1.7 us in operations that came one at a time, on an H200)."""
CALLER_WEIGHT = 0.1
"""What a second of the caller's thread is worth, in seconds of a load."""
BULK_MULTIPLE = 128
"""Rows of other lengths do not go by bulk copies: they would split the packets of the bus (``movers.py``)."""
SHORT_ROW_BYTES = 512
"""Shorter rows, and those that do not go by bulk copies, keep a load of few CTAs from the full rate: a CTA names about
57 million rows a second."""
SHORT_ROW_LOSS = 0.2
"""Share of the rate that a load of such rows loses with one CTA, half of it with two and so on: the row kernel reaches
0.83 of the bus with 2 CTAs, 0.90 with 4 (measured on an H200)."""
STAGED_PREFERENCE = 0.04
"""How much slower a staged write-back may be and still be chosen where nobody says what the model computes: it leaves
the SMs to the model, and frees device slots early."""
NEAR_BEST_COST = 1.05
"""A direct transfer takes the fewest CTAs whose cost is so close to the best: each more takes an SM from the model."""


def staged_write_back_seconds(work: Work, constants: DeviceConstants, staging_bytes: int) -> float:
    """Model the device time of a staged write-back through ``staging_bytes`` of staging memory, used in quarters."""
    chunk = max(work.page_bytes, min(work.bytes, staging_bytes // 4))
    chunks = math.ceil(work.bytes / chunk)
    pieces = work.layers * work.planes if work.layout is HostLayout.LAYER_FIRST else 1
    copies = (work.runs + chunks - 1) * pieces
    direction = constants.write_back
    moved = _copies_seconds(work.bytes, copies, direction, batched=constants.batched and copies > chunks)
    return 2 * constants.launch_seconds + chunk / constants.relayout_bytes_per_second + moved


@functools.lru_cache(maxsize=1024)
def layer_groups(first: int, end: int, most: int) -> tuple[tuple[int, int, int], ...]:
    """Cut layers into stretches ``(first, end, each)`` that are moved ``each`` layers at a time.

    At a time go one, one, two, four layers and so on up to ``most``: no more than have gone before.
    """
    sizes: list[int] = []
    start = first
    while start < end:
        sizes.append(min(most, max(1, start - first), end - start))
        start += sizes[-1]
    groups = []
    start = first
    for size, same in itertools.groupby(sizes):
        stretch = size * len(list(same))
        groups.append((start, start + stretch, size))
        start += stretch
    return tuple(groups)


def layer_steps(first: int, end: int, most: int) -> list[int]:
    """Layers of each step of :func:`layer_groups`, in order."""
    return [each for start, stop, each in layer_groups(first, end, most) for _ in range((stop - start) // each)]


def staged_load_seconds(
    work: Work, constants: DeviceConstants, staging_bytes: int, layers_each: int | None = None
) -> float:
    """Model the device time of a staged load-back, which moves some layers after the others; None: as many as best."""
    most = layers_per_copy(work, constants, staging_bytes) if layers_each is None else layers_each
    copies = sum(
        (end - start) // each * _load_step(work, constants, staging_bytes, each).seconds
        for start, end, each in layer_groups(0, work.layers, most)
    )
    last = most * work.bytes / work.layers / constants.relayout_bytes_per_second
    return constants.launch_seconds + copies + last


def layers_per_copy(work: Work, constants: DeviceConstants, staging_bytes: int) -> int:
    """Fewest layers a copy of a load, a power of two, with which it costs hardly more than with the best number."""
    if work.layout is HostLayout.LAYER_FIRST:
        return 1
    choices = [1]
    least_pages = min(MIN_CHUNK_PAGES, max(1, work.pages))
    while (
        2 * choices[-1] <= min(MAX_LAYERS_EACH, work.layers // 2)
        and 2 * choices[-1] * work.layer_page_bytes * least_pages <= staging_bytes // LOAD_BUFFERS
    ):
        choices.append(2 * choices[-1])
    steps = [_load_step(work, constants, staging_bytes, each) for each in choices]
    costs = [(step.seconds + CALLER_WEIGHT * step.submit) / each for step, each in zip(steps, choices, strict=True)]
    return next(each for each, cost in zip(choices, costs, strict=True) if cost <= NEAR_BEST * min(costs))


class _Step(NamedTuple):
    """Copies of some layers: time on the device, and of the thread that queues them."""

    seconds: float
    submit: float


def _load_step(work: Work, constants: DeviceConstants, staging_bytes: int, each: int) -> _Step:
    """Model the copies of ``each`` layers."""
    direction = constants.load
    size = work.bytes / work.layers * each
    chunks = math.ceil(size / max(each * work.layer_page_bytes, staging_bytes // LOAD_BUFFERS))
    runs = work.runs + chunks - 1
    width = work.layer_width * each
    copies, batched = runs, constants.batched and runs > 1
    if work.layout is HostLayout.LAYER_FIRST:
        copies *= work.planes
    elif work.layout is not HostLayout.PAGE_FIRST_DIRECT or work.runs != work.pages:
        rows = 1 if work.layout is HostLayout.PAGE_FIRST_DIRECT else work.page_size
        rows_of_a_run = rows * work.pages / max(1, runs)
        size /= direction.efficiency(width)
        batched = constants.batched and rows_of_a_run * width < PITCHED_BYTES and width >= FLAT_WIDTH_BYTES
        if batched:
            copies = rows * work.pages + chunks - 1
        else:
            seconds = size / direction.copy_bytes_per_second + runs * direction.copy_2d_seconds
            return _Step(max(seconds, constants.launch_seconds), _submit_seconds(copies, direction))
    seconds = _copies_seconds(size, copies, direction, batched=batched)
    return _Step(max(seconds, constants.launch_seconds), _submit_seconds(copies, direction))


def _copies_seconds(size: float, copies: int, direction: DirectionConstants, *, batched: bool) -> float:
    if not batched:
        return size / direction.copy_bytes_per_second + copies * direction.copy_seconds
    engine = size / direction.copy_bytes_per_second + copies * direction.batch_copy_seconds
    return max(engine, _submit_seconds(copies, direction))


def _submit_seconds(copies: int, direction: DirectionConstants) -> float:
    """Time of the thread that queues so many copies."""
    return SUBMIT_MARGIN * copies * direction.batch_submit_seconds


def direct_plan(
    work: Work,
    direction: DirectionConstants,
    launch_seconds: float,
    block_quota: int | None = None,
    compute: Compute | None = None,
    *,
    short_rows: bool = False,
) -> Plan:
    """Plan a direct transfer: of as many CTAs as the quota says, else of the fewest that cost hardly more than best.

    ``launch_seconds`` is the time of all its launches, ``short_rows`` True where :data:`SHORT_ROW_LOSS` applies.
    """

    def plan(ctas: int) -> Plan:
        rate = direction.direct_rate(ctas) * (1 - SHORT_ROW_LOSS / ctas if short_rows else 1)
        loss = direction.loss(ctas).during(compute)
        return Plan(DIRECT, "", launch_seconds + work.bytes / rate, ctas, model_loss=loss)

    if block_quota:
        return plan(block_quota)
    plans = [plan(ctas) for ctas, _ in direction.direct_rates]
    enough = NEAR_BEST_COST * min(each.cost for each in plans)
    return next(each for each in plans if each.cost <= enough)


def plan_write_back(
    work: Work,
    *,
    constants: DeviceConstants = H200,
    available: Availability | None = None,
    policy: str = "auto",
    block_quota: int | None = None,
    compute: Compute | str | None = None,
    staging_bytes: int = 128 << 20,
) -> Plan:
    """Choose the path of a write-back.

    Parameters
    ----------
    work
        The operation.
    constants
        Figures of the device.
    available
        Paths that exist for these planes; both by default.
    policy
        ``"auto"`` picks the path whose seconds on the bus cost least, with those that the model loses meanwhile; the
        names of paths demand that path.
    block_quota
        Most CTAs a direct transfer may hold; 0 forbids the direct path, None takes the measured trade of
        bandwidth and what the model loses. The quota is for transfers that hold SMs while bytes cross the bus: the
        staged path's re-layout kernels, which use all SMs for some microseconds a chunk, are not under it.
    compute
        What the model computes meanwhile: ``"prefill"``, ``"decode"``, ``"idle"``. With None the seconds of the bus
        alone decide, except that staged may be :data:`STAGED_PREFERENCE` slower; a load counts the larger loss.
    staging_bytes
        Budget of the staging ring.

    Raises
    ------
    PathUnavailableError
        Where the policy demands a path that is missing or forbidden.
    ValueError
        For an unknown policy or computation, or a negative quota.
    """
    quota, found = _checked_quota(block_quota), _checked_compute(compute)
    seconds = staged_write_back_seconds(work, constants, staging_bytes)
    way = constants.write_back
    weighed = Compute.IDLE if found is None else found
    staged = Plan(STAGED, "", seconds, 0, model_loss=way.staged_loss.during(weighed))
    direct = direct_plan(work, way, constants.launch_seconds, quota, weighed)
    if found is None and constants.has_sms:
        direct = dataclasses.replace(direct, model_loss=STAGED_PREFERENCE)
    return _choose("write-back", work, staged, direct, available, policy, quota)


def plan_load(
    work: Work,
    *,
    constants: DeviceConstants = H200,
    available: Availability | None = None,
    policy: str = "auto",
    block_quota: int | None = None,
    compute: Compute | str | None = None,
    staging_bytes: int = 128 << 20,
    layer_by_layer: bool = True,
) -> Plan:
    """Choose the path of a load-back; ``layer_by_layer`` True where each layer is a call of its own.

    The plan is for the whole load: an engine that loads layer by layer takes one path for all layers. Parameters and
    errors are those of :func:`plan_write_back`.
    """
    quota, found = _checked_quota(block_quota), _checked_compute(compute)
    launches = work.layers if layer_by_layer else 1
    each = 1 if layer_by_layer else layers_per_copy(work, constants, staging_bytes)
    seconds = staged_load_seconds(work, constants, staging_bytes, each)
    way = constants.load
    staged = Plan(STAGED, "", seconds, 0, each, way.staged_loss.during(found))
    short = work.row_bytes < SHORT_ROW_BYTES or work.row_bytes % BULK_MULTIPLE != 0
    direct = direct_plan(work, way, launches * constants.launch_seconds, quota, found, short_rows=short)
    return _choose("load-back", work, staged, direct, available, policy, quota)


def _checked_quota(block_quota: int | None) -> int | None:
    return None if block_quota is None else whole("block_quota", block_quota, least=0, most=MAX_BLOCKS)


def _checked_compute(compute: Compute | str | None) -> Compute | None:
    if compute is None or isinstance(compute, Compute):
        return compute
    try:
        return Compute(compute)
    except ValueError:
        raise ValueError(f"compute is {compute!r}; it must be one of {', '.join(Compute)}, or None") from None


def _choose(
    what: str, work: Work, staged: Plan, direct: Plan, available: Availability | None, policy: str, quota: int | None
) -> Plan:
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
    available = available or Availability()
    no_staged = "" if available.staged else available.staged_reason or "the staged module is missing"
    no_direct = "" if available.direct else available.direct_reason or "the main module is missing"
    if not no_direct and quota == 0:
        no_direct = "block_quota is 0, which forbids SM-driven transfers"
    if policy == REFERENCE:
        return Plan(REFERENCE, "asked for by policy", 0.0, 0)
    if policy == STAGED:
        if no_staged:
            raise PathUnavailableError(f"policy 'staged' cannot be followed for this {what}: {no_staged}")
        return _because(staged, "asked for by policy")
    if policy == DIRECT:
        if no_direct:
            raise PathUnavailableError(f"policy 'direct' cannot be followed for this {what}: {no_direct}")
        return _because(direct, "asked for by policy")
    if no_staged and no_direct:
        return Plan(REFERENCE, f"no compiled path: staged: {no_staged}; direct: {no_direct}", 0.0, 0)
    if no_staged:
        return _because(direct, f"no staged path: {no_staged}")
    if no_direct:
        return _because(staged, f"no direct path: {no_direct}")
    shape = f"{work.pages} pages of {work.page_bytes} bytes in {work.runs} runs"
    if staged.cost <= direct.cost:
        return _because(staged, f"{shape}: staged {_terms(staged)} against direct {_terms(direct)}")
    return _because(direct, f"{shape}: direct {_terms(direct)} against staged {_terms(staged)}")


def _terms(plan: Plan) -> str:
    """Say what a plan costs."""
    ctas = f" with {plan.block_quota} CTAs" if plan.block_quota else ""
    loss = f" at {plan.model_loss:.0%} of the model" if plan.model_loss else ""
    return f"{plan.expected_seconds * 1e3:.3f} ms{ctas}{loss}"


def _because(plan: Plan, reason: str) -> Plan:
    return dataclasses.replace(plan, reason=reason)
