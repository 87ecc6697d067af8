"""A storage backend for SGLang: the L3 of its own hierarchical cache in hicache's storages.

SGLang makes it for ``--hicache-storage-backend dynamic`` from ``--hicache-storage-backend-extra-config``, whose JSON
:func:`storage_backend_config` returns. SGLang is imported by the backend alone, when its class is
first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .settings import SglangSettings, storage_backend_config

if TYPE_CHECKING:
    from .backend import HiCacheBackend

__all__ = ["HiCacheBackend", "SglangSettings", "storage_backend_config"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheBackend":
        from .backend import HiCacheBackend

        return HiCacheBackend
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
