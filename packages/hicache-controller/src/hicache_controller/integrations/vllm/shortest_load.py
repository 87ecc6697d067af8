"""Decides from how many tokens on loading a prefix takes less time than computing it; no vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hicache_kernels.validation import finite, whole

LOAD_BYTES_PER_SECOND = 50e9
"""Of a long load: 0.9 of the 55 GB/s that a plain copy makes on one H200 with PCIe 5 x16. An estimate."""

LOAD_FIXED_SECONDS = 0.004
"""What a load costs whatever its length: a step of the scheduler more, and submitting it. An estimate.

It lies within the 0 to 12 ms by which, on one H200, a load took longer than a plain copy and a device hit together.
"""


class GroupBytes(NamedTuple):
    """What a group of layers needs for its tokens.

    Attributes
    ----------
    tokens_per_block
        Tokens of one block.
    block_bytes
        Bytes of one block that one worker loads.
    """

    tokens_per_block: int
    block_bytes: int


def shortest_load(groups: Sequence[GroupBytes], prefill_tokens_per_second: float) -> int:
    """Return how many tokens a hit must at least have for its load to take no longer than computing them.

    Every group counts with all of its blocks: windows and states load fewer, so for them this is an upper bound.

    Parameters
    ----------
    groups
        Of the model.
    prefill_tokens_per_second
        How fast the engine computes a prompt.

    Returns
    -------
    int
        In tokens, at least 1.

    Raises
    ------
    TypeError, ValueError
        Where an argument is not such, or the bus is slower than the model, so that no load pays.
    """
    finite("prefill_tokens_per_second", prefill_tokens_per_second, above=True)
    token_bytes = 0.0
    for group in groups:
        whole("tokens_per_block", group.tokens_per_block)
        token_bytes += whole("block_bytes", group.block_bytes) / group.tokens_per_block
    saved = 1 / prefill_tokens_per_second - token_bytes / LOAD_BYTES_PER_SECOND
    if saved <= 0:
        raise ValueError(
            f"prefill_tokens_per_second is {prefill_tokens_per_second:g}, and a token has {token_bytes:.0f} bytes, of "
            f"which the bus moves {LOAD_BYTES_PER_SECOND:.0e} a second: no load would pay; accepted is less than "
            f"{LOAD_BYTES_PER_SECOND / token_bytes:.0f}, or give min_load_tokens"
        )
    return max(1, math.ceil(LOAD_FIXED_SECONDS / saved))
