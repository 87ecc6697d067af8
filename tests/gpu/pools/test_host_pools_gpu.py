"""Host pools on the GPU: states, mixed groups, drafts, translation on the transfer's stream, and the end of life."""

import pytest
import torch

from hicache_kernels import StagingRing
from hicache_pools import (
    HostPoolGroup,
    MambaPool,
    MambaPoolHost,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    PoolEntry,
    PoolTransfer,
)
from hicache_pools.simulation import fill_randomly, read_slots

pytestmark = pytest.mark.gpu

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int64,
    torch.bool,
]
POLICIES = ["auto", "staged", "direct"]
DELAY = 20_000_000
"""Cycles: some 10 ms of a stream."""


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def wait_for(event):
    if event is not None:
        event.synchronize()


def states(gpu, dtype, odd, slots=40, layers=3):
    def layer(*shape, dtype=dtype):
        return [torch.zeros((slots, *shape), dtype=dtype, device=gpu) for _ in range(layers)]

    side = {"wide": layer(4, dtype=torch.int64)} | ({"odd": layer(5, dtype=torch.uint8)} if odd else {})
    return MambaPool.from_buffers(conv=[layer(16, 4), layer(8, 4)], temporal=layer(2, 4, 8), side=side)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("odd", [False, True])
def test_states_survive_slots_overwritten_right_after_they_were_released(gpu, dtype, policy, odd):
    device_pool = states(gpu, dtype, odd)
    for layout in ("page_first", "page_first_direct"):
        pool = MambaPoolHost(
            device_pool, 2.0, 0, layout=layout, transfer_policy=policy, staging_ring=StagingRing(gpu, pages=4)
        )
        fill_randomly(device_pool)
        slots = torch.randperm(40)[:17]
        before = read_slots(device_pool, slots)
        host_slots = pool.alloc(17)
        compute = torch.cuda.Stream()
        result = pool.backup_from_device_all_layer(device_pool, host_slots, slots)
        if result.device_released is not None:
            compute.wait_event(result.device_released)
        with torch.cuda.stream(compute):
            fill_randomly(device_pool)
        wait_for(result.host_ready)
        compute.synchronize()
        other_slots = torch.randperm(40)[:17]
        for layer in range(3):
            pool.load_to_device_per_layer(device_pool, host_slots, other_slots, layer)
        assert same(read_slots(device_pool, other_slots), before)
        pool.destroy()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reused_slot_never_shows_the_previous_owners_bytes(gpu, policy):
    device_pool = states(gpu, torch.bfloat16, odd=False)
    pool = MambaPoolHost(device_pool, 0, 0, pages=4, transfer_policy=policy)
    for _ in range(20):
        fill_randomly(device_pool)
        slots = torch.randperm(40)[:3]
        expected = read_slots(device_pool, slots)
        host_slots = pool.alloc(3)
        result = pool.backup_from_device_all_layer(device_pool, host_slots, slots)
        wait_for(result.device_released)
        fill_randomly(device_pool)
        result = pool.load_to_device_all_layer(device_pool, host_slots, slots)
        assert same(read_slots(device_pool, slots), expected)
        wait_for(result.host_ready)
        pool.free(host_slots)
    pool.destroy()


