"""Writes, loads, acks, cancels and errors of the controller."""

import logging
import threading

import pytest
import torch

from hicache_controller import layer_done
from hicache_controller.controller import HiCacheController
from hicache_controller.events import COMPLETED, HostSignal
from hicache_controller.hybrid import HybridCacheController
from hicache_controller.layer_done import LayerDoneCounter
from hicache_controller.operations import CacheOperation, SourceFailedError
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import NullPoolHost

LAYOUTS = ["layer_first", "page_first", "page_first_direct"]


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_come_back_bit_for_bit(make_stack, layout, synchronous):
    stack = make_stack(layout=layout, synchronous=synchronous)
    host, rows = stack.written(5)
    assert stack.same(stack.loaded(host), rows)
    assert stack.used() == (0, 5)


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
@pytest.mark.parametrize("controller", [HiCacheController, HybridCacheController])
def test_a_page_first_pool_without_staged_path_takes_cpu_indices(make_stack, controller, io_backend):
    stack = make_stack(controller=controller, io_backend=io_backend)
    assert not stack.group.can_use_write_back_jit or stack.device_pool.device.type != "cpu"
    device = stack.alloc(4)[torch.randperm(4).repeat_interleave(4) * 4 + torch.arange(4).repeat(4)].to(torch.int32)
    rows = stack.compute(device.long())
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert ack.error is None
    assert stack.same(stack.loaded(host), rows)


def test_each_ack_is_returned_once_and_names_every_merged_node(make_stack):
    stack = make_stack()
    devices = [stack.alloc(pages) for pages in (1, 3, 2)]
    rows = [stack.compute(device) for device in devices]
    hosts = [stack.controller.write(device, node_id=node) for node, device in enumerate(devices)]
    pending = stack.controller.start_writing()
    assert pending.node_ids == (0, 1, 2)
    pending.host_ready.synchronize()
    (ack,) = stack.controller.poll_writes()
    assert ack.node_ids == (0, 1, 2)
    assert ack.device_released.query()
    assert stack.controller.poll_writes(wait=True) == []
    assert stack.controller.start_writing() is None
    assert stack.host_pool.write_gate.calls == 1
    for host, want in zip(hosts, rows, strict=True):
        assert stack.same(stack.loaded(host), want)


def test_merged_operations_keep_order_parts_and_events():
    events = [HostSignal(), HostSignal()]
    parts = [
        CacheOperation(torch.arange(3) + 10 * n, torch.arange(3) - 10 * n, (n,), ready_events=(events[n],))
        for n in range(2)
    ]
    merged = CacheOperation.merge_ops(parts)
    assert merged.host_indices.tolist() == [0, 1, 2, 10, 11, 12]
    assert merged.device_indices.tolist() == [0, 1, 2, -10, -9, -8]
    assert (merged.node_ids, merged.parts, merged.ready_events) == ((0, 1), tuple(parts), tuple(events))
    assert CacheOperation.merge_ops(parts[:1]) is parts[0]
    with pytest.raises(ValueError, match="operations is empty"):
        CacheOperation.merge_ops([])


def test_acks_come_in_the_order_the_operations_were_started(make_stack):
    stack = make_stack()
    gate = stack.host_pool.write_gate
    gate.close()
    for node in range(3):
        stack.controller.write(stack.alloc(1), node_id=node)
        stack.controller.start_writing()
    assert stack.controller.poll_writes() == []
    gate.open()
    acks = []
    while len(acks) < 3:
        acks += stack.controller.poll_writes(wait=True)
    assert [ack.node_ids for ack in acks] == [(0,), (1,), (2,)]


def test_a_forward_pass_starts_while_later_layers_travel(make_stack):
    stack = make_stack()
    host, rows = stack.written(4)
    stack.host_pool.load_gates[2].close()
    device = stack.controller.load(host, node_id=1)
    counter = stack.controller.layer_done_counter
    consumer = stack.controller.start_loading()
    counter.set_consumer(consumer)
    counter.wait_until(0)
    counter.wait_until(1)
    assert stack.same([b[device] for b in (*stack.k[:2], *stack.v[:2])], [*rows[:2], *rows[3:5]])
    assert stack.controller.poll_loads() == []
    stack.host_pool.load_gates[2].open()
    counter.wait_until(2)
    assert stack.same(stack.rows(device), rows)
    stack.controller.poll_loads(wait=True)
    counter.wait_until(2)


