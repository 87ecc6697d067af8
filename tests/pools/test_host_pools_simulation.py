"""Engines' tests run every pool on CPU tensors with the torch reference, without a compiler."""

import contextlib

import pytest
import torch

from hicache_kernels import paths
from hicache_pools import MHATokenToKVPoolHost, cpu_simulation
from hicache_pools.simulation import simulation_is_active


def test_every_pool_runs_on_the_reference_and_nothing_is_compiled(bench, case_name, layout, monkeypatch):
    def compiled(*_):
        raise AssertionError("a module was loaded inside the simulation")

    monkeypatch.setattr(paths, "load_module", compiled)
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    device_pool = case.make(6, page_size, "cpu")
    with cpu_simulation():
        pool = case.host_class(device_pool, 1.0, 0, page_size, layout=layout, transfer_policy="staged")
    bench.fill(device_pool)
    before = case.rows(device_pool)
    slots, host_slots = (bench.slots(torch.randperm(6), page_size) for _ in range(2))
    for io_backend in ("kernel", "direct"):
        result = pool.backup_from_device_all_layer(device_pool, host_slots, slots, io_backend)
        assert (result.path, result.device_released, result.host_ready) == ("reference", None, None)
        bench.fill(device_pool)
        for layer in range(pool.layer_num):
            pool.load_to_device_per_layer(device_pool, host_slots, slots, layer, io_backend)
        assert bench.same(case.rows(device_pool), before)
    assert not pool.can_use_write_back_jit
    assert not pool.can_use_jit
    assert "cpu_simulation" in pool.capabilities().reason
    assert pool.layout == layout


def test_only_pools_made_inside_are_simulated(bench):
    assert not simulation_is_active()
    with contextlib.suppress(KeyError), cpu_simulation():
        assert simulation_is_active()
        raise KeyError
    assert not simulation_is_active()
    device_pool = bench.cases["mha"].make(4, 16, "cpu")
    assert "cpu_simulation" not in MHATokenToKVPoolHost(device_pool, 1.0, 0, 16).capabilities().reason


def test_a_device_pool_elsewhere_is_refused(bench):
    device_pool = bench.cases["mha"].make(4, 16, "cpu")
    device_pool.device = torch.device("cuda")
    with cpu_simulation(), pytest.raises(ValueError, match="device_pool is on cuda; inside cpu_simulation"):
        MHATokenToKVPoolHost(device_pool, 1.0, 0, 16)
