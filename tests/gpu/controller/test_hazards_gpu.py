"""The five hazards on CUDA streams, windows held open by spins on the device; a guard taken out must be noticed."""

import functools

import pytest
import torch

from hicache_controller.operations import CacheOperation
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.transfer_handle import Guards

pytestmark = pytest.mark.gpu

guarded = pytest.mark.parametrize("guard", [True, False], ids=["guard", "no_guard"])
paths = pytest.mark.parametrize("policy", ["staged", "direct"])


@pytest.fixture(params=[False, True], ids=["by_a_thread", "inline"])
def make_stack(make_stack, request):
    return functools.partial(make_stack, queue_inline=request.param)


@paths
@guarded
def test_write_back_reads_rows_only_after_compute_wrote_them(make_stack, guard, policy):
    stack = make_stack(policy=policy, guards=Guards(write_follows_compute=guard))
    device = stack.alloc(8)
    on_gpu, rows = device.cuda(), stack.random_rows(len(device))
    torch.cuda.synchronize()
    stack.spin()
    stack.put(on_gpu, rows)
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    stack.controller.poll_writes(wait=True)
    torch.cuda.synchronize()
    assert stack.same(stack.loaded(host), rows) is guard


@paths
@guarded
def test_write_back_follows_the_event_it_is_given(make_stack, guard, policy):
    """Compute on a stream of its own, which the current stream knows nothing of."""
    stack = make_stack(policy=policy, guards=Guards(write_follows_compute=guard))
    device = stack.alloc(8)
    on_gpu, rows, compute = device.cuda(), stack.random_rows(len(device)), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(compute):
        stack.spin(compute)
        stack.put(on_gpu, rows)
        valid = compute.record_event()
    host = stack.controller.write(device, node_id=1, ready_event=valid)
    stack.controller.start_writing()
    stack.controller.poll_writes(wait=True)
    torch.cuda.synchronize()
    assert stack.same(stack.loaded(host), rows) is guard


@paths
@guarded
def test_compute_overwrites_rows_only_after_write_back_read_them(make_stack, guard, policy):
    stack = make_stack(policy=policy, guards=Guards(overwrite_follows_read=guard))
    device = stack.alloc(8)
    on_gpu, rows, others = device.cuda(), stack.random_rows(len(device)), stack.random_rows(len(device))
    stack.put(on_gpu, rows)
    torch.cuda.synchronize()
    stack.spin(stack.device_to_host_stream)
    host = stack.controller.write(device, node_id=1)
    ack = stack.controller.start_writing()
    ack.device_released.wait()
    stack.put(on_gpu, others)
    stack.controller.poll_writes(wait=True)
    assert stack.same(stack.loaded(host), rows) is guard


@paths
@guarded
def test_device_slots_are_given_back_after_the_write_back_that_reads_them(make_stack, guard, policy):
    stack = make_stack(device_pages=8, policy=policy, guards=Guards(overwrite_follows_read=guard))
    device = stack.alloc(8)
    on_gpu, rows, others = device.cuda(), stack.random_rows(len(device)), stack.random_rows(len(device))
    stack.put(on_gpu, rows)
    torch.cuda.synchronize()
    stack.spin(stack.device_to_host_stream)
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    stack.controller.evict_device(device)
    assert stack.alloc(8).tolist() == device.tolist()
    stack.put(on_gpu, others)
    stack.controller.poll_writes(wait=True)
    stack.controller.evict_device(device)
    assert stack.same(stack.loaded(host), rows) is guard


@paths
@guarded
def test_load_fills_slots_only_after_earlier_compute_read_them(make_stack, guard, policy):
    stack = make_stack(device_pages=8, policy=policy, guards=Guards(load_follows_compute=guard))
    host, _ = stack.written(8)
    device = stack.alloc(8)
    on_gpu, before = device.cuda(), stack.random_rows(len(device))
    stack.put(on_gpu, before)
    torch.cuda.synchronize()
    stack.spin()
    seen = stack.rows(on_gpu)
    # The engine lets the slots go while the compute it has queued still reads them.
    stack.allocator.free(device)
    stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    stack.controller.poll_loads(wait=True)
    assert stack.same(seen, before) is guard


