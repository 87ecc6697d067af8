"""Nodes whose transfers are in flight: evicted, split, matched, inserted twice, and what becomes of a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import SequenceKeys, WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def insert(model: Any, keys: list[bytes]) -> None:
    """Insert a request without waiting for anything."""
    match = model.cache.match_prefix(keys)
    pages, windows = model.compute(match, len(keys) - match.pages)
    model.cache.release(model.cache.insert(match, pages, windows=windows).match)


def held_loads(model: Any, keys: list[bytes]) -> Any:
    """Insert a request, leave it on the host alone, and hold its loads; returns the gate."""
    insert(model, keys)
    model.cache.drain()
    model.cache.evict_device(len(keys))
    gate = model.gate("load")
    gate.close()
    return gate


def test_node_with_its_write_in_flight_is_not_evicted_by_write_through(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model()
    gate = model.gate("write")
    gate.close()
    insert(model, keys_of((1, 2, 3)))
    gate.wait_entered()
    assert model.cache._tree.order.queues.device.pop() is None
    assert model.cache._tree.order.queues.host.pop() is None
    gate.open()
    assert model.cache.evict_device(3) == 3
    assert model.serve((1, 2, 3)) == 3
    model.empty()


@pytest.mark.parametrize("failing", [False, True])
def test_write_back_frees_the_device_before_the_bytes_are_on_the_host(
    make_model: MakeModel, keys_of: KeysOf, failing: bool
) -> None:
    model = make_model(write_policy=WritePolicy.WRITE_BACK)
    insert(model, keys_of((1, 2, 3)))
    gate = model.gate("write")
    gate.failing = failing
    events: list[object] = []
    evict = model.controller.evict_device

    def note(*arguments: Any, **options: Any) -> int:
        events.append(bool(model.cache._transfers.writes))
        return int(evict(*arguments, **options))

    model.controller.evict_device = note
    assert model.cache.evict_device(3) == 3
    assert events == [True], "the device part must go while the write's ack is still to come"
    model.cache.check_integrity()
    model.cache.drain()
    model.cache.check_integrity()
    assert model.lookup((1, 2, 3)) == (0, 0 if failing else 3)
    if not failing:
        assert model.serve((1, 2, 3)) == 3
    gate.failing = False
    model.empty()


def test_match_on_a_write_that_fails_after_its_device_part_left_is_cut(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(write_policy=WritePolicy.WRITE_BACK, windows=(8, 8), states=(8, 8))
    insert(model, keys_of((1, 2, 3)))
    gate = model.gate("write")
    gate.failing = True
    model.cache.evict_device(3)
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    assert match.host_pages == 3
    match = model.cache.load_back(match)
    assert match.pages == 0
    model.cache.release(match)
    model.cache.check_integrity()
    gate.failing = False
    model.empty()


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_split_of_a_node_with_its_write_in_flight(
    make_model: MakeModel, keys_of: KeysOf, failing: bool, at: int
) -> None:
    model = make_model(windows=(8, 8))
    gate = model.gate("write")
    gate.close()
    gate.failing = failing
    insert(model, keys_of((1, 2, 3)))
    gate.wait_entered()
    model.lookup((1, 2, 3)[:at])
    insert(model, keys_of((*(1, 2, 3)[:at], 7)))
    model.cache.check_integrity()
    gate.open()
    model.cache.drain()
    model.cache.check_integrity()
    gate.failing = False
    model.serve((1, 2, 3))
    model.empty()


def test_split_of_a_node_with_its_load_in_flight(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=20)
    insert(model, keys_of((1, 2, 3, 4)))
    model.cache.drain()
    model.cache.evict_device(4)
    gate = model.gate("load")
    gate.close()
    loading = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2, 3, 4))), wait=False)
    gate.wait_entered()
    assert loading.consumers
    other = model.cache.match_prefix(keys_of((1, 2)))  # cuts the node that is being loaded
    assert other.device_pages == 2
    assert other.consumers == loading.consumers
    model.cache.check_integrity()
    gate.open()
    for match in (other, loading):
        settled = model.cache.settle(match)
        model.verify_match(settled)
        model.cache.release(settled)
    model.empty()


def test_a_match_tells_no_pages_for_those_of_a_load_that_failed(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=20)
    insert(model, keys_of((1, 2)))
    insert(model, keys_of((1, 2, 3, 4)))
    model.cache.drain()
    model.cache.evict_device(2)
    gate = model.gate("load")
    gate.failing = True
    loading = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2, 3, 4))), wait=False)
    loads = loading.consumers
    assert len(model.cache.device_page_numbers(loading)) == 4
    model.cache.poll(wait=True)
    with pytest.raises(ValueError, match=r"has 2 of its 4 device pages.*settle must come first"):
        model.cache.device_page_numbers(loading)
    counter = model.controller.layer_done_counter
    counter.set_consumer(loads)
    with pytest.raises(RuntimeError, match="failed"):
        counter.wait_until(0)
    gate.failing = False
    settled = model.cache.settle(loading)
    assert settled.device_pages == 2
    model.verify_match(settled)
    model.cache.release(settled)
    model.empty()


@pytest.mark.parametrize("failing", [False, True])
def test_overlapping_loads_of_one_prefix_load_each_page_once(
    make_model: MakeModel, keys_of: KeysOf, failing: bool
) -> None:
    model = make_model(device_pages=20, windows=(8, 8), states=(8, 8))
    insert(model, keys_of((1, 2, 3)))
    insert(model, keys_of((1, 2, 3, 4, 5)))
    model.cache.drain()
    model.cache.evict_device(5)
    for name in ("swa", "mamba"):
        model.cache.evict_window_device(name, 8)
    gate = model.gate("load")
    gate.close()
    gate.failing = failing
    first = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2, 3))), wait=False)
    second = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2, 3, 4, 5))), wait=False)
    assert model.cache.stats().device_pages == 5
    assert len(second.consumers) == 2
    with pytest.raises(ValueError, match="settle must come before insert"):
        model.cache.insert(second, np.empty(0, np.int64))
    gate.open()
    for match, pages in ((first, 3), (second, 5)):
        settled = model.cache.settle(match)
        assert settled.pages == (0 if failing else pages)
        model.verify_match(settled)
        model.cache.release(settled)
    model.cache.check_integrity()
    gate.failing = False
    assert model.serve((1, 2, 3, 4, 5)) == 5
    model.empty()


@pytest.mark.parametrize("failing", [False, True])
def test_split_of_a_node_with_its_backup_in_flight(make_model: MakeModel, keys_of: KeysOf, failing: bool) -> None:
    model = make_model(storage=MemoryStorage(), states=(8, 8))
    gate = model.gate("set")
    gate.close()
    insert(model, keys_of((1, 2, 3)))
    while not model.cache._backups.running:
        model.cache.poll(wait=True)
    gate.wait_entered()
    insert(model, keys_of((1, 7)))
    assert model.cache._tree.order.queues.host.pop() is None
    model.cache.check_integrity()
    gate.failing = failing
    gate.open()
    model.cache.drain()
    gate.failing = False
    model.empty()
    assert model.serve((1, 2, 3)) == (0 if failing else 3)
    model.empty()


def test_first_seen_prefix_evicted_before_its_backup_is_a_miss(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, windows=(8, 8), storage=MemoryStorage())
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    pages, windows = model.compute(match, 3)
    model.cache.release(model.cache.insert(match, pages, windows=windows).match)
    assert model.cache.evict_device(3) == 3
    model.cache.drain()
    assert model.cache.stats() == (0, 0, 0)
    assert model.allocators["swa"].available_pages == 8
    assert model.serve((1, 2, 3)) == 0
    model.empty()


def test_window_write_in_flight_outlives_its_node(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(write_policy=WritePolicy.WRITE_BACK, states=(8, 8), host_pages=2)
    insert(model, keys_of((1, 2, 3)))  # three pages never fit the host
    part = model.cache.root.all_children()[0].window("mamba")
    assert model.cache._evictor.write_window(part)
    assert model.cache.evict_device(3) == 3
    model.cache.drain()
    model.cache.check_integrity()
    assert model.host["mamba"].available_size() == 8
    model.empty()


def test_same_request_inserted_twice_at_once_keeps_one_copy_of_everything(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(windows=(8, 8), states=(8, 8))
    gate = model.gate("write")
    gate.close()
    matches = [model.cache.match_prefix(keys_of((1, 2, 3))) for _ in range(2)]
    made = [model.compute(match, 3) for match in matches]
    results = [
        model.cache.insert(match, pages, windows=windows) for match, (pages, windows) in zip(matches, made, strict=True)
    ]
    assert [result.duplicates for result in results] == [0, 3]
    for result in results:
        model.verify_match(result.match)
        model.cache.release(result.match)
    assert [model.allocators[name].available_pages for name in ("kv", "swa", "mamba")] == [9, 6, 7]
    gate.open()
    model.empty()


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_request_shorter_than_a_page_is_served_without_a_trace(make_model: MakeModel, policy: WritePolicy) -> None:
    model = make_model(windows=(8, 8), states=(8, 8), storage=MemoryStorage(), write_policy=policy)
    short = SequenceKeys(2, np.array([7]))
    assert short.token_count == 1
    for keys in ([], short):
        assert model.serve((), keys) == 0
        assert model.cache.stats() == (0, 0, 0)
    # It may be taken off the device all the same: what it has computed is private.
    match = model.cache.match_prefix(short)
    private, state = model.cache.alloc_device(1), model.cache.alloc_window("mamba", 1)
    model.fill("kv", [b"private"], private)
    model.fill("mamba", [b"private"], state)
    assert model.cache.retraction_backup("short", match, private, windows={"mamba": state})
    restored = model.cache.retraction_restore("short")
    model.verify("kv", [b"private"], restored.pages)
    model.verify("mamba", [b"private"], restored.windows["mamba"])
    model.give_back(restored.pages, restored.windows)
    # A page more, and the first page is published.
    short.extend(np.array([8, 9]))
    assert model.serve((), short) == 0
    model.cache.release(restored.match)
    assert model.serve((), short) == 1
    model.empty()


def test_only_computed_tokens_are_published(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model()
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    pages, _ = model.compute(match, 3)
    result = model.cache.insert(match, pages, computed_tokens=5)  # two pages of two tokens, and one token
    assert result.match.pages == 2
    model.cache.release(result.match)
    model.allocators["kv"].free_pages(pages[2:])
    assert model.lookup((1, 2, 3)) == (2, 0)
    model.empty()


def test_host_smaller_than_the_device_never_starves_write_through(make_model: MakeModel) -> None:
    model = make_model(device_pages=16, host_pages=4, windows=(16, 3), states=(16, 2), storage=MemoryStorage())
    for word in range(12):
        model.serve((word, word))
        model.cache.drain()
        # The newest request always gets its copy: older ones, though still on the device, give theirs up.
        node = model.cache.root.child(model.cache.root.all_children()[-1].key(0))
        assert node is not None
        assert node.host is not None
    for word in range(12):
        assert model.serve((word, word)) == 2
    model.empty()


def test_request_larger_than_the_host_evicts_nothing_there(make_model: MakeModel) -> None:
    model = make_model(host_pages=4)
    model.serve((1, 2))
    model.cache.drain()
    model.serve((3, 4, 5, 6, 7))
    model.cache.drain()
    assert model.cache.stats().host_pages == 2
    model.empty()


@pytest.mark.parametrize("together", [False, True])
def test_write_below_a_write_that_fails_is_given_up(make_model: MakeModel, keys_of: KeysOf, together: bool) -> None:
    model = make_model()
    gate = model.gate("write")
    gate.close()
    gate.failing = gate.single = True
    insert(model, keys_of((1, 2)))
    gate.wait_entered()
    insert(model, keys_of((1, 2, 3, 4)))
    parent, child = model.controller._writes.started
    gate.open()
    gate.wait_entered()  # the parent's write has failed, and the child's is about to begin
    parent.wait()
    gate.failing = gate.single = False
    if together:
        gate.open()
        child.wait()
    model.cache.poll()
    model.cache.check_integrity()
    assert model.cache.stats() == (2, 4, 0)
    gate.open()
    child.wait()
    model.cache.drain()
    model.cache.poll()
    assert model.host["kv"].available_size() == 32
    model.empty()


def test_node_and_window_whose_one_write_fails_give_nothing_back_twice(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(windows=(8, 8), write_policy=WritePolicy.WRITE_BACK)
    insert(model, keys_of((1, 2, 3)))
    node = model.cache.root.all_children()[0]
    gate = model.gate("write")
    gate.failing = True
    assert model.cache._evictor.write_node(node)
    assert model.cache._evictor.write_window(node.window("swa"))
    assert model.cache.evict_device(3) == 3
    model.cache.drain()
    model.cache.check_integrity()
    assert model.cache.stats() == (0, 0, 0)
    gate.failing = False
    model.empty()


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_device_is_freed_while_writes_of_a_whole_path_are_under_way(
    make_model: MakeModel, keys_of: KeysOf, policy: WritePolicy
) -> None:
    model = make_model(write_policy=policy, selective_hits=1)
    for length in range(1, 5):
        insert(model, keys_of(range(length)))
    waits: list[object] = []
    wait = model.cache._transfers.wait

    def note() -> bool:
        waits.append(None)
        return bool(wait())

    model.cache._transfers.wait = note
    assert model.cache.evict_device(4) == 4
    assert not waits, "nothing has to arrive on the host for the device to be free"
    model.cache._transfers.wait = wait
    assert model.serve(range(4)) == 4
    model.empty()


def test_node_gets_no_host_part_when_its_prefix_lost_its_own_while_room_was_made(
    make_model: MakeModel, in_thread: Callable[[Callable[[], object]], Any]
) -> None:
    model = make_model(host_pages=5)
    gate = model.gate("write")
    gate.close()
    model.serve((1, 2))
    model.serve((3, 4))
    # The host has one page left: the write of the child waits for those before it.
    serving = in_thread(lambda: (model.controller.adopt_thread(), model.serve((1, 2, 5, 6))))
    gate.wait_entered()
    gate.failing = gate.single = True
    gate.entered.clear()
    gate.open()
    gate.wait_entered()
    gate.failing = gate.single = False
    gate.open()
    serving.join()
    model.controller.adopt_thread()
    model.cache.drain()
    model.cache.check_integrity()
    assert model.lookup((1, 2, 5, 6)) == (4, 0)
    model.empty()


def test_a_write_that_fails_on_a_node_split_twice_gives_its_slots_back_once(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(device_pages=8, host_pages=8)
    gate = model.gate("write")
    gate.close()
    gate.failing = True
    insert(model, keys_of(range(8)))
    gate.wait_entered()
    model.lookup((0, 1))
    model.lookup((0, 1, 2, 3, 4))
    gate.open()
    model.cache.drain()
    model.cache.check_integrity()
    gate.failing = False
    model.empty()


def test_a_load_that_fails_while_room_is_made_takes_nothing_below_it_along(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device_pages=8, host_pages=16)
    gate = held_loads(model, keys_of(range(8)))
    gate.failing = True
    above = model.cache.load_back(model.cache.match_prefix(keys_of(range(4))), wait=False)
    gate.wait_entered()
    longer = model.cache.match_prefix(keys_of(range(8)))
    make_room = model.cache._evictor.make_device_room

    def and_fail(count: int) -> bool:
        monkeypatch.setattr(model.cache._evictor, "make_device_room", make_room)
        gate.open()
        while model.cache._transfers.loads:
            model.cache.poll(wait=True)
        gate.failing = False
        return make_room(count)

    monkeypatch.setattr(model.cache._evictor, "make_device_room", and_fail)
    longer = model.cache.load_back(longer)
    assert longer.pages == 8
    model.verify_match(longer)
    model.cache.check_integrity()
    for match in (longer, model.cache.settle(above)):
        model.cache.release(match)
    model.empty()


def test_an_interrupted_load_keeps_the_next_request_waiting_for_its_bytes(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device_pages=8, host_pages=8)
    gate = held_loads(model, keys_of(range(4)))
    engine = model.controller.engine
    submit = engine.submit

    def interrupted(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        return submit(*arguments, **options)

    monkeypatch.setattr(engine, "submit", interrupted)
    match = model.cache.match_prefix(keys_of(range(4)))
    with pytest.raises(KeyboardInterrupt):
        model.cache.load_back(match, wait=False)
    model.cache.release(match)
    following = model.cache.load_back(model.cache.match_prefix(keys_of(range(4))), wait=False)
    (consumer,) = following.consumers
    assert len(model.controller.layer_done_counter.events(consumer)) == 2
    gate.open()
    following = model.cache.settle(following)
    model.verify_match(following)
    model.cache.release(following)
    model.empty()


def test_eviction_ends_where_writes_fail_while_it_makes_room_for_windows(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(windows=(8, 1), write_policy=WritePolicy.WRITE_BACK)
    model.serve((1, 2, 3))
    gate = model.gate("write")
    gate.failing = True
    write, writes = model.controller.write, []

    def counted(*arguments: Any, **options: Any) -> Any:
        writes.append(arguments)
        assert len(writes) < 50, "the same nodes are written again and again"
        return write(*arguments, **options)

    monkeypatch.setattr(model.controller, "write", counted)
    assert model.cache.evict_device(3) == 3
    gate.failing = False
    model.empty()


def test_eviction_ends_where_nothing_can_be_saved(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=8, host_pages=4, write_policy=WritePolicy.WRITE_BACK)
    gate = model.gate("write")
    model.serve((1, 2, 3))
    model.serve((4, 5, 6))
    gate.failing = True
    assert model.cache.evict_device(6) == 6
    gate.failing = False
    model.empty()
