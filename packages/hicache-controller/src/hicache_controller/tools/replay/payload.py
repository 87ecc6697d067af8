"""Bytes used in place of computed KV: a function of (prefix hash, position, layer, component) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# Odd multipliers and the finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA '14), as signed 64-bit numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


class Mismatch(NamedTuple):
    """First wrong byte: index into the pages given, position in the page, byte in the row, and both values."""

    page: int
    position: int
    byte: int
    expected: int
    found: int


def _mix(value: torch.Tensor) -> torch.Tensor:
    # Shifts of signed numbers drag the sign bit along; the masks make them logical.
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * _MIX_1
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * _MIX_2
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def page_seeds(keys: Sequence[bytes], device: torch.device) -> torch.Tensor:
    """Return the low half of each 16-byte page hash as int64 ``[pages]``."""
    raw = bytearray(b"".join(keys))
    return torch.frombuffer(raw, dtype=torch.int64).view(-1, 2)[:, 0].contiguous().to(device)


def rows(seeds: torch.Tensor, *, page_size: int, layer: int, component: int, row_bytes: int) -> torch.Tensor:
    """Make the rows of one layer and component, uint8 ``[pages * page_size, row_bytes]`` on the seeds' device."""
    words = -(-row_bytes // 8)
    stream = torch.tensor((layer << 32) | component, device=seeds.device)
    page = _mix(seeds + (stream + 1) * _GAMMA)
    counter = _mix(torch.arange(1, page_size * words + 1, device=seeds.device) * _GAMMA)
    # Both sides are mixed already: one multiplication spreads their difference, and memory bandwidth is what counts.
    values = (page[:, None] ^ counter[None, :]).mul_(_MIX_1)
    return values.view(torch.uint8).view(-1, words * 8)[:, :row_bytes]


def first_mismatch(expected: torch.Tensor, found: torch.Tensor, page_size: int) -> Mismatch | None:
    """Where two ``[rows, row_bytes]`` uint8 tensors first differ, or None."""
    if torch.equal(expected, found):
        return None
    row, byte = (int(i) for i in torch.nonzero(expected != found)[0])
    return Mismatch(row // page_size, row % page_size, byte, int(expected[row, byte]), int(found[row, byte]))
