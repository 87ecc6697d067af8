"""Storage that hangs: a miss, waited for once, and what it holds stays in flight until it answers."""

import math
import threading

import pytest

from hicache_controller.events import HostSignal
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_settings import StorageSettings


def test_storage_that_hangs_is_a_miss_and_is_left_alone_for_a_while(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(back_off_seconds=1000))
    keys, _ = stack.stored(2)
    stack.wait_at_most(0.01)
    stack.storage.exists_gate.close()
    assert stack.controller.storage_exists(keys) == 0
    lookup = stack.controller.storage._attached.lookup
    lookup._pause._pause = lookup._pause._until = math.inf
    assert stack.controller.storage_exists(keys) == 0
    stack.storage.exists_gate.open()
    lookup.worker.drain(30)
    assert stack.controller.storage_exists(keys) == 0
    assert stack.storage.exists_gate.calls == 1
    assert stack.controller.metrics.snapshot().total("storage_timeouts", operation="exists") == 1
    lookup._pause.succeeded()
    stack.wait_at_most(30)
    assert stack.controller.storage_exists(keys) == 2


def test_no_call_waits_for_storage_while_a_lookup_that_hangs_is_out(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(back_off_seconds=0))
    keys, _ = stack.stored(2)
    stack.wait_at_most(0.01)
    stack.storage.exists_gate.close()
    assert [stack.controller.storage_exists(keys) for _ in range(5)] == [0] * 5
    assert stack.controller.metrics.snapshot().total("storage_timeouts", operation="exists") == 1
    stack.storage.exists_gate.open()
    stack.wait_at_most(30)
    assert stack.controller.storage_exists(keys) == 2


def test_a_lookup_that_a_scheduler_gave_up_is_waited_for_by_who_has_the_time(make_stack, in_thread):
    stack = make_stack(storage=True)
    keys, _ = stack.stored(2)
    stack.wait_at_most(0)
    gate, found = stack.storage.exists_gate, []
    gate.close()
    assert stack.controller.storage_exists(keys) == 0
    gate.wait_entered()

    def wait():
        stack.controller.adopt_thread()
        with stack.controller.storage.one_call(30):
            found.append(stack.controller.storage_exists(keys))

    thread = in_thread(wait)
    gate.open()
    thread.join()
    stack.controller.adopt_thread()
    assert found == [2]


def test_a_backup_that_hangs_is_waited_for_once_and_within_the_bound(make_stack):
    stack = make_stack(storage=True)
    host, _ = stack.written(2)
    stack.wait_at_most(0.01)
    stack.storage.set_gate.close()
    stack.controller.backup(host, stack.keys(2), node_id=5)
    assert [stack.controller.poll_backups(wait=True) for _ in range(5)] == [[]] * 5
    assert stack.controller.metrics.snapshot().total("storage_timeouts", operation="backup") == 1
    assert stack.controller.evict_host(host) == 0
    stack.storage.set_gate.open()
    stack.controller.storage._attached.backups.drain(30)
    (ack,) = stack.controller.poll_backups(wait=True)
    assert (ack.node_id, ack.stored_pages, ack.error) == (5, 2, None)
    assert stack.used() == (0, 0)


def test_a_slow_backup_is_drained_for_as_long_as_storage_gets_on(make_stack, monkeypatch):
    stack = make_stack(storage=True)
    storage = stack.controller.storage
    host, _ = stack.written(2)
    stack.storage.set_gate.close()
    stack.controller.backup(host, stack.keys(2), node_id=5)
    (backup,) = storage._backups
    synchronize, waits = HostSignal.synchronize, []

    def slow(signal, timeout=None):
        if signal is not backup.host_ready:
            return synchronize(signal, timeout)
        waits.append(timeout)
        if len(waits) < 4:
            storage._attached.calls.backups += 1
            return False
        stack.storage.set_gate.open()
        return synchronize(signal, timeout)

    monkeypatch.setattr(HostSignal, "synchronize", slow)
    with storage.one_call(math.inf):
        (ack,) = stack.controller.poll_backups(wait=True)
    assert waits == [storage.settings.timeout_seconds] * 4
    assert (ack.stored_pages, ack.error) == (2, None)


def test_a_cancelled_backup_keeps_the_pages_of_the_call_that_runs_alone(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(batch_pages=2))
    host, rows = stack.written(8)
    keys = stack.keys(8)
    gate = stack.storage.set_gate
    gate.close()
    stack.controller.backup(host[:20], keys[:5], node_id=1)
    stack.controller.backup(host[20:], keys[5:], node_id=2)
    gate.wait_entered()
    assert [stack.controller.cancel_backup(node) for node in (1, 2, 3)] == [True, True, False]
    # What the running call reads is not free before it ends, whatever else is asked for.
    assert stack.controller.evict_host(host) == 24
    fresh = stack.group.alloc(stack.host_pool.available_size())
    assert not set(fresh.tolist()) & set(host[:8].tolist())
    pages = fresh // 4
    for page in set(pages.tolist()):
        for view in stack.host_pool.page_memory(page):
            view[:] = bytes(len(view))
    gate.open()
    stack.controller.storage._attached.backups.drain(30)
    assert stack.controller.poll_backups() == []
    assert stack.controller.metrics.snapshot().total("backup_pages") == 2
    assert stack.controller.metrics.snapshot().total("backup_skipped_pages") == 6
    stack.group.free(fresh)
    assert stack.used() == (0, 0)
    got = stack.group.alloc(12)
    assert stack.controller.prefetch(got, keys[:3], request_id="r").wait() == 2
    assert stack.same(stack.loaded(got[:8]), [each[:8] for each in rows])


