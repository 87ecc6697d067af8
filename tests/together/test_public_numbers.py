"""Every number a public call takes is checked where it is given: its kind, its bounds, by the argument's name."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import hicache_controller
import hicache_kernels
import hicache_pools
from hicache_controller import (
    Fingerprint,
    HiCacheController,
    L2Transfer,
    L2TransferEngine,
    LayerDoneCounter,
    MemoryStorage,
    Namespace,
    StorageSettings,
    UnifiedRadixCache,
    page_hashes,
)
from hicache_controller.storage.file import FileStorage
from hicache_controller.tree import Quota, SequenceKeys, WindowComponent
from hicache_kernels import DeviceRows, HostRows, Plane, PlaneTransfer, StagingRing, host_bytes, host_strides
from hicache_pools import (
    DeepSeekV4PagedPool,
    DeepSeekV4StatePool,
    DSATokenToKVPool,
    ExtentAllocator,
    HostMemoryBudget,
    HostMemoryOptions,
    HostPoolGroup,
    MambaPool,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    NullPoolHost,
    PoolEntry,
    PoolSpec,
    allocate_host_buffer,
    attach_host_buffer,
    build_host_pool_group,
    component_from_tensors,
    layer_mapper,
)

NAN, INF = math.nan, math.inf
NOT_WHOLE = (NAN, INF, -1, 1.5, True, np.True_, "3", 1 << 70)
NOT_REAL = (NAN, INF, -INF, -1, -0.5, True, np.True_, "3")
SMALL = {"size": 8, "page_size": 2, "dtype": torch.uint8, "layer_num": 1}
STRIDES = {"element_bytes": [4], "layers": 1, "pages": 2, "page_size": 2}


def device_pool() -> MHATokenToKVPool:
    return MHATokenToKVPool(**SMALL, head_num=1, head_dim=4)


def host_pool(**options: Any) -> MHATokenToKVPoolHost:
    return MHATokenToKVPoolHost(device_pool(), **{"host_to_device_ratio": 1.0, "host_size": 0} | options)


def controller(**options: Any) -> HiCacheController:
    pool = host_pool()
    slots = ExtentAllocator(4, 2)
    entry = PoolEntry(
        "kv", pool, pool.device_pool, lambda layer: layer, True, device_alloc_fn=slots.alloc, device_free_fn=slots.free
    )
    return HiCacheController(HostPoolGroup([entry]), synchronous=True, **options)


def tree(**options: Any) -> UnifiedRadixCache:
    return UnifiedRadixCache(controller(), ExtentAllocator(4, 2), **{"page_size": 2} | options)


def insert(**numbers: Any) -> None:
    cache = tree()
    match = cache.match_prefix([bytes(16)])
    pages = cache.alloc_device(1)
    assert pages is not None
    cache.insert(match, pages, **numbers)


def pin(**numbers: Any) -> None:
    cache = tree()
    cache.pin(cache.match_prefix([]), **numbers)


def detach(**numbers: Any) -> None:
    with_storage = controller()
    with_storage.attach_storage_backend(MemoryStorage())
    with_storage.detach_storage_backend(**numbers)


def prefetch(**numbers: Any) -> None:
    cache = tree()
    cache.prefetch(cache.match_prefix([]), **numbers)


def split(**numbers: Any) -> None:
    cache = tree()
    keys = [bytes([page] * 16) for page in range(3)]
    pages = cache.alloc_device(3)
    assert pages is not None
    cache.split(cache.insert(cache.match_prefix(keys), pages).match.node, **numbers)


def planes(**numbers: Any) -> PlaneTransfer:
    (strides,) = host_strides("page_first", [4], layers=1, pages=2, page_size=2)
    values = {"row_bytes": 4, "pages": 2, "page_size": 2} | numbers
    rows = HostRows(torch.zeros(16, dtype=torch.uint8), strides, values["pages"], values["page_size"])
    return PlaneTransfer([Plane("kv", values["row_bytes"], DeviceRows.slot_major([torch.zeros(4, 1)]), rows)])


def move(**numbers: Any) -> None:
    pool, slots = host_pool(), torch.arange(2)
    pool.load_to_device_per_layer(pool.device_pool, slots, slots, **{"layer_id": 0} | numbers)


def attach(**numbers: Any) -> None:
    with allocate_host_buffer(64, page_bytes=64, allocator_type="shared") as buffer:
        attach_host_buffer(buffer.shared_name or "", page_bytes=64, **numbers).close()


WAITS = ("prefetch_timeout_seconds", "prefetch_timeout_seconds_per_page", "retry_seconds", "back_off_seconds")
CALLS: dict[str, tuple[Callable[..., object], Mapping[str, Any]]] = {
    # kernels
    "host_strides": (lambda **n: host_strides("page_first", **n), STRIDES),
    "host_bytes": (host_bytes, STRIDES),
    "element_bytes": (lambda **n: host_bytes(list(n.values()), layers=1, pages=1, page_size=1), {"element_bytes": 4}),
    "StagingRing": (lambda **n: StagingRing("cpu", **n), {"budget_bytes": 1 << 20, "pages": 2, "chunk_bytes": 4096}),
    "Plane": (planes, {"row_bytes": 4, "pages": 2, "page_size": 2}),
    "PlaneTransfer": (lambda **n: PlaneTransfer(planes().planes, boundaries=list(n.values())), {"boundaries": 8}),
    "PlaneTransfer.plan": (lambda **n: planes().plan("load", **n), {"pages": 1, "runs": 1}),
    "PlaneTransfer.write_back": (
        lambda **n: planes().write_back(torch.arange(2), torch.arange(2), **n),
        {"block_quota": 1},
    ),
    # pools
    "ExtentAllocator": (ExtentAllocator, {"pages": 2, "page_size": 2}),
    "ExtentAllocator.alloc": (lambda **n: ExtentAllocator(4).alloc(**n), {"n_slots": 2}),
    "ExtentAllocator.alloc_pages": (lambda **n: ExtentAllocator(4).alloc_pages(**n), {"n": 2}),
    "MHATokenToKVPool": (MHATokenToKVPool, {**SMALL, "head_num": 1, "head_dim": 4, "v_head_dim": 4}),
    "MLATokenToKVPool": (MLATokenToKVPool, {**SMALL, "kv_lora_rank": 4, "qk_rope_head_dim": 4}),
    "DSATokenToKVPool": (
        DSATokenToKVPool,
        {**SMALL, "kv_lora_rank": 4, "qk_rope_head_dim": 4, "index_head_dim": 8, "quant_block_size": 4},
    ),
    "MambaPool": (
        lambda **n: MambaPool(
            n["size"],
            [[n["conv_shapes"]]],
            [n["temporal_shape"]],
            torch.uint8,
            torch.uint8,
            n["layer_num"],
            side={"s": ([n["side"]], torch.uint8)},
        ),
        {"size": 4, "conv_shapes": 4, "temporal_shape": 4, "layer_num": 1, "side": 4},
    ),
    "DeepSeekV4PagedPool": (
        DeepSeekV4PagedPool,
        {"size": 8, "page_size": 4, "compression_ratio": 4, "kv_bytes": 8, "layer_num": 1, "indexer_bytes": 4},
    ),
    "DeepSeekV4StatePool": (
        lambda **n: DeepSeekV4StatePool(n["size"], [n["state_shape"]], torch.uint8, n["layer_num"]),
        {"size": 4, "state_shape": 4, "layer_num": 1},
    ),
    "component_from_tensors": (lambda **n: component_from_tensors("x", [torch.zeros(4, 2)], **n), {"slots_per_row": 2}),
    "HostPool": (host_pool, {"page_size": 2, "pages": 4, "host_to_device_ratio": 1.0, "host_size": 0.0}),
    "HostPool.alloc": (lambda **n: host_pool().alloc(*n.values()), {"n_slots": 2}),
    "HostPool.page_parts": (lambda **n: host_pool().page_parts(**n), {"page": 1}),
    "HostPool.load_to_device_per_layer": (move, {"layer_id": 0, "block_quota": 1}),
    "NullPoolHost": (NullPoolHost, {"pages": 2, "page_size": 2}),
    "HostMemoryOptions": (HostMemoryOptions, {"chunk_bytes": 4096, "numa_node": 0, "threads": 1}),
    "HostMemoryBudget": (HostMemoryBudget, {"reserve_bytes": 1}),
    "HostMemoryBudget.check": (lambda **n: HostMemoryBudget().check(**n), {"nbytes": 1}),
    "PoolSpec": (
        lambda **n: PoolSpec(device_pool(), layers=[n["layers"]], pages=n["pages"]),
        {"layers": 0, "pages": 2},
    ),
    "allocate_host_buffer": (
        lambda **n: allocate_host_buffer(**n).close(),
        {"nbytes": 64, "page_bytes": 64, "chunk_bytes": 4096, "numa_node": 0, "threads": 1},
    ),
    "attach_host_buffer": (attach, {"chunk_bytes": 4096}),
    "build_host_pool_group": (
        lambda **n: build_host_pool_group({"kv": device_pool()}, **n),
        {"page_size": 2, "host_size": 0.0, "host_to_device_ratio": 1.0},
    ),
    "layer_mapper": (layer_mapper, {"layer_num": 2}),
    # controller
    "HiCacheController": (controller, {"write_block_quota": 1, "load_block_quota": 1, "distributed_timeout": 1.0}),
    "HiCacheController.shutdown": (lambda **n: controller().shutdown(**n), {"timeout": 1.0}),
    "HiCacheController.reset": (lambda **n: controller().reset(**n), {"timeout": 1.0}),
    "HiCacheController.quiesce": (lambda **n: controller().quiesce(**n), {"timeout": 1.0}),
    "HiCacheController.detach_storage_backend": (detach, {"timeout": 1.0}),
    "L2Transfer": (
        lambda **n: L2Transfer("kv", None, None, torch.arange(1), torch.arange(1), (0,), **n),
        {"block_quota": 1},
    ),
    "L2TransferEngine.drain": (lambda **n: L2TransferEngine("cpu", synchronous=True).drain(**n), {"timeout": 1.0}),
    "L2TransferEngine.close": (lambda **n: L2TransferEngine("cpu", synchronous=True).close(**n), {"timeout": 1.0}),
    "LayerDoneCounter": (LayerDoneCounter, {"layers": 1}),
    "StorageSettings": (
        StorageSettings,
        dict.fromkeys(("batch_pages", "backup_queue_pages", "prefetch_queue_pages", "backup_retries"), 1)
        | dict.fromkeys((*WAITS, "timeout_seconds", "max_wait_seconds"), 0.5),
    ),
    "MemoryStorage": (MemoryStorage, {"capacity_bytes": 1}),
    "Fingerprint": (lambda **n: Fingerprint("m", "r", **n), {"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2}),
    "UnifiedRadixCache": (tree, {"page_size": 2, "selective_hits": 1, "load_back_pages": 1, "load_quota_pages": 1}),
    "UnifiedRadixCache.alloc_device": (lambda **n: tree().alloc_device(**n), {"count": 1}),
    "UnifiedRadixCache.evict_device": (lambda **n: tree().evict_device(**n), {"count": 1}),
    "UnifiedRadixCache.evict_host": (lambda **n: tree().evict_host(**n), {"count": 1}),
    "UnifiedRadixCache.insert(count)": (insert, {"count": 1}),
    "UnifiedRadixCache.insert(computed_tokens)": (insert, {"computed_tokens": 2}),
    "UnifiedRadixCache.pin": (pin, {"seconds": 0.5}),
    "UnifiedRadixCache.split": (split, {"pages": 1}),
    "UnifiedRadixCache.drain": (lambda **n: tree().drain(**n), {"timeout": 1.0}),
    "UnifiedRadixCache.reset": (lambda **n: tree().reset(**n), {"timeout": 1.0}),
    "UnifiedRadixCache.prefetch": (prefetch, {"timeout": 1.0}),
    "Quota": (Quota, {"device_pages": 1, "host_pages": 1}),
    "SequenceKeys": (SequenceKeys, {"page_size": 2}),
    "page_hashes": (lambda **n: page_hashes(np.arange(4), **n), {"page_size": 2}),
    "WindowComponent": (lambda **n: WindowComponent("swa", **n), {"window_pages": 2}),
    "WindowComponent.sliding_window": (
        lambda **n: WindowComponent.sliding_window("swa", **n),
        {"window_tokens": 2, "page_size": 2},
    ),
}
"""Calls that work: what is an int is a whole number, what is a float a real one."""

LOOKED_AT_ELSEWHERE = {
    "DeviceRows": "checked with its plane, by PlaneTransfer",
    "HostRows": "checked with its plane, by PlaneTransfer",
    "HostStrides": "checked with its plane, by PlaneTransfer",
    "DSAIndexerPoolHost": "a HostPool",
    "DeepSeekV4PagedHostPool": "a HostPool",
    "DeepSeekV4StateHostPool": "a HostPool",
    "HybridCacheController": "HiCacheController by its older name",
    "MHATokenToKVPoolHost": "a HostPool",
    "MLATokenToKVPoolHost": "a HostPool",
    "MambaPoolHost": "a HostPool",
    "StateHostPool": "a HostPool",
    "BlockPoolHost": "a HostPool",
    "FileStorage": "in a test of its own, as it needs a directory",
    "HiCache": "in a test of its own, as it needs transformers",
    "ReplayOptions": "by its check, in the tests of the command",
}
"""Public classes and functions that take numbers and are in no row above."""

DESCRIPTIONS = {
    *("Plan", "Capabilities", "TransferResult", "ComponentGeometry", "PoolGeometry", "PagePart", "DeviceComponent"),
    *("ExtentStats", "HostBuffer", "HostMemoryBudgetError", "PoolEntry", "Ack", "CacheOperation", "StorageAck"),
    *("InsertResult", "Match", "TreeNode", "TreeStats", "WindowStats", "Prefetching", "StorageStats", "CacheStats"),
    *("Hit", "PastCache", "StaticPastCache", "PathCounts", "PoolCounts", "ReplayReport"),
}
"""What hicache makes and hands out; nobody gives it numbers."""


def numbers_of(given: Mapping[str, Any], *kinds: type) -> list[str]:
    """Names of the arguments of some kinds."""
    return [name for name, value in given.items() if type(value) in kinds]


@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_cannot_be_meant_is_refused_by_name(name: str) -> None:
    call, given = CALLS[name]
    call(**given)
    for argument in numbers_of(given, int, float):
        for value in NOT_WHOLE if type(given[argument]) is int else NOT_REAL:
            with pytest.raises((TypeError, ValueError), match=rf"\b{argument}\b.* is {re.escape(repr(value))}"):
                call(**{**given, argument: value})


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_numpy_are_accepted(name: str) -> None:
    call, given = CALLS[name]
    call(**{**given, **{argument: np.int64(given[argument]) for argument in numbers_of(given, int)}})
    call(**{**given, **{argument: np.float32(given[argument]) for argument in numbers_of(given, float)}})


@pytest.mark.parametrize("package", [hicache_kernels, hicache_pools, hicache_controller])
def test_every_public_call_that_takes_a_number_is_in_a_row(package: ModuleType) -> None:
    rows = {name.partition(".")[0].partition("(")[0] for name in CALLS}
    for name, thing in public_names(package):
        takes = [
            parameter.name
            for parameter in inspect.signature(thing).parameters.values()
            if re.search(r"\b(int|float)\b", str(parameter.annotation))
            and not str(parameter.annotation).startswith(("Callable", "collections.abc.Callable"))
        ]
        assert not takes or name in rows | DESCRIPTIONS | set(LOOKED_AT_ELSEWHERE), f"{name} takes {takes}"


def public_names(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """Public classes and functions of a package and of the modules in it that say what is public, tools left out.

    And what engines alone load: their settings are checked in tests of their own.
    """
    tools = ("bench", "cli", "contract", "reference", "sglang", "tools", "vllm", "__main__")
    modules = [package]
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not set(found.name.split(".")) & set(tools) and found.ispkg:
            modules.append(importlib.import_module(found.name))
    for module in modules:
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if inspect.isfunction(thing) or (inspect.isclass(thing) and not issubclass(thing, (str, BaseException))):
                yield name, thing


@pytest.mark.parametrize("value", NOT_WHOLE)
@pytest.mark.parametrize("name", ["capacity_bytes", "threads"])
def test_numbers_of_a_file_storage_are_refused_by_name_before_there_is_a_directory(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} is "):
        FileStorage(tmp_path / "pages", fingerprint=Fingerprint("m", "r"), **{name: value})
    assert not (tmp_path / "pages").exists()


@pytest.mark.parametrize("name", ["l1_gb", "l2_gb", "page_size"])
def test_sizes_of_a_model_cache_are_refused_by_name(name: str) -> None:
    transformers_cache = pytest.importorskip("hicache_controller.integrations.transformers")
    for value in (NAN, INF, -1, True, "3"):
        with pytest.raises((TypeError, ValueError), match=f"{name} is "):
            transformers_cache.HiCache.for_model(None, model_id="m", **{name: value})


@pytest.mark.parametrize("name", ["salt", "adapter", "modality"])
@pytest.mark.parametrize("value", [5, True, 1.5, [1, 2], bytearray(b"a")])
def test_a_namespace_of_anything_but_text_and_bytes_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} is {re.escape(repr(value))}; accepted are str, bytes and None"):
        Namespace(**{name: value})


def test_equal_ranks_make_equal_fingerprints_whatever_the_type_of_the_number() -> None:
    plain, numpy = (Fingerprint("m", "r", tp_rank=kind(1), tp_size=kind(2)) for kind in (int, np.int32))
    assert plain.digest() == numpy.digest()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_tree_of_other_pages_than_its_pools_is_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size is {page_size}; the controller's pools have pages of 2"):
        tree(page_size=page_size)


def test_a_device_allocator_of_other_pages_or_with_pages_outside_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="device_allocator has pages of 4 slots; page_size is 2"):
        UnifiedRadixCache(controller(), ExtentAllocator(2, 4), page_size=2)
    with pytest.raises(ValueError, match="device_allocator has 5 pages of 2 slots; the device pool"):
        UnifiedRadixCache(controller(), ExtentAllocator(5, 2), page_size=2)


def test_a_pool_that_does_not_fit_is_refused_before_its_slots_are_made() -> None:
    with pytest.raises(MemoryError, match="asked for"):
        host_pool(pages=(1 << 31) - 1, memory_options=HostMemoryOptions(budget=HostMemoryBudget(reserve_bytes=1 << 60)))
