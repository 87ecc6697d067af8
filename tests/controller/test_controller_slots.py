"""Slots that go back: by eviction, by cancels, and at the end."""

import threading

import pytest
import torch

from hicache_controller import indices
from hicache_controller.events import HostSignal


def test_evicting_the_rows_of_a_queued_write_starts_it_first(make_stack):
    stack = make_stack()
    device = stack.alloc(4)
    rows = stack.compute(device)
    host = stack.controller.write(device, node_id=1)
    stack.controller.evict_device(device)
    stack.compute(stack.alloc(32))
    assert stack.controller.poll_writes(wait=True)[0].node_ids == (1,)
    stack.allocator.clear()
    assert stack.same(stack.loaded(host), rows)


def test_loading_or_storing_slots_of_a_queued_write_starts_it_first(make_stack):
    stack = make_stack(storage=True)
    device = stack.alloc(4)
    rows = stack.compute(device)
    host = stack.controller.write(device, node_id=1)
    target = stack.controller.load(host, node_id=2)
    stack.controller.start_loading()
    assert stack.controller.poll_loads(wait=True)[0].error is None
    assert stack.same(stack.rows(target), rows)
    again = stack.controller.write(device, node_id=3)
    keys = stack.keys(4)
    stack.controller.backup(again, keys, node_id=3)
    assert stack.controller.poll_backups(wait=True)[0].stored_pages == 4
    fresh = stack.group.alloc(16)
    assert stack.controller.prefetch(fresh, keys, request_id="r").wait() == 4
    assert stack.same(stack.loaded(fresh), rows)


def test_an_error_while_the_uses_of_waiting_writes_are_found_is_over_with_the_next_question(make_stack, monkeypatch):
    stack = make_stack()
    devices = [stack.alloc(2) for _ in range(3)]
    rows = [stack.compute(device) for device in devices]
    hosts = [stack.controller.write(device, node_id=node) for node, device in enumerate(devices)]
    real, failing = indices.pages_of, iter([False, False, True])

    def fail_once(given, page_size):
        if next(failing, False):
            raise MemoryError
        return real(given, page_size)

    monkeypatch.setattr(indices, "pages_of", fail_once)
    with pytest.raises(MemoryError):
        stack.controller.check_integrity()
    stack.controller.check_integrity()
    assert stack.controller.cancel_write(0)
    stack.controller.evict_device(devices[2])  # which starts what still waits
    assert stack.controller.poll_writes(wait=True)[0].node_ids == (1, 2)
    for host, expected in zip(hosts[1:], rows[1:], strict=True):
        assert stack.same(stack.loaded(host), expected)


def test_slots_of_a_queued_load_cannot_be_written_or_evicted(make_stack):
    stack = make_stack()
    host, rows = stack.written(2)
    device = stack.controller.load(host, node_id=7)
    for call in (
        lambda: stack.controller.evict_device(device),
        lambda: stack.controller.write(device, node_id=8),
    ):
        with pytest.raises(RuntimeError, match="load of node 7 that was not started"):
            call()
    stack.controller.start_loading()
    stack.controller.poll_loads(wait=True)
    assert stack.same(stack.rows(device), rows)
    assert stack.used() == (2, 2)


def test_host_slots_in_flight_are_freed_once_nothing_uses_them(make_stack):
    stack = make_stack()
    host, _ = stack.written(6)
    gate = stack.host_pool.load_gates[1]
    gate.close()
    stack.controller.load(host[4:16], node_id=1)
    stack.controller.start_loading()
    assert stack.controller.evict_host(host) == 12
    with pytest.raises(ValueError, match="which was given back"):
        stack.controller.evict_host(host[4:8])
    with pytest.raises(ValueError, match="which was given back"):
        stack.controller.load(host[8:12], node_id=2)
    assert stack.used() == (3, 3)
    gate.open()
    stack.controller.poll_loads(wait=True)
    assert stack.used() == (3, 0)
    assert stack.controller.metrics.snapshot().total("deferred_frees") == 3


NOT_OWNED = {
    "given back": (lambda kept, gone: gone, "free already"),
    "never allocated": (lambda kept, gone: torch.arange(100, 104), "index 100 is free already"),
    "in part given back": (lambda kept, gone: torch.cat((kept, gone)), "free already"),
    "no whole page": (lambda kept, gone: kept[[1, 2, 3, 4]], "is not slot 0"),
    "twice": (lambda kept, gone: torch.cat((kept, kept[:4])), "more than once"),
}


