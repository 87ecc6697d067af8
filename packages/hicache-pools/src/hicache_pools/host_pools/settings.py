"""Keyword arguments that every host pool takes beyond what it mirrors and where its memory is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from hicache_kernels import StagingRing, TransferPolicy
from hicache_kernels.validation import one_of

from .memory_options import HostMemoryOptions

TRANSFER_POLICIES = (TransferPolicy.AUTO, TransferPolicy.STAGED, TransferPolicy.DIRECT)


class HostPoolOptions(TypedDict, total=False):
    """Further keyword arguments of every host pool; :class:`HostPool` says what they mean."""

    transfer_policy: TransferPolicy | str
    pages: int | None
    packed_draft_device_pools: Sequence[object]
    memory_options: HostMemoryOptions | None
    staging_ring: StagingRing | None


@dataclass(frozen=True)
class HostPoolSettings:
    """The options with their defaults, checked."""

    transfer_policy: TransferPolicy | str = TransferPolicy.AUTO
    pages: int | None = None
    packed_draft_device_pools: Sequence[object] = ()
    memory_options: HostMemoryOptions | None = None
    staging_ring: StagingRing | None = None

    def __post_init__(self) -> None:
        _ = self.policy
        if not isinstance(self.packed_draft_device_pools, Sequence):
            raise TypeError(
                f"packed_draft_device_pools is a {type(self.packed_draft_device_pools).__name__}; it must be a "
                "sequence of device pools"
            )

    @property
    def policy(self) -> TransferPolicy:
        """The policy, by its own type."""
        return one_of("transfer_policy", self.transfer_policy, TRANSFER_POLICIES)
