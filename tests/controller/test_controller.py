"""Writes, loads and their acks; arguments and metrics of the controller."""

import pytest
import torch

from hicache_controller.controller import HiCacheController
from hicache_controller.events import HostSignal
from hicache_controller.hybrid import HybridCacheController
from hicache_controller.operations import CacheOperation
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


def test_a_pool_without_bytes_is_accounted_for(make_stack):
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
