"""Requests that a scheduler takes off the device and brings back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def start(model: Any, keys: list[bytes]) -> tuple[Any, Any, Any]:
    match = model.begin(keys)
    made = model.compute(match, len(keys) - match.pages)
    assert made is not None
    return match, *made


def check(model: Any, restored: Any) -> None:
    """Check what is private; the match's own bytes as well."""
    model.verify_match(restored.match)
    rest = restored.match.rest()
    model.verify("kv", rest, restored.pages)
    for name, pages in restored.windows.items():
        model.verify(name, rest[len(rest) - len(pages) :], pages)


def test_a_request_without_room_to_come_back_moves_nothing(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=10, host_pages=40)
    match, pages, _ = start(model, keys_of(range(8)))
    inserted = model.cache.insert(match, pages)
    assert model.cache.retraction_backup("r", inserted.match, model.cache.alloc_device(1))
    model.cache.drain()
    model.cache.evict_device(10)
    taken = model.allocators["kv"].alloc_pages(3)
    assert model.cache.retraction_restore("r") is None
    assert model.cache.stats().device_pages == 0
    model.allocators["kv"].free_pages(taken)
    restored = model.cache.retraction_restore("r")
    model.verify_match(restored.match)
    model.cache.release(restored.match)
    model.allocators["kv"].free_pages(restored.pages)
    model.empty()


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_retracted_request_comes_back_bit_exact(make_model: MakeModel, keys_of: KeysOf, policy: WritePolicy) -> None:
    model = make_model(windows=(6, 8), states=(4, 8), write_policy=policy)
    model.serve((1, 2, 3))
    match, pages, windows = start(model, keys_of((1, 2, 3, 4, 5)))
    assert match.pages == 3
    assert model.cache.retraction_backup("r", match, pages, windows=windows)
    model.cache.drain()
    model.cache.evict_device(100)
    for name in ("swa", "mamba"):
        model.cache.evict_window_device(name, 100)
        assert model.allocators[name].available_pages == model.allocators[name].page_num
    assert model.allocators["kv"].available_pages == 12, "nothing of it may stay on the device"
    for rows in model.device.values():
        for buffer in rows:
            buffer.random_(256)
    restored = model.cache.retraction_restore("r")
    assert restored is not None
    check(model, restored)
    assert "r" not in model.cache.retracted
    result = model.cache.insert(restored.match, restored.pages, windows=restored.windows)
    model.verify_match(result.match)
    model.cache.release(result.match)
    model.empty()


def test_retraction_under_full_pools_makes_room_or_changes_nothing(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=8, host_pages=6, states=(4, 2))
    model.serve((1, 2))
    first = start(model, keys_of((1, 2, 3, 4)))
    second = start(model, keys_of((7, 7, 7, 7)))
    assert model.allocators["kv"].available_pages == 0
    assert model.cache.retraction_backup("first", first[0], first[1], windows=first[2])
    # The host has two pages left for four, and everything else there is pinned.
    assert not model.cache.retraction_backup("second", second[0], second[1], windows=second[2])
    model.verify("kv", second[0].rest(), second[1])
    third = start(model, keys_of((8, 8)))
    assert model.cache.retraction_restore("first") is None, "the device is full"
    assert "first" in model.cache.retracted
    for match, pages, windows in (second, third):
        model.give_back(pages, windows)
        model.cache.release(match)
    restored = model.cache.retraction_restore("first")
    assert restored is not None
    check(model, restored)
    model.give_back(restored.pages, restored.windows)
    model.cache.release(restored.match)
    model.empty()


def test_retraction_evicts_what_the_host_only_caches(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=12, host_pages=4, storage=MemoryStorage())
    model.serve((1, 2, 3, 4))
    model.cache.drain()
    match, pages, windows = start(model, keys_of((5, 6, 7)))
    assert model.cache.retraction_backup("r", match, pages, windows=windows)
    restored = model.cache.retraction_restore("r")
    check(model, restored)
    model.give_back(restored.pages, restored.windows)
    model.cache.release(restored.match)
    model.empty()


@pytest.mark.parametrize("what", ["write", "load"])
def test_retraction_whose_transfer_fails_changes_nothing(make_model: MakeModel, keys_of: KeysOf, what: str) -> None:
    model = make_model(states=(4, 8))
    match, pages, windows = start(model, keys_of((1, 2, 3)))
    gate = model.gate(what, "mamba")
    gate.failing = True
    kept = model.cache.retraction_backup("r", match, pages, windows=windows)
    if what == "write":
        assert not kept
        model.verify("kv", match.rest(), pages)
        gate.failing = False
        assert model.cache.retraction_backup("r", match, pages, windows=windows)
    else:
        assert model.cache.retraction_restore("r") is None
        gate.failing = False
    restored = model.cache.retraction_restore("r")
    check(model, restored)
    model.give_back(restored.pages, restored.windows)
    model.cache.release(restored.match)
    model.empty()


def test_discarded_request_leaves_nothing(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(states=(4, 8))
    model.serve((1,))
    match, pages, windows = start(model, keys_of((1, 2, 3)))
    assert model.cache.retraction_backup("r", match, pages, windows=windows)
    with pytest.raises(ValueError, match="retracted already"):
        model.cache.retraction_backup("r", match, pages, windows=windows)
    model.cache.retraction_discard("r")
    with pytest.raises(KeyError):
        model.cache.retraction_restore("r")
    model.empty()


def test_windows_of_a_pool_that_is_no_component_are_refused(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(states=(4, 8))
    match, pages, windows = start(model, keys_of((1, 2)))
    with pytest.raises(ValueError, match=r"windows has kv; the tree's components are \['mamba'\]"):
        model.cache.retraction_backup("r", match, pages, windows={"kv": pages})
    assert model.cache.retracted == ()
    model.give_back(pages, windows)
    model.cache.release(match)
    model.empty()