def test_reset_gives_up_on_a_storage_that_hangs_and_frees_nothing_it_uses(make_stack):
    stack = make_stack(storage=True)
    host, _ = stack.written(4)
    stack.storage.set_gate.close()
    stack.controller.backup(host, stack.keys(4), node_id=1)
    stack.storage.set_gate.wait_entered()
    with pytest.raises(TimeoutError, match=r"still uses slots after 0\.01 s"):
        stack.controller.reset(timeout=0.01)
    assert stack.used() == (0, 4)
    stack.storage.set_gate.open()
    stack.controller.reset(timeout=30)
    assert stack.used() == (0, 0)


@pytest.mark.parametrize("what", ["detach", "shutdown"])
def test_ending_waits_for_a_storage_that_hangs_once_for_all_its_workers(make_stack, monkeypatch, what):
    stack = make_stack(storage=True)
    controller = stack.controller
    host, _ = stack.written(2)
    stack.storage.set_gate.close()
    controller.backup(host, stack.keys(2), node_id=1)
    stack.storage.set_gate.wait_entered()
    workers, waits = controller.storage._attached.workers, []
    for worker in workers:
        close = worker.close
        monkeypatch.setattr(worker, "close", lambda timeout, close=close: (waits.append(timeout), close(timeout))[1])
    end = controller.detach_storage_backend if what == "detach" else controller.shutdown
    end(timeout=0.25)
    assert len(waits) == 3
    assert 0.25 >= waits[0] >= waits[1] >= waits[2]
    assert waits[2] < 0.05
    stack.storage.set_gate.open()


def test_acks_of_a_new_storage_do_not_wait_for_one_that_hung_when_it_was_detached(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(timeout_seconds=0.01))
    host, _ = stack.written(4)
    stack.storage.set_gate.close()
    stack.controller.backup(host[:8], stack.keys(2), node_id=1)
    stack.storage.set_gate.wait_entered()
    stack.controller.detach_storage_backend()
    stack.controller.attach_storage_backend(MemoryStorage())
    stack.controller.backup(host[8:], stack.keys(2), node_id=2)
    acks = []
    while len(acks) < 2:
        acks += stack.controller.poll_backups(wait=True)
    assert [(ack.node_id, ack.stored_pages) for ack in acks] == [(1, 0), (2, 2)]
    assert "detached" in str(acks[0].error)
    assert stack.controller.evict_host(host) == 8
    stack.storage.set_gate.open()


def test_slots_of_a_prefetch_that_hangs_stay_in_flight_until_storage_answers(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(timeout_seconds=0.01))
    keys, _ = stack.stored(2)
    stack.storage.get_gate.close()
    host = stack.group.alloc(8)
    operation = stack.controller.prefetch(host, keys, request_id="r")
    assert operation.wait() == 0
    assert stack.controller.evict_host(host) == 0
    assert stack.used() == (0, 2)
    stack.storage.get_gate.open()
    operation.host_ready.synchronize()
    stack.controller.poll_backups()
    assert stack.used() == (0, 0)
    assert operation.completed_pages == 0


def test_what_came_before_a_prefetch_hung_counts_and_can_be_loaded_at_once(make_stack):
    settings = StorageSettings(batch_pages=1, prefetch_policy="wait_complete")
    stack = make_stack(storage=True, storage_settings=settings)
    keys, rows = stack.stored(3)
    stack.wait_at_most(0.01)
    host = stack.group.alloc(12)
    batch_get, entered, opened = stack.storage.batch_get, threading.Event(), threading.Event()

    def hang_at_the_second(names, *arguments, **options):
        if names != keys[:1]:
            entered.set()
            assert opened.wait(30)
        return batch_get(names, *arguments, **options)

    stack.storage.batch_get = hang_at_the_second
    operation = stack.controller.prefetch(host, keys, request_id="r")
    assert entered.wait(30)
    assert stack.controller.finish_prefetch(operation) == 1
    assert stack.same(stack.loaded(host[:4]), [each[:4] for each in rows])
    assert stack.controller.evict_host(host[4:]) == 4
    opened.set()
    operation.host_ready.synchronize()
    stack.controller.poll_backups()
    assert operation.completed_pages == 1
    assert stack.used() == (0, 1)


def test_a_prefetch_that_makes_no_progress_lets_its_request_go(make_stack):
    settings = StorageSettings(timeout_seconds=1e-6, prefetch_policy="wait_complete")
    stack = make_stack(storage=True, storage_settings=settings)
    keys, _ = stack.stored(2)
    stack.wait_at_most(0)
    stack.storage.get_gate.close()
    operation = stack.controller.prefetch(stack.group.alloc(8), keys, request_id="r")
    while not stack.controller.prefetch_ready(operation):
        pass
    assert stack.controller.finish_prefetch(operation) == 0
    stack.storage.get_gate.open()
