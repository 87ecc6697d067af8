"""Sliding windows and recurrent states: a prefix counts only as far as each of them can be restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def test_attention_of_two_pages_with_states_at_one_and_four_gives_one_page(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(states=(8, 8))
    assert model.serve((1,)) == 0
    assert model.serve((1, 2, 3, 4)) == 1
    assert model.lookup((1, 2, 3, 4)) == (4, 0)
    assert model.lookup((1, 2)) == (1, 0)
    assert model.lookup((1, 2, 9)) == (1, 0)
    model.empty()


def test_known_pages_are_those_of_the_anchor_wherever_windows_let_a_prefix_end(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(states=(8, 8))
    model.serve((1, 2, 3, 4))
    assert model.lookup((1, 2, 9)) == (0, 0)
    before = model.cache.pretty()
    for words, known in (((1, 2, 9), 2), ((1, 2, 3, 4, 5), 4), ((1, 2), 2), ((9, 1), 0), ((), 0)):
        assert model.cache.known_pages(keys_of(words)) == known
    assert model.cache.pretty() == before
    model.cache.drain()
    model.cache.evict_device(100)
    assert model.cache.known_pages(keys_of((1, 2, 3, 4))) == 4
    model.empty()


def test_window_longer_than_what_a_split_leaves_of_it_shortens_the_hit(make_model: MakeModel) -> None:
    model = make_model(windows=(8, 8))
    model.serve((1, 2, 3, 4, 5))
    assert model.lookup((1, 2, 3, 4, 5, 6)) == (5, 0)
    # The window of the first three pages was never kept; pages 4 and 5 have theirs.
    assert model.lookup((1, 2, 3)) == (0, 0)
    assert model.lookup((1, 2, 3, 4)) == (0, 0)
    assert model.lookup((1, 2, 3, 4, 5)) == (5, 0)
    model.cache.check_integrity()
    model.empty()


def test_window_across_several_nodes_is_restored_whole(make_model: MakeModel) -> None:
    model = make_model(windows=(8, 8), states=(8, 8))
    for length in range(1, 6):
        assert model.serve(tuple(range(length))) == length - 1
    model.cache.drain()
    for name in ("swa", "mamba"):
        model.cache.evict_window_device(name, 100)
    model.cache.evict_device(100)
    assert model.lookup(tuple(range(5))) == (0, 5)
    assert model.serve(tuple(range(5))) == 5
    model.empty()


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_window_is_saved_before_it_leaves_the_device(make_model: MakeModel, policy: WritePolicy) -> None:
    model = make_model(windows=(4, 8), states=(2, 8), write_policy=policy)
    model.serve((1, 2, 3))
    model.serve((4, 5, 6))
    model.serve((7, 8, 9))
    assert model.lookup((1, 2, 3)) == (3, 0)
    assert model.serve((1, 2, 3)) == 3
    assert model.serve((4, 5, 6)) == 3
    model.empty()


def test_state_missing_at_the_boundary_makes_a_miss_though_its_kv_is_there(make_model: MakeModel) -> None:
    model = make_model(states=(2, 1))
    model.serve((1, 2))
    model.serve((3, 4))
    model.serve((5, 6))
    model.cache.drain()
    model.cache.evict_window_device("mamba", 2)
    model.cache.evict_window_host("mamba", 1)
    model.cache.drain()
    assert model.cache.stats().device_pages == 6
    assert [model.lookup(w) for w in ((1, 2), (3, 4), (5, 6))].count((0, 0)) == 3
    assert model.serve((1, 2)) == 0
    assert model.lookup((1, 2)) == (2, 0)
    model.empty()


def test_node_with_only_a_window_on_the_device_loads_its_attention_with_it(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(windows=(8, 8))
    model.serve((1, 2, 3))
    model.cache.drain()
    model.cache.evict_device(3)
    assert model.cache.window_stats("swa").device_pages == 2
    assert model.lookup((1, 2, 3)) == (0, 3)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the window is on the device already")

    monkeypatch.setattr(model.host["swa"], "load_to_device_per_layer", refuse)
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_window_on_the_host_is_loaded_for_attention_on_the_device(make_model: MakeModel) -> None:
    model = make_model(windows=(8, 8), states=(8, 8))
    model.serve((1, 2, 3))
    model.cache.drain()
    model.cache.evict_window_device("swa", 2)
    model.cache.evict_window_device("mamba", 1)
    match = model.cache.match_prefix([model.cache.root.all_children()[0].key(i) for i in range(3)])
    assert (match.device_pages, match.host_pages, match.on_device) == (3, 0, False)
    with pytest.raises(ValueError, match="2 windows on the host; load_back must come before insert"):
        model.cache.insert(match, np.empty(0, np.int64))
    match = model.cache.load_back(match)
    model.verify_match(match)
    model.cache.release(match)
    model.empty()


def test_attention_that_leaves_every_tier_takes_its_windows_along(make_model: MakeModel) -> None:
    model = make_model(windows=(8, 8), states=(8, 8), host_pages=4)
    model.serve((1, 2, 3))
    model.cache.drain()
    model.cache.evict_host(4)
    model.cache.evict_device(3)
    assert model.cache.stats().nodes == 0
    assert model.allocators["swa"].available_pages == 8
    assert model.host["mamba"].available_size() == 8
    model.empty()


def test_pinned_window_survives_any_eviction(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(windows=(8, 8), states=(8, 8))
    model.serve((1, 2, 3))
    held = model.cache.match_prefix(keys_of((1, 2, 3)))
    model.cache.drain()
    for name in ("swa", "mamba"):
        assert model.cache.evict_window_device(name, 8) == 0
    model.verify_match(held)
    model.cache.release(held)
    assert model.cache.evict_window_device("swa", 8) == 2
    model.empty()


def test_split_of_a_pinned_window_keeps_both_halves(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(windows=(8, 8))
    model.serve((1, 2, 3, 4))
    held = model.cache.match_prefix(keys_of((1, 2, 3, 4)))
    assert model.lookup((1, 2, 3)) == (0, 0)  # cuts through the window
    model.cache.drain()
    model.cache.check_integrity()
    assert model.cache.evict_window_device("swa", 8) == 0
    model.verify_match(held)
    model.cache.release(held)
    assert model.cache.evict_window_device("swa", 8) == 2
    model.empty()


def test_prefix_with_its_state_comes_back_from_storage(make_model: MakeModel, memory_storage: MemoryStorage) -> None:
    model = make_model(windows=(8, 8), states=(8, 8), storage=memory_storage)
    model.serve((1, 2, 3))
    model.serve((1, 2, 3, 4, 5))
    model.empty()
    assert model.lookup((1, 2, 3, 4, 5)) == (0, 0)
    assert model.serve((1, 2, 3, 4)) == 3
    assert model.serve((1, 2, 3, 4, 5)) == 5
    model.empty()


def test_windows_that_never_left_the_device_follow_their_attention_into_storage(
    make_model: MakeModel, memory_storage: MemoryStorage
) -> None:
    model = make_model(windows=(8, 8), states=(8, 8), storage=memory_storage, write_policy=WritePolicy.WRITE_BACK)
    model.serve((1, 2, 3))
    model.serve((1, 2, 3, 4, 5))
    for _ in range(2):
        # The leaf first; its parent has a host part by then.
        model.cache.evict_device(1)
        model.cache.drain()
    assert model.cache.window_stats("swa").device_pages == 4
    model.cache.evict_host(100)
    assert model.cache.stats() == (0, 0, 0)
    assert model.serve((1, 2, 3, 4, 5)) == 5
    model.empty()
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_attention_does_not_leave_memory_before_its_windows_are_written(
    make_model: MakeModel, memory_storage: MemoryStorage, in_thread: Callable[[Callable[[], object]], Any]
) -> None:
    model = make_model(windows=(8, 8), states=(8, 8), storage=memory_storage, write_policy=WritePolicy.WRITE_BACK)
    model.serve((1, 2, 3))
    model.serve((1, 2, 3, 4, 5))
    model.cache.evict_device(1)
    model.cache.drain()
    # The parent has a host part by now, and its windows are on the device alone.
    gate = model.gate("write", "mamba")
    gate.close()
    model.cache.evict_device(1)
    evicting = in_thread(lambda: (model.controller.adopt_thread(), model.cache.evict_host(100)))
    gate.wait_entered()
    gate.open()
    evicting.join()
    model.controller.adopt_thread()
    assert model.cache.stats() == (0, 0, 0)
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_storage_without_the_state_is_a_miss(make_model: MakeModel, memory_storage: MemoryStorage) -> None:
    model = make_model(states=(8, 8), storage=memory_storage)
    model.serve((1, 2, 3))
    model.empty()
    memory_storage._bytes = {k: v for k, v in memory_storage._bytes.items() if k[0] == "kv"}
    assert model.serve((1, 2, 3)) == 0
    model.empty()


def test_state_lost_in_memory_comes_from_storage_under_attention_that_stayed(
    make_model: MakeModel, memory_storage: MemoryStorage
) -> None:
    model = make_model(states=(8, 8), storage=memory_storage)
    model.serve((1, 2, 3))
    model.cache.drain()
    model.cache.evict_window_host("mamba", 8)
    model.cache.evict_window_host("mamba", 8)
    model.cache.write_policy = WritePolicy.WRITE_THROUGH
    part = next(iter(model.cache.root.all_children())).window("mamba")
    assert part is not None
    model.cache._pools.drop(part, device=True)
    assert model.lookup((1, 2, 3)) == (0, 0)
    assert model.serve((1, 2, 3)) == 3
    model.cache.check_integrity()
    model.empty()


def test_window_cut_by_a_split_is_completed_by_the_next_insert(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(windows=(8, 8))
    gate = model.gate("write", "swa")
    gate.close()
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    pages, windows = model.compute(match, 3)
    first = model.cache.insert(match, pages, windows=windows).match
    gate.wait_entered()
    # The head of the split keeps one page of the window that is being written; two are needed.
    match = model.cache.match_prefix(keys_of((1, 2)))
    assert match.pages == 0
    pages, windows = model.compute(match, 2)
    second = model.cache.insert(match, pages, windows=windows).match
    model.verify_match(second)
    gate.open()
    model.cache.drain()
    for match in (first, second):
        model.verify_match(match)
        model.cache.release(match)
    model.cache.check_integrity()
    model.cache.evict_window_device("swa", 8)
    model.cache.evict_device(8)
    assert model.serve((1, 2)) == 2
    assert model.serve((1, 2, 3)) == 3
    model.empty()
