"""A connector for vLLM: its prefix cache extended to host memory and storage.

>>> vllm serve MODEL --kv-transfer-config "$(hicache vllm-config --l2-gb 64 --storage file:///mnt/l3)"

vLLM is imported by the connector alone, when its class is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .settings import VllmSettings, kv_transfer_config

if TYPE_CHECKING:
    from .connector import HiCacheConnector

__all__ = ["HiCacheConnector", "VllmSettings", "kv_transfer_config"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheConnector":
        from .connector import HiCacheConnector

        return HiCacheConnector
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
