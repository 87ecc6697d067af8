"""A storage backend for SGLang: the L3 of its own hierarchical cache in hicache's storages.

>>> sglang serve --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic \\
...     --hicache-storage-backend-extra-config "$JSON"

``storage_backend_config`` returns what goes into ``JSON``. SGLang is imported by the backend alone, when its class is
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
