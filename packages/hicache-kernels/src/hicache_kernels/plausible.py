"""Judges measured constants: what a device that was busy while it was measured says must not be kept."""

from __future__ import annotations

import dataclasses

from .planner import DeviceConstants, DirectionConstants

LEAST_DIRECT_SHARE = 0.4
MOST_DIRECT_SHARE = 1.5
"""Best rate of the main module, as a share of a plain copy's; 0.93 on an H200."""
LEAST_WIDE_SHARE = 0.7
"""Share of the bandwidth that the widest 2-D copies reach; 0.98 on an H200."""
MOST_SECONDS = 200e-6
"""A launch, or one more copy; under 20 us on an H200."""
LEAST_RELAYOUT = 1.5
"""Rate of the re-layout kernel over that of a plain copy; 20 on an H200."""


def implausible(constants: DeviceConstants) -> str | None:
    """Why constants cannot be those of an idle device, in a few words; None where they can."""
    for name, direction in (("write_back", constants.write_back), ("load", constants.load)):
        reason = _implausible_direction(direction)
        if reason is not None:
            return f"{name}: {reason}"
    if not 0 < constants.launch_seconds < MOST_SECONDS:
        return f"launch_seconds is {constants.launch_seconds:.3g}"
    fastest = max(constants.write_back.copy_bytes_per_second, constants.load.copy_bytes_per_second)
    if constants.relayout_bytes_per_second < LEAST_RELAYOUT * fastest:
        return f"relayout_bytes_per_second is {constants.relayout_bytes_per_second:.3g}, copies make {fastest:.3g}"
    return None


def _implausible_direction(direction: DirectionConstants) -> str | None:
    numbers = [value for value in dataclasses.astuple(direction) if not isinstance(value, tuple)]
    for table in (direction.width_efficiency, direction.direct_rates):
        numbers += [value for _, value in table] or [0.0]
    if not all(number > 0 for number in numbers):
        return "a figure is not positive"
    best = max(rate for _, rate in direction.direct_rates) / direction.copy_bytes_per_second
    if not LEAST_DIRECT_SHARE <= best <= MOST_DIRECT_SHARE:
        return f"direct transfers reach {best:.2f} of a plain copy"
    widest = direction.width_efficiency[-1][1]
    if not LEAST_WIDE_SHARE <= widest <= 1:
        return f"wide 2-D copies reach {widest:.2f} of a plain copy"
    for name in ("batch_copy_seconds", "batch_submit_seconds", "copy_seconds", "copy_2d_seconds"):
        if getattr(direction, name) > MOST_SECONDS:
            return f"{name} is {getattr(direction, name):.3g}"
    return None
