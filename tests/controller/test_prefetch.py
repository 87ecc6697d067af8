"""Backup to and prefetch from storage: threads, policies, limits, faults, attach and detach."""

import asyncio
import threading

import pytest
import torch

from hicache_controller.devices import CpuDevice
from hicache_controller.policies import PrefetchPolicy
from hicache_controller.storage.contract import FaultyStorage
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_settings import StorageSettings
from hicache_controller.storage_tasks import StorageTask
from hicache_controller.worker import Worker, WorkerStoppedError
from hicache_pools.group import PoolEntry
from hicache_pools.host_pools import MHATokenToKVPoolHost

QUICK = StorageSettings(retry_seconds=0, batch_pages=2)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_survive_in_storage_bit_for_bit(make_stack, layout, synchronous):
    stack = make_stack(layout=layout, synchronous=synchronous, storage=True, storage_settings=QUICK)
    keys, rows = stack.stored(5, node_id=9)
    assert stack.controller.storage_exists([*keys, *stack.keys(2)]) == 5
    host = stack.group.alloc(20)
    operation = stack.controller.prefetch(host, keys, request_id="r")
    assert operation.wait() == operation.completed_pages == 5
    assert operation.done
    assert stack.same(stack.loaded(host), rows)


def test_acks_of_backups_come_in_order_and_once(make_stack):
    stack = make_stack(storage=True)
    host, _ = stack.written(6)
    stack.storage.set_gate.close()
    for node in range(3):
        stack.controller.backup(host[node * 8 : node * 8 + 8], stack.keys(2), node_id=node)
    assert stack.controller.poll_backups() == []
    stack.storage.set_gate.open()
    acks = []
    while len(acks) < 3:
        acks += stack.controller.poll_backups(wait=True)
    assert [(ack.node_id, ack.stored_pages, ack.error) for ack in acks] == [(0, 2, None), (1, 2, None), (2, 2, None)]
    assert stack.controller.poll_backups(wait=True) == []


# Holes and cancels


@pytest.mark.parametrize("hole", [0, 1, 2, 3, 4])
def test_a_hole_ends_the_hit(make_stack, hole):
    stack = make_stack(storage=True, storage_settings=QUICK)
    keys, rows = stack.stored(5)
    wanted = list(keys)
    wanted[hole] = stack.keys(1)[0]
    host = stack.group.alloc(20)
    assert stack.controller.prefetch(host, wanted, request_id="r").wait() == hole
    if hole:
        assert stack.same(stack.loaded(host[: hole * 4]), [each[: hole * 4] for each in rows])
    missing = stack.controller.metrics.snapshot().total("prefetch_missing_pages")
    assert missing == 5 - hole


def test_a_cancelled_prefetch_keeps_what_has_come(make_stack):
    stack = make_stack(storage=True, storage_settings=QUICK)
    keys, rows = stack.stored(6)
    gate = stack.storage.get_gate
    gate.close()
    host = stack.group.alloc(24)
    operation = stack.controller.prefetch(host, keys, request_id="r")
    gate.wait_entered()
    operation.cancel()
    assert not operation.done
    # No call to storage uses these, and none will.
    assert stack.controller.evict_host(host[8:]) == 16
    gate.open()
    assert operation.wait() == 2
    assert stack.used() == (0, 2)
    assert stack.same(stack.loaded(host[:8]), [each[:8] for each in rows])


def test_a_prefetch_does_not_hold_up_writes_loads_or_backups(make_stack):
    stack = make_stack(storage=True)
    keys, _ = stack.stored(2)
    stack.storage.get_gate.close()
    host = stack.group.alloc(8)
    operation = stack.controller.prefetch(host, keys, request_id="r")
    stack.storage.get_gate.wait_entered()
    other, rows = stack.written(3)
    assert stack.same(stack.loaded(other), rows)
    more = stack.keys(3)
    stack.controller.backup(other, more, node_id=1)
    assert stack.controller.poll_backups(wait=True)[0].stored_pages == 3
    assert stack.controller.storage_exists(more) == 3
    stack.storage.get_gate.open()
    assert operation.wait() == 2


def test_a_rank_without_room_takes_part_with_no_pages(make_stack):
    stack = make_stack(storage=True)
    operation = stack.controller.prefetch(None, stack.keys(3), request_id="r")
    assert operation.done
    assert operation.wait() == 0


