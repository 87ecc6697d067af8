"""How far a transfer is from the call that starts it: few frames of ours, in few files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hicache_controller import HiCacheController
from hicache_controller.devices import CpuDevice
from hicache_kernels import StagingRing, paths
from hicache_pools import ExtentAllocator, HostPoolGroup, MHATokenToKVPool, MHATokenToKVPoolHost, PoolEntry

MAX_FRAMES, MAX_FILES = 12, 8
MAX_CONTROLLER_FRAMES, MAX_CONTROLLER_FILES = 7, 5
PACKAGES = ("hicache_controller", "hicache_pools", "hicache_kernels")


class Recorder:
    """A compiled module whose functions note the frames of ours that they are called from, the innermost first."""

    def __init__(self, module, chains):
        self._module = module
        self._chains = chains

    def __getitem__(self, name):
        function = self._module[name]

        def call(*arguments):
            frame, files = sys._getframe(1), []
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                if not set(PACKAGES).isdisjoint(path.parts):
                    files.append(path)
                frame = frame.f_back
            self._chains.append((name, files))
            return function(*arguments)

        return call


@pytest.fixture
def chains(monkeypatch):
    """Chains of frames of every compiled call, by its name."""
    found = []
    load = paths.load_module

    def recorded(name, device_type):
        module = load(name, device_type)
        assert module is not None
        return Recorder(module, found)

    monkeypatch.setattr(paths, "load_module", recorded)
    return found


@pytest.mark.parametrize("policy", ["staged", "direct"])
@pytest.mark.parametrize("whole_pools", [True, False], ids=["by_pools", "by_layers"])
def test_a_transfer_started_by_the_scheduler_is_twelve_calls_from_the_compiled_one(
    monkeypatch, chains, policy, whole_pools
):
    """With the transfer run in the thread that starts it, and as on a GPU with one call for all layers of a pool."""
    monkeypatch.setattr(CpuDevice, "moves_on_cpu", lambda *_: False)
    monkeypatch.setattr(CpuDevice, "loads_whole_pools", whole_pools)
    device_pool = MHATokenToKVPool(96, 16, torch.bfloat16, 2, 8, 2)
    host_pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, transfer_policy=policy, staging_ring=StagingRing("cpu"))
    allocator = ExtentAllocator(6, 16)
    entry = PoolEntry(
        "kv",
        host_pool,
        device_pool,
        lambda layer: layer,
        device_alloc_fn=allocator.alloc,
        device_free_fn=allocator.free,
    )
    controller = HiCacheController(HostPoolGroup([entry]), queue_inline=True)
    try:
        chains.clear()
        host = controller.write(allocator.alloc(32), node_id=1)
        controller.start_writing()
        assert controller.poll_writes(wait=True)[0].error is None
        writes, chains[:] = list(chains), []
        controller.load(host, node_id=2)
        controller.start_loading()
        assert controller.poll_loads(wait=True)[0].error is None
    finally:
        controller.shutdown()
    for found in (writes, chains):
        assert {name for name, _ in found} - {"scan_indices"}
    for name, files in [*writes, *chains]:
        controller_files = [path for path in files if "hicache_controller" in path.parts]
        described = [f"{path.parent.name}/{path.name}" for path in files]
        assert len(controller_files) <= MAX_CONTROLLER_FRAMES, (name, described)
        assert len(set(controller_files)) <= MAX_CONTROLLER_FILES, (name, described)
        assert len(files) <= MAX_FRAMES, (name, described)
        assert len(set(files)) <= MAX_FILES, (name, described)
