"""StateHostPool: what host pools of states have in common, be they recurrent or a compressor's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from hicache_kernels import HostLayout, StagingRing, TransferPolicy

from ..device_pools import DevicePool
from .base import HostPool
from .memory_options import HostMemoryOptions


class StateHostPool(HostPool):
    """A host pool with pages of one slot, in a layout that keeps a slot together; otherwise as :class:`HostPool`."""

    layouts: ClassVar[tuple[HostLayout, ...]] = (HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT)
    fixed_page_size: ClassVar[int | None] = 1

    def __init__(
        self,
        device_pool: DevicePool,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int = 1,
        layout: HostLayout | str = HostLayout.PAGE_FIRST,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        transfer_policy: TransferPolicy | str = TransferPolicy.AUTO,
        *,
        pages: int | None = None,
        packed_draft_device_pools: Sequence[object] = (),
        memory_options: HostMemoryOptions | None = None,
        staging_ring: StagingRing | None = None,
    ) -> None:
        super().__init__(
            device_pool,
            host_to_device_ratio,
            host_size,
            page_size,
            layout,
            pin_memory,
            device,
            allocator_type,
            transfer_policy,
            pages=pages,
            packed_draft_device_pools=packed_draft_device_pools,
            memory_options=memory_options,
            staging_ring=staging_ring,
        )
