"""Storage that hangs: a miss, waited for once, and what it holds stays in flight until it answers."""

import time

from hicache_controller.events import HostSignal
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_link import StorageSettings


def test_storage_that_hangs_is_a_miss_and_is_left_alone_for_a_while(make_stack):
    settings = StorageSettings(timeout_seconds=0.01, back_off_seconds=1000)
    stack = make_stack(storage=True, storage_settings=settings)
    keys, _ = stack.stored(2)
    stack.storage.exists_gate.close()
    assert stack.controller.storage_exists(keys) == 0
    calls = stack.storage.exists_gate.calls
    assert stack.controller.storage_exists(keys) == 0
    stack.storage.exists_gate.open()
    stack.controller.storage._attached.lookups.drain(30)
    assert stack.storage.exists_gate.calls == calls + 1
    assert stack.controller.metrics.snapshot().total("storage_timeouts", operation="exists") == 1
    stack.controller.storage._quiet_until = time.monotonic()
    assert stack.controller.storage_exists(keys) == 2


def test_nobody_waits_for_storage_while_a_lookup_that_hangs_is_out(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(timeout_seconds=0.01, back_off_seconds=0))
    keys, _ = stack.stored(2)
    stack.storage.exists_gate.close()
    assert [stack.controller.storage_exists(keys) for _ in range(5)] == [0] * 5
    assert stack.controller.metrics.snapshot().total("storage_timeouts", operation="exists") == 1
    stack.storage.exists_gate.open()
    stack.controller.storage._attached.lookups.drain(30)
    assert stack.controller.storage_exists(keys) == 2


def test_a_backup_that_hangs_is_waited_for_once_and_within_the_timeout(make_stack):
    stack = make_stack(storage=True, storage_settings=StorageSettings(timeout_seconds=0.01))
    host, _ = stack.written(2)
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


def test_a_slow_backup_is_waited_for_as_long_as_it_gets_on(make_stack, monkeypatch):
    stack = make_stack(storage=True)
    host, _ = stack.written(2)
    stack.storage.set_gate.close()
    stack.controller.backup(host, stack.keys(2), node_id=5)
    (backup,) = stack.controller.storage._backups
    synchronize, waits = HostSignal.synchronize, []

    def slow(signal, timeout=None):
        if signal is not backup.host_ready:
            return synchronize(signal, timeout)
        waits.append(timeout)
        if len(waits) < 4:
            backup.stored_pages = len(waits)
            return False
        backup.stored_pages = 0
        stack.storage.set_gate.open()
        return synchronize(signal, timeout)

    monkeypatch.setattr(HostSignal, "synchronize", slow)
    (ack,) = stack.controller.poll_backups(wait=True)
    assert waits == [stack.controller.storage.settings.timeout_seconds] * 4
    assert (ack.stored_pages, ack.error) == (2, None)


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


def test_what_came_before_a_prefetch_hung_does_not_count_as_a_load_would_wait_for_the_rest(make_stack):
    settings = StorageSettings(timeout_seconds=0.01, batch_pages=1, prefetch_policy="wait_complete")
    stack = make_stack(storage=True, storage_settings=settings)
    keys, _ = stack.stored(2)
    stack.storage.get_gate.close()
    host = stack.group.alloc(8)
    operation = stack.controller.prefetch(host, keys, request_id="r")
    stack.storage.get_gate.wait_entered()
    operation.progress(1)
    assert stack.controller.finish_prefetch(operation) == 0
    stack.storage.get_gate.open()
    operation.host_ready.synchronize()
    assert operation.completed_pages == 0
