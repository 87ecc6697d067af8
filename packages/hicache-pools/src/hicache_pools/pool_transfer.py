"""What moves between a pool's device and host slots: names of pools, hit policies, and the transfer itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PoolName(StrEnum):
    """Names of the pools this package builds; a group takes any other string as well."""

    KV = "kv"
    """Full attention, MHA or MLA: the usual anchor."""
    SWA = "swa"
    """Sliding window attention, with slots of its own."""
    MAMBA = "mamba"
    """Recurrent states."""
    INDEXER = "indexer"
    """The DSA indexer's keys and scales, on the anchor's slots."""
    DEEPSEEK_V4_C4 = "deepseek_v4_c4"
    """DeepSeek-V4 KV, one entry for four tokens."""
    DEEPSEEK_V4_C4_INDEXER = "deepseek_v4_c4_indexer"
    DEEPSEEK_V4_C128 = "deepseek_v4_c128"
    """DeepSeek-V4 KV, one entry for 128 tokens."""
    DEEPSEEK_V4_C128_INDEXER = "deepseek_v4_c128_indexer"
    DEEPSEEK_V4_C4_STATE = "deepseek_v4_c4_state"
    """State of the compressor of the C4 layers."""
    DEEPSEEK_V4_C4_INDEXER_STATE = "deepseek_v4_c4_indexer_state"
    DEEPSEEK_V4_C128_STATE = "deepseek_v4_c128_state"
    """State of the compressor of the C128 layers."""
    DRAFT = "draft"
    """A stand-alone draft model's KV."""


class PoolHitPolicy(StrEnum):
    """Which pages of a pool have to be found for a prefix to count as a hit."""

    ALL_PAGES = "all_pages"
    """Every page of the prefix, as attention needs them."""
    TRAILING_PAGES = "trailing_pages"
    """Only the last pages, as a sliding window or a recurrent state needs them."""


@dataclass(eq=False, slots=True)
class PoolTransfer:
    """One pool's part of an operation.

    Between device and host it is ``host_indices`` with ``device_indices``; between host and storage ``host_indices``
    with ``keys``. A side that is None is filled in by the group (:meth:`HostPoolGroup.resolve_host_transfers`).

    Attributes
    ----------
    name
        The pool.
    host_indices, device_indices
        int64 or int32 slot indices ``[n]``, whole pages in order, or None.
    keys
        One storage key a page, or None.
    hit_policy
        Which pages must be found in storage.
    indices_from_pool
        Pool whose indices this transfer shares. It then takes no slots, and is never released by itself.
    host_from_group, device_from_group
        Whether a group filled that side in; only those sides are given back by ``release_transfers``.
    """

    name: PoolName | str
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: Sequence[bytes] | Sequence[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    indices_from_pool: PoolName | str | None = None
    host_from_group: bool = field(default=False, init=False)
    device_from_group: bool = field(default=False, init=False)
