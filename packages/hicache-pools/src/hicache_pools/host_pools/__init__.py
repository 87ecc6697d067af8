"""Host pools of every kind of cache, over one base that allocates, moves and shows pages."""

from .base import HostPool
from .blocks import BlockPoolHost
from .deepseek_v4 import DeepSeekV4PagedHostPool, DeepSeekV4StateHostPool
from .dsa import DSAIndexerPoolHost
from .geometry import ComponentGeometry, PagePart, PoolGeometry
from .mamba import MambaPoolHost
from .memory_options import HostMemoryOptions
from .mha import MHATokenToKVPoolHost
from .mla import MLATokenToKVPoolHost
from .null import NullPoolHost
from .state import StateHostPool

__all__ = [
    "BlockPoolHost",
    "ComponentGeometry",
    "DSAIndexerPoolHost",
    "DeepSeekV4PagedHostPool",
    "DeepSeekV4StateHostPool",
    "HostMemoryOptions",
    "HostPool",
    "MHATokenToKVPoolHost",
    "MLATokenToKVPoolHost",
    "MambaPoolHost",
    "NullPoolHost",
    "PagePart",
    "PoolGeometry",
    "StateHostPool",
]