@pytest.mark.parametrize("case", NOT_OWNED)
@pytest.mark.parametrize("call", ["load", "backup", "prefetch"])
def test_host_slots_that_are_not_owned_whole_pages_are_refused_and_nothing_changes(make_stack, call, case):
    stack = make_stack(storage=True)
    controller = stack.controller
    kept, rows = stack.written(3)
    gone, _ = stack.written(1)
    controller.evict_host(gone)
    make, message = NOT_OWNED[case]
    slots = make(kept, gone)
    keys = stack.keys(len(slots) // stack.page_size)
    calls = {
        "load": lambda: controller.load(slots, node_id=1),
        "backup": lambda: controller.backup(slots, keys, node_id=1),
        "prefetch": lambda: controller.prefetch(slots, keys, request_id="r"),
    }
    with pytest.raises(ValueError, match=f"host_indices are not pages .* pool kv: .*{message}"):
        calls[call]()
    assert controller.start_loading() == -1
    assert controller.poll_backups(wait=True) == []
    assert controller.storage_exists(keys) == 0
    assert stack.used() == (0, 3)
    assert stack.same(stack.loaded(kept), rows)


def test_device_slots_of_a_write_are_refused_where_one_is_there_twice(make_stack):
    stack = make_stack()
    device = stack.alloc(8)
    for bad in (
        torch.tensor([0, 0, 1, 2]),
        torch.cat((device[8:16], device[12:16])),
        device.flip(0)[[*range(8), 3, 9, 10, 11]],
    ):
        with pytest.raises(ValueError, match=r"device_indices has slot .* twice; accepted is each slot once"):
            stack.controller.write(bad, node_id=1)
    assert stack.controller.start_writing() is None
    assert stack.used() == (8, 0)


@pytest.mark.parametrize("scattered", [False, True], ids=["pages_in_any_order", "slots_in_any_order"])
def test_device_slots_of_a_write_may_lie_anywhere(make_stack, scattered):
    stack = make_stack()
    device = stack.alloc(6)
    order = torch.randperm(24) if scattered else (torch.randperm(6)[:, None] * 4 + torch.arange(4)).flatten()
    rows = stack.compute(device[order])
    host = stack.controller.write(device[order], node_id=1)
    stack.controller.start_writing()
    assert stack.controller.poll_writes(wait=True)[0].error is None
    assert stack.same(stack.loaded(host), rows)


def test_a_bad_free_raises_and_changes_nothing(make_stack):
    stack = make_stack()
    host, _ = stack.written(4)
    gate = stack.host_pool.load_gates[0]
    gate.close()
    stack.controller.load(host[:8], node_id=1)
    stack.controller.start_loading()
    for bad in (torch.cat((host, host[:4])), host[:3], torch.cat((host, torch.arange(400, 404)))):
        with pytest.raises(ValueError):
            stack.controller.evict_host(bad)
        assert stack.used() == (2, 4)
    gate.open()
    stack.controller.poll_loads(wait=True)
    assert stack.controller.evict_host(host) == 16


@pytest.mark.parametrize("fails", [True, False])
def test_host_slots_given_back_while_they_are_written_are_freed_once(make_stack, fails):
    stack = make_stack()
    device = stack.alloc(4)
    gate = stack.host_pool.write_gate
    gate.close()
    gate.failures = int(fails)
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    gate.wait_entered()
    assert stack.controller.evict_host(host[:8]) == 0
    gate.open()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert (ack.error is not None) is fails
    assert stack.used() == (4, 0 if fails else 2)


@pytest.mark.parametrize("synchronous", [True, False])
def test_host_slots_of_a_failed_write_nobody_has_heard_of_are_not_handed_out_again(make_stack, synchronous):
    stack = make_stack(host_pages=4, synchronous=synchronous)
    stack.host_pool.write_gate.failures = 1
    host = stack.controller.write(stack.alloc(3), node_id=1)
    stack.controller.start_writing().host_ready.synchronize()
    assert stack.controller.evict_host(host) == 0
    assert stack.controller.write(stack.alloc(2), node_id=2) is None
    (ack,) = stack.controller.poll_writes()
    assert "injected" in str(ack.error)
    assert stack.used()[1] == 0
    again, rows = stack.written(4)
    assert stack.same(stack.loaded(again), rows)


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_cancelled_operation_that_was_queued_leaves_nothing(make_stack, synchronous):
    stack = make_stack(synchronous=synchronous)
    host, rows = stack.written(3)
    kept = stack.controller.load(host[:4], node_id=1)
    stack.controller.load(host[4:], node_id=2)
    assert stack.controller.cancel_load(2)
    assert not stack.controller.cancel_load(2)
    assert stack.used() == (1, 3)
    stack.controller.start_loading()
    (ack,) = stack.controller.poll_loads(wait=True)
    assert ack.node_ids == (1,)
    assert stack.same(stack.rows(kept), [each[:4] for each in rows])
    device = stack.alloc(1)
    stack.controller.write(device, node_id=3)
    assert stack.controller.cancel_write(3)
    assert stack.controller.start_writing() is None
    assert stack.used() == (2, 3)


def test_a_load_cancelled_on_its_way_stops_and_gives_its_slots_back(make_stack):
    stack = make_stack()
    host, rows = stack.written(4)
    stack.host_pool.load_gates[1].close()
    stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    stack.host_pool.load_gates[1].wait_entered()
    assert stack.controller.cancel_load(1)
    assert stack.used() == (4, 4)
    stack.host_pool.load_gates[1].open()
    assert stack.controller.poll_loads(wait=True) == []
    assert stack.used() == (0, 4)
    assert stack.host_pool.load_gates[2].calls == 0
    assert stack.same(stack.loaded(host), rows)


def test_cancelling_one_node_of_a_merged_load_leaves_the_others(make_stack):
    stack = make_stack()
    host, rows = stack.written(4)
    stack.host_pool.load_gates[0].close()
    kept = stack.controller.load(host[:8], node_id=1)
    stack.controller.load(host[8:], node_id=2)
    stack.controller.start_loading()
    stack.controller.cancel_load(2)
    stack.host_pool.load_gates[0].open()
    (ack,) = stack.controller.poll_loads(wait=True)
    assert (ack.node_ids, ack.error) == ((1,), None)
    assert stack.same(stack.rows(kept), [each[:8] for each in rows])
    assert stack.used() == (2, 4)


def test_a_thousand_cancels_leak_nothing(make_stack):
    stack = make_stack()
    host, rows = stack.written(4)
    device = stack.alloc(2)
    for number in range(1000):
        stack.controller.load(host, node_id=number)
        if number % 3:
            stack.controller.start_loading()
        stack.controller.cancel_load(number)
        stack.controller.write(device, node_id=number)
        if number % 2:
            stack.controller.start_writing()
        stack.controller.cancel_write(number)
        stack.controller.poll_loads()
        stack.controller.poll_writes()
    stack.controller.engine.drain()
    assert stack.controller.poll_loads() == stack.controller.poll_writes() == []
    assert stack.used() == (2, 4)
    assert len(stack.controller.engine.in_flight) == 0
    assert stack.same(stack.loaded(host), rows)


def test_shutdown_finishes_what_runs_cancels_what_waits_and_stops_the_threads(make_stack):
    before = set(threading.enumerate())
    stack = make_stack(storage=True)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert names == {
        "hicache-device-to-host",
        "hicache-host-to-device",
        "hicache-backup",
        "hicache-prefetch",
        "hicache-lookup",
    }
    host, _ = stack.written(2)
    running, waiting = stack.alloc(3), stack.alloc(1)
    stack.controller.write(running, node_id=1)
    stack.controller.start_writing()
    stack.controller.write(waiting, node_id=2)
    stack.controller.load(host, node_id=3)
    assert stack.controller.shutdown()
    assert set(threading.enumerate()) <= before
    assert stack.used() == (4, 5)
    assert [ack.node_ids for ack in stack.controller.poll_writes(wait=True)] == [(1,)]
    assert stack.controller.poll_loads(wait=True) == []
    assert stack.controller.shutdown()
    for call in (
        lambda: stack.controller.write(running, node_id=1),
        lambda: stack.controller.load(host, node_id=1),
        stack.controller.start_writing,
        stack.controller.start_loading,
        lambda: stack.controller.backup(host, stack.keys(2), node_id=1),
        lambda: stack.controller.prefetch(host, stack.keys(2), request_id="r"),
        lambda: stack.controller.attach_storage_backend(stack.storage),
        stack.controller.reset,
    ):
        with pytest.raises(RuntimeError, match="the controller is closed"):
            call()


def test_shutdown_gives_up_on_a_write_whose_rows_never_come(make_stack):
    stack = make_stack()
    device = stack.alloc(2)
    stack.controller.write(device, node_id=1, ready_event=HostSignal())
    stack.controller.start_writing()
    assert not stack.controller.shutdown(timeout=0)
    stack.controller.engine.drain()
    (ack,) = stack.controller.poll_writes()
    assert "closed before" in str(ack.error)
    assert stack.used() == (2, 0)


def test_reset_frees_every_host_slot_and_device_slots_of_loads(make_stack):
    stack = make_stack(storage=True)
    host, _ = stack.written(4)
    device = stack.alloc(2)
    stack.controller.write(device, node_id=1)
    stack.controller.load(host[:4], node_id=2)
    stack.controller.start_loading()
    stack.controller.load(host[4:8], node_id=3)
    stack.controller.start_writing()
    stack.controller.backup(host, stack.keys(4), node_id=4)
    stack.controller.reset()
    assert stack.used() == (2, 0)
    assert stack.controller.poll_writes() == stack.controller.poll_loads() == stack.controller.poll_backups() == []
    host, rows = stack.written(8)
    assert stack.same(stack.loaded(host), rows)
