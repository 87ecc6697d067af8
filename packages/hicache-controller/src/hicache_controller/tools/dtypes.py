"""Sizes of the types that caches keep, without torch."""

from __future__ import annotations

from collections.abc import Mapping

ELEMENT_BYTES: Mapping[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of a value by torch's name of its type."""
