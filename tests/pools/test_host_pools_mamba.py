"""Recurrent states come back bit for bit in every dtype and under every policy, and slots never leak what they held."""

import pytest
import torch

from hicache_kernels import StagingRing
from hicache_pools import MambaPool, MambaPoolHost
from hicache_pools.simulation import fill_randomly, read_slots

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
POLICIES = ["auto", "staged", "direct"]


def states(dtype, slots=40, layers=3):
    def layer(*shape, dtype=dtype):
        return [torch.zeros((slots, *shape), dtype=dtype) for _ in range(layers)]

    return MambaPool.from_buffers(
        conv=[layer(16, 3), layer(8, 3)],
        temporal=layer(2, 4, 8),
        side={"wide": layer(4, dtype=torch.int64), "odd": layer(5, dtype=torch.uint8)},
    )


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("policy", POLICIES)
def test_states_come_back_bit_for_bit_in_every_dtype(dtype, layout, policy):
    device_pool = states(dtype)
    host_pool = MambaPoolHost(
        device_pool, 2.0, 0, layout=layout, transfer_policy=policy, staging_ring=StagingRing("cpu", pages=4)
    )
    fill_randomly(device_pool)
    slots = torch.randperm(40)[:17]
    before = read_slots(device_pool, slots)
    host_slots = host_pool.alloc(17)[torch.randperm(17)]
    host_pool.backup_from_device_all_layer(device_pool, host_slots, slots)
    fill_randomly(device_pool)
    other_slots = torch.randperm(40)[:17]
    for layer in range(3):
        host_pool.load_to_device_per_layer(device_pool, host_slots, other_slots, layer)
    assert same(read_slots(device_pool, other_slots), before)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reused_slot_never_shows_the_previous_owners_bytes(policy):
    device_pool = states(torch.bfloat16)
    host_pool = MambaPoolHost(device_pool, 0, 0, pages=4, transfer_policy=policy)
    host_pool.buffer.fill_(255)
    for _ in range(30):
        fill_randomly(device_pool)
        slots = torch.randperm(40)[:3]
        expected = read_slots(device_pool, slots)
        host_slots = host_pool.alloc(3)
        host_pool.backup_from_device_all_layer(device_pool, host_slots, slots)
        fill_randomly(device_pool)
        host_pool.load_to_device_all_layer(device_pool, host_slots, slots)
        assert same(read_slots(device_pool, slots), expected)
        assert host_pool.free(host_slots) == 3


def test_sizes_come_from_shape_and_dtype_and_not_from_a_buffer():
    device_pool = states(torch.bfloat16)
    host_pool = MambaPoolHost(device_pool, 2.0, 0)
    assert {c.name: c.element_bytes for c in host_pool.geometry.components} == {
        "conv[0]": 16 * 3 * 2,
        "conv[1]": 8 * 3 * 2,
        "temporal": 2 * 4 * 8 * 2,
        "side[wide]": 4 * 8,
        "side[odd]": 5,
    }
    assert host_pool.page_bytes == 3 * (96 + 48 + 128 + 32 + 5)
    assert len(host_pool.page_parts(0)) == 1
