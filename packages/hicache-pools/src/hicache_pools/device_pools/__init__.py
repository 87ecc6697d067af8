"""Descriptions of device memory an engine already has, one for each kind of cache; they allocate only when asked to."""

from .base import DevicePool
from .blocks import BlockPool
from .components import BufferForm, DeviceComponent, component_from_tensors
from .deepseek_v4 import DeepSeekV4PagedPool, DeepSeekV4StatePool
from .dsa import DSATokenToKVPool
from .mamba import MambaPool
from .mha import MHATokenToKVPool
from .mla import MLATokenToKVPool

__all__ = [
    "BlockPool",
    "BufferForm",
    "DSATokenToKVPool",
    "DeepSeekV4PagedPool",
    "DeepSeekV4StatePool",
    "DeviceComponent",
    "DevicePool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "MambaPool",
    "component_from_tensors",
]
