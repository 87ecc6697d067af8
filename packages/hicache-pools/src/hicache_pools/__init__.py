"""Host memory for hierarchical KV caches: extent allocation, host pools for every attention kind, and pool groups."""

from .device_pools import (
    BufferForm,
    DeepSeekV4PagedPool,
    DeepSeekV4StatePool,
    DeviceComponent,
    DevicePool,
    DSATokenToKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    component_from_tensors,
)
from .extents import ExtentAllocator, ExtentStats
from .group import HostPoolGroup, PoolEntry
from .host_pools import (
    ComponentGeometry,
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    DSAIndexerPoolHost,
    HostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NullPoolHost,
    PagePart,
    PoolGeometry,
    StateHostPool,
)
from .pool_transfer import PoolHitPolicy, PoolName, PoolTransfer

__all__ = [
    "BufferForm",
    "ComponentGeometry",
    "DSAIndexerPoolHost",
    "DSATokenToKVPool",
    "DeepSeekV4PagedHostPool",
    "DeepSeekV4PagedPool",
    "DeepSeekV4StateHostPool",
    "DeepSeekV4StatePool",
    "DeviceComponent",
    "DevicePool",
    "ExtentAllocator",
    "ExtentStats",
    "HostPool",
    "HostPoolGroup",
    "MHATokenToKVPool",
    "MHATokenToKVPoolHost",
    "MLATokenToKVPool",
    "MLATokenToKVPoolHost",
    "MambaPool",
    "MambaPoolHost",
    "NullPoolHost",
    "PagePart",
    "PoolEntry",
    "PoolGeometry",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "StateHostPool",
    "component_from_tensors",
]
