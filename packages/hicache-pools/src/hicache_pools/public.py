"""Every public name of the package, which imports this module when the first of them is used."""

from .build_group import PoolSpec, build_host_pool_group, layer_mapper
from .device_pools import (
    BlockPool,
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
from .group import HostPoolGroup
from .host_memory import AllocatorType, HostBuffer, HugePages, allocate_host_buffer, attach_host_buffer
from .host_pools import (
    BlockPoolHost,
    ComponentGeometry,
    DeepSeekV4PagedHostPool,
    DeepSeekV4StateHostPool,
    DSAIndexerPoolHost,
    HostMemoryOptions,
    HostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    NullPoolHost,
    PagePart,
    PoolGeometry,
    StateHostPool,
)
from .memory_budget import HostMemoryBudget, HostMemoryBudgetError
from .packed_draft import unwrap_draft_pool
from .pool_entry import PoolEntry
from .pool_transfer import PoolHitPolicy, PoolName, PoolTransfer
from .simulation import cpu_simulation

__all__ = [
    "AllocatorType",
    "BlockPool",
    "BlockPoolHost",
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
    "HostBuffer",
    "HostMemoryBudget",
    "HostMemoryBudgetError",
    "HostMemoryOptions",
    "HostPool",
    "HostPoolGroup",
    "HugePages",
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
    "PoolSpec",
    "PoolTransfer",
    "StateHostPool",
    "allocate_host_buffer",
    "attach_host_buffer",
    "build_host_pool_group",
    "component_from_tensors",
    "cpu_simulation",
    "layer_mapper",
    "unwrap_draft_pool",
]
