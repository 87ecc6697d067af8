"""Checks that vLLM is there, is a version that is known, and has every hook that is used here."""

from __future__ import annotations

import logging
from typing import Any

from ..surface import EngineSurface

logger = logging.getLogger("vllm.hicache")  # whose handlers vLLM sets up

__all__ = ["VERSION", "check_hooks", "check_version"]

try:
    import vllm
except ImportError as error:
    raise ImportError(
        "vLLM is not installed, or one of its parts cannot be imported; this connector is loaded by vLLM"
    ) from error

_SURFACE = EngineSurface("vLLM", "connector", (0, 26), (0, 32), logger)
check_version = _SURFACE.check_version


def check_hooks(used: dict[Any, tuple[str, ...]]) -> None:
    """Raise ImportError where a class lacks a method or field that is used, by class."""
    _SURFACE.check_hooks(VERSION, used)


VERSION: str = vllm.__version__
check_version(VERSION)