def test_layer_counter_refuses_what_it_does_not_know(make_stack):
    counter = make_stack().controller.layer_done_counter
    counter.set_consumer(-1)
    counter.wait_until(0)
    with pytest.raises(ValueError, match=r"layer is 3; accepted: 0\.\.2"):
        counter.wait_until(3)
    with pytest.raises(ValueError, match="consumer is 0"):
        counter.set_consumer([-1, 0])
    assert counter.layers == 3


def test_nothing_to_load_has_no_consumer(make_stack):
    stack = make_stack()
    assert stack.controller.start_loading() == -1
    assert stack.controller.poll_loads(wait=True) == []


# Failures


@pytest.mark.parametrize("synchronous", [True, False])
def test_a_failed_write_gives_its_host_slots_back_and_tells(make_stack, synchronous):
    stack = make_stack(synchronous=synchronous)
    device = stack.alloc(4)
    rows = stack.compute(device)
    stack.host_pool.write_gate.failures = 1
    stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert "injected" in str(ack.error)
    assert ack.device_released.query()
    assert ack.host_ready.query()
    assert stack.used() == (4, 0)
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    assert stack.controller.poll_writes(wait=True)[0].error is None
    assert stack.same(stack.loaded(host), rows)
    assert stack.controller.metrics.snapshot().total("transfer_failures", direction="write_back") == 1


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_load_that_fails_in_the_middle_is_not_marked_loaded(make_stack, layer, synchronous):
    stack = make_stack(synchronous=synchronous)
    host, rows = stack.written(4)
    stack.host_pool.load_gates[layer].failures = 1
    stack.controller.load(host, node_id=1)
    counter = stack.controller.layer_done_counter
    counter.set_consumer(stack.controller.start_loading())
    with pytest.raises(RuntimeError, match=r"layer 2 failed: injected"):
        counter.wait_until(2)
    (ack,) = stack.controller.poll_loads(wait=True)
    assert "injected" in str(ack.error)
    assert stack.used() == (0, 4)
    with pytest.raises(RuntimeError, match=r"layer 0 failed: injected"):
        counter.wait_until(0)
    assert stack.same(stack.loaded(host), rows)


def test_failed_loads_are_told_until_reset_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(layer_done, "_MOST_FAILURES", 3)
    counter = LayerDoneCounter(1)
    consumers = [counter.register([COMPLETED], lambda: None) for _ in range(6)]
    for consumer in consumers:
        counter.forget(consumer, None if consumer in (1, 4) else RuntimeError(f"reason {consumer}"))
    for consumer in (2, 3, 5):
        counter.set_consumer([4, consumer])
        with pytest.raises(RuntimeError, match=f"layer 0 failed: reason {consumer}"):
            counter.wait_until(0)
    counter.set_consumer(4)
    counter.wait_until(0)
    counter.set_consumer(0)
    with pytest.raises(RuntimeError, match="load 0 of layer 0 is too old to tell"):
        counter.wait_until(0)
    counter.reset()
    counter.set_consumer(consumers)
    counter.wait_until(0)


def test_a_submission_that_fails_is_an_ack_with_an_error(make_stack, monkeypatch):
    stack = make_stack()
    host, rows = stack.written(2)

    def broken(*args, **kwargs):
        raise MemoryError("no room for a pointer table")

    with monkeypatch.context() as patch:
        patch.setattr(stack.controller.engine, "submit_host_to_device", broken)
        patch.setattr(stack.controller.engine, "submit_device_to_host", broken)
        stack.controller.load(host, node_id=1)
        counter = stack.controller.layer_done_counter
        counter.set_consumer(stack.controller.start_loading())
        with pytest.raises(RuntimeError, match="no room"):
            counter.wait_until(0)
        assert isinstance(stack.controller.poll_loads()[0].error, MemoryError)
        device = stack.alloc(1)
        stack.controller.write(device, node_id=2)
        assert isinstance(stack.controller.start_writing().error, MemoryError)
        assert isinstance(stack.controller.poll_writes()[0].error, MemoryError)
    assert stack.used() == (1, 2)
    assert stack.same(stack.loaded(host), rows)


