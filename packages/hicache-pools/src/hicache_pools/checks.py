"""Plain arguments: whole, finite or one of a few, or an error that names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import SupportsIndex, TypeVar

Choice = TypeVar("Choice", bound=str)


def whole(name: str, value: SupportsIndex) -> int:
    """Return ``value`` as an int; TypeError for anything that is not a whole number by its type."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be a whole number") from None


def one_of(name: str, value: object, accepted: Iterable[Choice]) -> Choice:
    """Return the choice that ``value`` is, or names; ValueError listing them where it is none."""
    choices = tuple(accepted)
    for choice in choices:
        if value == choice:
            return choice
    raise ValueError(f"{name} is {value!r}; accepted are {', '.join(choices)}")


def finite(name: str, value: float) -> float:
    """Return ``value`` as a float; TypeError where it is no number, ValueError where it is not finite."""
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be finite")
    return float(value)
