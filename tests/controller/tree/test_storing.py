"""Pages that storage did not take, was not there for, or removed by itself: marks, events, and storing them again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import CacheEvent, Change, Tier, WritePolicy
from hicache_controller.tree.presence import Run, StoragePresence

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]
PAGE_BYTES = 2 * 2 * 2 * 8  # K and V, two layers, two tokens, eight bytes


class Clock:
    """Stands still, so that a pause lasts until the test ends it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(model: Any, keys: list[bytes], *pools: str) -> list[int]:
    """How many of some leading pages storage has, by pool."""
    return [sum(model.storage._present(model.storage._pools[pool], keys, leading=False)) for pool in pools]


def storage_events(events: list[CacheEvent], change: Change) -> list[CacheEvent]:
    return [event for event in events if event.tier is Tier.STORAGE and event.change is change]


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_backup_that_failed_is_made_when_the_prefix_is_used_again(
    make_model: MakeModel, keys_of: KeysOf, policy: WritePolicy
) -> None:
    clock = Clock()
    model = make_model(
        storage=MemoryStorage(), windows=(8, 8), states=(8, 8), clock=clock, write_policy=policy, selective_hits=1
    )
    gate = model.gate("set")
    gate.failing = True
    model.serve((1, 2, 3))
    model.cache.evict_device(3)
    for name in model.windows:
        model.cache.evict_window_device(name, 8)
    model.cache.drain()
    gate.failing = False
    assert stored(model, keys_of((1, 2, 3)), "kv", "swa", "mamba") == [0, 0, 0]
    model.lookup((1, 2))  # cuts the node
    model.lookup((1, 2, 3))
    model.cache.drain()
    assert stored(model, keys_of((1, 2, 3)), "kv") == [0], "the pause behind the failure is not over"
    clock.now += 1
    model.cache.drain()
    assert stored(model, keys_of((1, 2, 3)), "kv", "swa", "mamba") == [3, 2, 1]
    model.empty()
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_page_inserted_again_is_stored_after_its_backup_failed(make_model: MakeModel, keys_of: KeysOf) -> None:
    clock = Clock()
    model = make_model(storage=MemoryStorage(), clock=clock)
    gate = model.gate("set")
    gate.failing = True
    model.serve((1, 2))
    model.cache.drain()
    gate.failing = False
    clock.now += 1
    model.serve((1, 2, 3))
    model.cache.drain()
    assert stored(model, keys_of((1, 2, 3)), "kv") == [3]
    model.empty()


