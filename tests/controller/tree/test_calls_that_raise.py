"""A call that raises leaves the match it was given, allocates nothing and locks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import Change, Quota, Tier, WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]
InterruptedAt = Callable[[Callable[[], object], int], bool]


class Listener:
    """Raises at one kind of event, once it is armed."""

    def __init__(self, change: Change, tier: Tier) -> None:
        self.kind = change, tier
        self.armed = False

    def __call__(self, event: Any) -> None:
        if self.armed and (event.change, event.tier) == self.kind:
            self.armed = False
            raise RuntimeError("injected by the listener")


def insert(model: Any, keys: list[bytes]) -> None:
    match = model.cache.match_prefix(keys)
    pages, _ = model.compute(match, len(keys) - match.pages)
    model.cache.release(model.cache.insert(match, pages).match)


def locks(cache: Any) -> set[tuple[int, int]]:
    return {(node.device_lock, node.host_lock) for node in cache._tree.nodes()}


def test_an_insert_whose_listener_raises_has_published_and_leaves_the_match(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    listener = Listener(Change.STORED, Tier.DEVICE)
    model = make_model(listener=listener)
    cache, keys = model.cache, keys_of((1, 2, 3))
    match = cache.match_prefix(keys)
    pages, _ = model.compute(match, 3)
    listener.armed = True
    with pytest.raises(RuntimeError, match="injected by the listener"):
        cache.insert(match, pages)
    assert cache.stats().device_pages == 3
    cache.drain()
    cache.release(match)
    assert locks(cache) == {(0, 0)}
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def refuse_once(entry: Any) -> None:
    """Let the engine's next free of device pages of a pool raise, after which it has them."""
    free = entry.device_free_fn

    def refuse(_: Any) -> None:
        entry.device_free_fn = free
        raise RuntimeError("refused by the engine")

    entry.device_free_fn = refuse


def test_an_insert_frees_all_duplicates_though_the_engine_refuses_those_of_a_window(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(windows=(6, 6))
    keys = keys_of((1, 2))
    first, second = ((match := model.cache.match_prefix(keys), *model.compute(match, 2)) for _ in range(2))
    model.cache.release(model.cache.insert(first[0], first[1], windows=first[2]).match)
    refuse_once(model.group.get_entry("swa"))
    with pytest.raises(RuntimeError, match="refused by the engine"):
        model.cache.insert(second[0], second[1], windows=second[2])
    assert model.allocators["kv"].available_pages == 10
    model.cache.release(second[0])
    model.allocators["swa"].free_pages(second[2]["swa"])
    model.empty()


def test_a_window_that_leaves_with_its_prefix_is_reported_though_the_engine_refuses_its_pages(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    removed: list[bytes] = []

    def listener(event: Any) -> None:
        if (event.change, event.tier, event.pool) == (Change.REMOVED, Tier.DEVICE, "swa"):
            removed.extend(event.keys)

    model = make_model(windows=(6, 6), write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, listener=listener)
    match = model.cache.match_prefix(keys_of((1, 2)))
    pages, windows = model.compute(match, 2)
    model.cache.release(model.cache.insert(match, pages, windows=windows).match)
    refuse_once(model.group.get_entry("swa"))
    with pytest.raises(RuntimeError, match="refused by the engine"):
        model.cache.evict_device(2)
    assert removed == keys_of((1, 2))
    model.allocators["swa"].free_pages(windows["swa"])
    model.empty()


def test_a_prefetch_whose_listener_raises_leaves_the_match(make_model: MakeModel, keys_of: KeysOf) -> None:
    listener = Listener(Change.STORED, Tier.HOST)
    model = make_model(listener=listener, storage=MemoryStorage())
    model.serve((1, 2, 3))
    model.empty()
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    listener.armed = True
    with pytest.raises(RuntimeError, match="injected by the listener"):
        model.cache.prefetch(match)
    assert model.cache.stats().host_pages == 3
    model.cache.release(match)
    assert locks(model.cache) == {(0, 0)}
    model.empty()


def test_a_match_whose_listener_raises_pins_nothing(make_model: MakeModel, keys_of: KeysOf) -> None:
    listener = Listener(Change.REMOVED, Tier.HOST)
    model = make_model(
        host_pages=2, listener=listener, write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, selective_hits=2
    )
    insert(model, keys_of((1, 2)))
    insert(model, keys_of((1, 2)))
    model.cache.drain()
    insert(model, keys_of((3, 4)))
    assert model.cache.stats().host_pages == 2
    listener.armed = True
    with pytest.raises(RuntimeError, match="injected by the listener"):
        model.cache.match_prefix(keys_of((3, 4)))  # whose write makes room on the host
    model.cache.drain()
    assert locks(model.cache) == {(0, 0)}
    model.empty()


@pytest.mark.parametrize("windowed", [False, True])
def test_an_allocation_whose_listener_raises_takes_no_pages(
    make_model: MakeModel, keys_of: KeysOf, windowed: bool
) -> None:
    listener = Listener(Change.REMOVED, Tier.DEVICE)
    model = make_model(device_pages=4, windows=(3, 3) if windowed else None, listener=listener)
    model.serve((1, 2, 3, 4))
    model.cache.drain()
    listener.armed = True
    with pytest.raises(RuntimeError, match="injected by the listener"):
        model.cache.alloc_window("swa", 2) if windowed else model.cache.alloc_device(2)
    model.empty()


@pytest.mark.parametrize("wait", [False, True])
def test_an_interrupt_at_any_line_of_a_load_leaves_the_match_or_comes_with_its_end(
    make_model: MakeModel, keys_of: KeysOf, interrupted_at: InterruptedAt, wait: bool
) -> None:
    model = make_model(device_pages=20, windows=(8, 8))
    cache, nth, came, kept = model.cache, 1, True, 0
    while came:
        model.serve((1, 2))
        cache.drain()
        cache.evict_device(9)
        cache.evict_window_device("swa", 9)
        match = cache.match_prefix(keys_of((1, 2)))
        loaded: list[Any] = []

        def load(loaded: list[Any] = loaded, match: Any = match) -> None:
            loaded.append(cache.load_back(match, wait=wait))

        came = interrupted_at(load, nth)
        cache.drain()
        if not loaded and match not in cache._tree._pinned:
            break  # what comes once all is done takes the result along
        kept += not loaded
        cache.release(loaded[0] if loaded else match)
        assert locks(cache) == {(0, 0)}
        model.empty()
        nth += 23
    assert kept > 10


def test_a_quota_is_kept_though_the_listener_raises(make_model: MakeModel, keys_of: KeysOf) -> None:
    listener = Listener(Change.REMOVED, Tier.DEVICE)
    model = make_model(listener=listener)
    model.cache.set_quota(None, Quota(device_pages=2))
    insert(model, keys_of((1, 2)))
    model.cache.drain()
    match = model.cache.match_prefix(keys_of((3, 4)))
    pages, _ = model.compute(match, 2)
    listener.armed = True
    with pytest.raises(RuntimeError, match="injected by the listener"):
        model.cache.insert(match, pages)
    model.cache.drain()
    model.cache.release(match)
    assert model.cache.namespace_stats(None)[0] == 2
    assert locks(model.cache) == {(0, 0)}
    model.empty()
