"""Checks that vLLM is there, is a version that is known, and has every hook that is used here."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

logger = logging.getLogger("vllm.hicache")  # whose handlers vLLM sets up

OLDEST, NEWEST = (0, 26), (0, 32)
"""Versions that were tried."""

__all__ = ["VERSION", "check_hooks", "check_version"]

try:
    import vllm
except ImportError as error:
    raise ImportError(
        "vLLM is not installed, or one of its parts cannot be imported; this connector is loaded by vLLM"
    ) from error


def check_version(version: str) -> None:
    """Warn of a version that was not tried; ImportError where it is not one that has all hooks."""
    try:
        found = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        found = (0, 0)
    known = f"{_text(OLDEST)} to {_text(NEWEST)}"
    if found < OLDEST and found != (0, 0):
        raise ImportError(f"vLLM is {version}; the connector needs {_text(OLDEST)} or newer")
    if not OLDEST <= found <= NEWEST:
        logger.warning(
            "vLLM is %s; this connector was tried with %s, and goes on as long as the hooks agree", version, known
        )


def check_hooks(used: dict[Any, tuple[str, ...]]) -> None:
    """Raise ImportError where a class lacks a method or field that is used.

    Parameters
    ----------
    used
        Names by class.
    """
    missing = [
        f"{owner.__module__}.{owner.__qualname__}.{name}"
        for owner, names in used.items()
        for name in names
        if name not in _names(owner)
    ]
    if missing:
        raise ImportError(
            f"vLLM {VERSION} lacks {', '.join(missing)}, which this connector uses; versions that were tried: "
            f"{_text(OLDEST)} to {_text(NEWEST)}"
        )


def _names(owner: Any) -> set[str]:
    return set(_all_names(owner))


def _all_names(owner: Any) -> Iterator[str]:
    yield from dir(owner)
    if is_dataclass(owner):
        yield from (each.name for each in fields(owner))
    if inspect.isclass(owner):
        for each in owner.__mro__:
            yield from getattr(each, "__annotations__", {})


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


VERSION: str = vllm.__version__
check_version(VERSION)