def test_no_room_on_the_host_or_the_device_is_none(make_stack):
    stack = make_stack(device_pages=4, host_pages=3)
    assert stack.controller.write(stack.alloc(4), node_id=1) is None
    stack.allocator.clear()
    host, _ = stack.written(3)
    stack.alloc(2)
    assert stack.controller.load(host, node_id=1) is None
    assert stack.used() == (2, 3)


BAD_INDICES = {
    "part of a page": (torch.arange(3), "3 slots; accepted is a positive multiple of the page size 4"),
    "none": (torch.arange(0), "0 slots"),
    "below": (torch.arange(4) - 1, "runs from -1 to 2"),
    "above": (torch.arange(4) + 125, r"runs from 125 to 128; accepted is 0\.\.127"),
    "floats": (torch.zeros(4), "dtype torch.float32"),
    "two dimensions": (torch.arange(4).view(2, 2), r"shape \(2, 2\)"),
}


@pytest.mark.parametrize("bad", BAD_INDICES)
def test_bad_indices_raise_and_change_nothing(make_stack, bad):
    indices, message = BAD_INDICES[bad]
    stack = make_stack(storage=True)
    keys = stack.keys(max(1, indices.numel() // 4))
    controller = stack.controller
    for call in (
        lambda: controller.write(indices, node_id=1),
        lambda: controller.load(indices, node_id=1),
        lambda: controller.backup(indices, keys, node_id=1),
        lambda: controller.prefetch(indices, keys, request_id="r"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert controller.start_writing() is None
    assert controller.start_loading() == -1
    assert stack.used() == (0, 0)


def test_counts_that_do_not_match_raise(make_stack):
    stack = make_stack(storage=True)
    host, _ = stack.written(2)
    with pytest.raises(ValueError, match="8 slots for 3 keys"):
        stack.controller.backup(host, stack.keys(3), node_id=1)
    with pytest.raises(ValueError, match="parents has 1 entries for 2 keys"):
        stack.controller.backup(host, stack.keys(2), parents=[None], node_id=1)
    assert stack.controller.poll_backups(wait=True) == []


# Evict


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


# Cancel


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


# End


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


# Bookkeeping and metrics


def test_a_pool_without_bytes_keeps_books(make_stack):
    stack = make_stack()
    entry = PoolEntry(
        "kv",
        NullPoolHost(32, 4),
        None,
        lambda layer: layer,
        device_alloc_fn=stack.allocator.alloc,
        device_free_fn=stack.allocator.free,
    )
    controller = HiCacheController(HostPoolGroup([entry]), synchronous=True)
    host = controller.write(stack.alloc(3), node_id=1)
    controller.start_writing()
    assert controller.poll_writes()[0].node_ids == (1,)
    controller.load(host, node_id=2)
    controller.start_loading()
    assert controller.poll_loads()[0].error is None
    assert controller.layer_num == 0
    assert controller.evict_host(host) == 12


def test_metrics_count_bytes_operations_and_paths(make_stack):
    stack = make_stack()
    host, _ = stack.written(4)
    stack.loaded(host)
    snapshot = stack.controller.metrics.snapshot()
    page = stack.host_pool.page_bytes
    assert snapshot.total("transfer_operations", direction="write_back") == 1
    assert snapshot.total("transfer_operations", direction="load") == 3
    assert snapshot.total("transfer_bytes", direction="write_back") == 4 * page
    assert snapshot.total("transfer_bytes", direction="load") == 4 * page
    assert snapshot.total("transfer_bytes", pool="kv") == 8 * page
    assert snapshot.gauges["write_queue_operations"] == 0
    (histogram,) = (
        series for key, series in snapshot.histograms["transfer_submit_seconds"].items() if ("direction", "load") in key
    )
    assert histogram.observations == 1
    (histogram,) = (
        series for key, series in snapshot.histograms["transfer_seconds"].items() if ("direction", "load") in key
    )
    assert histogram.observations == 1


def test_prometheus_sees_what_the_metrics_hold(make_stack):
    prometheus = pytest.importorskip("prometheus_client")
    from hicache_controller.metrics import PrometheusCollector

    stack = make_stack()
    stack.written(1)
    registry = prometheus.CollectorRegistry()
    registry.register(PrometheusCollector(stack.controller.metrics, {"rank": "3"}))
    text = prometheus.generate_latest(registry).decode()
    assert 'rank="3"' in text
    assert "hicache_transfer_bytes_total{" in text
    assert "hicache_transfer_submit_seconds_bucket{" in text


# Operations behind one that fails


@pytest.mark.parametrize("known", [False, True], ids=["while_it_waits", "when_it_is_queued"])
def test_a_load_behind_a_write_that_fails_fails_too(make_stack, known):
    stack = make_stack()
    device = stack.alloc(2)
    gate = stack.host_pool.write_gate
    gate.failures = 1
    gate.close()
    host = stack.controller.write(device, node_id=1)
    ack = stack.controller.start_writing()
    if known:
        gate.open()
        ack.host_ready.synchronize()
        stack.controller.engine.reap()
    target = stack.controller.load(host, node_id=2)
    before = stack.rows(target)
    counter = stack.controller.layer_done_counter
    counter.set_consumer(stack.controller.start_loading())
    gate.open()
    with pytest.raises(RuntimeError, match="write-back of its bytes failed: injected"):
        counter.wait_until(0)
    assert [ack.error is None for ack in stack.controller.poll_writes(wait=True)] == [False]
    (ack,) = stack.controller.poll_loads(wait=True)
    assert isinstance(ack.error, SourceFailedError)
    assert "injected" in str(ack.error)
    assert stack.same(stack.rows(target), before)
    assert stack.used() == (2, 0)


def test_a_load_behind_a_write_that_is_cancelled_fails(make_stack):
    stack = make_stack()
    gate = stack.host_pool.write_gate
    gate.close()
    stack.controller.write(stack.alloc(1), node_id=0)
    stack.controller.start_writing()
    gate.wait_entered()
    host = stack.controller.write(stack.alloc(2), node_id=1)
    stack.controller.start_writing()
    stack.controller.load(host, node_id=2)
    stack.controller.start_loading()
    assert stack.controller.cancel_write(1)
    gate.open()
    (ack,) = stack.controller.poll_loads(wait=True)
    assert "the write was cancelled" in str(ack.error)


@pytest.mark.parametrize("known", [False, True], ids=["while_it_waits", "when_it_is_queued"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_backup_behind_a_write_that_fails_stores_nothing(make_stack, synchronous, known):
    stack = make_stack(storage=True, synchronous=synchronous)
    stack.host_pool.write_gate.failures = 1
    host, keys = stack.controller.write(stack.alloc(2), node_id=1), stack.keys(2)
    if known:
        stack.controller.start_writing().host_ready.synchronize()
        stack.controller.engine.reap()
    stack.controller.backup(host, keys, node_id=3)
    (ack,) = stack.controller.poll_backups(wait=True)
    assert ack.node_id == 3
    assert ack.stored_pages == 0
    assert "write-back of its bytes failed: injected" in str(ack.error)
    assert "injected" in str(stack.controller.poll_writes(wait=True)[0].error)
    assert stack.controller.storage_exists(keys) == 0


def test_a_write_behind_a_load_that_fails_fails_too(make_stack):
    stack = make_stack()
    host, _ = stack.written(2)
    gate = stack.host_pool.load_gates[1]
    gate.failures = 1
    gate.close()
    device = stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    other = stack.alloc(1)
    rows = stack.compute(other)
    stack.controller.write(device, node_id=2)
    stack.controller.start_writing()
    kept = stack.controller.write(other, node_id=3)
    stack.controller.start_writing()
    gate.open()
    assert "injected" in str(stack.controller.poll_loads(wait=True)[0].error)
    acks = []
    while len(acks) < 2:
        acks += stack.controller.poll_writes(wait=True)
    assert "load of its bytes failed: injected" in str(acks[0].error)
    assert acks[1].error is None
    assert stack.same(stack.loaded(kept), rows)


def test_what_overwrites_the_slots_of_a_failed_transfer_is_not_its_reader(make_stack):
    stack = make_stack(storage=True)
    host, _ = stack.written(2)
    keys = stack.keys(2)
    stack.controller.backup(host, keys, node_id=0)
    assert stack.controller.poll_backups(wait=True)[0].error is None
    stack.controller.evict_host(host)
    gate = stack.host_pool.write_gate
    gate.failures = 1
    gate.close()
    slots = stack.controller.write(stack.alloc(2), node_id=1)
    stack.controller.start_writing()
    operation = stack.controller.prefetch(slots, keys, request_id="a")
    gate.open()
    assert stack.controller.finish_prefetch(operation) in (0, 1, 2)  # best effort
    operation.host_ready.synchronize()
    assert operation.error is None
    assert stack.controller.poll_writes(wait=True)[0].error is not None


# Index tensors of the caller


def test_index_tensors_are_the_callers_again_at_once(make_stack):
    stack = make_stack(storage=True)
    controller, other = stack.controller, stack.alloc(2)
    stack.compute(other)
    device = stack.alloc(2)
    rows, asked = stack.compute(device), device.clone()
    gate = stack.host_pool.write_gate
    gate.close()
    host = controller.write(asked, node_id=1)
    wanted = host.clone()
    keys = stack.keys(2)
    controller.start_writing()
    gate.wait_entered()
    asked.copy_(other)
    stored = host.clone()
    controller.backup(stored, keys, node_id=2)
    for tensor in (host, stored):
        tensor.zero_()
    gate.open()
    assert controller.poll_writes(wait=True)[0].error is None
    assert controller.poll_backups(wait=True)[0].error is None
    assert stack.same(stack.loaded(wanted), rows)

    (gate, *_) = stack.host_pool.load_gates
    gate.close()
    asked = wanted.clone()
    target = controller.load(asked, node_id=3)
    loaded = target.clone()
    controller.start_loading()
    gate.wait_entered()
    asked.zero_()
    target.zero_()
    gate.open()
    assert controller.poll_loads(wait=True)[0].error is None
    assert stack.same(stack.rows(loaded), rows)

    fetched = stack.host_pool.alloc(8)
    asked = fetched.clone()
    stack.storage.get_gate.close()
    operation = controller.prefetch(asked, keys, request_id="a")
    stack.storage.get_gate.wait_entered()
    asked.zero_()
    stack.storage.get_gate.open()
    operation.host_ready.synchronize()
    assert operation.completed_pages == 2
    assert stack.same(stack.loaded(fetched), rows)


# What is logged


def test_the_first_failure_of_each_direction_and_kind_is_a_warning(make_stack, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, logger="hicache_controller.failure_log")
    stack = make_stack()
    host, _ = stack.written(1)
    device = stack.alloc(1)

    def write():
        stack.controller.write(device, node_id=1)
        stack.controller.start_writing()
        assert stack.controller.poll_writes(wait=True)[0].error is not None

    def load():
        stack.controller.load(host, node_id=2)
        stack.controller.start_loading()
        assert stack.controller.poll_loads(wait=True)[0].error is not None

    def broken(*args, **kwargs):
        raise MemoryError("no room for a pointer table")

    stack.host_pool.write_gate.failures = stack.host_pool.load_gates[0].failures = 3
    for _ in range(3):
        write()
        load()
    with monkeypatch.context() as patch:
        patch.setattr(stack.controller.engine, "submit_device_to_host", broken)
        write()
        write()
    told = [(record.levelname, record.getMessage().partition(";")[0]) for record in caplog.records]
    injected = [f"a {direction} failed with InjectedError('injected')" for direction in ("write-back", "load")]
    assert told == [
        *(("WARNING", message) for message in injected),
        *(("DEBUG", message) for message in injected * 2),
        ("WARNING", "a write-back failed with MemoryError('no room for a pointer table')"),
        ("DEBUG", "a write-back failed with MemoryError('no room for a pointer table')"),
    ]
    assert all(record.exc_info for record in caplog.records)


def test_cancelled_transfers_are_no_failures_to_log(make_stack, caplog):
    stack = make_stack()
    gate = stack.host_pool.write_gate
    gate.close()
    for node in (1, 2):
        stack.controller.write(stack.alloc(1), node_id=node)
        stack.controller.start_writing()
    gate.wait_entered()
    assert stack.controller.cancel_write(2)
    gate.open()
    stack.controller.engine.drain()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
