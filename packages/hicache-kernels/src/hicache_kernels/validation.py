"""Checks plain arguments: whole numbers and finite ones within bounds, seconds, and one of a few names."""

from __future__ import annotations

import math
import numbers
import operator
import threading
from collections.abc import Iterable
from typing import SupportsIndex, TypeVar

Choice = TypeVar("Choice", bound=str)

MAX_WHOLE = (1 << 63) - 1
"""Largest whole number accepted anywhere: an int64."""
MAX_BLOCKS = (1 << 31) - 1
"""Largest quota of CTAs."""
MAX_SECONDS = threading.TIMEOUT_MAX
"""Longest time that can be waited for."""


def whole(name: str, value: SupportsIndex, *, least: int = 1, most: int = MAX_WHOLE) -> int:
    """Return ``value`` as an int.

    Raises
    ------
    TypeError
        Where its type is not one of whole numbers; a bool is not, a numpy integer is.
    ValueError
        Where it is less than ``least`` or more than ``most``.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be a whole number") from None
    if number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    if number > most:
        raise ValueError(f"{name} is {number}; it must be at most {most}")
    return number


def finite(name: str, value: float, *, least: float = 0.0, most: float = math.inf, above: bool = False) -> float:
    """Return ``value`` as a float.

    Parameters
    ----------
    name
        For the error.
    value
        A real number; numpy's are too.
    least, most
        Bounds.
    above
        Whether ``least`` itself is refused.

    Raises
    ------
    TypeError
        Where it is not a number by its type; a bool is not.
    ValueError
        Where it is not finite, or outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}; it must be finite")
    if number < least or (above and number == least):
        raise ValueError(f"{name} is {number}; it must be {'more than' if above else 'at least'} {least:g}")
    if number > most:
        raise ValueError(f"{name} is {number}; it must be at most {most:g}")
    return number


def seconds(name: str, value: float, *, above: bool = False) -> float:
    """Return a time as a float: 0 (more than 0 with ``above``) to :data:`MAX_SECONDS`; errors of :func:`finite`."""
    return finite(name, value, most=MAX_SECONDS, above=above)


def one_of(name: str, value: object, accepted: Iterable[Choice]) -> Choice:
    """Return the choice that ``value`` is, or names; ValueError listing them where it is none."""
    choices = tuple(accepted)
    for choice in choices:
        if value == choice:
            return choice
    raise ValueError(f"{name} is {value!r}; accepted are {', '.join(choices)}")
