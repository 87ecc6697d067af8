"""Pools on different paths in one operation: each decides for itself, none for another."""

import pytest
import torch

from hicache_pools import (
    DeepSeekV4PagedPool,
    DSATokenToKVPool,
    HostPoolGroup,
    MambaPool,
    MambaPoolHost,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    NullPoolHost,
    PoolEntry,
    PoolName,
    PoolTransfer,
    build_host_pool_group,
    cpu_simulation,
)
from hicache_pools.simulation import fill_randomly, read_slots


def mixed_group(policy):
    """A pool with a staged path, one without, one without any compiled path, and one without bytes."""
    wide = MHATokenToKVPool(128, 16, torch.bfloat16, 2, 8, 2)
    narrow = MLATokenToKVPool(128, 16, torch.bfloat16, 16, 4, 2)
    odd = MambaPool(12, [(3,)], (5,), torch.uint8, torch.uint8, 2)
    with cpu_simulation():
        odd_host = MambaPoolHost(odd, 2.0, 0)
    pools = {
        "kv": (MHATokenToKVPoolHost(wide, 2.0, 0, 16, transfer_policy=policy), wide),
        "narrow": (MLATokenToKVPoolHost(narrow, 2.0, 0, 16, transfer_policy=policy), narrow),
        "odd": (odd_host, odd),
        "none": (NullPoolHost(16, 16), None),
    }
    entries = [PoolEntry(name, host, device, lambda layer: layer) for name, (host, device) in pools.items()]
    return HostPoolGroup(entries)


@pytest.mark.parametrize("policy", ["auto", "staged", "direct"])
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_pools_of_every_path_write_back_and_load_in_one_operation(policy, io_backend):
    group = mixed_group(policy)
    for name in ("kv", "narrow", "odd"):
        fill_randomly(group.get_entry(name).device_pool)
    kv_slots = (torch.randperm(8)[:5, None] * 16 + torch.arange(16)).flatten()
    odd_slots = torch.randperm(12)[:4]
    transfers = [
        PoolTransfer("kv", device_indices=kv_slots),
        PoolTransfer("narrow", device_indices=kv_slots),
        PoolTransfer("odd", device_indices=odd_slots),
        PoolTransfer("none", device_indices=kv_slots),
    ]
    transfers = group.resolve_host_transfers(transfers)
    before = {}
    for transfer in transfers:
        entry = group.get_entry(transfer.name)
        if entry.device_pool is not None:
            before[transfer.name] = read_slots(entry.device_pool, transfer.device_indices)
        entry.host_pool.backup_from_device_all_layer(
            entry.device_pool, transfer.host_indices, transfer.device_indices, io_backend
        )
        if entry.device_pool is not None:
            fill_randomly(entry.device_pool)
    for layer in range(2):
        for transfer in transfers:
            entry = group.get_entry(transfer.name)
            entry.host_pool.load_to_device_per_layer(
                entry.device_pool, transfer.host_indices, transfer.device_indices, layer, io_backend
            )
    for transfer in transfers:
        device_pool = group.get_entry(transfer.name).device_pool
        if device_pool is not None:
            after = read_slots(device_pool, transfer.device_indices)
            assert all(torch.equal(after[name], saved) for name, saved in before[transfer.name].items())
    group.release_transfers(transfers)
    assert group.available_size() == group.size
    group.destroy()


def test_the_group_is_staged_only_where_all_of_its_pools_are():
    group = mixed_group("auto")
    flags = [entry.host_pool.can_use_write_back_jit for entry in group.entries]
    assert group.can_use_write_back_jit == all(flags)
    assert not group.can_use_write_back_jit
    assert group.supports_per_pool_backup_indices == any(flags)
    assert group.capabilities()["odd"].path_write_back == "reference"


def compressed(ratio, layers, row_bytes, page_size=128, pages=6):
    return DeepSeekV4PagedPool(pages * page_size, page_size, ratio, row_bytes, layers)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pools_of_other_granularity_follow_the_slots_of_their_anchor(layout):
    """Sparse attention (a row a page) and compression (a row for 4 or 128 tokens), on the anchor's token slots."""
    models = {
        "sparse": {"kv": DSATokenToKVPool(768, 128, torch.bfloat16, 16, 4, 2, index_head_dim=16, quant_block_size=16)},
        "compressed": {
            PoolName.DEEPSEEK_V4_C4: compressed(4, 2, 32),
            PoolName.DEEPSEEK_V4_C4_INDEXER: compressed(4, 2, 20),
            PoolName.DEEPSEEK_V4_C128: compressed(128, 3, 48),
        },
    }
    for device_pools in models.values():
        group = build_host_pool_group(device_pools, page_size=128, host_to_device_ratio=2.0, layout=layout)
        slots = (torch.randperm(6)[:4, None] * 128 + torch.arange(128)).flatten()
        host_slots = group.alloc(512)
        entries = [entry for entry in group.entries if entry.device_pool is not None]
        for device_pool in device_pools.values():
            fill_randomly(device_pool)
        before = [read_slots(device_pool, slots) for device_pool in device_pools.values()]
        for entry in entries:
            result = entry.host_pool.backup_from_device_all_layer(entry.device_pool, host_slots, slots)
            assert result.bytes == 4 * entry.host_pool.page_bytes
        for device_pool in device_pools.values():
            fill_randomly(device_pool)
        for entry in entries:
            for layer in range(entry.host_pool.layer_num):
                entry.host_pool.load_to_device_per_layer(entry.device_pool, host_slots, slots, layer)
        for device_pool, saved in zip(device_pools.values(), before, strict=True):
            after = read_slots(device_pool, slots)
            assert all(torch.equal(after[name], saved[name]) for name in saved)
        group.destroy()


def test_a_sliding_window_is_an_mha_pool_with_slots_of_its_own():
    full, window = (MHATokenToKVPool(size, 16, torch.bfloat16, 2, 8, 2) for size in (256, 64))
    group = build_host_pool_group({PoolName.KV: full, PoolName.SWA: window}, page_size=16, host_to_device_ratio=1.0)
    transfers = group.resolve_host_transfers(
        [
            PoolTransfer(PoolName.KV, device_indices=torch.arange(256)),
            PoolTransfer(PoolName.SWA, device_indices=torch.arange(64)),
        ]
    )
    assert [len(transfer.host_indices) for transfer in transfers] == [256, 64]
    assert [group.available_size(name) for name in (PoolName.KV, PoolName.SWA)] == [0, 0]
    assert isinstance(group.get_pool(PoolName.SWA), MHATokenToKVPoolHost)
    group.destroy()
