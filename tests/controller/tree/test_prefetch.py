"""Prefetches that run while the tree goes on, and meet what happened in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_tasks import PrefetchOperation

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def stored(make_model: MakeModel, *requests: tuple[int, ...], **options: Any) -> Any:
    """A model that has nothing in memory, and these requests in storage."""
    model = make_model(windows=(8, 8), states=(8, 8), storage=MemoryStorage(), **options)
    for words in requests:
        model.serve(words)
    model.empty()
    return model


@pytest.mark.parametrize("policy", ["wait_complete", "best_effort", "timeout"])
def test_blocking_prefetch_brings_everything_whatever_the_policy(
    make_model: MakeModel, keys_of: KeysOf, policy: str
) -> None:
    model = stored(make_model, (1, 2, 3), prefetch_policy=policy)
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_tree_serves_others_while_a_prefetch_is_under_way(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = stored(make_model, (1, 2, 3), (1, 2, 3, 4))
    gate = model.gate("get")
    gate.close()
    started = model.cache.start_prefetch(model.cache.match_prefix(keys_of((1, 2, 3, 4))))
    gate.wait_entered()
    assert not model.cache.prefetch_ready(started)
    other = model.cache.match_prefix(keys_of((7, 8)))
    pages, windows = model.compute(other, 2)
    model.cache.release(model.cache.insert(other, pages, windows=windows).match)
    # The same prefix is computed by someone else meanwhile: the prefetched pages meet its nodes.
    twin = model.cache.match_prefix(keys_of((1, 2)))
    pages, windows = model.compute(twin, 2)
    model.cache.release(model.cache.insert(twin, pages, windows=windows).match)
    model.cache.check_integrity()
    gate.open()
    match = model.cache.load_back(model.cache.finish_prefetch(started))
    assert match.pages == 4
    model.verify_match(match)
    model.cache.release(match)
    model.empty()


@pytest.mark.parametrize("tier", ["host", "storage"])
@pytest.mark.parametrize(("pinned", "loaded"), [(0, 8), (3, 7), (7, 3), (10, 0)])
def test_of_a_prefix_as_much_is_loaded_as_the_device_has_room_for(
    make_model: MakeModel, keys_of: KeysOf, tier: str, pinned: int, loaded: int
) -> None:
    model = make_model(device_pages=10, host_pages=32, storage=MemoryStorage() if tier == "storage" else None)
    words, others = tuple(range(8)), tuple(range(20, 20 + pinned))
    model.serve(words)
    model.cache.drain()
    model.cache.evict_device(8)
    if tier == "storage":
        model.empty()
    if pinned:
        model.serve(others)
    held = model.cache.match_prefix(keys_of(others))
    assert held.device_pages == pinned
    match = model.begin(keys_of(words))
    assert match.pages == loaded
    model.cache.release(match)
    model.cache.release(held)
    assert model.serve(words) == 8
    model.empty()


@pytest.mark.parametrize(("room", "loaded"), [(3, 0), (4, 4)])
def test_no_less_is_loaded_for_want_of_room_than_is_worth_loading(
    make_model: MakeModel, keys_of: KeysOf, room: int, loaded: int
) -> None:
    model = make_model(device_pages=10, host_pages=32, load_back_pages=4)
    model.serve(tuple(range(8)))
    model.cache.drain()
    model.cache.evict_device(8)
    taken = model.cache.alloc_device(10 - room)
    match = model.begin(keys_of(tuple(range(8))))
    assert match.pages == loaded
    model.cache.release(match)
    model.allocators["kv"].free_pages(taken)
    model.empty()


@pytest.mark.parametrize("where", ["lookup", "request", "wait"])
def test_interrupted_prefetch_leaves_nothing_behind(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model = stored(make_model, (1, 2, 3))
    match = model.cache.match_prefix(keys_of((1, 2, 3)))

    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "lookup":
            patch.setattr(model.cache._prefetches, "_find", interrupt)
        elif where == "request":
            patch.setattr(model.controller, "prefetch", interrupt)
        else:
            patch.setattr(PrefetchOperation, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.cache.prefetch(match)
    model.cache.release(match)
    model.cache.drain()
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_two_prefetches_of_one_prefix_keep_one_copy(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = stored(make_model, (1, 2, 3))
    gate = model.gate("get")
    gate.close()
    both = [model.cache.start_prefetch(model.cache.match_prefix(keys_of((1, 2, 3)))) for _ in range(2)]
    gate.open()
    for started in both:
        match = model.cache.load_back(model.cache.finish_prefetch(started))
        assert match.pages == 3
        model.verify_match(match)
        model.cache.release(match)
    assert model.cache.stats() == (1, 3, 3)
    model.empty()


def test_prefetch_that_fails_leaves_the_match_as_it_was(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = stored(make_model, (1,), (1, 2, 3))
    assert model.serve((1,)) == 1
    gate = model.gate("get")
    gate.failing = True
    match = model.cache.prefetch(model.cache.match_prefix(keys_of((1, 2, 3))))
    assert match.pages == 1
    model.cache.release(match)
    model.empty()


def test_prefix_under_a_running_prefetch_stays_on_the_host(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = stored(make_model, (1,), (1, 2, 3))
    assert model.serve((1,)) == 1
    model.cache.drain()
    gate = model.gate("get")
    gate.close()
    started = model.cache.start_prefetch(model.cache.match_prefix(keys_of((1, 2, 3))))
    assert model.cache._tree.order.queues.host.pop() is None
    gate.open()
    match = model.cache.finish_prefetch(started)
    assert match.pages == 3
    model.cache.check_integrity()
    model.cache.release(match)
    model.empty()
