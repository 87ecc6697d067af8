"""Pages that storage did not take, was not there for, or removed by itself: marks, events, and storing them again."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import CacheEvent, Change, Tier, TreeNode, WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def storage_events(events: list[CacheEvent], change: Change) -> list[CacheEvent]:
    return [event for event in events if event.tier is Tier.STORAGE and event.change is change]


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_backup_that_failed_is_made_when_the_prefix_is_used_again(
    make_model: MakeModel, keys_of: KeysOf, policy: WritePolicy, clock: Any
) -> None:
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
    assert model.in_storage(keys_of((1, 2, 3)), "kv", "swa", "mamba") == [0, 0, 0]
    model.lookup((1, 2))  # cuts the node
    model.lookup((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys_of((1, 2, 3)), "kv") == [0], "the pause after the failure is not over"
    clock.now += 1
    model.cache.drain()
    assert model.in_storage(keys_of((1, 2, 3)), "kv", "swa", "mamba") == [3, 2, 1]
    model.empty()
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_page_inserted_again_is_stored_after_its_backup_failed(
    make_model: MakeModel, keys_of: KeysOf, clock: Any
) -> None:
    model = make_model(storage=MemoryStorage(), clock=clock)
    gate = model.gate("set")
    gate.failing = True
    model.serve((1, 2))
    model.cache.drain()
    gate.failing = False
    clock.now += 1
    model.serve((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys_of((1, 2, 3)), "kv") == [3]
    model.empty()


def test_window_that_storage_did_not_take_is_stored_when_it_is_used_again(
    make_model: MakeModel, keys_of: KeysOf, clock: Any
) -> None:
    model = make_model(storage=MemoryStorage(), states=(8, 8), clock=clock)
    store = model.storage.store_pages
    model.storage.store_pages = lambda pool, *rest: (
        [False] * len(rest[0]) if pool.name == "mamba" else store(pool, *rest)
    )
    model.serve((1, 2, 3))
    model.cache.drain()
    model.storage.store_pages = store
    assert model.in_storage(keys_of((1, 2, 3)), "kv", "mamba") == [3, 0]
    clock.now += 1
    model.serve((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys_of((1, 2, 3)), "mamba") == [1]
    model.empty()
    assert model.serve((1, 2, 3)) == 3
    model.empty()


def test_failing_storage_is_asked_once_a_pause_however_many_requests_come(make_model: MakeModel, clock: Any) -> None:
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
    for word in range(20):
        model.lookup((word,))  # the one of the last attempt waits until it is used
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
    assert sum(operation.pages for operation in model.cache._backups.running.values()) == 6, "a quarter of the queue"
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
    assert model.in_storage(keys_of(range(1, 6)), "kv", "swa", "mamba") == [5, 4, 2]
    model.empty()
    assert model.serve((1, 2, 3, 4, 5)) == 5
    model.empty()


def test_another_storage_gets_everything_anew_and_the_old_one_is_reported_gone(
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
    assert not events, "the old storage is not listened to any more"
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
    assert not model.cache._backups.presence.take_noted()


def test_storage_that_comes_back_is_listened_to_and_gets_what_left_it_meanwhile(
    make_model: MakeModel, keys_of: KeysOf
) -> None:
    model = make_model(storage=MemoryStorage(), windows=(8, 8), states=(8, 8))
    words = random.sample(range(100), 4)
    model.serve(words)
    model.cache.drain()
    there = model.in_storage(keys_of(words), "kv", "swa", "mamba")
    assert model.controller.detach_storage_backend() is model.storage
    model.storage.clear()
    model.controller.attach_storage_backend(model.storage)  # before the tree looked
    model.cache.drain()
    assert model.in_storage(keys_of(words), "kv", "swa", "mamba") == there
    model.lose(keys_of(words)[-1])
    model.cache.poll()
    model.lookup(words)
    model.cache.drain()
    assert model.in_storage(keys_of(words), "kv", "swa", "mamba") == there
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
    assert sorted(model.cache._backups.presence.take_noted()["kv"]) == sorted(keys_of((1, 2, 3, 4)))
    model.empty()
    model.storage.set_removal_listener(None)
    model.cache = another()
    model.serve((5, 6))
    model.cache.drain()
    first.poll()
    model.storage.clear()
    assert not first._backups.presence.take_noted()
    assert sorted(model.cache._backups.presence.take_noted()["kv"]) == sorted(keys_of((5, 6)))
    model.empty()


def test_storage_that_tells_somebody_else_is_not_attached_under_a_tree(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model()
    model.serve((1, 2))
    model.cache.drain()
    storage, removed = MemoryStorage(), list[tuple[str, bytes]]()
    storage.set_removal_listener(lambda keys, name: removed.extend((name, key) for key in keys))
    with pytest.raises(RuntimeError, match=r"set_removal_listener\(None\) must come first"):
        model.controller.attach_storage_backend(storage)
    assert not model.controller.has_storage
    assert not storage._pools
    storage.note_removed(keys_of((1,)), "kv")
    storage.report_removed()
    assert removed == [("kv", *keys_of((1,)))], "its listener stays"
    storage.set_removal_listener(None)
    model.storage = storage
    model.controller.attach_storage_backend(storage)
    model.cache.drain()
    assert model.in_storage(keys_of((1, 2)), "kv") == [2]
    model.empty()


def test_storage_that_refuses_a_pool_is_not_listened_to(make_model: MakeModel, keys_of: KeysOf) -> None:
    class Refuses(MemoryStorage):
        def register_mem_pool_host(self, pool: Any, name: str = "kv") -> None:
            raise OSError("cannot register this memory")

    model = make_model()
    storage = Refuses()
    with pytest.raises(OSError, match="cannot register"):
        model.controller.attach_storage_backend(storage)
    storage.note_removed(keys_of((1,)), "kv")
    storage.report_removed()
    assert not model.cache._backups.presence.take_noted()
    storage.close()


@pytest.mark.parametrize("lost", range(6))
def test_page_lost_anywhere_in_a_node_is_stored_again_when_it_is_used(
    make_model: MakeModel, keys_of: KeysOf, lost: int
) -> None:
    words = random.sample(range(100), 6)
    model = make_model(storage=MemoryStorage(), windows=(8, 8), states=(8, 8))
    model.serve(words)
    model.cache.drain()
    before = model.in_storage(keys_of(words), "kv", "swa", "mamba")
    assert before == [6, 2, 1]
    model.lose(keys_of(words)[lost])
    assert model.in_storage(keys_of(words), "kv") == [5]
    model.cache.poll()
    model.lookup(words)
    model.cache.drain()
    assert model.in_storage(keys_of(words), "kv", "swa", "mamba") == before
    model.empty()
    assert model.serve(words) == 6, "all of it comes back from storage"
    model.empty()


def test_marks_follow_what_storage_removed_though_nobody_uses_the_pages(
    make_model: MakeModel, keys_of: KeysOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hicache_controller.tree.backups._MIN_CLEANUP", 1)
    model = make_model(storage=MemoryStorage(), states=(8, 8))
    model.serve((1, 2, 3))
    model.serve((7,))
    model.cache.drain()
    lost, kept = (model.cache.root.child(keys_of(words)[0]) for words in ((1,), (7,)))
    assert lost.stored
    assert lost.window("mamba").stored
    for pool, marks in (("kv", (False, True)), ("mamba", (False, False))):
        model.storage.note_removed(keys_of((1, 2, 3))[1:], pool)
        model.storage.report_removed()
        model.cache.poll()
        assert (lost.stored, lost.window("mamba").stored) == marks
    assert (kept.stored, kept.window("mamba").stored) == (True, True)
    assert len(model.cache._backups.presence) == 0, "removals that were compared with all pages are forgotten"
    model.empty()


def test_head_that_storage_lost_without_a_word_is_stored_again_with_its_tail(
    make_model: MakeModel, keys_of: KeysOf, clock: Any
) -> None:
    model = make_model(storage=MemoryStorage(), clock=clock)
    model.serve((1, 2))
    model.cache.drain()
    model.storage.set_removal_listener(None)
    model.storage.clear()
    model.serve((1, 2, 3))  # refused, as the page before it is not stored
    model.cache.drain()
    assert model.in_storage(keys_of((1, 2, 3)), "kv") == [0]
    clock.now += 1
    model.serve((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys_of((1, 2, 3)), "kv") == [3]
    model.empty()


def test_backup_that_is_interrupted_leaves_no_lock_and_is_made_when_the_prefix_is_used_again(
    make_model: MakeModel, keys_of: KeysOf, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(storage=MemoryStorage(), windows=(8, 8), states=(8, 8), clock=clock)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    def serve() -> None:
        model.serve((1, 2, 3))
        model.cache.drain()

    with monkeypatch.context() as patch:
        patch.setattr(model.controller, "backup", interrupted)
        with pytest.raises(KeyboardInterrupt):
            serve()
    model.cache.drain()
    model.cache.check_integrity()
    assert not model.cache._backups.running
    clock.now += 1
    model.serve((1, 2, 3))
    model.cache.drain()
    assert model.in_storage(keys_of((1, 2, 3)), "kv", "swa", "mamba") == [3, 2, 1]
    model.empty()


def test_a_backup_looks_at_no_more_of_a_long_prefix_than_is_not_in_storage(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(device_pages=40, host_pages=40, storage=MemoryStorage())
    for end in range(1, 31):
        model.serve(range(end))
        model.cache.drain()
    backups = model.cache._backups
    store, is_to_store = backups.store, backups._is_to_store
    looked_at: list[int] = []

    def note(node: TreeNode) -> bool:
        looked_at.append(node.depth)
        return bool(is_to_store(node))

    def noted_store(node: TreeNode) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(backups, "_is_to_store", note)
            store(node)

    monkeypatch.setattr(backups, "store", noted_store)
    model.serve(range(31))
    model.cache.drain()
    assert looked_at == [31]
    assert model.storage.stats().pages == 31
    model.empty()
