"""Loads that meet what other requests do meanwhile: insert over them, fail above them, take their room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_controller.tree import WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def insert(model: Any, keys: list[bytes]) -> None:
    """Insert a request without waiting for anything."""
    match = model.cache.match_prefix(keys)
    pages, windows = model.compute(match, len(keys) - match.pages)
    model.cache.release(model.cache.insert(match, pages, windows=windows).match)


def once_before(monkeypatch: pytest.MonkeyPatch, cache: Any, method: str, happens: Callable[[], object]) -> None:
    """Let something happen before the next call of a method."""
    original = getattr(cache, method)

    def call(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(cache, method, original)
        happens()
        return original(*arguments, **options)

    monkeypatch.setattr(cache, method, call)


def finish_loads(model: Any, gate: Any) -> None:
    """Let the loads at a gate go, and those that come later succeed."""
    gate.open()
    while model.cache._transfers.loads:
        model.cache.poll(wait=True)
    gate.failing = False


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("shared", [2, 3, 4], ids=["part of a node", "the node", "the node and a page"])
def test_insert_over_pages_that_another_request_is_loading_has_the_right_bytes(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch, shared: int, failing: bool
) -> None:
    model = make_model(device_pages=20)
    insert(model, keys_of((1,)))
    mine, loaded = keys_of((*(1, 2, 3, 4)[:shared], 9)), keys_of((1, 2, 3))
    match = model.cache.match_prefix(mine)
    pages, _ = model.compute(match, shared)
    insert(model, loaded)
    model.cache.drain()
    assert model.cache.evict_device(2) == 2
    gate = model.gate("load")
    gate.close()
    gate.failing = failing
    other = model.cache.load_back(model.cache.match_prefix(loaded), wait=False)
    gate.wait_entered()
    once_before(monkeypatch, model.cache._transfers, "poll", gate.open)
    result = model.cache.insert(match, pages)
    assert result.match.consumers == ()
    assert result.duplicates == (0 if failing else min(shared, 3) - 1)
    model.verify_match(result.match)
    finish_loads(model, gate)
    model.cache.check_integrity()
    model.verify_match(result.match)
    for held in (result.match, model.cache.settle(other)):
        model.cache.release(held)
    model.empty()


@pytest.mark.parametrize("failing", [False, True])
def test_insert_over_windows_that_another_request_is_loading_keeps_its_own_where_that_fails(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch, failing: bool
) -> None:
    model = make_model(device_pages=20, windows=(8, 8))
    insert(model, keys_of((1,)))
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    pages, windows = model.compute(match, 2)
    insert(model, keys_of((1, 2)))
    model.cache.drain()
    assert model.cache.evict_window_device("swa", 1) == 1
    gate = model.gate("load", "swa")
    gate.close()
    gate.failing = failing
    other = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2))), wait=False)
    gate.wait_entered()
    once_before(monkeypatch, model.cache._transfers, "poll", gate.open)
    result = model.cache.insert(match, pages, windows=windows).match
    finish_loads(model, gate)
    model.verify_match(result)
    for held in (result, model.cache.settle(other)):
        model.cache.release(held)
    model.empty()


def test_insert_waits_for_no_load_of_another_prefix(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device_pages=20)
    insert(model, keys_of((1,)))
    match = model.cache.match_prefix(keys_of((1, 7)))
    pages, _ = model.compute(match, 1)
    insert(model, keys_of((1, 2, 3)))
    model.cache.drain()
    assert model.cache.evict_device(2) == 2
    gate = model.gate("load")
    gate.close()
    other = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2, 3))), wait=False)
    gate.wait_entered()
    with monkeypatch.context() as patch:
        patch.setattr(model.cache._transfers, "poll", lambda **_: pytest.fail("there is nothing to wait for"))
        model.cache.release(model.cache.insert(match, pages).match)
    gate.open()
    other = model.cache.settle(other)
    assert other.pages == 3
    model.cache.release(other)
    model.empty()


def test_a_load_that_fails_while_room_for_windows_is_made_takes_nothing_below_it_along(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device_pages=20, windows=(8, 8))
    insert(model, keys_of((1, 2)))
    insert(model, keys_of((1, 2, 3, 4)))
    model.cache.drain()
    model.cache.evict_device(4)
    model.cache.evict_window_device("swa", 8)
    gate = model.gate("load")
    gate.close()
    gate.failing = True
    above = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2))), wait=False)
    gate.wait_entered()
    longer = model.cache.match_prefix(keys_of((1, 2, 3, 4)))
    assert (longer.device_pages, longer.host_pages) == (2, 2)
    once_before(monkeypatch, model.cache._evictor, "make_window_room", lambda: finish_loads(model, gate))
    longer = model.cache.load_back(longer)
    model.cache.check_integrity()
    assert longer.pages == 4
    model.verify_match(longer)
    for match in (longer, model.cache.settle(above)):
        model.cache.release(match)
    model.empty()


def test_a_window_whose_load_fails_while_room_is_made_is_loaded_with_the_rest(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device_pages=20, windows=(8, 8))
    insert(model, keys_of((1, 2)))
    insert(model, keys_of((1, 2, 3)))
    model.cache.drain()
    model.cache.evict_window_device("swa", 8)
    gate = model.gate("load", "swa")
    gate.close()
    gate.failing = True
    above = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2))), wait=False)
    gate.wait_entered()
    longer = model.cache.match_prefix(keys_of((1, 2, 3)))
    assert len(longer.device_pin.parts) == len(longer.host_pin.parts) == 1
    once_before(monkeypatch, model.cache._evictor, "make_window_room", lambda: finish_loads(model, gate))
    longer = model.cache.load_back(longer)
    assert longer.pages == 3
    model.verify_match(longer)
    for match in (longer, model.cache.settle(above)):
        model.cache.release(match)
    model.empty()


@pytest.mark.parametrize("nodes", [[2], [1, 2]], ids=["all of the window", "part of the window"])
def test_a_window_whose_write_fails_while_room_is_made_for_its_load_shortens_the_match(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch, nodes: list[int]
) -> None:
    model = make_model(windows=(8, 8), write_policy=WritePolicy.WRITE_BACK)
    for end in nodes:
        insert(model, keys_of((1, 2)[:end]))
    model.cache.evict_device(2)
    model.cache.drain()
    model.cache.release(model.cache.load_back(model.cache.match_prefix(keys_of((1, 2)))))
    model.cache.evict_window_host("swa", 3 - len(nodes))
    gate = model.gate("write", "swa")
    gate.failing = True
    model.cache.evict_device(2)
    model.cache.evict_window_device("swa", 2)
    assert model.cache._transfers.writes, "the window is on the host alone as far as is known, and its write has failed"
    match = model.cache.match_prefix(keys_of((1, 2)))
    assert match.host_pages == 2
    once_before(monkeypatch, model.cache._evictor, "make_device_room", model.cache.drain)
    match = model.cache.load_back(match)
    assert match.pages == 0
    model.cache.check_integrity()
    model.cache.release(match)
    gate.failing = False
    model.empty()


@pytest.mark.parametrize(("room", "loaded"), [(3, 0), (4, 4), (6, 6)])
def test_no_less_is_loaded_than_is_worth_it_though_whole_nodes_would_fit(
    make_model: MakeModel, keys_of: KeysOf, room: int, loaded: int
) -> None:
    model = make_model(device_pages=10, host_pages=32)
    insert(model, keys_of((1, 2)))
    insert(model, keys_of(range(1, 7)))
    model.cache.drain()
    model.cache.evict_device(6)
    model.cache.load_back_pages = 4
    taken = model.cache.alloc_device(10 - room)
    match = model.begin(keys_of(range(1, 7)))
    assert match.pages == loaded
    assert model.allocators["kv"].available_pages == room - loaded
    model.cache.release(match)
    model.allocators["kv"].free_pages(taken)
    model.empty()


def test_no_less_is_loaded_than_is_worth_it_where_windows_lack_room(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=20, host_pages=32, windows=(4, 16))
    insert(model, keys_of((1,)))
    insert(model, keys_of((1, 2, 3, 4)))
    model.cache.drain()
    model.cache.evict_device(4)
    model.cache.evict_window_device("swa", 4)
    model.cache.load_back_pages = 2
    taken = model.allocators["swa"].alloc_pages(3)
    match = model.begin(keys_of((1, 2, 3, 4)))
    assert match.pages == 0
    assert model.allocators["kv"].available_pages == 20
    model.cache.release(match)
    model.allocators["swa"].free_pages(taken)
    model.empty()


def test_restore_that_lacks_room_loads_no_part_of_the_prefix(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=12, host_pages=32)
    insert(model, keys_of((1, 2)))
    insert(model, keys_of((1, 2, 3, 4, 5)))
    match = model.cache.match_prefix(keys_of((1, 2, 3, 4, 5, 6)))
    pages, _ = model.compute(match, 1)
    assert model.cache.retraction_backup("a", match, pages)
    model.cache.evict_device(12)
    taken = model.cache.alloc_device(9)
    assert model.cache.retraction_restore("a") is None
    assert model.allocators["kv"].available_pages == 3
    model.allocators["kv"].free_pages(taken)
    restored = model.cache.retraction_restore("a")
    model.verify_match(restored.match)
    model.verify("kv", keys_of((1, 2, 3, 4, 5, 6))[5:], restored.pages)
    model.cache.release(restored.match)
    model.give_back(restored.pages, restored.windows)
    model.empty()


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE])
@pytest.mark.parametrize("pool", ["kv", "swa"])
def test_insert_returns_its_match_though_nothing_can_be_written_to_the_host(
    make_model: MakeModel,
    keys_of: KeysOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    policy: WritePolicy,
    pool: str,
) -> None:
    model = make_model(windows=(8, 8), write_policy=policy, selective_hits=1)
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    pages, windows = model.compute(match, 3)

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(model.host[pool].allocator, "alloc", fail)
        match = model.cache.insert(match, pages, windows=windows).match
    assert "was not written to the host" in caplog.text
    model.cache.release(match)
    assert model.serve((1, 2, 3)) == 3
    model.empty()
