"""Callbacks and allocators that raise, interrupts: nothing is lost, locked or waited for long."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hicache_controller.operation_queue import StartedOperation
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import Change, Tier, WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]
InterruptedAt = Callable[[Callable[[], object], int], bool]


class Raising:
    """A callback that raises at its nth call, and does its work at the others."""

    def __init__(self, function: Callable[..., Any], nth: int = 1) -> None:
        self.function, self.left = function, nth

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("injected")
        return self.function(*arguments, **options)


def insert(model: Any, keys: list[bytes]) -> None:
    """Insert a request without waiting for anything."""
    match = model.cache.match_prefix(keys)
    pages, windows = model.compute(match, len(keys) - match.pages)
    model.cache.release(model.cache.insert(match, pages, windows=windows).match)


def leave_device(model: Any, *requests: list[bytes]) -> None:
    """Insert requests, and leave them on the host alone."""
    for keys in requests:
        insert(model, keys)
    model.cache.drain()
    model.cache.evict_device(10**6)


def all_settled(model: Any) -> bool:
    """Whether no node waits for a transfer, and no operation is known that ended."""
    cache = model.cache
    return not any(node.load or node.write for node in cache._tree.nodes()) and not (
        cache._transfers.writes or cache._transfers.loads
    )


# Polls


def test_a_listener_that_raises_loses_no_outcome_and_no_event(make_model: MakeModel, keys_of: KeysOf) -> None:
    reported: Counter[tuple[Change, Tier, bytes]] = Counter()

    def listener(event: Any) -> None:
        reported.update((event.change, event.tier, key) for key in event.keys)
        if len(reported) == 5:  # the first page of the first request has arrived on the host
            raise RuntimeError("injected by the listener")

    model = make_model(device_pages=20, listener=listener)
    for words in ((1, 2), (7, 8)):
        insert(model, keys_of(words))
    model.lookup((1,))  # which cuts the node, so that one write is of two
    model.controller.engine.drain()
    assert reported.total() == 4
    with pytest.raises(RuntimeError, match="injected by the listener"):
        model.cache.poll()
    assert all_settled(model)
    assert set(reported.values()) == {1}
    keys = [*keys_of((1, 2)), *keys_of((7, 8))]
    assert reported == Counter((Change.STORED, tier, key) for tier in (Tier.DEVICE, Tier.HOST) for key in keys)
    model.cache.check_integrity()
    assert not model.cache.poll()
    model.empty()


def test_an_allocator_that_does_not_take_pages_back_loses_no_outcome_of_others(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(device_pages=20)
    leave_device(model, keys_of((1, 2)), keys_of((7, 8)))
    gate = model.gate("load")
    gate.failing = True
    failing = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2))), wait=False)
    model.controller.engine.drain()
    gate.failing = False
    other = model.cache.load_back(model.cache.match_prefix(keys_of((7, 8))), wait=False)
    model.controller.engine.drain()
    entry = model.group.anchor_entry
    entry.device_free_fn = Raising(entry.device_free_fn)
    with pytest.raises(MemoryError, match="injected"):
        model.cache.poll()
    assert all_settled(model)
    settled = model.cache.settle(other)
    assert settled.device_pages == 2
    model.verify_match(settled)
    shorter = model.cache.settle(failing)
    assert shorter.pages == 0
    for match in (settled, shorter):
        model.cache.release(match)
    model.cache.check_integrity()


def test_an_ack_that_nobody_knows_is_passed_over(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model()
    pages = model.cache.alloc_device(1)
    host = model.controller.write(model.cache._pools.slots(pages), node_id=10**9)
    insert(model, keys_of((1, 2)))
    model.cache.drain()
    assert model.cache.stats().host_pages == 2
    model.controller.evict_host(host)
    model.allocators["kv"].free_pages(pages)
    model.empty()


def test_an_interrupt_at_any_line_of_a_poll_loses_no_transfer(
    make_model: MakeModel, keys_of: KeysOf, interrupted_at: InterruptedAt
) -> None:
    model = make_model(device_pages=20)
    nth, came = 1, True
    while came:
        leave_device(model, keys_of((1, 2)))
        insert(model, keys_of((7, 8)))
        match = model.cache.load_back(model.cache.match_prefix(keys_of((1, 2))), wait=False)
        model.controller.engine.drain()
        came = interrupted_at(model.cache.poll, nth)
        model.cache.poll()
        assert all_settled(model)
        settled = model.cache.settle(match)
        model.verify_match(settled)
        model.cache.release(settled)
        model.empty()
        nth += 4
    assert nth > 200


# Writes


def test_an_interrupt_at_any_line_of_a_write_leaves_no_lock(
    make_model: MakeModel, keys_of: KeysOf, interrupted_at: InterruptedAt
) -> None:
    model = make_model(host_pages=4, windows=(6, 3), write_policy=WritePolicy.WRITE_BACK)
    nth, came = 1, True
    while came:
        leave_device(model, keys_of((7, 8, 9)))  # so that room has to be made
        insert(model, keys_of((1, 2, 3)))
        (node,) = (node for node in model.cache._tree.nodes() if node.device is not None)

        def write(node: Any = node) -> None:
            with model.cache.engine_calls:
                model.cache._evictor.write_node(node)
                for part, _ in model.cache._tree.all_needed(node):
                    model.cache._evictor.write_window(part)

        came = interrupted_at(write, nth)
        model.cache.drain()
        assert all_settled(model)
        assert all((node.device_lock, node.host_lock) == (0, 0) for node in model.cache._tree.nodes())
        assert not any(part.pins for node in model.cache._tree.nodes() for part in node.windows)
        model.empty()
        nth += 17
    assert nth > 200


def loading_without_host_part(model: Any, keys: list[bytes]) -> tuple[Any, Any]:
    """Start to load the third page of a request, whose host part goes with a failed write above it meanwhile.

    Returns the match and the closed gate of the load, which will fail.
    """
    cache = model.cache
    model.serve((1, 2, 3), keys)
    model.empty()
    insert(model, keys[:1])
    cache.drain()
    get, write, load = (model.gate(what) for what in ("get", "write", "load"))
    get.close()
    started = cache.start_prefetch(cache.match_prefix(keys))
    for gate in (write, load):
        gate.close()
        gate.failing = True
    insert(model, keys[:2])
    write.wait_entered()
    get.open()
    match = cache.load_back(cache.finish_prefetch(started, wait=True), wait=False)
    load.wait_entered()
    write.open()
    while cache._transfers.writes:
        cache.poll()
    write.failing = False
    assert [node.host is None for node in match.node.path()] == [True, True, False]
    return match, load


def test_a_node_whose_load_fails_after_its_host_part_went_leaves_the_tree(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(device_pages=20, host_pages=20, storage=MemoryStorage())
    match, load = loading_without_host_part(model, keys_of((1, 2, 3)))
    load.open()
    while model.cache._transfers.loads:
        model.cache.poll()
    model.cache.check_integrity()
    settled = model.cache.settle(match)
    assert settled.pages == 2
    model.cache.release(settled)
    load.failing = False
    model.serve((1, 2, 3))
    model.empty()


def test_a_node_that_the_device_loses_while_room_for_it_is_made_is_not_written(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device_pages=20, host_pages=20, storage=MemoryStorage())
    cache = model.cache
    match, load = loading_without_host_part(model, keys_of((1, 2, 3)))
    assert cache._evictor.write_node(match.node.parent)
    while cache._transfers.writes:
        cache.poll()
    others = model.group.alloc(model.host["kv"].available_size())
    evict = cache._evictor.evict_host

    def wait_for_the_load(count: int) -> int:
        load.open()
        evict(count)
        assert not cache._transfers.loads
        model.group.free(others)
        return count

    monkeypatch.setattr(cache._evictor, "evict_host", wait_for_the_load)
    assert not cache._evictor._write(match.node)
    assert not cache._transfers.writes
    monkeypatch.undo()
    cache.drain()
    cache.check_integrity()
    load.failing = False
    cache.release(cache.settle(match))
    model.empty()


# Allocators


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(("pool", "windows"), [("kv", None), ("kv", (8, 8)), ("swa", (8, 8))])
def test_an_eviction_in_which_an_allocator_raises_leaves_no_lock(
    make_model: MakeModel, keys_of: KeysOf, pool: str, windows: tuple[int, int] | None, nth: int
) -> None:
    model = make_model(device_pages=20, windows=windows, write_policy=WritePolicy.WRITE_BACK)
    for words in ((1, 2), (1, 2, 3), (1, 2, 4)):
        insert(model, keys_of(words))
    allocator = model.host[pool].allocator
    alloc = allocator.alloc
    allocator.alloc = raising = Raising(alloc, nth)
    evictions = [partial(model.cache.evict_window_device, "swa")] if windows else []
    for evict in (*evictions, model.cache.evict_device):
        while True:
            try:
                evict(4)
                break
            except MemoryError:
                model.cache.check_integrity()
    allocator.alloc = alloc
    assert raising.left <= 0
    for name, allocator in model.allocators.items():
        assert allocator.available_pages == model.sizes[name][0], name
    model.cache.drain()
    assert model.cache.stats() == (3, 0, 4)
    model.empty()


@pytest.mark.parametrize("pool", ["kv", "swa"])
def test_pages_that_the_engine_does_not_take_back_are_evicted_again(
    make_model: MakeModel, keys_of: KeysOf, pool: str
) -> None:
    model = make_model(device_pages=20, windows=(8, 8))
    insert(model, keys_of((1, 2)))
    model.cache.drain()
    entry = model.group.get_entry(pool)
    entry.device_free_fn = Raising(entry.device_free_fn)
    evict = partial(model.cache.evict_window_device, "swa") if pool == "swa" else model.cache.evict_device
    with pytest.raises(MemoryError, match="injected"):
        evict(2)
    model.cache.check_integrity()
    assert evict(2) == 2
    model.empty()


@pytest.mark.parametrize("pool", ["kv", "swa"])
@pytest.mark.parametrize("way", ["backup", "restore"])
def test_a_retraction_in_which_an_allocator_raises_leaves_no_lock(
    make_model: MakeModel, keys_of: KeysOf, way: str, pool: str
) -> None:
    model = make_model(device_pages=20, windows=(8, 8))
    insert(model, keys_of((1, 2)))
    model.cache.drain()
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    pages, windows = model.compute(match, 1)
    entry, allocator = model.group.get_entry(pool), model.host[pool].allocator
    device_alloc, host_alloc = entry.device_alloc_fn, allocator.alloc
    if way == "backup":
        allocator.alloc = Raising(host_alloc)
        with pytest.raises(MemoryError):
            model.cache.retraction_backup("a", match, pages, windows=windows)
        allocator.alloc = host_alloc
        assert model.cache.retracted == ()
        model.verify("kv", match.rest(), pages)
    assert model.cache.retraction_backup("a", match, pages, windows=windows)
    model.cache.evict_device(9)
    if way == "restore":
        entry.device_alloc_fn = Raising(device_alloc)
        with pytest.raises(MemoryError):
            model.cache.retraction_restore("a")
        entry.device_alloc_fn = device_alloc
        assert model.cache.retracted == ("a",)
    restored = model.cache.retraction_restore("a")
    model.verify("kv", match.rest(), restored.pages)
    model.give_back(restored.pages, restored.windows)
    model.cache.release(restored.match)
    model.empty()


def test_a_request_is_retracted_though_the_engine_does_not_take_its_pages_back(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(device_pages=20)
    insert(model, keys_of((1, 2)))
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    pages, windows = model.compute(match, 1)
    entry = model.group.anchor_entry
    free = entry.device_free_fn
    entry.device_free_fn = Raising(free)
    with pytest.raises(MemoryError, match="injected"):
        model.cache.retraction_backup("a", match, pages, windows=windows)
    assert model.cache.retracted == ("a",)
    assert not model.cache._tree._pinned
    model.allocators["kv"].free_pages(pages)
    restored = model.cache.retraction_restore("a")
    model.verify("kv", match.rest(), restored.pages)
    model.give_back(restored.pages, restored.windows)
    model.cache.release(restored.match)
    model.empty()


# Interrupts while requests are retracted


@pytest.mark.parametrize("way", ["backup", "restore"])
def test_an_interrupt_while_a_retraction_waits_leaves_the_request_where_it_was(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    model = make_model(device_pages=20)
    insert(model, keys_of((1, 2)))
    model.cache.drain()
    match = model.cache.match_prefix(keys_of((1, 2, 3)))
    pages, windows = model.compute(match, 1)
    if way == "restore":
        assert model.cache.retraction_backup("a", match, pages, windows=windows)
    gate = model.gate("write" if way == "backup" else "load")
    gate.close()

    def wait(started: StartedOperation) -> None:
        gate.wait_entered()
        signal.raise_signal(signal.SIGINT)

    def retract() -> bool:
        return bool(model.cache.retraction_backup("a", match, pages, windows=windows))

    monkeypatch.setattr(StartedOperation, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        retract() if way == "backup" else model.cache.retraction_restore("a")
    monkeypatch.undo()
    gate.open()
    model.cache.drain()
    model.cache.check_integrity()
    assert way == "restore" or retract()
    assert model.cache.retracted == ("a",)
    restored = model.cache.retraction_restore("a")
    model.verify("kv", match.rest(), restored.pages)
    model.give_back(restored.pages, restored.windows)
    model.cache.release(restored.match)
    model.empty()


def test_an_interrupt_at_any_line_of_a_restore_leaves_the_request_where_it_was(
    make_model: MakeModel, keys_of: KeysOf, interrupted_at: InterruptedAt
) -> None:
    model = make_model(device_pages=20, windows=(8, 8))
    nth, came = 1, True
    while came:
        insert(model, keys_of((1, 2)))
        match = model.cache.match_prefix(keys_of((1, 2, 3)))
        pages, windows = model.compute(match, 1)
        assert model.cache.retraction_backup("a", match, pages, windows=windows)
        model.cache.drain()
        model.cache.evict_device(9)
        restored: list[Any] = []

        def restore(restored: list[Any] = restored) -> None:
            restored.append(model.cache.retraction_restore("a"))

        came = interrupted_at(restore, nth)
        if model.cache.retracted:
            restore()
        elif not restored:
            break  # what comes once all is done takes the result along
        model.verify("kv", match.rest(), restored[0].pages)
        model.give_back(restored[0].pages, restored[0].windows)
        model.cache.release(restored[0].match)
        model.empty()
        nth += 61
    assert nth > 500


@pytest.mark.parametrize("device", [True, False], ids=["device", "host"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_listener_that_raises_as_pages_leave_has_them_gone_once(
    make_model: MakeModel, keys_of: KeysOf, device: bool, nth: int
) -> None:
    leaving = Raising(lambda: None, 10**6)

    def listener(event: Any) -> None:
        if event.change is Change.REMOVED:
            leaving()

    model = make_model(device_pages=20, host_pages=20, windows=(8, 8), listener=listener)
    cache = model.cache
    for words in ((1, 2), (1, 3), (7, 8)):
        insert(model, keys_of(words))
    cache.drain()
    if not device:
        cache.evict_device(100)
        cache.evict_window_device("swa", 100)
    leaving.left = nth
    evict, evict_window = (
        (cache.evict_device, cache.evict_window_device) if device else (cache.evict_host, cache.evict_window_host)
    )
    raised = 0
    for _ in range(10):
        for step in (partial(evict, 1), partial(evict_window, "swa", 1)):
            try:
                step()
            except MemoryError:
                raised += 1
            cache.check_integrity()
    assert raised == 1
    model.empty()
