"""BlockPoolHost: host pages of an engine's blocks."""

from __future__ import annotations

from typing import ClassVar

from ..device_pools import BlockPool, DevicePool
from .state import StateHostPool


class BlockPoolHost(StateHostPool):
    """Host pages of a :class:`BlockPool`, a block each; parameters as in :class:`HostPool`, with ``page_size`` 1."""

    device_pool_type: ClassVar[type[DevicePool]] = BlockPool
