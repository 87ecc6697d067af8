"""The quota of CTAs and what the model computes, from a controller to the calls of its pools."""

import re

import pytest
import torch
from tests.conftest import needs

from hicache_controller.controller import HiCacheController
from hicache_controller.devices import CpuDevice
from hicache_controller.hybrid import HybridCacheController
from hicache_controller.transfer_handle import L2Transfer
from hicache_kernels import Compute, TransferResult


class Recorder:
    """Records what each call of a host pool gets for a keyword; "none" where it does not get it."""

    def __init__(self, monkeypatch, pool, keyword="block_quota"):
        self.seen, self.keyword = [], keyword
        for name in ("backup_from_device_all_layer", "load_to_device_per_layer"):
            monkeypatch.setattr(pool, name, self._spying(getattr(pool, name)))

    def _spying(self, inner):
        def call(*args, **options):
            self.seen.append(options.get(self.keyword, "none"))
            return inner(*args, **options)

        return call

    def take(self):
        seen, self.seen = self.seen, []
        return set(seen)


@pytest.mark.parametrize("controller", [HiCacheController, HybridCacheController])
def test_each_direction_has_its_quota(make_stack, monkeypatch, controller):
    stack = make_stack(controller=controller, write_block_quota=3, load_block_quota=0)
    calls = Recorder(monkeypatch, stack.host_pool)
    host, rows = stack.written(4)
    assert calls.take() == {3}
    assert stack.same(stack.loaded(host), rows)
    assert calls.take() == {0}


def test_pools_that_do_not_know_the_keyword_work_without_a_quota(make_stack, monkeypatch):
    stack = make_stack()
    calls = Recorder(monkeypatch, stack.host_pool)
    host, rows = stack.written(2)
    assert stack.same(stack.loaded(host), rows)
    assert calls.take() == {"none"}


def test_a_quota_changed_between_calls_holds_for_what_starts_later(make_stack, monkeypatch):
    stack = make_stack()
    calls = Recorder(monkeypatch, stack.host_pool)
    device = stack.alloc(2)
    stack.controller.write(device, node_id=1)
    stack.controller.write_block_quota = 2
    stack.controller.start_writing()
    stack.controller.write_block_quota = 5
    (ack,) = stack.controller.poll_writes(wait=True)
    assert ack.error is None
    assert calls.take() == {2}
    stack.written(1)
    assert calls.take() == {5}
    stack.controller.write_block_quota = None
    stack.written(1)
    assert calls.take() == {"none"}


def test_a_quota_of_0_shows_in_the_metrics_as_another_path(make_stack):
    stack = make_stack(write_block_quota=0)
    capabilities = stack.host_pool.capabilities()
    needs(capabilities.direct, "no direct path here to forbid: " + capabilities.reason)
    host, rows = stack.written(3)
    assert stack.same(stack.loaded(host), rows)
    operations = stack.controller.metrics.snapshot().counters["transfer_operations"]
    paths = {(dict(labels)["direction"], dict(labels)["path"]) for labels in operations}
    assert ("load", "direct") in paths
    assert not any(direction == "write_back" and path == "direct" for direction, path in paths)


@pytest.mark.parametrize("quota", [None, 0, 6])
def test_a_load_in_one_call_has_the_quota_too(make_stack, monkeypatch, quota):
    stack = make_stack()
    device, host = stack.alloc(2), stack.host_pool.alloc(8)
    seen = []

    def load_all(*_, **options):
        seen.append(options)
        return TransferResult("staged", "", 0, 0, None, None, 0)

    monkeypatch.setattr(CpuDevice, "loads_whole_pools", True)
    monkeypatch.setattr(stack.host_pool, "load_to_device_all_layer", load_all)
    transfer = L2Transfer("kv", stack.host_pool, stack.device_pool, host, device, (0, 1, 2), block_quota=quota)
    handle = stack.controller.engine.submit_host_to_device([transfer], layers=3)
    handle.host_ready.synchronize()
    assert handle.error is None
    assert seen == [{"layer_events": True} | ({} if quota is None else {"block_quota": quota})]


@pytest.mark.parametrize("quota", [-1, 1.0, "2", True])
@pytest.mark.parametrize("name", ["write_block_quota", "load_block_quota"])
def test_a_wrong_quota_raises_and_changes_nothing(make_stack, name, quota):
    with pytest.raises((TypeError, ValueError), match=f"{name} is {quota!r}"):
        make_stack(**{name: quota})
    stack = make_stack(**{name: 4})
    with pytest.raises((TypeError, ValueError), match=f"{name} is {quota!r}"):
        setattr(stack.controller, name, quota)
    assert getattr(stack.controller, name) == 4


def test_what_the_model_computes_reaches_the_pools_of_both_directions_while_it_is_set(make_stack, monkeypatch):
    stack = make_stack()
    calls = Recorder(monkeypatch, stack.host_pool, "compute")
    assert stack.controller.compute is None
    host, rows = stack.written(2)
    assert calls.take() == {"none"}
    for compute in ("prefill", Compute.DECODE, "idle"):
        stack.controller.compute = compute
        other, written = stack.written(2)
        assert stack.same(stack.loaded(other), written)
        assert calls.take() == {Compute(compute)}
    stack.controller.compute = None
    assert stack.same(stack.loaded(host), rows)
    assert calls.take() == {"none"}


@pytest.mark.parametrize("compute", ["training", 1, True, b"decode"])
def test_a_computation_that_is_not_known_raises_and_changes_nothing(make_stack, compute):
    stack = make_stack()
    stack.controller.compute = "decode"
    with pytest.raises(ValueError, match=re.escape(f"compute is {compute!r}; it must be one of prefill, decode, idle")):
        stack.controller.compute = compute
    assert stack.controller.compute == "decode"
    slots = torch.arange(2)
    with pytest.raises(ValueError, match="compute is "):
        L2Transfer("kv", stack.host_pool, stack.device_pool, slots, slots, (0, 1, 2), compute=compute)
