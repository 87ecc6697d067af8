"""StateHostPool: what host pools of states have in common, be they recurrent, a compressor's or whole blocks."""

from __future__ import annotations

from typing import ClassVar

from hicache_kernels import HostLayout

from .base import HostPool


class StateHostPool(HostPool):
    """A host pool with pages of one slot, in a layout that keeps a slot together; otherwise as :class:`HostPool`."""

    layouts: ClassVar[tuple[HostLayout, ...]] = (HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT)
    fixed_page_size: ClassVar[int | None] = 1
