"""The five hazards on the CPU worker threads, windows held open by gates; a guard taken out must be noticed."""

import pytest

from hicache_controller.events import HostSignal, wait_until_done
from hicache_controller.operations import CacheOperation
from hicache_controller.transfer_handle import Guards
from hicache_kernels.staging import Direction

guarded = pytest.mark.parametrize("guard", [True, False], ids=["guard", "no_guard"])

LONG_ENOUGH = 0.05
"""Seconds in which what no guard holds back is done; what a guard holds back never is, so nothing depends on speed."""


def waits(event):
    """Tell whether an event is held back; blocks until it has come where it is not."""
    return not wait_until_done(event, LONG_ENOUGH)


def is_blocked(thread):
    thread.join(LONG_ENOUGH)
    return thread.is_alive()


@guarded
def test_write_back_reads_rows_only_after_compute_wrote_them(make_stack, guard):
    stack = make_stack(guards=Guards(write_follows_compute=guard))
    device, computed = stack.alloc(4), HostSignal()
    host = stack.controller.write(device, node_id=1, ready_event=computed)
    ack = stack.controller.start_writing()
    assert waits(ack.host_ready) is guard
    rows = stack.compute(device)
    computed.fire()
    ack.host_ready.synchronize()
    stack.controller.poll_writes()
    assert stack.same(stack.loaded(host), rows) is guard


@guarded
def test_compute_overwrites_rows_only_after_write_back_read_them(make_stack, in_thread, guard):
    stack = make_stack(guards=Guards(overwrite_follows_read=guard))
    device = stack.alloc(4)
    rows = stack.compute(device)
    gate = stack.host_pool.write_gate
    gate.close()
    host = stack.controller.write(device, node_id=1)
    ack = stack.controller.start_writing()
    gate.wait_entered()

    def overwrite():
        ack.device_released.synchronize()
        stack.compute(device)

    compute = in_thread(overwrite)
    assert is_blocked(compute) is guard
    gate.open()
    compute.join()
    stack.controller.adopt_thread()
    stack.controller.poll_writes(wait=True)
    assert stack.same(stack.loaded(host), rows) is guard


@guarded
def test_device_slots_are_given_back_only_after_write_back_read_them(make_stack, in_thread, guard):
    stack = make_stack(device_pages=4, guards=Guards(overwrite_follows_read=guard))
    device = stack.alloc(4)
    rows = stack.compute(device)
    gate = stack.host_pool.write_gate
    gate.close()
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    gate.wait_entered()

    def reuse():
        stack.controller.adopt_thread()
        stack.controller.evict_device(device)
        slots = stack.alloc(4)
        stack.compute(slots)
        stack.controller.evict_device(slots)

    compute = in_thread(reuse)
    assert is_blocked(compute) is guard
    gate.open()
    compute.join()
    stack.controller.adopt_thread()
    stack.controller.poll_writes(wait=True)
    assert stack.same(stack.loaded(host), rows) is guard


@guarded
def test_load_fills_slots_only_after_earlier_compute_read_them(make_stack, guard):
    stack = make_stack(device_pages=4, guards=Guards(load_follows_compute=guard))
    host, _ = stack.written(4)
    slots, read = stack.alloc(4), HostSignal()
    before = stack.compute(slots)
    # The engine lets the slots go while compute it has started still reads them.
    stack.allocator.free(slots)
    stack.controller.load(host, node_id=1, ready_event=read)
    consumer = stack.controller.start_loading()
    assert waits(stack.controller.layer_done_counter.events(consumer)[-1]) is guard
    seen = stack.rows(slots)
    read.fire()
    stack.controller.poll_loads(wait=True)
    assert stack.same(seen, before) is guard


@guarded
def test_load_reads_host_slots_only_after_their_write_back_landed(make_stack, guard):
    stack = make_stack(guards=Guards(read_follows_write=guard))
    device = stack.alloc(4)
    rows = stack.compute(device)
    gate = stack.host_pool.write_gate
    gate.close()
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    gate.wait_entered()
    target = stack.controller.load(host, node_id=2)
    consumer = stack.controller.start_loading()
    assert waits(stack.controller.layer_done_counter.events(consumer)[-1]) is guard
    gate.open()
    stack.controller.poll_writes(wait=True)
    stack.controller.poll_loads(wait=True)
    assert stack.same(stack.rows(target), rows) is guard


@guarded
def test_backup_reads_host_slots_only_after_their_write_back_landed(make_stack, guard):
    stack = make_stack(storage=True, guards=Guards(read_follows_write=guard))
    device, keys = stack.alloc(4), stack.keys(4)
    rows = stack.compute(device)
    gate = stack.host_pool.write_gate
    gate.close()
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    gate.wait_entered()
    stack.controller.backup(host, keys, node_id=1)
    (backup,) = stack.controller.engine.in_flight.owners()[1:]
    assert waits(backup.host_ready) is guard
    gate.open()
    stack.controller.poll_writes(wait=True)
    stack.controller.poll_backups(wait=True)
    fresh = stack.group.alloc(len(host))
    assert stack.controller.prefetch(fresh, keys, request_id="r").wait() == 4
    assert stack.same(stack.loaded(fresh), rows) is guard


