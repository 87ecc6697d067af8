"""What is reported of storage: each pool's pages once they are there, and once they are gone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import CacheEvent, Change, Tier

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]
PAGE_BYTES = 2 * 2 * 2 * 8  # K and V, two layers, two tokens, eight bytes


def storage_events(events: list[CacheEvent], change: Change) -> list[CacheEvent]:
    return [event for event in events if event.tier is Tier.STORAGE and event.change is change]


class Mirror:
    """What a listener takes a storage to have, by pool; nothing may be reported twice."""

    def __init__(self) -> None:
        self.reported: dict[str, set[bytes]] = {"kv": set(), "swa": set(), "mamba": set()}

    def __call__(self, event: CacheEvent) -> None:
        if event.tier is Tier.STORAGE:
            known, keys = self.reported[event.pool], set(event.keys)
            assert keys.isdisjoint(known) if event.change is Change.STORED else keys <= known
            known ^= keys


def held(storage: MemoryStorage) -> dict[str, set[bytes]]:
    return {pool: set(storage._bytes.get(pool, ())) for pool in ("kv", "swa", "mamba")}


def test_what_storage_removes_is_reported_with_its_parent_and_stored_again_when_used(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    events: list[CacheEvent] = []
    model = make_model(storage=MemoryStorage(4 * PAGE_BYTES), listener=events.append)
    first, second = keys_of((1, 2, 3)), keys_of((7, 8, 9))
    model.serve((1, 2, 3))
    model.cache.drain()
    model.serve((7, 8, 9))  # two pages of the first prefix have to go, its tail
    model.cache.drain()
    assert [(e.keys, e.parent, e.pool) for e in storage_events(events, Change.STORED)] == [
        (tuple(first), None, "kv"),
        (tuple(second), None, "kv"),
    ]
    assert [(e.keys, e.parent, e.pool) for e in storage_events(events, Change.REMOVED)] == [
        (tuple(first[1:]), first[0], "kv")
    ]
    events.clear()
    model.serve((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(first, "kv") == [3]
    assert [(e.keys, e.parent) for e in storage_events(events, Change.STORED)] == [(tuple(first[1:]), first[0])]
    assert [(e.keys, e.parent) for e in storage_events(events, Change.REMOVED)] == [(tuple(second[1:]), second[0])]
    model.empty()


def test_page_removed_while_it_was_being_stored_is_not_taken_for_stored(make_model: MakeModel, keys_of: KeysOf) -> None:
    events: list[CacheEvent] = []
    model = make_model(storage=MemoryStorage(), listener=events.append)
    keys = keys_of((1, 2, 3))
    gate = model.gate("set")
    gate.close()
    model.serve((1, 2, 3))
    while not model.cache._backups.running:
        model.cache.poll(wait=True)
    gate.wait_entered()
    model.storage.note_removed(keys[2:], "kv")
    model.storage.report_removed()
    model.cache.poll()
    gate.open()
    model.cache.drain()
    assert [event.keys for event in storage_events(events, Change.STORED)] == [tuple(keys[:2])]
    assert not model.cache.root.all_children()[0].stored
    model.lookup((1, 2, 3))
    model.cache.drain()
    assert [event.keys for event in storage_events(events, Change.STORED)] == [tuple(keys[:2]), tuple(keys[2:])]
    model.empty()


def test_page_removed_before_its_backup_was_seen_to_end_is_reported_as_removed(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    events: list[CacheEvent] = []
    model = make_model(storage=MemoryStorage(2 * PAGE_BYTES), listener=events.append)
    gate = model.gate("set")
    gate.close()
    for words in ((1, 2), (7, 8)):
        model.serve(words)
    while len(model.cache._backups.running) < 2:
        model.cache.poll(wait=True)
    gate.open()
    while not all(operation.done for operation in model.controller.storage._backups):
        pass
    model.cache.drain()
    assert [event.keys for event in storage_events(events, Change.REMOVED)] == [tuple(keys_of((1, 2)))]
    reported = {key for event in storage_events(events, Change.STORED) for key in event.keys}
    assert reported == {*keys_of((1, 2)), *keys_of((7, 8))}
    model.empty()


def test_prefetched_pages_are_reported_as_stored_once(make_model: MakeModel, keys_of: KeysOf) -> None:
    storage = MemoryStorage()
    first = make_model(storage=storage)
    first.serve((1, 2, 3))
    first.cache.drain()
    first.controller.detach_storage_backend()
    first.storage = None
    events: list[CacheEvent] = []
    storage._pools.clear()
    second = make_model(storage=storage, listener=events.append)
    assert second.serve((1, 2, 3)) == 3
    second.empty()
    assert second.serve((1, 2, 3)) == 3
    assert [event.keys for event in storage_events(events, Change.STORED)] == [tuple(keys_of((1, 2, 3)))]
    second.empty()


def test_window_above_what_was_prefetched_counts_as_stored_only_where_it_is(
    make_model: MakeModel, keys_of: KeysOf, clock: Any
) -> None:
    events: list[CacheEvent] = []
    model = make_model(storage=MemoryStorage(), windows=(8, 8), listener=events.append, clock=clock)
    head, tail = keys_of((1, 2))
    model.serve((1,))
    model.serve((1, 2))
    model.cache.drain()
    model.cache.evict_device(1)
    model.cache.evict_host(1)
    store = model.storage.store_pages
    model.storage.store_pages = lambda pool, *rest: [False] * len(rest[0]) if pool.name == "swa" else store(pool, *rest)
    model.lose(head)
    model.cache.poll()
    model.lookup((1,))  # its page is stored again, its window is not
    model.cache.drain()
    model.storage.store_pages = store
    assert model.in_storage([head, tail], "kv", "swa") == [2, 1]
    events.clear()
    assert model.serve((1, 2)) == 2, "the tail comes from storage"
    assert ("swa", (head,)) not in [(event.pool, event.keys) for event in storage_events(events, Change.STORED)]
    clock.now += 1
    model.lookup((1, 2))
    model.cache.drain()
    assert model.in_storage([head, tail], "kv", "swa") == [2, 2]
    assert [(e.pool, e.keys) for e in storage_events(events, Change.STORED)] == [("swa", (head,))]
    model.empty()


def test_window_that_was_fetched_in_part_counts_as_stored_only_as_a_whole(
    make_model: MakeModel, keys_of: KeysOf, clock: Any
) -> None:
    mirror, keys = Mirror(), keys_of((1, 2, 3, 4))
    model = make_model(storage=MemoryStorage(), windows=(8, 8), states=(8, 8), listener=mirror, clock=clock)
    take_again = model.refuse("swa", keys[1])
    for words in ((1, 2, 3), (1, 2, 3, 4)):
        clock.now += 1000
        model.serve(words)
        model.cache.drain()
    assert model.in_storage(keys, "kv", "swa") == [4, 2], "of the last two pages of (1, 2, 3) one"
    take_again()
    model.cache.evict_device(1)
    model.cache.evict_host(1)
    model.cache.evict_window_device("mamba", 8)
    model.cache.evict_window_host("mamba", 8)
    assert model.lookup((1, 2, 3)) == (0, 0), "of (1, 2, 3) all is there but its state"
    match = model.cache.prefetch(model.cache.match_prefix(keys))
    assert match.pages == 4
    model.cache.release(match)
    assert mirror.reported == held(model.storage)
    clock.now += 1000
    model.lookup((1, 2, 3, 4))
    model.cache.drain()
    assert model.in_storage(keys, "kv", "swa") == [4, 3]
    assert mirror.reported == held(model.storage)
    model.empty()


def test_windows_that_storage_took_in_part_are_reported_and_marked_page_by_page_after_a_split(
    make_model: MakeModel, keys_of: KeysOf, clock: Any
) -> None:
    mirror, keys = Mirror(), keys_of((1, 2, 3))
    model = make_model(windows=(8, 8), states=(8, 8), listener=mirror, clock=clock)
    model.serve((1, 2, 3))
    model.cache.drain()
    model.storage = MemoryStorage()
    take_again = model.refuse("swa", keys[2])
    gate = model.gate("set")
    gate.close()
    model.controller.attach_storage_backend(model.storage)
    model.cache.poll()
    gate.wait_entered()
    model.lookup((1, 2))
    gate.open()
    model.cache.drain()
    assert model.in_storage(keys, "kv", "swa", "mamba") == [3, 1, 1]
    assert mirror.reported == held(model.storage)
    head = model.cache.root.all_children()[0]
    (tail,) = head.all_children()
    assert [node.window("swa").stored for node in (head, tail)] == [True, False]
    assert tail.window("mamba").stored
    take_again()
    clock.now += 1000
    model.lookup((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys, "kv", "swa", "mamba") == [3, 2, 1]
    assert mirror.reported == held(model.storage)
    model.empty()


def test_ranks_mark_no_window_of_a_backup_that_failed_on_one_of_them(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of((1, 2, 3))
    model = make_model(storage=MemoryStorage(), windows=(8, 8), states=(8, 8))
    monkeypatch.setattr(model.controller, "agreement", SimpleNamespace(needed=True, broken=False, smallest=list))
    model.refuse("swa", keys[2])
    model.serve((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys, "kv", "swa", "mamba") == [3, 1, 1]
    (node,) = model.cache.root.all_children()
    assert [node.window(pool).stored for pool in ("swa", "mamba")] == [False, False]
    model.empty()


@pytest.mark.parametrize("lost", ["kv", "swa"])
@pytest.mark.parametrize("noticed", ["before", "after"])
def test_part_dropped_between_its_backup_and_the_acknowledgement_is_reported_of_its_pool_alone(
    make_model: MakeModel, keys_of: KeysOf, lost: str, noticed: str
) -> None:
    mirror, keys = Mirror(), keys_of(random.sample(range(100), 3))
    dropped, seen = threading.Event(), threading.Event()

    class Drops(MemoryStorage):
        """Loses a part as soon as it has it, and stores no other pool's until that was seen."""

        def store_pages(self, pool: Any, *rest: Any) -> list[bool]:
            if dropped.is_set():
                assert seen.wait(30)
            stored = super().store_pages(pool, *rest)
            if pool.name == lost and not dropped.is_set():
                model.lose(keys[-1], lost)
                dropped.set()
            return stored

    model = make_model(windows=(8, 8), states=(8, 8), listener=mirror)
    model.serve((), keys)
    model.cache.drain()
    model.storage = Drops()
    model.controller.attach_storage_backend(model.storage)
    model.cache.poll()
    assert dropped.wait(30)
    if noticed == "before":
        model.cache.poll()
    seen.set()
    model.cache.drain()
    there = {"kv": 3, "swa": 2, "mamba": 1}
    there[lost] -= 1
    assert model.in_storage(keys, *there) == list(there.values())
    assert mirror.reported == held(model.storage)
    if noticed == "before":
        node = model.cache.root.all_children()[0]
        marks = {"kv": node.stored, **{part.name: part.stored for part in node.windows}}
        assert marks == {pool: pool != lost for pool in there}
    model.cache.release(model.cache.match_prefix(keys))
    model.cache.drain()
    assert model.in_storage(keys, *there) == [3, 2, 1]
    assert mirror.reported == held(model.storage)
    model.empty()


