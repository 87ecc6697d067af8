"""Chooses the path of one transfer, and says why: a small cost model over measured constants, with no device in it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
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
        CTAs a direct transfer holds, and a staged one with ``direct_layers``; else 0.
    layers_each
        Layers that a copy of a staged load-back takes at most.
    model_loss
        Share of its time that the model loses meanwhile, on top of what a plain copy takes from it.
    direct_layers
        Layers of a staged load-back that go directly, ahead of its copies, with ``block_quota`` CTAs.
    in_order
        False where all layers that the copies of a load-back bring come at once, at its end.
    """

    path: str
    reason: str
    expected_seconds: float
    block_quota: int
    layers_each: int = 1
    model_loss: float = 0.0
    direct_layers: int = 0
    in_order: bool = True

    @property
    def cost(self) -> float:
        """Seconds that decide: those of the bus, and those that the model loses meanwhile."""
        return self.expected_seconds * (1 + self.model_loss + (0.0 if self.in_order else AT_ONCE_COST))


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
AT_ONCE_COST = 0.1
"""What a load whose layers come all at once costs on top, as a share of its time: its request waits for all of it."""
DIRECT_SHARE = 4
"""At most one layer in so many goes directly ahead of the copies of a staged load."""
SUBMIT_MARGIN = 1.5
"""A thread whose code is not in the caches, or that shares its core, submits so much slower than it was measured to
(0.5 to 1.2 us a copy in calibration, 0.7 to 1.7 us in operations that came one at a time, on an H200)."""
CALLER_WEIGHT = 0.1
"""What a second of the caller's thread is worth, in seconds of a load."""
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
        done = by_sms = direct.expected_seconds * ahead / work.layers if direct and ahead else 0.0
        submit = 0.0
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

    def plan(ctas: int) -> Plan:
        seconds = launch_seconds + work.bytes / rate(ctas)
        return Plan(DIRECT, "", seconds, ctas, model_loss=direction.loss(ctas).during(compute))

    if block_quota:
        return plan(block_quota)
    plans = [plan(ctas) for ctas, _ in direction.direct_rates]
    enough = NEAR_BEST_COST * min(each.cost for each in plans)
    return next(each for each in plans if each.cost <= enough)


def direct_load_rate(work: Work, direction: DirectionConstants, ctas: int) -> float:
    """Bytes per second of a direct load of so many CTAs, which short rows and uneven ones hold back."""
    rate = direction.direct_rate(ctas)
    if work.row_bytes == 0:
        return rate
    if work.row_bytes < BULK_LOAD_ROW_BYTES or work.row_bytes % BULK_MULTIPLE:
        rate *= 1 - ROW_KERNEL_LOSS / ctas
    return min(rate, ctas * ROWS_PER_CTA_SECOND * work.row_bytes)


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
        What the model computes meanwhile: ``"prefill"``, ``"decode"``, ``"idle"``. With None a load counts
        what decode steps would lose; for a write-back the seconds of the bus alone decide, except that staged may be
        :data:`STAGED_PREFERENCE` slower.
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
    direct = direct_plan(work, way, constants.launch_seconds, way.direct_rate, quota, weighed)
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
    way = constants.load
    rate = functools.partial(direct_load_rate, work, way) if constants.has_sms else way.direct_rate
    direct = direct_plan(work, way, launches * constants.launch_seconds, rate, quota, found)
    may_go_ahead = constants.has_sms and quota != 0 and (available is None or available.direct)
    ahead = direct if may_go_ahead and not layer_by_layer else None
    sizes = (1,) if layer_by_layer else None
    staged = staged_load_plan(work, constants, staging_bytes, found, ahead, sizes)
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
    ctas += f" for {plan.direct_layers} layers ahead" if plan.direct_layers else ""
    loss = f" at {plan.model_loss:.0%} of the model" if plan.model_loss else ""
    order = "" if plan.in_order else ", the other layers all at once"
    return f"{plan.expected_seconds * 1e3:.3f} ms{ctas}{loss}{order}"


def _because(plan: Plan, reason: str) -> Plan:
    return dataclasses.replace(plan, reason=reason)
