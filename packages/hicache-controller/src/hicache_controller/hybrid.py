"""HybridCacheController: the controller by the name that it has where a model has several pools."""

from .controller import HiCacheController
from .pool_transfers import SidecarPoolSpec

__all__ = ["HybridCacheController", "SidecarPoolSpec"]

HybridCacheController = HiCacheController