@guarded
def test_host_slots_are_refilled_only_after_load_read_them(make_stack, guard):
    stack = make_stack(host_pages=4, guards=Guards(refill_follows_read=guard))
    host, rows = stack.written(4)
    gate = stack.host_pool.load_gates[0]
    gate.close()
    target = stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    gate.wait_entered()
    assert stack.controller.evict_host(host) == (0 if guard else len(host))
    other = stack.alloc(4)
    stack.compute(other)
    refilled = stack.controller.write(other, node_id=2)
    assert (refilled is None) is guard
    if not guard:
        stack.controller.start_writing()
        stack.controller.poll_writes(wait=True)
    gate.open()
    stack.controller.poll_loads(wait=True)
    assert stack.same(stack.rows(target), rows) is guard
    if guard:
        assert stack.controller.write(other, node_id=2) is not None


@guarded
def test_host_slots_are_refilled_only_after_backup_read_them(make_stack, guard):
    stack = make_stack(host_pages=4, storage=True, guards=Guards(refill_follows_read=guard))
    host, rows = stack.written(4)
    keys = stack.keys(4)
    gate = stack.storage.set_gate
    gate.close()
    stack.controller.backup(host, keys, node_id=1)
    gate.wait_entered()
    stack.controller.evict_host(host)
    other = stack.alloc(4)
    stack.compute(other)
    refilled = stack.controller.write(other, node_id=2)
    assert (refilled is None) is guard
    if not guard:
        stack.controller.start_writing()
        stack.controller.poll_writes(wait=True)
        stack.controller.evict_host(refilled)
    gate.open()
    stack.controller.poll_backups(wait=True)
    fresh = stack.group.alloc(len(host))
    assert stack.controller.prefetch(fresh, keys, request_id="r").wait() == 4
    assert stack.same(stack.loaded(fresh), rows) is guard


@guarded
def test_write_back_into_slots_a_load_reads_waits_for_it(make_stack, guard):
    """The same hazard below the controller, for users of the engine alone."""
    stack = make_stack(guards=Guards(refill_follows_read=guard))
    host, rows = stack.written(4)
    other = stack.alloc(4)
    stack.compute(other)
    gate = stack.host_pool.load_gates[0]
    gate.close()
    target = stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    gate.wait_entered()
    controller = stack.controller
    handle = controller.engine.submit_device_to_host(transfers_of(stack, host, other, load=False))
    assert waits(handle.host_ready) is guard
    gate.open()
    controller.poll_loads(wait=True)
    handle.host_ready.synchronize()
    assert stack.same(stack.rows(target), rows) is guard


def test_prefetch_fills_host_slots_only_after_others_used_them(make_stack):
    stack = make_stack(storage=True)
    host, _ = stack.written(4)
    keys = stack.keys(4)
    stack.controller.backup(host, keys, node_id=1)
    stack.controller.poll_backups(wait=True)
    fresh, rows = stack.written(4)
    gate = stack.host_pool.load_gates[0]
    gate.close()
    target = stack.controller.load(fresh, node_id=1)
    stack.controller.start_loading()
    gate.wait_entered()
    operation = stack.controller.prefetch(fresh, keys, request_id="r")
    assert waits(operation.host_ready)
    gate.open()
    stack.controller.poll_loads(wait=True)
    assert stack.same(stack.rows(target), rows)
    assert operation.wait() == 4


def transfers_of(stack, host, device, *, load):
    direction = Direction.LOAD if load else Direction.WRITE_BACK
    return stack.controller._plan.transfers(CacheOperation(host, device, (), direction=direction))


def test_load_fills_slots_only_after_a_write_back_read_them(make_stack):
    """Below the controller, which does not hand such slots out."""
    stack = make_stack()
    host, rows = stack.written(4)
    device = stack.alloc(4)
    before = stack.compute(device)
    gate = stack.host_pool.write_gate
    gate.close()
    other = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    gate.wait_entered()
    engine = stack.controller.engine
    handle = engine.submit_host_to_device(transfers_of(stack, host, device, load=True), layers=3)
    assert waits(handle.host_ready)
    gate.open()
    stack.controller.poll_writes(wait=True)
    handle.host_ready.synchronize()
    assert stack.same(stack.rows(device), rows)
    assert stack.same(stack.loaded(other), before)


def test_write_back_reads_rows_only_after_a_load_filled_them(make_stack):
    stack = make_stack()
    host, rows = stack.written(4)
    gate = stack.host_pool.load_gates[2]
    gate.close()
    device = stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    gate.wait_entered()
    other = stack.controller.write(device, node_id=2)
    ack = stack.controller.start_writing()
    assert waits(ack.host_ready)
    gate.open()
    stack.controller.poll_loads(wait=True)
    stack.controller.poll_writes(wait=True)
    assert stack.same(stack.loaded(other), rows)
