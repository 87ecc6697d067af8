"""The controller over CUDA pools: every path, either side of the indices, layers one by one, faults."""

import pytest
import torch

from hicache_controller.controller import HiCacheController
from hicache_controller.hybrid import HybridCacheController, SidecarPoolSpec
from hicache_pools.device_pools import MambaPool, MHATokenToKVPool
from hicache_pools.extents import ExtentAllocator
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import MambaPoolHost, MHATokenToKVPoolHost
from hicache_pools.pool_transfer import PoolTransfer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("policy", ["auto", "staged", "direct"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_rows_come_back_bit_for_bit(make_stack, layout, policy):
    stack = make_stack(layout=layout, policy=policy)
    written = [stack.written(pages) for pages in (1, 7, 20)]
    for host, rows in written:
        assert stack.same(stack.loaded(host), rows)
    snapshot = stack.controller.metrics.snapshot()
    if policy != "auto":
        assert snapshot.total("transfer_bytes") == snapshot.total("transfer_bytes", path=policy)
    seconds = snapshot.histograms["transfer_seconds"]
    assert all(histogram.sum > 0 for histogram in seconds.values())
    assert len(seconds) == 2


@pytest.mark.parametrize("policy", ["auto", "direct"])
@pytest.mark.parametrize(("write_quota", "load_quota"), [(0, 0), (1, 3), (0, 2), (4, 0)])
def test_a_quota_of_0_leaves_the_sms_alone_and_any_other_gives_the_same_bytes(
    make_stack, policy, write_quota, load_quota
):
    stack = make_stack(policy=policy)
    stack.controller.write_block_quota, stack.controller.load_block_quota = write_quota, load_quota
    before = stack.controller.metrics.snapshot()
    written = [stack.written(pages) for pages in (1, 7, 20)]
    for host, rows in written:
        assert stack.same(stack.loaded(host), rows)
    after = stack.controller.metrics.snapshot()
    for direction, quota in (("write_back", write_quota), ("load", load_quota)):
        direct = {"direction": direction, "path": "direct"}
        moved = after.total("transfer_bytes", **direct) - before.total("transfer_bytes", **direct)
        if quota == 0:
            assert moved == 0
        elif policy == "direct":
            assert moved > 0


@pytest.mark.parametrize("controller", [HiCacheController, HybridCacheController])
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
@pytest.mark.parametrize("index_device", ["cpu", "cuda"])
def test_indices_may_be_on_either_side(make_stack, controller, io_backend, index_device):
    stack = make_stack(controller=controller, io_backend=io_backend)
    stack.entry.device_alloc_fn = lambda count: (
        None if (slots := stack.allocator.alloc(count)) is None else slots.to(index_device)
    )
    device = stack.alloc(8)
    rows = stack.random_rows(len(device))
    stack.put(device.cuda(), rows)
    host = stack.controller.write(device.to(index_device), node_id=1)
    stack.controller.start_writing()
    assert stack.controller.poll_writes(wait=True)[0].error is None
    target = stack.controller.load(host, node_id=1)
    assert target.device.type == index_device
    stack.controller.start_loading()
    assert stack.controller.poll_loads(wait=True)[0].error is None
    assert stack.same(stack.rows(target.cuda()), rows)


@pytest.mark.parametrize("controller", [HiCacheController, HybridCacheController])
def test_a_page_first_pool_without_staged_path_takes_cpu_indices(make_stack, controller):
    stack = make_stack(controller=controller, layout="page_first", pin=False)
    assert not stack.group.can_use_write_back_jit or stack.host_pool.capabilities().staged
    host, rows = stack.written(9)
    assert stack.same(stack.loaded(host), rows)


def test_a_forward_pass_waits_layer_by_layer(make_stack):
    stack = make_stack()
    host, rows = stack.written(16)
    stack.spin(stack.host_to_device_stream)
    device = stack.controller.load(host, node_id=1)
    on_gpu = torch.empty(len(device), dtype=torch.int64, device="cuda").copy_(device)
    counter = stack.controller.layer_done_counter
    counter.set_consumer(stack.controller.start_loading())
    seen = []
    for layer in range(stack.controller.layer_num):
        counter.wait_until(layer)
        seen.append((stack.k[layer].index_select(0, on_gpu), stack.v[layer].index_select(0, on_gpu)))
    torch.cuda.synchronize()
    layers = stack.controller.layer_num
    assert stack.same([pair[0] for pair in seen] + [pair[1] for pair in seen], rows)
    assert len(rows) == 2 * layers
    stack.controller.poll_loads(wait=True)


def test_a_transfer_that_fails_in_the_middle_leaves_no_slot_in_flight(make_stack, monkeypatch):
    stack = make_stack()
    host, rows = stack.written(8)

    def broken(*args, **kwargs):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(stack.host_pool, "load_to_device_all_layer", broken)
        patch.setattr(stack.host_pool, "backup_from_device_all_layer", broken)
        stack.controller.load(host, node_id=1)
        counter = stack.controller.layer_done_counter
        counter.set_consumer(stack.controller.start_loading())
        with pytest.raises(RuntimeError, match="injected"):
            counter.wait_until(0)
        assert "injected" in str(stack.controller.poll_loads(wait=True)[0].error)
        device = stack.alloc(2)
        stack.controller.write(device, node_id=2)
        stack.controller.start_writing()
        assert "injected" in str(stack.controller.poll_writes(wait=True)[0].error)
    assert stack.used() == (2, 8)
    assert stack.same(stack.loaded(host), rows)


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
    assert stack.same(stack.loaded(host), rows)


def test_staged_direct_and_unpinned_pools_move_in_one_operation(gpu):
    page, pages, states = 16, 32, 8

    def layers(count, *shape):
        return [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(count)]

    slots = page * pages
    pools = {
        name: MHATokenToKVPool.from_buffers(k=layers(2, slots, 2, 64), v=layers(2, slots, 2, 64), page_size=page)
        for name in ("kv", "direct", "unpinned")
    }
    draft = MHATokenToKVPool.from_buffers(k=layers(1, slots, 2, 64), v=layers(1, slots, 2, 64), page_size=page)
    mamba = MambaPool.from_buffers(conv=[layers(2, states, 48)], temporal=layers(2, states, 4, 64))
    hosts = {
        "kv": MHATokenToKVPoolHost(
            pools["kv"], 1, 0, page, transfer_policy="staged", packed_draft_device_pools=(draft,)
        ),
        "direct": MHATokenToKVPoolHost(pools["direct"], 1, 0, page, transfer_policy="direct"),
        "unpinned": MHATokenToKVPoolHost(pools["unpinned"], 1, 0, page, pin_memory=False),
        "mamba": MambaPoolHost(mamba, 1, 0, 1),
    }
    pools["mamba"] = mamba
    allocators = {"kv": ExtentAllocator(pages, page), "mamba": ExtentAllocator(states)}
    mappers = {"mamba": {1: 0, 3: 1}.get}
    group = HostPoolGroup(
        PoolEntry(
            name,
            hosts[name],
            pools[name],
            mappers.get(name, {0: 0, 2: 1}.get),
            device_alloc_fn=allocators[name].alloc if name in allocators else None,
            device_free_fn=allocators[name].free if name in allocators else None,
            packed_draft_device_pools=(draft,) if name == "kv" else (),
        )
        for name in ("kv", "direct", "unpinned", "mamba")
    )
    controller = HybridCacheController(
        group, sidecars=[SidecarPoolSpec("direct", "kv"), SidecarPoolSpec("unpinned", "kv")]
    )
    attention = [
        t for p in (pools["kv"], pools["direct"], pools["unpinned"], draft) for c in p.components for t in c.tensors
    ]
    recurrent = [t for c in mamba.components for t in c.tensors]

    def rows(tokens, state):
        read = [t[tokens.cuda()].clone() for t in attention] + [t[state.cuda()].clone() for t in recurrent]
        torch.cuda.synchronize()
        return read

    tokens, state = allocators["kv"].alloc(9 * page), allocators["mamba"].alloc(3)
    want = rows(tokens, state)
    out = PoolTransfer("mamba", device_indices=state)
    host = controller.write(tokens, node_id=1, pool_transfers=[out])
    controller.start_writing()
    assert controller.poll_writes(wait=True)[0].error is None
    for tensor in (*attention, *recurrent):
        tensor.random_(0, 256)
    back = PoolTransfer("mamba", host_indices=out.host_indices)
    target = controller.load(host, node_id=1, pool_transfers=[back])
    counter = controller.layer_done_counter
    counter.set_consumer(controller.start_loading())
    counter.wait_until(controller.layer_num - 1)
    assert controller.poll_loads(wait=True)[0].error is None
    got = rows(target, back.device_indices)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert controller.shutdown(60)
    group.destroy()
