"""Host pools of SGLang on the CPU, made by its own assembler without pinned memory, and configurations of ranks."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler as assembler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from hicache_controller.integrations.sglang import SglangSettings, storage_backend_config

PAGE_SIZE = 4
PAGES = 16
LAYERS = 3


def config(directory: Path, *, mla: bool = False, tp_rank: int = 0, tp_size: int = 1, **extra: Any) -> Any:
    """What SGLang makes of a launch with our extra configuration; ``extra`` is added to that, None takes a key out."""
    settings = SglangSettings(f"file://{directory / 'l3'}", revision="1")
    given = {**storage_backend_config(settings), **extra}
    return HiCacheStorageConfig(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="org/model",
        extra_config={name: value for name, value in given.items() if value is not None},
    )


def open_backend(given: Any, host: Any) -> Any:
    """Make the backend as SGLang's controller does, with its anchor."""
    backend = StorageBackendFactory.create_backend("dynamic", given, host)
    backend.register_mem_pool_host(host)
    return backend


def _host(device_pool: Any, layout: str) -> Any:
    inputs = assembler._mha_host_inputs

    def unpinned(pool: Any) -> Any:
        kind, first, second = inputs(pool)
        return functools.partial(kind, pin_memory=False), first, second

    mla = functools.partial(assembler.MLATokenToKVPoolHost, pin_memory=False)
    with (
        mock.patch.object(assembler, "_mha_host_inputs", unpinned),
        mock.patch.object(assembler, "MLATokenToKVPoolHost", mla),
    ):
        return assembler._build_mha_mla_host_pool(
            pool=device_pool,
            host_to_device_ratio=2.0,
            page_size=PAGE_SIZE,
            layout=layout,
            allocator_type="default",
            pool_label="kv",
        )


def mha(layout: str = "page_first") -> Any:
    """A host pool of keys and values."""
    shape = {"head_num": 2, "head_dim": 8, "layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False}
    return _host(MHATokenToKVPool(size=PAGES * PAGE_SIZE, page_size=PAGE_SIZE, dtype=torch.float16, **shape), layout)


def mla(layout: str = "page_first") -> Any:
    """A host pool of latents."""
    shape = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "layer_num": LAYERS}
    options = {"device": "cpu", "enable_memory_saver": False}
    pool = MLATokenToKVPool(size=PAGES * PAGE_SIZE, page_size=PAGE_SIZE, dtype=torch.float16, **shape, **options)
    return _host(pool, layout)


def fill(host: Any) -> None:
    """Write random numbers over the whole pool."""
    host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape).to(host.kv_buffer.dtype))


def page(host: Any, number: int) -> torch.Tensor:
    """A copy of one page's bytes."""
    return host.get_data_page(number * PAGE_SIZE, flat=True).clone()


def slots(pages: Any) -> torch.Tensor:
    """Slots of some pages, in order."""
    return (torch.as_tensor(list(pages))[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).reshape(-1)


def keys(count: int, tag: str = "page") -> list[str]:
    """Hashes of pages as SGLang makes them: 64 hexadecimal digits."""
    return [hashlib.sha256(f"{tag} {number}".encode()).hexdigest() for number in range(count)]
