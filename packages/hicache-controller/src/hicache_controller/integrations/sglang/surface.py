"""Checks that SGLang is there, is a version that is known, and has every hook that is used here."""

from __future__ import annotations

import logging

from ..surface import EngineSurface

logger = logging.getLogger(__name__)

__all__ = ["VERSION", "check_hooks", "logger"]

try:
    import sglang
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
    from sglang.srt.mem_cache.pool_host.base import HostKVCache
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
except ImportError as error:
    raise ImportError(
        "SGLang is not installed, or one of its parts cannot be imported; this storage backend is loaded by SGLang"
    ) from error

VERSION: str = sglang.__version__
_SURFACE = EngineSurface("SGLang", "storage backend", (0, 5, 23), (0, 5, 23), logger)
check_version = _SURFACE.check_version


def check_hooks() -> None:
    """Raise ImportError where SGLang lacks what the backend uses or fills in."""
    _SURFACE.check_hooks(
        VERSION,
        {
            HiCacheStorage: (
                *("register_mem_pool_host", "register_mem_host_pool_v2", "batch_get_v1", "batch_set_v1", "clear"),
                *("batch_exists", "batch_exists_v2", "batch_get_v2", "batch_set_v2", "get", "set", "exists"),
                *("batch_get", "batch_set"),
            ),
            HiCacheStorageConfig: (
                *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model"),
                *("model_name", "extra_config", "dcp_rank", "dcp_size", "logical_page_size"),
            ),
            HiCacheStorageExtraInfo: ("prefix_keys",),
            PoolHitPolicy: ("ALL_PAGES", "TRAILING_PAGES"),
            PoolName: ("KV", "MAMBA"),
            PoolTransfer: ("name", "host_indices", "keys", "hit_policy"),
            PoolTransferResult: ("kv_hit_pages", "extra_pool_hit_pages", "restorable_prefix_pages"),
            HostKVCache: ("get_dummy_flat_data_page", "storage_format_tag"),
            MHATokenToKVPoolHost: ("get_page_buffer_meta",),
            LogicalHostPool: ("storage_format_tag",),
        },
    )


check_version(VERSION)
check_hooks()