def test_window_that_storage_did_not_take_is_stored_when_it_is_used_again(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    clock = Clock()
    model = make_model(storage=MemoryStorage(), states=(8, 8), clock=clock)
    store = model.storage._store
    model.storage._store = lambda pool, *rest: [False] * len(rest[0]) if pool.name == "mamba" else store(pool, *rest)
    model.serve((1, 2, 3))
    model.cache.drain()
    model.storage._store = store
    assert stored(model, keys_of((1, 2, 3)), "kv", "mamba") == [3, 0]
    clock.now += 1
    model.serve((1, 2, 3))
    model.cache.drain()
    assert stored(model, keys_of((1, 2, 3)), "mamba") == [1]
    model.empty()
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_failing_storage_is_asked_once_a_pause_however_many_requests_come(make_model: MakeModel) -> None:
    clock = Clock()
    model = make_model(storage=MemoryStorage(), clock=clock, device_pages=40, host_pages=60)
    calls: list[object] = []
    model.storage.batch_set = lambda keys, *_, **__: calls.append(None) or [False] * len(keys)
    for word in range(20):
        model.serve((word,))
        model.serve((word,))
        model.cache.drain()
    first = len(calls)
    assert first == 3, "one backup and its two retries"
    clock.now += 1  # the first pause is over: one more attempt, and a longer pause
    for word in range(20):
        model.serve((word,))
        model.cache.drain()
    assert len(calls) == first + 3
    del model.storage.batch_set
    clock.now += 1000
    model.cache.drain()
    assert model.storage.stats().pages == 20
    model.empty()


def test_storing_again_leaves_room_in_the_backup_queue(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(device_pages=40, host_pages=60)
    for word in range(20):
        model.serve((word, 1, 2))
    model.cache.drain()
    model.storage = MemoryStorage()
    object.__setattr__(model.controller.storage.settings, "backup_queue_pages", 24)
    gate = model.gate("set")
    gate.close()
    model.controller.attach_storage_backend(model.storage)
    for _ in range(5):
        model.cache.poll()
    assert sum(operation.pages for operation in model.cache._backups.values()) == 6, "a quarter of the queue"
    gate.open()
    model.cache.drain()
    assert model.storage.stats().pages == 60
    model.empty()


def test_storage_that_is_attached_late_gets_what_is_on_the_host(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(windows=(8, 8), states=(8, 8))
    model.serve((1, 2, 3))
    model.serve((1, 2, 3, 4, 5))
    model.cache.drain()
    model.storage = MemoryStorage()
    model.controller.attach_storage_backend(model.storage)
    model.cache.drain()
    assert stored(model, keys_of(range(1, 6)), "kv", "swa", "mamba") == [5, 4, 2]
    model.empty()
    assert model.serve((1, 2, 3, 4, 5)) == 5
    model.empty()


def test_another_storage_gets_everything_anew_and_the_old_one_is_told_gone(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    events: list[CacheEvent] = []
    model = make_model(storage=MemoryStorage(), listener=events.append)
    model.serve((1, 2, 3))
    model.cache.drain()
    old = model.controller.detach_storage_backend()
    model.cache.poll()
    assert [event.keys for event in storage_events(events, Change.REMOVED)] == [tuple(keys_of((1, 2, 3)))]
    events.clear()
    model.storage = MemoryStorage()
    model.controller.attach_storage_backend(model.storage)
    model.cache.drain()
    assert model.storage.stats().pages == 3
    assert [event.keys for event in storage_events(events, Change.STORED)] == [tuple(keys_of((1, 2, 3)))]
    events.clear()
    old.clear()
    model.cache.poll()
    assert not events, "the old storage is nobody's any more"
    old.close()
    model.empty()


@pytest.mark.parametrize("end", ["detach", "shutdown"])
def test_storage_tells_nobody_once_the_controller_lets_go_of_it(make_model: MakeModel, end: str) -> None:
    model = make_model(storage=MemoryStorage())
    model.serve((1, 2, 3))
    model.cache.drain()
    if end == "detach":
        model.controller.detach_storage_backend()
    else:
        assert model.controller.shutdown(30)
    model.storage.clear()
    assert not model.cache._presence.take_removed()


def test_storage_that_comes_back_is_listened_to_and_gets_what_left_it_meanwhile(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(storage=MemoryStorage(), windows=(8, 8), states=(8, 8))
    words = random.sample(range(100), 4)
    model.serve(words)
    model.cache.drain()
    there = stored(model, keys_of(words), "kv", "swa", "mamba")
    assert model.controller.detach_storage_backend() is model.storage
    model.storage.clear()
    model.controller.attach_storage_backend(model.storage)  # before the tree looked
    model.cache.drain()
    assert stored(model, keys_of(words), "kv", "swa", "mamba") == there
    lose(model.storage, keys_of(words)[-1])
    model.cache.poll()
    model.lookup(words)
    model.cache.drain()
    assert stored(model, keys_of(words), "kv", "swa", "mamba") == there
    model.empty()


def test_second_tree_is_refused_a_storage_that_tells_the_first_and_changes_nothing(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(storage=MemoryStorage(), device_pages=4, host_pages=4)
    first = model.cache

    def another() -> Any:
        return type(first)(model.controller, model.allocators["kv"], page_size=2)

    with pytest.raises(RuntimeError, match=r"set_removal_listener\(None\) must come first"):
        another()
    model.serve((1, 2, 3, 4))
    model.cache.drain()
    mine = model.group.alloc(2 * 2)
    assert mine is not None, "the pool still evicts through the first tree"
    model.group.free(mine)
    model.storage.clear()
    assert sorted(model.cache._presence.take_removed()) == sorted(keys_of((1, 2, 3, 4)))
    model.empty()
    model.storage.set_removal_listener(None)
    model.cache = another()
    model.serve((5, 6))
    model.cache.drain()
    first.poll()
    model.storage.clear()
    assert not first._presence.take_removed()
    assert sorted(model.cache._presence.take_removed()) == sorted(keys_of((5, 6)))
    model.empty()


def test_storage_that_tells_somebody_else_is_not_attached_under_a_tree(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model()
    model.serve((1, 2))
    model.cache.drain()
    storage, told = MemoryStorage(), list[bytes]()
    storage.set_removal_listener(told.extend)
    with pytest.raises(RuntimeError, match=r"set_removal_listener\(None\) must come first"):
        model.controller.attach_storage_backend(storage)
    assert not model.controller.has_storage
    assert not storage._pools
    storage._note_removed(keys_of((1,)))
    storage._tell_removed()
    assert told == keys_of((1,)), "its listener stays"
    storage.set_removal_listener(None)
    model.storage = storage
    model.controller.attach_storage_backend(storage)
    model.cache.drain()
    assert stored(model, keys_of((1, 2)), "kv") == [2]
    model.empty()


def test_storage_that_refuses_a_pool_is_not_listened_to(make_model: MakeModel, keys_of: KeysOf) -> None:
    class Refuses(MemoryStorage):
        def register_mem_pool_host(self, pool: Any, name: str = "kv") -> None:
            raise OSError("cannot register this memory")

    model = make_model()
    storage = Refuses()
    with pytest.raises(OSError, match="cannot register"):
        model.controller.attach_storage_backend(storage)
    storage._note_removed(keys_of((1,)))
    storage._tell_removed()
    assert not model.cache._presence.take_removed()
    storage.close()


def test_what_storage_removes_is_told_with_its_parent_and_stored_again_when_used(
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
    assert stored(model, first, "kv") == [3]
    assert [(e.keys, e.parent) for e in storage_events(events, Change.STORED)] == [(tuple(first[1:]), first[0])]
    assert [(e.keys, e.parent) for e in storage_events(events, Change.REMOVED)] == [(tuple(second[1:]), second[0])]
    model.empty()


def lose(storage: MemoryStorage, lost: bytes) -> None:
    """Take a page out as one that was found damaged."""
    with storage._lock:
        for pages in storage._bytes.values():
            pages.pop(lost, None)
        storage._index.remove(lost)
        storage._note_removed((lost,))
    storage._tell_removed()


@pytest.mark.parametrize("lost", range(6))
def test_page_lost_anywhere_in_a_node_is_stored_again_when_it_is_used(
    make_model: MakeModel, keys_of: KeysOf, lost: int
) -> None:
    words = random.sample(range(100), 6)
    model = make_model(storage=MemoryStorage(), windows=(8, 8), states=(8, 8))
    model.serve(words)
    model.cache.drain()
    before = stored(model, keys_of(words), "kv", "swa", "mamba")
    assert before == [6, 2, 1]
    lose(model.storage, keys_of(words)[lost])
    assert stored(model, keys_of(words), "kv") == [5]
    model.cache.poll()
    model.lookup(words)
    model.cache.drain()
    assert stored(model, keys_of(words), "kv", "swa", "mamba") == before
    model.empty()
    assert model.serve(words) == 6, "all of it comes back from storage"
    model.empty()


def test_page_removed_while_it_was_being_stored_is_not_taken_for_stored(make_model: MakeModel, keys_of: KeysOf) -> None:
    events: list[CacheEvent] = []
    model = make_model(storage=MemoryStorage(), listener=events.append)
    keys = keys_of((1, 2, 3))
    gate = model.gate("set")
    gate.close()
    model.serve((1, 2, 3))
    while not model.cache._backups:
        model.cache.poll(wait=True)
    gate.wait_entered()
    model.storage._note_removed(keys[2:])
    model.storage._tell_removed()
    model.cache.poll()
    gate.open()
    model.cache.drain()
    assert [event.keys for event in storage_events(events, Change.STORED)] == [tuple(keys[:2])]
    assert not model.cache.root.all_children()[0].stored
    model.lookup((1, 2, 3))
    model.cache.drain()
    assert [event.keys for event in storage_events(events, Change.STORED)] == [tuple(keys[:2]), tuple(keys[2:])]
    model.empty()


def test_page_removed_before_its_backup_was_seen_to_end_is_told_as_removed(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    events: list[CacheEvent] = []
    model = make_model(storage=MemoryStorage(2 * PAGE_BYTES), listener=events.append)
    gate = model.gate("set")
    gate.close()
    for words in ((1, 2), (7, 8)):
        model.serve(words)
    while len(model.cache._backups) < 2:
        model.cache.poll(wait=True)
    gate.open()
    while not all(operation.done for operation in model.controller.storage._backups):
        pass
    model.cache.drain()
    assert [event.keys for event in storage_events(events, Change.REMOVED)] == [tuple(keys_of((1, 2)))]
    told = {key for event in storage_events(events, Change.STORED) for key in event.keys}
    assert told == {*keys_of((1, 2)), *keys_of((7, 8))}
    model.empty()


def test_marks_follow_what_storage_removed_though_nobody_uses_the_pages(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_controller.tree.backups._FEW", 1)
    model = make_model(storage=MemoryStorage(), states=(8, 8))
    model.serve((1, 2, 3))
    model.serve((7,))
    model.cache.drain()
    lost, kept = (model.cache.root.child(keys_of(words)[0]) for words in ((1,), (7,)))
    assert lost.stored
    assert lost.window("mamba").stored
    model.storage._note_removed(keys_of((1, 2, 3))[1:])
    model.storage._tell_removed()
    model.cache.poll()
    assert (lost.stored, lost.window("mamba").stored) == (False, False)
    assert (kept.stored, kept.window("mamba").stored) == (True, True)
    assert len(model.cache._presence) == 0, "removals that were compared with all pages are forgotten"
    model.empty()


def test_head_that_storage_lost_without_a_word_is_stored_again_with_its_tail(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    clock = Clock()
    model = make_model(storage=MemoryStorage(), clock=clock)
    model.serve((1, 2))
    model.cache.drain()
    model.storage.set_removal_listener(None)
    model.storage.clear()
    model.serve((1, 2, 3))  # refused, as the page before it is not stored
    model.cache.drain()
    assert stored(model, keys_of((1, 2, 3)), "kv") == [0]
    clock.now += 1
    model.serve((1, 2, 3))
    model.cache.drain()
    assert stored(model, keys_of((1, 2, 3)), "kv") == [3]
    model.empty()


def test_prefetched_pages_are_told_as_stored_once(make_model: MakeModel, keys_of: KeysOf) -> None:
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
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    events: list[CacheEvent] = []
    clock = Clock()
    model = make_model(storage=MemoryStorage(), windows=(8, 8), listener=events.append, clock=clock)
    head, tail = keys_of((1, 2))
    model.serve((1,))
    model.serve((1, 2))
    model.cache.drain()
    model.cache.evict_device(1)
    model.cache.evict_host(1)
    store = model.storage._store
    model.storage._store = lambda pool, *rest: [False] * len(rest[0]) if pool.name == "swa" else store(pool, *rest)
    lose(model.storage, head)
    model.cache.poll()
    model.lookup((1,))  # its page is stored again, its window is not
    model.cache.drain()
    model.storage._store = store
    assert stored(model, [head, tail], "kv", "swa") == [2, 1]
    events.clear()
    assert model.serve((1, 2)) == 2, "the tail comes from storage"
    assert ("swa", (head,)) not in [(event.pool, event.keys) for event in storage_events(events, Change.STORED)]
    clock.now += 1
    model.lookup((1, 2))
    model.cache.drain()
    assert stored(model, [head, tail], "kv", "swa") == [2, 2]
    assert [(e.pool, e.keys) for e in storage_events(events, Change.STORED)] == [("swa", (head,))]
    model.empty()


def test_removals_noted_by_many_threads_arrive_once_each() -> None:
    presence = StoragePresence(remember=True)
    keys = [number.to_bytes(16) for number in range(4000)]
    presence.stored("kv", keys, None)
    threads = [
        threading.Thread(target=lambda part=keys[i::4]: [presence.note_removed([k]) for k in part]) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    taken: list[bytes] = []
    while any(thread.is_alive() for thread in threads):
        taken += presence.take_removed()
    taken += presence.take_removed()
    assert sorted(taken) == keys
    assert presence.removed(taken) == [("kv", Run(tuple(keys), None))]


def test_runs_are_cut_where_pages_are_known_or_gone() -> None:
    presence = StoragePresence(remember=True)
    a, b, c, d, e = (bytes([number]) * 16 for number in range(5))
    assert presence.stored("kv", [a, b, c, d, e], None) == [Run((a, b, c, d, e), None, 0)]
    assert presence.removed([e, b, a]) == [("kv", Run((e,), d)), ("kv", Run((a, b), None))]
    assert presence.stored("kv", [a, b, c, d, e], None) == [Run((a, b), None, 0), Run((e,), d, 4)]
    presence.note_removed([d])
    presence.take_removed()
    assert presence.removed([d, d]) == [("kv", Run((d,), c))]
    assert presence.stored("kv", [c, d, e], b) == [], "what was removed is not there"
    presence.storing([d])
    assert presence.stored("kv", [c, d, e], b) == [Run((d,), c, 1)]
    assert presence.removed([b"unknown"]) == []
    assert StoragePresence(remember=False).stored("kv", [a], None) == []


@pytest.mark.parametrize("synchronous", [True, False])
def test_events_mirror_a_storage_that_keeps_removing_pages(
    make_model: MakeModel, keys_of: KeysOf, synchronous: bool
) -> None:
    told: dict[str, set[bytes]] = {"kv": set(), "swa": set(), "mamba": set()}

    def listen(event: CacheEvent) -> None:
        if event.tier is Tier.STORAGE:
            known, keys = told[event.pool], set(event.keys)
            assert keys.isdisjoint(known) if event.change is Change.STORED else keys <= known
            known ^= keys

    storage, clock = MemoryStorage(12 * PAGE_BYTES), Clock()
    model = make_model(
        windows=(8, 8), states=(6, 6), storage=storage, listener=listen, clock=clock, synchronous=synchronous
    )
    for _ in range(200):
        clock.now += 100
        model.serve(random.choices(range(2), k=random.randrange(1, 7)))
        model.cache.drain()
        for pool, known in told.items():
            held = set(storage._bytes.get(pool, ()))
            # A page that leaves while it is stored again counts as removed until its next use.
            missing, wrong = held - known, known - held
            assert not wrong, f"{pool} pages are told of and not there"
            assert not missing or not synchronous or pool != "kv", f"{pool} pages are there and not told of"
    assert storage.stats().evicted > 20
    model.empty()
