"""Sidecars and draft models: pools that share the slots of the anchor or of the sliding window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache_controller.controller import HiCacheController
from hicache_controller.hybrid import SidecarPoolSpec
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import (
    CacheEvent,
    Change,
    UnifiedRadixCache,
    maybe_register_hicache_draft,
    register_hicache_draft_pools,
)
from hicache_pools import (
    ExtentAllocator,
    HostPoolGroup,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    NullPoolHost,
    PoolEntry,
    PoolName,
)

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def draft_entry(model: Any, device_pages: int, host_pages: int, page_size: int = 2) -> PoolEntry:
    rows = [torch.zeros((device_pages * page_size, 1, 8), dtype=torch.uint8) for _ in range(2)]
    pool = MHATokenToKVPool.from_buffers(k=rows[:1], v=rows[1:], page_size=page_size)
    host = MHATokenToKVPoolHost(pool, 0, 0, page_size, "page_first", False, pages=host_pages)
    model.device["draft"], model.host["draft"] = rows, host
    return PoolEntry(PoolName.DRAFT, host, pool, lambda layer: 0 if layer == 0 else None)


@pytest.mark.parametrize("extra", [0, 3])
def test_draft_on_the_anchors_slots_comes_back_from_host_and_storage(
    make_model: MakeModel, keys_of: KeysOf, extra: int
) -> None:
    model = make_model(windows=(8, 8), states=(8, 8), storage=MemoryStorage())
    assert maybe_register_hicache_draft(model.cache, entry=draft_entry(model, 12, 16 + extra))
    assert model.storage._pools["draft"].pool is model.host["draft"], "storage moves pages of the physical pool"
    keys = keys_of((1, 2, 3))
    match = model.cache.match_prefix(keys)
    pages, windows = model.compute(match, 3)
    model.fill("draft", keys, pages)
    model.cache.release(model.cache.insert(match, pages, windows=windows).match)
    for tier in ("host", "storage"):
        model.cache.drain()
        if tier == "storage":
            model.empty()
        else:
            model.cache.evict_device(12)
        for rows in model.device["draft"]:
            rows.zero_()
        match = model.begin(keys)
        assert match.pages == 3
        model.verify("draft", keys, model.cache.device_page_numbers(match))
        model.cache.release(match)
    assert model.host["draft"].available_size() == (16 + extra) * 2, "a sidecar takes no slots of its own"
    model.empty()


def test_draft_on_the_windows_slots_moves_with_the_window(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(windows=(8, 8), storage=MemoryStorage())
    register_hicache_draft_pools(model.cache, entry=draft_entry(model, 8, 8), indices_from_pool="swa")
    keys = keys_of((1, 2, 3))
    match = model.cache.match_prefix(keys)
    pages, windows = model.compute(match, 3)
    model.fill("draft", keys[1:], windows["swa"])
    model.cache.release(model.cache.insert(match, pages, windows=windows).match)
    for tier in ("host", "storage"):
        model.cache.drain()
        if tier == "storage":
            model.empty()
        else:
            model.cache.evict_window_device("swa", 8)
        for rows in model.device["draft"]:
            rows.zero_()
        match = model.begin(keys)
        assert match.pages == 3
        model.verify("draft", keys[1:], model.cache.window_page_numbers(match, "swa"))
        model.cache.release(match)
    model.empty()


@pytest.mark.parametrize("source", ["kv", "swa"])
def test_source_of_a_draft_whose_part_left_storage_is_reported_as_gone_and_stored_again_with_it(
    make_model: MakeModel, keys_of: KeysOf, source: str
) -> None:
    events: list[CacheEvent] = []
    model = make_model(windows=(8, 8), storage=MemoryStorage(), listener=events.append)
    pages = model.sizes[source]
    register_hicache_draft_pools(model.cache, entry=draft_entry(model, *pages), indices_from_pool=source)
    keys = keys_of((1, 2, 3))
    model.serve((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys, "kv", "swa", "draft") == [3, 2, 3 if source == "kv" else 2]
    events.clear()
    model.storage.note_removed(keys, "of_nobody_here")
    model.lose(keys[1], "draft")
    model.cache.poll()
    model.lookup((1, 2, 3))
    model.cache.drain()
    assert [(event.change, event.pool, event.keys) for event in events] == [
        (change, source, (keys[1],)) for change in (Change.REMOVED, Change.STORED)
    ]
    assert model.in_storage(keys, "draft") == [3 if source == "kv" else 2]
    model.empty()


@pytest.mark.parametrize("refused", ["swa", "draft"])
def test_window_is_stored_again_where_storage_did_not_take_it_or_its_draft(
    make_model: MakeModel, keys_of: KeysOf, clock: Any, refused: str
) -> None:
    model = make_model(windows=(8, 8), storage=MemoryStorage(), clock=clock)
    register_hicache_draft_pools(model.cache, entry=draft_entry(model, 8, 8), indices_from_pool="swa")
    keys = keys_of((1, 2, 3))
    take_again = model.refuse(refused, keys[1])
    model.serve((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys, "swa", "draft") == ([1, 2] if refused == "swa" else [2, 1])
    take_again()
    clock.now += 1
    model.lookup((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys, "swa", "draft") == [2, 2]
    model.empty()


def test_removals_reach_an_anchor_of_another_name(make_model: MakeModel, keys_of: KeysOf) -> None:
    entry = PoolEntry("full", NullPoolHost(8, 2), None, lambda layer: layer, is_primary_index_anchor=True)
    controller = HiCacheController(HostPoolGroup([entry]))
    storage = MemoryStorage()
    controller.attach_storage_backend(storage)
    tree = UnifiedRadixCache(controller, ExtentAllocator(4, 2), page_size=2)
    storage.note_removed(keys_of((1, 2)), "kv")
    storage.report_removed()
    tree.poll()
    assert tree._backups.presence.lacks_any("full", keys_of((1,)))
    controller.shutdown()


@pytest.mark.parametrize(
    ("host_pages", "page_size", "message"),
    [
        (15, 2, "has size 30; it shares the slots of kv, which has 32, and needs at least as many"),
        (32, 4, "page_size 4"),
    ],
)
def test_sidecar_shorter_than_its_source_is_refused(
    make_model: MakeModel, host_pages: int, page_size: int, message: str
) -> None:
    model = make_model()
    entry = draft_entry(model, 12, host_pages, page_size)
    with pytest.raises(ValueError, match=message):
        register_hicache_draft_pools(model.cache, entry=entry)
    assert [str(each.name) for each in model.group.entries] == ["kv"]


def test_sidecar_after_the_first_insert_is_refused_until_reset(make_model: MakeModel) -> None:
    model = make_model(windows=(8, 8))
    model.serve((1, 2))
    entry = draft_entry(model, 12, 16)
    with pytest.raises(ValueError, match="before the first insert"):
        register_hicache_draft_pools(model.cache, entry=entry)
    model.cache.reset()
    assert [allocator.available_pages for allocator in model.allocators.values()] == [12, 8]
    register_hicache_draft_pools(model.cache, entry=entry)
    model.serve((1, 2))
    model.empty()


def test_spec_and_entry_of_a_sidecar_name_one_pool(make_model: MakeModel) -> None:
    model = make_model()
    entry = draft_entry(model, 12, 16)
    with pytest.raises(ValueError, match="spec is for pool indexer and entry is draft"):
        model.cache.register_sidecar_pool(SidecarPoolSpec("indexer", "kv"), entry)


def test_other_trees_are_refused_with_what_to_do(make_model: MakeModel) -> None:
    model = make_model()
    assert not maybe_register_hicache_draft(object())
    with pytest.raises(NotImplementedError, match=r"tree is a dict, .* use a UnifiedRadixCache"):
        maybe_register_hicache_draft({}, entry=draft_entry(model, 12, 16))


def test_packed_draft_takes_no_slots_and_must_be_in_its_owner(make_model: MakeModel) -> None:
    model = make_model()
    rows = [torch.zeros((24, 1, 8), dtype=torch.uint8) for _ in range(4)]
    owner = MHATokenToKVPool.from_buffers(k=rows[:1], v=rows[1:2], page_size=2)
    draft = MHATokenToKVPool.from_buffers(k=rows[2:3], v=rows[3:], page_size=2)
    host = MHATokenToKVPoolHost(owner, 0, 0, 2, pin_memory=False, pages=8, packed_draft_device_pools=[draft])
    allocator = ExtentAllocator(12, 2)
    entry = PoolEntry(
        "kv",
        host,
        owner,
        lambda layer: layer if layer < 1 else None,
        device_alloc_fn=allocator.alloc,
        device_free_fn=allocator.free,
        packed_draft_device_pools=(draft,),
    )
    controller = HiCacheController(HostPoolGroup([entry]))
    tree = UnifiedRadixCache(controller, allocator, page_size=2)
    assert maybe_register_hicache_draft(tree, packed_draft_device_pools=[draft])
    assert len(controller.host_group.entries) == 1
    with pytest.raises(ValueError, match="is in no pool of the group; give it to its owner"):
        register_hicache_draft_pools(model.cache, packed_draft_device_pools=[draft])
    with pytest.raises(ValueError, match="a draft model has one of them"):
        register_hicache_draft_pools(model.cache)
    controller.shutdown()
