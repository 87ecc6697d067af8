"""Pools on different paths in one operation: each decides for itself, none for another."""

import pytest
import torch

from hicache_pools import (
    HostPoolGroup,
    MambaPool,
    MambaPoolHost,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    NullPoolHost,
    PoolEntry,
    PoolTransfer,
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
