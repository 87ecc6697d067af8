"""How far a transfer is from the compiled call: few frames of ours, in few files."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.frames import recorded_chains

from hicache_kernels import StagingRing
from hicache_pools import MHATokenToKVPool, MHATokenToKVPoolHost, MLATokenToKVPool, MLATokenToKVPoolHost

MAX_POOLS_FRAMES, MAX_KERNELS_FRAMES, MAX_FILES = 2, 3, 4


@pytest.fixture
def chains(monkeypatch):
    """Chains of frames of every compiled call, by its name."""
    return recorded_chains(monkeypatch)


def mha():
    device_pool = MHATokenToKVPool(96, 16, torch.bfloat16, 2, 8, 2)
    return device_pool, MHATokenToKVPoolHost


def mla():
    device_pool = MLATokenToKVPool(96, 16, torch.bfloat16, 16, 8, 2)
    return device_pool, MLATokenToKVPoolHost


@pytest.mark.parametrize("make", [mha, mla])
@pytest.mark.parametrize(("policy", "moving"), [("staged", {"write_back", "load"}), ("direct", {"move_rows"})])
def test_a_transfer_is_five_calls_from_the_compiled_one(bench, chains, make, policy, moving):
    device_pool, host_class = make()
    pool = host_class(device_pool, 1.0, 0, transfer_policy=policy, staging_ring=StagingRing("cpu"))
    host, device = (bench.slots(torch.randperm(6)[:4], pool.page_size) for _ in range(2))
    chains.clear()
    pool.backup_from_device_all_layer(device_pool, host, device)
    pool.load_to_device_all_layer(device_pool, host, device, layer_events=True)
    pool.load_to_device_per_layer(device_pool, host, device, 1)
    assert moving <= {name for name, _ in chains} <= {*moving, "scan_indices"}
    for name, above in chains:
        files = [path for path, _ in above]
        frames = Counter("pools" if "hicache_pools" in path.parts else "kernels" for path in files)
        assert 1 <= frames["pools"] <= MAX_POOLS_FRAMES, (name, files)
        assert frames["kernels"] <= MAX_KERNELS_FRAMES, (name, files)
        assert len(set(files)) <= MAX_FILES, (name, files)
