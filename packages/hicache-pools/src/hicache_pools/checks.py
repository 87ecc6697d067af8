"""Numbers that callers pass: whole or finite, or an error that names the argument."""

from __future__ import annotations

import math
import operator
from typing import SupportsIndex


def whole(name: str, value: SupportsIndex) -> int:
    """Return ``value`` as an int; TypeError for anything that is not a whole number by its type."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be a whole number") from None


def finite(name: str, value: float) -> float:
    """Return ``value`` as a float; TypeError where it is no number, ValueError where it is not finite."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite")
    return float(value)