# Policies


def gated_prefetch(make_stack, policy, **settings):
    settings = StorageSettings(prefetch_policy=policy, batch_pages=2, retry_seconds=0, **settings)
    stack = make_stack(storage=True, storage_settings=settings)
    keys, _ = stack.stored(4)
    gate = stack.storage.get_gate
    gate.close()
    operation = stack.controller.prefetch(stack.group.alloc(16), keys, request_id="r")
    gate.wait_entered()
    return stack, gate, operation


def test_best_effort_takes_what_is_there(make_stack, monkeypatch):
    stack, gate, operation = gated_prefetch(make_stack, PrefetchPolicy.BEST_EFFORT)
    assert stack.controller.prefetch_ready(operation)
    cancel = operation.cancel

    def cancel_and_open():
        cancel()
        gate.open()

    monkeypatch.setattr(operation, "cancel", cancel_and_open)
    assert stack.controller.finish_prefetch(operation) == 2


def test_wait_complete_waits_for_the_end(make_stack):
    stack, gate, operation = gated_prefetch(make_stack, "wait_complete")
    assert not stack.controller.prefetch_ready(operation)
    gate.open()
    operation.host_ready.synchronize()
    assert stack.controller.prefetch_ready(operation)
    assert stack.controller.finish_prefetch(operation) == 4


def test_timeout_ends_a_prefetch_that_takes_too_long(make_stack):
    limits = {"prefetch_timeout_seconds": 0, "prefetch_timeout_seconds_per_page": 0, "timeout_seconds": 0.01}
    stack, gate, operation = gated_prefetch(make_stack, "timeout", **limits)
    assert stack.controller.prefetch_ready(operation)
    assert stack.controller.finish_prefetch(operation) == 0
    assert not operation.done
    gate.open()
    operation.host_ready.synchronize()
    assert operation.completed_pages == 0


def test_timeout_does_not_end_a_prefetch_that_has_time(make_stack):
    stack, gate, operation = gated_prefetch(make_stack, "timeout", prefetch_timeout_seconds=1000)
    assert not stack.controller.prefetch_ready(operation)
    gate.open()
    assert stack.controller.finish_prefetch(operation) == 4


# Limits


def test_backup_blocks_while_the_queue_is_full(make_stack, in_thread):
    stack = make_stack(storage=True, storage_settings=StorageSettings(backup_queue_pages=3))
    host, _ = stack.written(6)
    stack.storage.set_gate.close()
    stack.controller.backup(host[:8], stack.keys(2), node_id=0)
    stack.storage.set_gate.wait_entered()
    stack.controller.backup(host[8:16], stack.keys(2), node_id=1)
    assert stack.controller.metrics.snapshot().gauges["backup_queue_pages"] == 2
    returned = threading.Event()

    def third():
        stack.controller.adopt_thread()
        stack.controller.backup(host[16:], stack.keys(2), node_id=2)
        returned.set()

    thread = in_thread(third)
    assert not returned.is_set()
    stack.storage.set_gate.open()
    thread.join()
    stack.controller.adopt_thread()
    acks = []
    while len(acks) < 3:
        acks += stack.controller.poll_backups(wait=True)
    assert [ack.stored_pages for ack in acks] == [2, 2, 2]


def test_a_backup_that_finds_no_room_in_time_fails_and_frees_its_slots(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(backup_queue_pages=1))
    host, _ = stack.written(3)
    stack.wait_at_most(0.01)
    stack.storage.set_gate.close()
    for node in range(3):
        stack.controller.backup(host[node * 4 : node * 4 + 4], stack.keys(1), node_id=node)
    assert stack.controller.evict_host(host[8:]) == 4
    stack.storage.set_gate.open()
    acks = []
    while len(acks) < 3:
        acks += stack.controller.poll_backups(wait=True)
    assert [ack.stored_pages for ack in acks] == [1, 1, 0]
    assert "the backup queue of 1 pages stayed full" in str(acks[2].error)
    assert stack.controller.metrics.snapshot().total("backup_skipped_pages", pool="kv") == 1


