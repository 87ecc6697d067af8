"""Every public name of the package, which imports this module when the first of them is used."""

from .controller import HiCacheController
from .hashing import Namespace, page_hashes
from .hybrid import HybridCacheController, SidecarPoolSpec
from .layer_done import LayerDoneCounter
from .operations import Ack, CacheOperation, StorageAck
from .radix import UnifiedRadixCache, WritePolicy
from .storage import Fingerprint, HiCacheStorage, MemoryStorage, StorageBackendFactory
from .storage_settings import StorageSettings
from .transfer_engine import L2TransferEngine
from .transfer_handle import L2Transfer

__all__ = [
    "Ack",
    "CacheOperation",
    "Fingerprint",
    "HiCacheController",
    "HiCacheStorage",
    "HybridCacheController",
    "L2Transfer",
    "L2TransferEngine",
    "LayerDoneCounter",
    "MemoryStorage",
    "Namespace",
    "SidecarPoolSpec",
    "StorageAck",
    "StorageBackendFactory",
    "StorageSettings",
    "UnifiedRadixCache",
    "WritePolicy",
    "page_hashes",
]