@pytest.mark.parametrize("host_side", ["cpu", "cuda"])
@pytest.mark.parametrize("device_side", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_a_mixed_group_moves_in_one_operation_whatever_side_its_indices_are_on(
    gpu, host_side, device_side, policy, io_backend
):
    wide = MHATokenToKVPool(128, 16, torch.bfloat16, 2, 8, 2, gpu)
    narrow = MLATokenToKVPool(128, 16, torch.bfloat16, 16, 4, 2, gpu)
    odd = MambaPool(12, [(3,)], (5,), torch.uint8, torch.uint8, 2, gpu)
    pools = {
        "kv": (MHATokenToKVPoolHost(wide, 2.0, 0, 16, transfer_policy=policy), wide),
        "narrow": (MLATokenToKVPoolHost(narrow, 2.0, 0, 16, transfer_policy=policy), narrow),
        "odd": (MambaPoolHost(odd, 2.0, 0, transfer_policy=policy), odd),
    }
    group = HostPoolGroup([PoolEntry(n, host, device, lambda layer: layer) for n, (host, device) in pools.items()])
    assert [entry.host_pool.can_use_write_back_jit for entry in group.entries] == [True, False, False]
    assert [entry.host_pool.can_use_jit for entry in group.entries] == [True, True, False]
    assert not group.can_use_write_back_jit
    for device_pool in (wide, narrow, odd):
        fill_randomly(device_pool)
    kv_slots = (torch.randperm(8)[:5, None] * 16 + torch.arange(16)).flatten()
    odd_slots = torch.randperm(12)[:4]
    transfers = group.resolve_host_transfers(
        [
            PoolTransfer("kv", device_indices=kv_slots.to(device_side)),
            PoolTransfer("narrow", device_indices=kv_slots.to(device_side)),
            PoolTransfer("odd", device_indices=odd_slots.to(device_side)),
        ]
    )
    given = {t.name: (t.host_indices.to(host_side), t.device_indices) for t in transfers}
    before, results = {}, []
    for transfer in transfers:
        entry = group.get_entry(transfer.name)
        before[transfer.name] = read_slots(entry.device_pool, transfer.device_indices)
        results.append(
            entry.host_pool.backup_from_device_all_layer(entry.device_pool, *given[transfer.name], io_backend)
        )
    for result in results:
        wait_for(result.device_released)
        wait_for(result.host_ready)
    for device_pool in (wide, narrow, odd):
        fill_randomly(device_pool)
    for layer in range(2):
        for transfer in transfers:
            entry = group.get_entry(transfer.name)
            entry.host_pool.load_to_device_per_layer(entry.device_pool, *given[transfer.name], layer, io_backend)
    for transfer in transfers:
        device_pool = group.get_entry(transfer.name).device_pool
        assert same(read_slots(device_pool, transfer.device_indices), before[transfer.name])
    group.destroy()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_without_a_staged_path_takes_host_indices_on_cpu(gpu, policy):
    device_pool = MLATokenToKVPool(64, 16, torch.bfloat16, 16, 4, 2, gpu)
    pool = MLATokenToKVPoolHost(device_pool, 1.0, 0, 16, layout="page_first", transfer_policy=policy)
    assert not pool.can_use_write_back_jit
    fill_randomly(device_pool)
    slots = torch.arange(64)
    result = pool.backup_from_device_all_layer(device_pool, slots, slots.to(gpu), "kernel")
    assert result.path == "direct"
    wait_for(result.host_ready)
    assert torch.equal(pool.kv_buffer[:, 1].view(torch.uint8), device_pool.kv_buffer[1].cpu().view(torch.uint8))
    pool.destroy()


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_move_with_their_owner(gpu, policy):
    owner, draft = (MHATokenToKVPool(64, 16, torch.bfloat16, 2, 8, layers, gpu) for layers in (3, 1))
    pool = MHATokenToKVPoolHost(owner, 1.0, 0, 16, transfer_policy=policy, packed_draft_device_pools=[draft])
    fill_randomly(owner)
    fill_randomly(draft)
    slots = (torch.randperm(4)[:, None] * 16 + torch.arange(16)).flatten()
    before = read_slots(owner, slots), read_slots(draft, slots)
    host_slots = pool.alloc(64)
    wait_for(pool.backup_from_device_all_layer(owner, host_slots, slots).host_ready)
    fill_randomly(owner)
    fill_randomly(draft)
    for layer in range(3):
        pool.load_to_device_per_layer(owner, host_slots, slots, layer)
    pool.load_to_device_per_layer(draft, host_slots, slots, 0, is_draft=True)
    assert same(read_slots(owner, slots), before[0])
    assert same(read_slots(draft, slots), before[1])
    pool.destroy()


@pytest.mark.parametrize("policy", POLICIES)
def test_virtual_indices_are_translated_on_the_transfers_stream(gpu, policy):
    table = torch.zeros(128, dtype=torch.int64, device=gpu)
    k, v = ([torch.zeros((64, 2, 8), dtype=torch.bfloat16, device=gpu) for _ in range(2)] for _ in range(2))
    device_pool = MHATokenToKVPool.from_buffers(k=k, v=v, page_size=16, index_translation=table)
    pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16, transfer_policy=policy)
    fill_randomly(device_pool)
    physical = torch.randperm(64, device=gpu)
    expected = [tensor[physical].clone() for tensor in (*k, *v)]
    virtual = torch.arange(64, 128, device=gpu)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        table[64:] = physical  # Late, but on the stream of the transfer, so the transfer must see it.
        result = pool.backup_from_device_all_layer(device_pool, torch.arange(64), virtual)
    wait_for(result.host_ready)
    views = [*pool.k_data_refs, *pool.v_data_refs]
    for view, tensor in zip(views, expected, strict=True):
        assert torch.equal(view.contiguous().view(torch.uint8), tensor.cpu().view(torch.uint8))
    pool.destroy()