def test_a_prefetch_that_finds_no_room_has_no_pages(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(prefetch_queue_pages=1))
    keys, _ = stack.stored(1)
    stack.storage.get_gate.close()
    first = stack.controller.prefetch(stack.group.alloc(4), keys, request_id="running")
    stack.storage.get_gate.wait_entered()
    second = stack.controller.prefetch(stack.group.alloc(4), keys, request_id="waiting")
    third = stack.controller.prefetch(stack.group.alloc(4), keys, request_id="refused")
    assert third.done
    assert third.wait() == 0
    stack.storage.get_gate.open()
    assert (first.wait(), second.wait()) == (1, 1)


# Faults


def test_a_page_that_fails_to_store_is_tried_again(make_stack):
    stack = make_stack(storage=True, storage_settings=QUICK)
    host, _ = stack.written(5)
    stack.storage.set_gate.failures = 2
    keys = stack.keys(5)
    stack.controller.backup(host, keys, node_id=1)
    assert stack.controller.poll_backups(wait=True)[0].stored_pages == 5
    snapshot = stack.controller.metrics.snapshot()
    assert snapshot.total("backup_retries") == 2
    assert snapshot.total("storage_errors", operation="backup") == 2


def test_a_page_that_keeps_failing_ends_the_backup_after_a_complete_prefix(make_stack, monkeypatch):
    stack = make_stack(storage=True, storage_settings=QUICK)
    host, _ = stack.written(6)
    keys = stack.keys(6)
    store = stack.storage.batch_set
    calls = []

    def all_but_one(names, *args, **kwargs):
        calls.append(list(names))
        return [ok and name != keys[3] for ok, name in zip(store(names, *args, **kwargs), names, strict=True)]

    monkeypatch.setattr(stack.storage, "batch_set", all_but_one)
    stack.controller.backup(host, keys, node_id=1)
    (ack,) = stack.controller.poll_backups(wait=True)
    assert ack.stored_pages == 3
    assert "3 of 6 pages" in str(ack.error)
    assert calls == [keys[0:2], keys[2:4], *[keys[3:4]] * 2]
    assert stack.controller.metrics.snapshot().total("backup_failed_pages") == 3


def test_a_load_from_storage_that_fails_is_no_hit(make_stack):
    stack = make_stack(storage=True, storage_settings=QUICK)
    keys, rows = stack.stored(4)
    stack.storage.get_gate.failures = 1
    host = stack.group.alloc(16)
    assert stack.controller.prefetch(host, keys, request_id="r").wait() == 0
    assert stack.controller.prefetch(host, keys, request_id="r").wait() == 4
    assert stack.same(stack.loaded(host), rows)
    stack.storage.exists_gate.failures = 1
    assert stack.controller.storage_exists(keys) == 0
    assert stack.controller.storage_exists(keys) == 4


