"""Prefetches that end in another state than they began in: the tree reset, their prefix gone, another storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import CacheEvent, Change, Tier

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def free_pages(model: Any) -> dict[str, int]:
    return {name: pool.available_size() // pool.page_size for name, pool in model.host.items()}


@pytest.mark.parametrize("held", [False, True], ids=["all of it has come", "the reset cuts it short"])
def test_prefetch_that_ends_after_a_reset_changes_nothing(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    model = make_model(host_pages=8, storage=MemoryStorage())
    model.serve((1, 2, 3, 4))
    model.empty()
    gate = model.gate("get")
    if held:
        gate.close()
    started = model.cache.start_prefetch(model.cache.match_prefix(keys_of((1, 2, 3, 4))))
    gate.wait_entered()
    give_up = model.controller.storage.give_up

    def open_and_give_up(*arguments: Any, **options: Any) -> Any:
        gate.open()
        return give_up(*arguments, **options)

    if held:
        monkeypatch.setattr(model.controller.storage, "give_up", open_and_give_up)
    else:
        started.operation.wait()
    model.cache.reset()
    match = model.cache.match_prefix(keys_of((5, 6, 7, 8)))
    pages, windows = model.compute(match, 4)
    model.cache.release(model.cache.insert(match, pages, windows=windows).match)
    model.cache.drain()
    free = free_pages(model)
    with pytest.raises(ValueError, match="started has ended before, or the tree was reset"):
        model.cache.finish_prefetch(started)
    assert free_pages(model) == free
    assert model.cache.namespace_stats(None) == (4, 4)
    model.cache.check_integrity()
    model.empty()


def test_prefetch_ends_once(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(storage=MemoryStorage())
    model.serve((1, 2))
    model.empty()
    started = model.cache.start_prefetch(model.cache.match_prefix(keys_of((1, 2))))
    match = model.cache.finish_prefetch(started)
    with pytest.raises(ValueError, match="started has ended before"):
        model.cache.finish_prefetch(started)
    model.cache.release(match)
    model.empty()


def page_on_the_host_below_a_failing_write(model: Any, keys: list[bytes]) -> tuple[Any, Any, Any]:
    """Have a page computed whose write will fail, and the one after it come from storage; returns match and gates."""
    model.serve((), keys)
    model.empty()
    model.serve((), keys[:1])
    model.cache.drain()
    get, write = model.gate("get"), model.gate("write")
    get.close()
    started = model.cache.start_prefetch(model.cache.match_prefix(keys[:3]))
    write.close()
    write.failing = True
    match = model.cache.match_prefix(keys[:2])
    pages, _ = model.compute(match, 1)
    model.cache.release(model.cache.insert(match, pages).match)
    write.wait_entered()
    get.open()
    match = model.cache.finish_prefetch(started, wait=True)
    assert match.pages == 3
    return match, get, write


def finish_writes(model: Any, gate: Any) -> None:
    gate.open()
    while model.cache._transfers.writes:
        model.cache.poll(wait=True)


def test_what_comes_below_a_node_that_left_the_tree_is_given_back(make_model: MakeModel, keys_of: KeysOf) -> None:
    keys = keys_of((1, 2, 3, 4))
    model = make_model(host_pages=20, storage=MemoryStorage())
    shorter, get, write = page_on_the_host_below_a_failing_write(model, keys)
    get.close()
    started = model.cache.start_prefetch(model.cache.match_prefix(keys))
    get.wait_entered()
    finish_writes(model, write)
    assert started.match.node.host is None, "it left the tree with the page above it, whose write failed"
    get.open()
    match = model.cache.load_back(model.cache.finish_prefetch(started, wait=True))
    assert match.pages == 2
    model.verify_match(match)
    model.cache.check_integrity()
    for held in (match, shorter):
        model.cache.release(held)
    write.failing = False
    model.empty()


def test_a_page_that_leaves_the_host_while_room_is_made_for_its_load_shortens_the_match(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(host_pages=20, storage=MemoryStorage())
    match, _, write = page_on_the_host_below_a_failing_write(model, keys_of((1, 2, 3)))
    make_room = model.cache._evictor.make_device_room

    def after_the_write(count: int) -> bool:
        finish_writes(model, write)
        return bool(make_room(count))

    monkeypatch.setattr(model.cache._evictor, "make_device_room", after_the_write)
    match = model.cache.load_back(match)
    assert match.pages == 2
    model.verify_match(match)
    model.cache.check_integrity()
    model.cache.release(match)
    write.failing = False
    model.empty()


def test_pages_of_a_storage_that_was_changed_since_count_as_stored_nowhere(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    events: list[CacheEvent] = []
    words, keys = (1, 2, 3, 4), keys_of((1, 2, 3, 4))
    model = make_model(windows=(8, 8), states=(8, 8), storage=MemoryStorage(), listener=events.append)
    model.serve(words)
    model.empty()
    started = model.cache.start_prefetch(model.cache.match_prefix(keys))
    started.operation.wait()
    old, model.storage = model.storage, MemoryStorage()
    model.controller.detach_storage_backend()
    model.controller.attach_storage_backend(model.storage)
    model.cache.poll()
    events.clear()
    match = model.cache.finish_prefetch(started, wait=True)
    assert match.pages == 4
    assert not [event for event in events if event.tier is Tier.STORAGE]
    model.cache.release(match)
    model.cache.release(model.cache.match_prefix(keys))
    model.cache.drain()
    assert model.in_storage(keys, "kv", "swa", "mamba") == [4, 2, 1]
    model.empty()
    assert model.serve(words) == 4
    old.close()
    model.empty()


def test_slots_go_back_where_an_allocator_raises(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(windows=(8, 8), states=(4, 4), storage=MemoryStorage())
    model.serve((1, 2, 3))
    model.empty()

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("injected")

    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    free = free_pages(model)
    with monkeypatch.context() as patch:
        patch.setattr(model.host["mamba"].allocator, "alloc", fail)
        with pytest.raises(MemoryError, match="injected"):
            model.cache.start_prefetch(match)
    assert free_pages(model) == free
    model.cache.release(match)
    assert model.serve((1, 2, 3)) == 3
    model.empty()


# Reset


def test_reset_tells_of_all_that_leaves_memory_the_last_pages_first(make_model: MakeModel, keys_of: KeysOf) -> None:
    there: set[tuple[Tier, str, bytes]] = set()

    def listen(event: CacheEvent) -> None:
        named = {(event.tier, event.pool, key) for key in event.keys}
        if event.change is Change.STORED:
            assert not named & there, "reported twice"
            there.update(named)
        else:
            assert named <= there, "removed, though it was not there"
            if event.pool == "kv" and event.parent is not None and event.tier is not Tier.STORAGE:
                assert (event.tier, "kv", event.parent) in there, "removed after the pages before it"
            there.difference_update(named)

    model = make_model(windows=(8, 8), states=(8, 8), storage=MemoryStorage(), listener=listen)
    for words in ((1, 2), (1, 2, 3, 4), (1, 2, 5), (7,)):
        model.serve(words)
    model.cache.drain()
    model.cache.evict_device(1)
    assert {tier for tier, _, _ in there} == set(Tier)
    model.cache.reset()
    assert {tier for tier, _, _ in there} == {Tier.STORAGE}
    assert model.serve((1, 2, 3, 4)) == 4
    model.cache.drain()
    model.empty()


def test_reset_forgets_transfers_that_nobody_waited_for(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(host_pages=20, storage=MemoryStorage())
    gate = model.gate("set")
    gate.close()
    model.serve((1, 2))
    while model.cache._transfers.writes:
        model.cache.poll(wait=True)
    model.cache.release(model.cache.match_prefix(keys_of((1, 2))))
    model.cache.evict_device(2)
    match = model.cache.match_prefix(keys_of((1, 2)))
    match = model.cache.load_back(match, wait=False)
    other = model.cache.match_prefix(keys_of((3, 4)))
    pages, _ = model.compute(other, 2)
    model.cache.insert(other, pages)
    gate.open()
    assert model.cache._transfers.writes
    assert model.cache._transfers.loads
    assert model.cache._backups.running
    with monkeypatch.context() as patch:
        patch.setattr(model.cache._transfers, "drain", lambda timeout=None: False)
        model.cache.reset()
    for running in (model.cache._transfers.writes, model.cache._transfers.loads, model.cache._backups.running):
        assert not running
    assert model.cache._backups._running_pages == 0
    assert model.serve((1, 2)) in (0, 2)  # storage may have taken the pages before the reset
    assert model.serve((1, 2)) == 2
    model.empty()