def test_window_that_left_with_its_page_is_stored_again_though_the_page_was_to_be_anyway(
    make_model: MakeModel, keys_of: KeysOf, clock: Any
) -> None:
    mirror, keys = Mirror(), keys_of((1, 2))
    model = make_model(storage=MemoryStorage(), windows=(8, 8), listener=mirror, clock=clock)
    model.serve((1,))
    model.cache.drain()
    gate = model.gate("set")
    gate.failing = True
    model.serve((1, 2))
    model.cache.drain()  # nothing of the second page is taken, so the first is to be named again
    gate.failing = False
    model.lose(keys[0])
    assert mirror.reported == {"kv": {keys[0]}, "swa": {keys[0]}, "mamba": set()}
    model.cache.poll()
    assert mirror.reported == held(model.storage)
    clock.now += 1
    model.lookup((1, 2))
    model.cache.drain()
    assert model.in_storage(keys, "kv", "swa") == [2, 2]
    assert mirror.reported == held(model.storage)
    model.empty()


@pytest.mark.parametrize("lost", ["kv", "swa"])
def test_part_that_leaves_storage_after_it_was_fetched_is_not_reported_as_stored(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(
        "hicache_controller.tree.backups._MIN_CLEANUP", 0
    )  # removals are compared with all pages at once
    mirror, keys = Mirror(), keys_of((1, 2))
    model = make_model(storage=MemoryStorage(), windows=(8, 8), listener=mirror)
    model.serve((1, 2))
    model.empty()
    started = model.cache.start_prefetch(model.cache.match_prefix(keys))
    assert started.operation.wait() == 2
    model.lose(keys[1], lost)
    model.cache.poll()
    assert len(model.cache._backups.presence) == 1, "what is being fetched is in no node yet"
    match = model.cache.finish_prefetch(started)
    assert match.pages == 2
    assert (match.node.stored, match.node.window("swa").stored) == (lost != "kv", lost != "swa")
    assert mirror.reported == held(model.storage)
    model.cache.release(match)
    model.lookup((1, 2))
    model.cache.drain()
    assert model.in_storage(keys, "kv", "swa") == [2, 2]
    assert mirror.reported == held(model.storage)
    model.empty()


@pytest.mark.parametrize("synchronous", [True, False])
def test_events_mirror_a_storage_that_keeps_removing_pages(
    make_model: MakeModel, clock: Any, synchronous: bool
) -> None:
    storage, mirror = MemoryStorage(12 * PAGE_BYTES), Mirror()
    model = make_model(
        windows=(8, 8), states=(6, 6), storage=storage, listener=mirror, clock=clock, synchronous=synchronous
    )
    for _ in range(200):
        clock.now += 100
        model.serve(random.choices(range(2), k=random.randrange(1, 7)))
        model.cache.drain()
        for pool, there in held(storage).items():
            # A page that leaves while it is stored again counts as removed until its next use.
            missing, wrong = there - mirror.reported[pool], mirror.reported[pool] - there
            assert not wrong, f"{pool} pages are reported and not there"
            assert not missing or not synchronous, f"{pool} pages are there and not reported"
    assert storage.stats().evicted > 20
    model.empty()