def test_a_backup_whose_wait_for_room_is_interrupted_leaves_nothing(make_stack, monkeypatch):
    stack = make_stack(storage=True, storage_settings=StorageSettings(backup_queue_pages=1))
    host, _ = stack.written(3)
    stack.storage.set_gate.close()
    for node in range(2):
        stack.controller.backup(host[node * 4 : node * 4 + 4], stack.keys(1), node_id=node)
    wait_for = threading.Condition.wait_for

    def interrupted(condition, *arguments):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait_for(condition, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stack.controller.backup(host[8:], stack.keys(1), node_id=2)
    assert stack.controller.evict_host(host[8:]) == 4
    stack.storage.set_gate.open()
    acks = []
    while len(acks) < 2:
        acks += stack.controller.poll_backups(wait=True)
    assert [ack.node_id for ack in acks] == [0, 1]
    assert not stack.controller.poll_backups(wait=True)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_storage_that_loses_and_garbles_pages_never_loads_a_wrong_byte(make_stack, every):
    stack = make_stack(storage_settings=StorageSettings(retry_seconds=0, backup_retries=0, batch_pages=2))
    backend = FaultyStorage(MemoryStorage(), fail_store_every=every, fail_load_every=every + 1)
    stack.controller.attach_storage_backend(backend)
    kept = []
    for node in range(12):
        host, rows = stack.written(4)
        keys = stack.keys(4)
        stack.controller.backup(host, keys, parents=[None, *keys[:-1]], node_id=node)
        (ack,) = stack.controller.poll_backups(wait=True)
        assert (ack.error is None) is (ack.stored_pages == 4)
        assert stack.controller.storage_exists(keys) == ack.stored_pages
        stack.controller.evict_host(host)
        kept.append((keys, rows, ack.stored_pages))
    assert any(pages < 4 for _, _, pages in kept)
    served = 0
    for keys, rows, pages in kept:
        host = stack.group.alloc(16)
        got = stack.controller.prefetch(host, keys, request_id="r").wait()
        assert got <= pages
        served += got
        if got:
            assert stack.same(stack.loaded(host[: got * 4]), [each[: got * 4] for each in rows])
        stack.controller.evict_host(host)
    assert 0 < served < 48
    assert stack.used() == (0, 0)


# Attach and detach


class TensorStorage:
    """An engine's own backend, which takes and gives tensors."""

    def __init__(self):
        self.pages = {}
        self.pools = {}

    def register_mem_pool_host(self, pool, name="kv"):
        self.pools[name] = pool

    def batch_exists(self, keys, *, name="kv"):
        return next((n for n, key in enumerate(keys) if (name, key) not in self.pages), len(keys))

    def get(self, key, *, name="kv"):
        return self.pages.get((name, key))

    def set(self, key, page, *, parent=None, name="kv"):
        self.pages[name, key] = page
        return True


def test_a_backend_of_tensors_works_too(make_stack):
    stack = make_stack()
    backend = TensorStorage()
    stack.controller.attach_storage_backend(backend)
    assert backend.pools == {"kv": stack.host_pool}
    keys, rows = stack.stored(4)
    assert stack.controller.storage_exists(keys) == 4
    host = stack.group.alloc(20)
    assert stack.controller.prefetch(host, [*keys, *stack.keys(1)], request_id="r").wait() == 4
    assert stack.same(stack.loaded(host[:16]), rows)


def test_any_kind_of_backend_can_follow_another(make_stack):
    stack = make_stack()
    host, rows = stack.written(2)
    for backend in (stack.storage, TensorStorage(), stack.storage):
        stack.controller.attach_storage_backend(backend)
        assert stack.controller.has_storage
        assert stack.controller.storage.backend is backend
        keys = stack.keys(2)
        stack.controller.backup(host, keys, parents=[None, keys[0]], node_id=1)
        (ack,) = stack.controller.poll_backups(wait=True)
        assert (ack.stored_pages, ack.error) == (2, None)
        assert backend.batch_exists(keys) == 2
        fetched = stack.group.alloc(8)
        assert stack.controller.prefetch(fetched, keys, request_id="r").wait() == 2
        assert stack.same(stack.loaded(fetched), rows)
        stack.controller.evict_host(fetched)
        assert stack.controller.detach_storage_backend() is backend
        assert not stack.controller.has_storage
        assert stack.controller.storage_exists(keys) == 0


def test_attach_twice_and_detach_without_a_backend_raise_and_change_nothing(make_stack):
    stack = make_stack(storage=True)
    with pytest.raises(RuntimeError, match="a storage backend is attached"):
        stack.controller.attach_storage_backend(TensorStorage())
    assert stack.controller.storage.backend is stack.storage
    stack.controller.detach_storage_backend()
    for call in (
        stack.controller.detach_storage_backend,
        lambda: stack.controller.backup(torch.arange(4), stack.keys(1), node_id=1),
        lambda: stack.controller.prefetch(torch.arange(4), stack.keys(1), request_id="r"),
    ):
        with pytest.raises(RuntimeError, match="no storage backend is attached"):
            call()
    assert stack.controller.storage_exists(stack.keys(1)) == 0


def test_a_backend_that_refuses_a_pool_is_not_attached(make_stack):
    stack = make_stack()
    before = threading.active_count()

    class Refuses(TensorStorage):
        def register_mem_pool_host(self, pool, name="kv"):
            raise OSError("cannot register this memory")

    with pytest.raises(OSError, match="cannot register"):
        stack.controller.attach_storage_backend(Refuses())
    assert not stack.controller.has_storage
    assert threading.active_count() == before
    stack.controller.attach_storage_backend(stack.storage)


def test_every_pool_is_registered_by_name_later_ones_too(make_stack):
    stack = make_stack()

    def pool(name):
        host = MHATokenToKVPoolHost(stack.device_pool, 1, 0, 4, pin_memory=False)
        return PoolEntry(name, host, stack.device_pool, lambda layer: layer)

    early, late = pool("early"), pool("late")
    stack.controller.add_entry(early)
    backend = TensorStorage()
    stack.controller.attach_storage_backend(backend)
    stack.controller.add_entry(late)
    assert backend.pools == {"kv": stack.host_pool, "early": early.host_pool, "late": late.host_pool}
    assert stack.controller.storage_host_pool is stack.host_pool


def test_detach_finishes_backups_and_cancels_prefetches_in_flight(make_stack, in_thread, monkeypatch):
    stack = make_stack(storage=True, storage_settings=QUICK)
    keys, rows = stack.stored(6)
    host, _ = stack.written(4)
    more = stack.keys(4)
    stack.storage.get_gate.close()
    stack.storage.set_gate.close()
    fresh = stack.group.alloc(24)
    running = stack.controller.prefetch(fresh, keys, request_id="r")
    waiting = stack.controller.prefetch(stack.group.alloc(4), keys[:1], request_id="s")
    stack.controller.backup(host[:8], more[:2], node_id=1)
    stack.controller.backup(host[8:], more[2:], node_id=2)
    stack.storage.get_gate.wait_entered()
    stack.storage.set_gate.wait_entered()
    cancel, cancelled = running.cancel, threading.Event()

    def note():
        cancel()
        cancelled.set()

    monkeypatch.setattr(running, "cancel", note)

    def detach_elsewhere():
        stack.controller.adopt_thread()
        stack.controller.detach_storage_backend()

    detach = in_thread(detach_elsewhere)
    assert cancelled.wait(30)
    stack.storage.get_gate.open()
    stack.storage.set_gate.open()
    detach.join()
    stack.controller.adopt_thread()
    assert (running.wait(), waiting.wait()) == (2, 0)
    acks = stack.controller.poll_backups(wait=True)
    assert [(ack.node_id, ack.stored_pages) for ack in acks] == [(1, 2), (2, 2)]
    assert stack.storage.batch_exists(more) == 4
    assert len(stack.controller.engine.in_flight) == 0
    assert stack.same(stack.loaded(fresh[:8]), [each[:8] for each in rows])


def test_shutdown_with_storage_in_flight_loses_no_slot(make_stack):
    stack = make_stack(storage=True, storage_settings=QUICK)
    keys, _ = stack.stored(2)
    host, _ = stack.written(3)
    operation = stack.controller.prefetch(stack.group.alloc(8), keys, request_id="r")
    stack.controller.backup(host, stack.keys(3), node_id=1)
    assert stack.controller.shutdown()
    assert operation.done
    assert [ack.node_id for ack in stack.controller.poll_backups(wait=True)] == [1]
    assert stack.used() == (0, 5)
    assert len(stack.controller.engine.in_flight) == 0


def test_shutdown_ends_a_backup_after_the_batch_that_is_stored(make_stack, in_thread):
    stack = make_stack(storage=True, storage_settings=QUICK)
    host, _ = stack.written(6)
    keys = stack.keys(6)
    stack.storage.set_gate.close()
    stack.controller.backup(host, keys, node_id=1)
    stack.storage.set_gate.wait_entered()
    stopping = stack.controller.storage._attached.calls.stopping
    shutdown = in_thread(stack.controller.shutdown)
    assert stopping.wait(30)
    stack.storage.set_gate.open()
    shutdown.join()
    (ack,) = stack.controller.poll_backups()
    assert ack.stored_pages == 2
    assert "2 of 6 pages" in str(ack.error)


def test_settings_out_of_range_raise():
    for name, value in (("batch_pages", 0), ("timeout_seconds", 0), ("retry_seconds", -1), ("max_wait_seconds", -1)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            StorageSettings(**{name: value})
    with pytest.raises(ValueError, match="eventually"):
        StorageSettings(prefetch_policy="eventually")


class Raises(StorageTask):
    def __init__(self, error):
        super().__init__(calls=None, worker=None)
        self.raised = error

    def _move(self):
        raise self.raised


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [KeyError("broken"), asyncio.CancelledError()])
def test_what_a_storage_operation_raises_is_its_error_and_the_next_one_runs(error, caplog):
    worker = Worker("worker", CpuDevice(), max_pages=10)
    for _ in range(2):
        task = Raises(error)
        assert worker.submit(task)
        assert task.host_ready.synchronize(30)
        assert task.error is error
    assert worker.close(30)
    assert ("not an Exception" in caplog.text) == isinstance(error, asyncio.CancelledError)
    late = Raises(error)
    assert not worker.submit(late)
    assert isinstance(late.error, WorkerStoppedError)
