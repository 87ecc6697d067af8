"""Every pool, layout, page size and policy on the GPU, both directions: bit for bit, on the path that was announced."""

import random

import pytest
import torch

from hicache_kernels import StagingRing

pytestmark = pytest.mark.gpu

PAGE_COUNTS = (1, 63, 64, 65, 128, 129)
POLICIES = ("auto", "staged", "direct")
SPARE_PAGES = 3


def somewhere(indices, gpu):
    """Indices on either side, in either type."""
    return indices.to(random.choice(["cpu", gpu])).to(random.choice([torch.int32, torch.int64]))


def wait_for(event):
    if event is not None:
        event.synchronize()


def check_path(result, pool, policy):
    capabilities = pool.capabilities()
    assert result.bytes > 0
    assert result.reason
    if {"staged": capabilities.staged, "direct": capabilities.direct}.get(policy, False):
        assert result.path == policy, result
    elif policy == "auto":
        assert result.path in (("staged", "direct") if capabilities.direct else ("staged", "reference")), result
    else:
        assert result.path != policy, result
        assert policy in capabilities.reason, capabilities
    assert (result.copies > 0) == (result.path == "staged"), result


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_come_back_bit_for_bit_and_no_other_page_is_touched(bench, gpu, case_name, layout, page_size, policy):
    case = bench.cases[case_name]
    total = max(PAGE_COUNTS) + SPARE_PAGES
    device_pool = case.make(total, page_size, gpu)
    ring = StagingRing(gpu, pages=64)
    pool = case.host_class(device_pool, 1.0, 0, page_size, layout=layout, transfer_policy=policy, staging_ring=ring)
    assert pool.host_buffer.pinned
    rows = pool.geometry.rows_per_page
    pool.buffer.copy_(bench.random_bytes(pool.buffer.numel()))
    for count in PAGE_COUNTS:
        bench.fill(device_pool)
        device_pages, host_pages, new_pages = (torch.randperm(total)[:count] for _ in range(3))
        host_slots = bench.slots(host_pages, page_size)
        before = case.rows(device_pool)
        expected = bench.read_pages(pool)
        written = [[layer.view(total, rows, -1)[device_pages] for layer in component] for component in before]
        expected[host_pages] = bench.host_pages(layout, written)

        result = pool.backup_from_device_all_layer(
            device_pool, somewhere(host_slots, gpu), somewhere(bench.slots(device_pages, page_size), gpu)
        )
        check_path(result, pool, policy)
        wait_for(result.device_released)
        assert bench.same(case.rows(device_pool), before)
        bench.fill(device_pool)
        wait_for(result.host_ready)
        assert torch.equal(bench.read_pages(pool), expected)

        loaded = case.rows(device_pool)
        given_host, given_device = somewhere(host_slots, gpu), somewhere(bench.slots(new_pages, page_size), gpu)
        for layer in range(pool.layer_num):
            result = pool.load_to_device_per_layer(device_pool, given_host, given_device, layer)
            check_path(result, pool, policy)
        for component, saved in zip(loaded, before, strict=True):
            for layer, saved_layer in zip(component, saved, strict=True):
                layer.view(total, rows, -1)[new_pages] = saved_layer.view(total, rows, -1)[device_pages]
        assert bench.same(case.rows(device_pool), loaded)
        wait_for(result.host_ready)
        assert torch.equal(bench.read_pages(pool), expected)
    pool.destroy()


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_both_io_backends_and_the_all_layer_load_give_the_same_bytes(bench, gpu, case_name, layout, io_backend):
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    device_pool = case.make(9, page_size, gpu)
    pool = case.host_class(device_pool, 2.0, 0, page_size, layout=layout)
    bench.fill(device_pool)
    before = case.rows(device_pool)
    slots = bench.slots(torch.randperm(9), page_size)
    host_slots = pool.alloc(9 * page_size)
    result = pool.backup_from_device_all_layer(device_pool, host_slots, slots, io_backend)
    wait_for(result.device_released)
    bench.fill(device_pool)
    wait_for(result.host_ready)
    result = pool.load_to_device_all_layer(None, host_slots, slots, io_backend, layer_events=True)
    assert io_backend == "kernel" or result.path != "direct"
    assert bench.same(case.rows(device_pool), before)
    pool.destroy()
