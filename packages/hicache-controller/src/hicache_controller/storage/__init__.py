"""Storage backends (L3): the contract, the factory and what this package ships."""

from .base import HiCacheStorage, StoragePool, StorageStats
from .file import FileStorage
from .fingerprint import Fingerprint
from .memory import MemoryStorage

__all__ = ["FileStorage", "Fingerprint", "HiCacheStorage", "MemoryStorage", "StoragePool", "StorageStats"]
