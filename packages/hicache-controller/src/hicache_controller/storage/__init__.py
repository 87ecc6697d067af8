"""Storage backends (L3): the contract, the factory and what this package ships."""

from .base import HiCacheStorage, RemovalListener, StoragePool, StorageStats
from .factory import StorageBackendFactory
from .file import FileStorage
from .fingerprint import Fingerprint
from .generic import GenericStorage
from .memory import MemoryStorage

__all__ = [
    "FileStorage",
    "Fingerprint",
    "GenericStorage",
    "HiCacheStorage",
    "MemoryStorage",
    "RemovalListener",
    "StorageBackendFactory",
    "StoragePool",
    "StorageStats",
]
