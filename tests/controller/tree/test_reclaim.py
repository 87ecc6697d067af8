"""Allocations through the group that make the tree evict, also in the midst of the tree's own work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hicache_controller.tree import WindowComponent, WritePolicy
from hicache_pools import PoolTransfer

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def free(model: Any, name: str) -> tuple[int, int]:
    """Free pages of a pool on the device and on the host."""
    return model.allocators[name].available_pages, model.group.available_size(name) // model.host[name].page_size


def fill(model: Any, requests: int) -> None:
    for word in range(requests):
        model.serve((word, word))
    model.cache.drain()


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("name", ["kv", "swa", "mamba"])
def test_allocation_of_the_engine_evicts_what_the_tree_can_spare(
    make_model: MakeModel, name: str, policy: WritePolicy
) -> None:
    model = make_model(
        device_pages=8, host_pages=8, windows=(8, 8), states=(4, 4), write_policy=policy, selective_hits=1
    )
    fill(model, 4)
    assert free(model, name)[0] == 0
    slots = model.host[name].page_size
    mine = model.group.alloc_device(slots, name)
    assert mine is not None
    model.cache.check_integrity()
    model.group.free_device(mine, name)
    for _ in range(2):
        on_host = model.group.alloc(model.group.available_size(name) + slots, name)
        if on_host is not None:
            model.group.free(on_host, name)
        elif policy is not WritePolicy.WRITE_BACK:
            raise AssertionError("the host is full of what could be evicted")
        model.cache.check_integrity()
    model.cache.drain()
    model.empty()


def test_operation_of_the_engine_over_several_pools_evicts_in_each_or_takes_nothing(make_model: MakeModel) -> None:
    model = make_model(device_pages=8, host_pages=8, windows=(8, 8), states=(4, 4))
    fill(model, 4)

    def transfers(states: int) -> list[PoolTransfer]:
        return [
            PoolTransfer("kv", device_indices=torch.arange(4)),
            PoolTransfer("swa", device_indices=torch.arange(4)),
            PoolTransfer("mamba", device_indices=torch.arange(states)),
        ]

    assert model.group.resolve_host_transfers(transfers(5)) is None, "there are four states in all"
    model.cache.check_integrity()
    resolved = model.group.resolve_host_transfers(transfers(2))
    assert resolved is not None
    model.cache.check_integrity()
    assert model.group.release_transfers(resolved) == 10
    model.empty()


def test_pinned_prefix_stays_whatever_the_engine_allocates(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=4, host_pages=4, states=(4, 4))
    fill(model, 2)
    held = [model.begin(keys_of((word, word))) for word in range(2)]
    assert model.group.alloc_device(2) is None
    assert model.group.alloc_device(3, "mamba") is None
    for match in held:
        model.verify_match(match)
        model.cache.release(match)
    model.empty()


def test_eviction_for_the_engine_saves_pages_without_evicting_under_its_own_hands(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device_pages=4, host_pages=4, windows=(4, 4), write_policy=WritePolicy.WRITE_BACK)
    model.serve((1, 1))
    model.serve((2, 2))
    inside: list[str] = []
    evicted_inside: list[str] = []
    write = model.controller.write

    def noted_write(*arguments: Any, **options: Any) -> Any:
        inside.append("write")
        try:
            return write(*arguments, **options)
        finally:
            inside.pop()

    monkeypatch.setattr(model.controller, "write", noted_write)
    for name in ("evict_device", "evict_host", "evict_window_device", "evict_window_host"):
        evict = getattr(model.cache._evictor, name)

        def noted(*arguments: Any, evict: Callable[..., int] = evict, name: str = name) -> int:
            evicted_inside.extend(name for _ in inside)
            return evict(*arguments)

        monkeypatch.setattr(model.cache._evictor, name, noted)
    for _ in range(3):
        for word in range(3, 9):
            mine = model.group.alloc_device(8)
            assert mine is not None
            model.group.free_device(mine)
            model.cache.check_integrity()
            model.serve((word, word))
    assert not evicted_inside
    model.cache.drain()
    assert model.cache.stats().host_pages <= 4
    model.empty()


def test_load_that_finds_the_device_taken_meanwhile_evicts_nothing_of_its_own(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(device_pages=6, host_pages=8)
    model.serve((1, 2))
    model.serve((1, 2, 3, 4))
    model.serve((9,))
    model.cache.drain()
    model.cache.release(model.cache.match_prefix(keys_of((9,))))
    model.cache.evict_device(2)
    make_room = model.cache._evictor.make_device_room
    taken: list[Any] = []

    def and_lose_it(count: int) -> bool:
        room = bool(make_room(count))
        taken.append(model.allocators["kv"].alloc_pages(model.allocators["kv"].available_pages))
        return room

    model.cache._evictor.make_device_room = and_lose_it
    loaded = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2, 3, 4))))
    model.cache._evictor.make_device_room = make_room
    model.verify_match(loaded)
    assert loaded.pages == 2
    model.cache.check_integrity()
    model.cache.release(loaded)
    assert model.lookup((9,)) == (1, 0), "it was evicted for a load that could not be"
    for pages in taken:
        model.allocators["kv"].free_pages(pages)
    model.empty()


def test_allocation_of_another_thread_evicts_nothing(make_model: MakeModel) -> None:
    model = make_model(device_pages=4, host_pages=4)
    fill(model, 2)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(model.group.alloc_device(2)))
    thread.start()
    thread.join()
    assert found == [None]
    assert model.cache.stats().device_pages == 4
    model.empty()


def test_thread_that_uses_the_tree_may_be_another_than_the_one_that_made_it(make_model: MakeModel) -> None:
    model = make_model(device_pages=4, host_pages=4)
    found: list[Any] = []

    def serve() -> None:
        model.controller.adopt_thread()
        fill(model, 2)
        found.append(model.group.alloc_device(2))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    model.controller.adopt_thread()
    assert found[0] is not None
    model.group.free_device(found[0])
    model.empty()


def test_callbacks_of_the_engine_stay(make_model: MakeModel) -> None:
    model = make_model()
    own = model.group.anchor_entry
    mine: list[int] = []
    own.host_evict_fn = mine.append
    cache_type = type(model.cache)
    cache_type(model.controller, model.allocators["kv"], page_size=2)
    assert own.host_evict_fn == mine.append
    model.group.alloc(10**6)
    assert mine


@pytest.mark.parametrize("name", ["kv", "swa", "mamba"])
def test_tree_made_later_over_the_same_group_reclaims_in_place_of_the_first(make_model: MakeModel, name: str) -> None:
    model = make_model(device_pages=8, host_pages=8, windows=(8, 8), states=(4, 4))
    fill(model, 2)
    model.empty()
    model.cache = type(model.cache)(
        model.controller,
        model.allocators["kv"],
        page_size=2,
        components=[
            WindowComponent.sliding_window("swa", window_tokens=3, page_size=2),
            WindowComponent.recurrent_state(),
        ],
    )
    fill(model, 4)
    assert free(model, name)[0] == 0
    slots = model.host[name].page_size
    on_device = model.group.alloc_device(slots, name)
    on_host = model.group.alloc(model.group.available_size(name) + slots, name)
    assert on_device is not None
    assert on_host is not None
    model.group.free_device(on_device, name)
    model.group.free(on_host, name)
    model.empty()