def test_load_in_plain_torch_reads_host_slots_only_after_their_write_back_landed(make_stack):
    """A quota of 0 leaves a pool without a staged path to the CPU, which no stream orders."""
    stack = make_stack(dim=10, load_block_quota=0)
    assert not stack.host_pool.can_use_write_back_jit
    assert stack.host_pool.capabilities().direct
    device = stack.alloc(8)
    rows = stack.random_rows(len(device))
    stack.put(device.cuda(), rows)
    torch.cuda.synchronize()
    stack.spin(stack.device_to_host_stream)
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    target = stack.controller.load(host, node_id=2)
    stack.controller.start_loading()
    stack.controller.poll_loads(wait=True)
    stack.controller.poll_writes(wait=True)
    assert stack.same(stack.rows(target.cuda()), rows)
    counted = stack.controller.metrics.snapshot()
    assert counted.total("transfer_operations", direction="load", path="reference") > 0
    assert counted.total("transfer_operations", direction="write_back", path="direct") > 0


@paths
@guarded
def test_load_reads_host_slots_only_after_their_write_back_landed(make_stack, guard, policy):
    stack = make_stack(policy=policy, guards=Guards(read_follows_write=guard))
    device = stack.alloc(8)
    rows = stack.random_rows(len(device))
    stack.put(device.cuda(), rows)
    torch.cuda.synchronize()
    stack.spin(stack.device_to_host_stream)
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    target = stack.controller.load(host, node_id=2)
    stack.controller.start_loading()
    stack.controller.poll_loads(wait=True)
    stack.controller.poll_writes(wait=True)
    assert stack.same(stack.rows(target.cuda()), rows) is guard


@paths
@guarded
def test_backup_reads_host_slots_only_after_their_write_back_landed(make_stack, guard, policy):
    stack = make_stack(policy=policy, guards=Guards(read_follows_write=guard))
    stack.controller.attach_storage_backend(MemoryStorage())
    device = stack.alloc(8)
    rows = stack.random_rows(len(device))
    stack.put(device.cuda(), rows)
    torch.cuda.synchronize()
    stack.spin(stack.device_to_host_stream)
    host = stack.controller.write(device, node_id=1)
    stack.controller.start_writing()
    keys = [bytes([page] * 16) for page in range(8)]
    stack.controller.backup(host, keys, node_id=1)
    assert stack.controller.poll_backups(wait=True)[0].stored_pages == 8
    stack.controller.poll_writes(wait=True)
    fresh = stack.group.alloc(len(host))
    assert stack.controller.prefetch(fresh, keys, request_id="r").wait() == 8
    assert stack.same(stack.loaded(fresh), rows) is guard


@paths
@guarded
def test_host_slots_are_refilled_only_after_load_read_them(make_stack, guard, policy):
    stack = make_stack(host_pages=8, policy=policy, guards=Guards(refill_follows_read=guard))
    host, rows = stack.written(8)
    other = stack.alloc(8)
    stack.put(other.cuda(), stack.random_rows(len(other)))
    torch.cuda.synchronize()
    stack.spin(stack.host_to_device_stream)
    target = stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    assert stack.controller.evict_host(host) == (0 if guard else len(host))
    refilled = stack.controller.write(other, node_id=2)
    assert (refilled is None) is guard
    stack.controller.start_writing()
    stack.controller.poll_writes(wait=True)
    stack.controller.poll_loads(wait=True)
    assert stack.same(stack.rows(target.cuda()), rows) is guard
    if guard:
        assert stack.controller.write(other, node_id=2) is not None


@paths
@guarded
def test_write_back_into_slots_a_load_reads_waits_for_it(make_stack, guard, policy):
    """The same hazard below the controller, for a caller that drives the engine alone."""
    stack = make_stack(policy=policy, guards=Guards(refill_follows_read=guard))
    host, rows = stack.written(8)
    other = stack.alloc(8)
    stack.put(other.cuda(), stack.random_rows(len(other)))
    torch.cuda.synchronize()
    stack.spin(stack.host_to_device_stream)
    target = stack.controller.load(host, node_id=1)
    stack.controller.start_loading()
    transfers = stack.controller._plan.transfers(CacheOperation(host, other, ()))
    handle = stack.controller.engine.submit_device_to_host(transfers)
    handle.host_ready.synchronize()
    stack.controller.poll_loads(wait=True)
    assert stack.same(stack.rows(target.cuda()), rows) is guard
