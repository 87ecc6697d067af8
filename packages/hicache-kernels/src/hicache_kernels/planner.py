"""Chooses the path of one transfer, and says why: a small cost model over measured constants, with no device in it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from .constants import H200, Compute, DeviceConstants, DirectionConstants, checked_compute
from .direct_cost import direct_load_rate, direct_plan
from .staged_cost import (
    MIN_AHEAD_BYTES,
    copy_sizes,
    least_staged_load_cost,
    least_staged_write_back_cost,
    staged_load_plan,
    staged_write_back_seconds,
)
from .validation import MAX_BLOCKS, whole
from .work import DIRECT, REFERENCE, STAGED, Plan, Work

AUTO = "auto"
POLICIES = (AUTO, STAGED, DIRECT, REFERENCE)
ASKED_FOR = "asked for by policy"
STAGED_PREFERENCE = 0.04
"""How much slower a staged write-back may be and still be chosen where it is not known what the model computes.

It leaves the SMs to the model, and frees device slots early.
"""


class PathUnavailableError(RuntimeError):
    """A policy demands a path that this transfer cannot take; raised before anything was queued."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Which compiled paths a transfer could take; a reason, where it is given, says why that path is missing."""

    staged: bool = True
    direct: bool = True
    staged_reason: str = ""
    direct_reason: str = ""


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
    quota, found = _checked_quota(block_quota), checked_compute(compute)
    way = constants.write_back
    weighed = Compute.IDLE if found is None else found
    direct = direct_plan(work, way, constants.launch_seconds, way.direct_rate, quota, weighed)
    if found is None and constants.has_sms:
        direct = dataclasses.replace(direct, handicap=STAGED_PREFERENCE)
    if _is_small(work, policy, available, quota):
        least = least_staged_write_back_cost(work, constants, weighed)
        if direct.cost < least:
            return _small(direct, least, work, constants, way, found)
    seconds = staged_write_back_seconds(work, constants, staging_bytes)
    staged = Plan(STAGED, "", seconds, 0, model_loss=way.staged_loss.during(weighed))
    plan, reason = _choose("write-back", work, staged, direct, available, policy, quota)
    return _because(plan, reason, constants, way, found)


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
    quota, found = _checked_quota(block_quota), checked_compute(compute)
    launches = work.layers if layer_by_layer else 1
    way = constants.load
    rate = functools.partial(direct_load_rate, work, way) if constants.has_sms else way.direct_rate
    direct = direct_plan(work, way, launches * constants.launch_seconds, rate, quota, found)
    sizes = (1,) if layer_by_layer else copy_sizes(work, staging_bytes)
    if _is_small(work, policy, available, quota):
        least = least_staged_load_cost(work, constants, found, sizes)
        if direct.cost < least:
            return _small(direct, least, work, constants, way, found)
    may_go_ahead = constants.has_sms and quota != 0 and (available is None or available.direct)
    ahead = direct if may_go_ahead and not layer_by_layer else None
    staged = staged_load_plan(work, constants, staging_bytes, found, ahead, sizes)
    plan, reason = _choose("load-back", work, staged, direct, available, policy, quota)
    return _because(plan, reason, constants, way, found)


def _is_small(work: Work, policy: str, available: Availability | None, quota: int | None) -> bool:
    """Whether both paths are free to choose, and what staging costs at least may decide."""
    both = quota != 0 and (available is None or (available.direct and available.staged))
    return policy == AUTO and both and work.bytes < MIN_AHEAD_BYTES


def _small(
    direct: Plan,
    least: float,
    work: Work,
    constants: DeviceConstants,
    way: DirectionConstants,
    compute: Compute | None,
) -> Plan:
    """Return the plan of an operation that is over before a staged one, whatever its runs."""
    reason = (
        f"{work.pages} pages of {work.page_bytes} bytes: direct {_terms(direct)} against staged at a cost of "
        f"{least * 1e3:.3f} ms or more"
    )
    return dataclasses.replace(direct, reason=reason + _loss(direct, constants, way, compute), any_runs=True)


def _checked_quota(block_quota: int | None) -> int | None:
    return None if block_quota is None else whole("block_quota", block_quota, least=0, most=MAX_BLOCKS)


def _choose(
    what: str, work: Work, staged: Plan, direct: Plan, available: Availability | None, policy: str, quota: int | None
) -> tuple[Plan, str]:
    """Return the plan to follow, and why."""
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
    available = available or Availability()
    no_staged = "" if available.staged else available.staged_reason or "the staged module is missing"
    no_direct = "" if available.direct else available.direct_reason or "the main module is missing"
    if not no_direct and quota == 0:
        no_direct = "block_quota is 0, which forbids SM-driven transfers"
    if policy == REFERENCE:
        return Plan(REFERENCE, "", 0.0, 0), ASKED_FOR
    if policy == STAGED:
        if no_staged:
            raise PathUnavailableError(f"policy 'staged' cannot be followed for this {what}: {no_staged}")
        return staged, ASKED_FOR
    if policy == DIRECT:
        if no_direct:
            raise PathUnavailableError(f"policy 'direct' cannot be followed for this {what}: {no_direct}")
        return direct, ASKED_FOR
    if no_staged and no_direct:
        return Plan(REFERENCE, "", 0.0, 0), f"no compiled path: staged: {no_staged}; direct: {no_direct}"
    if no_staged:
        return direct, f"no staged path: {no_staged}"
    if no_direct:
        return staged, f"no direct path: {no_direct}"
    if staged.cost <= direct.cost:
        return staged, f"{_shape(work)}: staged {_terms(staged)} against direct {_terms(direct)}"
    return direct, f"{_shape(work)}: direct {_terms(direct)} against staged {_terms(staged)}"


def _shape(work: Work) -> str:
    return f"{work.pages} pages of {work.page_bytes} bytes in {work.runs} runs"


def _terms(plan: Plan) -> str:
    """Say what a plan costs."""
    ctas = f" with {plan.block_quota} CTAs" if plan.block_quota else ""
    ctas += f" for {plan.direct_layers} layers ahead" if plan.direct_layers else ""
    loss = f" at {plan.model_loss:.0%} of the model" if plan.model_loss else ""
    order = "" if plan.in_order else ", the other layers all at once"
    return f"{plan.expected_seconds * 1e3:.3f} ms{ctas}{loss}{order}"


def _loss(plan: Plan, constants: DeviceConstants, way: DirectionConstants, compute: Compute | None) -> str:
    """Say what a model loses meanwhile, and how that is known; nothing where there is no model to lose."""
    if plan.path == REFERENCE or compute is Compute.IDLE or not constants.has_sms:
        return ""
    share = plan.model_loss
    if compute is None and not share:
        share = (way.loss(plan.block_quota) if plan.path == DIRECT else way.staged_loss).decode
    who = "a prefill loses" if compute is Compute.PREFILL else "decode loses"
    return f"; {who} {share:.1%} of its time meanwhile ({constants.losses_source})"


def _because(
    plan: Plan, reason: str, constants: DeviceConstants, way: DirectionConstants, compute: Compute | None
) -> Plan:
    return dataclasses.replace(plan, reason=reason + _loss(plan, constants, way, compute))