@pytest.mark.parametrize("policy", POLICIES)
def test_destroy_waits_for_the_transfers_it_would_pull_the_memory_from(gpu, policy):
    device_pool = MHATokenToKVPool(4096, 16, torch.bfloat16, 8, 64, 4, gpu)
    fill_randomly(device_pool)
    slots = torch.arange(4096)
    torch.cuda.synchronize()
    for _ in range(3):
        pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16, transfer_policy=policy)
        torch.cuda._sleep(DELAY)
        result = pool.backup_from_device_all_layer(device_pool, slots, slots)
        buffer = pool.buffer
        pool.destroy()
        pool.destroy()
        assert result.host_ready.query()
        assert not buffer.is_pinned()
    torch.cuda.synchronize()


def test_flags_and_capacities_say_what_the_ring_offers(gpu):
    device_pool = MHATokenToKVPool(256, 16, torch.bfloat16, 8, 64, 4, gpu)
    pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16, staging_ring=StagingRing(gpu, pages=64))
    assert pool.can_use_jit
    assert pool.can_use_write_back_jit
    assert (pool.staging_page_capacity, pool.staging_token_capacity) == (64, 1024)
    assert pool.host_buffer.pinned
    pool.destroy()


def test_a_whole_load_reports_each_layer(gpu):
    device_pool = MHATokenToKVPool(256, 16, torch.bfloat16, 8, 64, 4, gpu)
    pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16, layout="page_first_direct")
    fill_randomly(device_pool)
    slots = torch.arange(256)
    before = read_slots(device_pool, slots)
    wait_for(pool.backup_from_device_all_layer(device_pool, slots, slots).host_ready)
    fill_randomly(device_pool)
    result = pool.load_to_device_all_layer(device_pool, slots, slots, layer_events=True)
    assert len(result.layer_done) == 4
    for layer, event in enumerate(result.layer_done):
        event.synchronize()
        assert torch.equal(device_pool.k_buffer[layer].flatten(1).view(torch.uint8).cpu(), before["k"][layer])
    pool.destroy()


@pytest.mark.parametrize("host_side", ["cpu", "cuda"])
@pytest.mark.parametrize("device_side", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", POLICIES)
def test_indices_made_in_inference_mode_move_pages_in_it_and_outside(gpu, host_side, device_side, policy):
    with torch.inference_mode():
        device_pool = MHATokenToKVPool(64, 16, torch.bfloat16, 2, 8, 2, gpu)
        pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16, transfer_policy=policy)
        fill_randomly(device_pool)
        slots = (torch.randperm(4)[:, None] * 16 + torch.arange(16)).flatten()
        before = read_slots(device_pool, slots)
        given = pool.alloc(64).to(host_side), slots.to(device_side)
        assert given[1].is_inference()
        wait_for(pool.backup_from_device_all_layer(device_pool, *given).host_ready)
        fill_randomly(device_pool)
        for layer in range(2):
            pool.load_to_device_per_layer(device_pool, *given, layer)
        assert same(read_slots(device_pool, slots), before)
    fill_randomly(device_pool)
    result = pool.load_to_device_all_layer(device_pool, *given)
    assert same(read_slots(device_pool, slots), before)
    wait_for(result.host_ready)
    pool.destroy()
