"""What ``hicache bench engine`` measures, and every reason why it cannot; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..dtypes import ELEMENT_BYTES
from .models import ModelShape

TIERS = ("l1", "l2", "l3")
DTYPES = ("float32", "bfloat16", "float16")

_MAX_VALUES = {"tail": 1 << 24, "repeats": 10_000, "page_size": 1 << 20, "chunk": 1 << 24, "storage_threads": 256}
_MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class EngineOptions:
    """What to measure.

    Attributes
    ----------
    shape
        The model's.
    dtype, device
        Of weights, keys and values; by torch's names.
    prompts
        Lengths of prompts in tokens, tail included.
    tail
        Tokens after the cached prefix, which are computed in every case; more if the prefix ends inside a page.
    tiers
        Some of :data:`TIERS`. L1, the time that is left to compute, is measured with any of them.
    page_size
        Tokens a page; None for what the integration takes.
    repeats
        Measured repetitions, of which the median counts.
    chunk
        Most tokens one forward pass of a re-prefill computes; None for no limit.
    storage, storage_threads
        Directory for L3; None for a temporary one. Threads that move its pages; None for the storage's default.
    """

    shape: ModelShape
    dtype: str
    device: str
    prompts: tuple[int, ...]
    tail: int = 64
    tiers: tuple[str, ...] = TIERS
    page_size: int | None = None
    repeats: int = 5
    chunk: int | None = None
    storage: Path | None = None
    storage_threads: int | None = None

    def __post_init__(self) -> None:
        for name, largest in _MAX_VALUES.items():
            value = getattr(self, name)
            if value is not None and not 0 < value <= largest:
                raise ValueError(f"{name} is {value}; accepted is 1 to {largest}")
        if not self.prompts:
            raise ValueError("prompts is empty; at least one length is needed")
        least = self.tail + (self.page_size or 1)
        for tokens in self.prompts:
            if not least <= tokens <= _MAX_TOKENS:
                raise ValueError(
                    f"prompts has one of {tokens} tokens; accepted is {least}, a page and the tail, to {_MAX_TOKENS}"
                )
        unknown = [tier for tier in self.tiers if tier not in TIERS]
        if unknown:
            raise ValueError(f"tiers has {unknown[0]!r}; accepted are {', '.join(TIERS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; accepted are {', '.join(DTYPES)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return self.shape.token_values * ELEMENT_BYTES[self.dtype]
