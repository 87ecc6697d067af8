"""How far a transfer is from the call that starts it: few frames of ours, in few files."""

from __future__ import annotations

import re

import pytest
import torch
from tests.frames import recorded_chains
from tests.house.measure import PACKAGES, ROOT, modules

from hicache_controller import HiCacheController
from hicache_controller.devices import CpuDevice
from hicache_kernels import StagingRing
from hicache_pools import ExtentAllocator, HostPoolGroup, MHATokenToKVPool, MHATokenToKVPoolHost, PoolEntry

MAX_FRAMES, MAX_FILES = 12, 8


@pytest.fixture
def chains(monkeypatch):
    """Chains of frames of every compiled call, by its name."""
    return recorded_chains(monkeypatch)


def walked(chains, monkeypatch, policy, whole_pools):
    """Write back and load two pages in the thread that starts it; return the chains of each."""
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
    return writes, list(chains)


@pytest.mark.parametrize("policy", ["staged", "direct"])
@pytest.mark.parametrize("whole_pools", [True, False], ids=["by_pools", "by_layers"])
def test_a_transfer_started_by_the_scheduler_is_twelve_calls_from_the_compiled_one(
    monkeypatch, chains, policy, whole_pools
):
    """As on a GPU with one call for all layers of a pool, and by layers."""
    writes, loads = walked(chains, monkeypatch, policy, whole_pools)
    for name, frames in [*writes, *loads]:
        described = [f"{path.parent.name}/{path.name} {function}" for path, function in frames]
        assert len(frames) <= MAX_FRAMES, (name, described)
        assert len({path for path, _ in frames}) <= MAX_FILES, (name, described)


def test_the_page_on_architecture_shows_the_chains_as_they_are(monkeypatch, chains):
    page = (ROOT / "docs" / "architecture.md").read_text()
    lists = [section.split("\n\n")[0] for section in page.split("\n\n1. ")[1:]]
    shown = [re.findall(r"`(hicache_[\w/]+\.py)`: `([\w.]+)`", section) for section in lists]
    for described, found in zip(shown, walked(chains, monkeypatch, "staged", True), strict=True):
        (frames,) = [frames for name, frames in found if name in ("write_back", "load")]
        files = [path.as_posix().split("/src/")[-1].split("site-packages/")[-1] for path, _ in reversed(frames)]
        assert described == [(file, function) for file, (_, function) in zip(files, reversed(frames), strict=True)]


def test_the_page_on_architecture_names_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and ".py`" in line]
    assert len(rows) > 8
    for row in rows:
        for file in re.findall(r"`([\w/]+\.py)`", row):
            assert any(file in modules(package) for package in PACKAGES), row
