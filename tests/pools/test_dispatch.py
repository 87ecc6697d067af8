"""Every pool, layout, page size and policy, both directions: bit for bit, on the path that was announced."""

import pytest
import torch

from hicache_kernels import StagingRing

PAGE_COUNTS = (1, 63, 64, 65, 128, 129)
POLICIES = ("auto", "staged", "direct")
SPARE_PAGES = 3


def check_path(result, pool, policy):
    capabilities = pool.capabilities()
    assert result.bytes > 0
    assert result.reason
    wanted = {"staged": capabilities.staged, "direct": capabilities.direct}.get(policy, False)
    if wanted:
        assert result.path == policy, result
    elif policy == "auto":
        assert result.path in (("staged", "direct") if capabilities.direct else ("staged", "reference")), result
    else:
        assert result.path != policy, result
        assert policy in capabilities.reason, capabilities
    assert (result.copies > 0) == (result.path == "staged"), result


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_come_back_bit_for_bit_and_no_other_page_is_touched(bench, case_name, layout, page_size, policy):
    case = bench.cases[case_name]
    total = max(PAGE_COUNTS) + SPARE_PAGES
    device_pool = case.make(total, page_size, "cpu")
    ring = StagingRing("cpu", pages=64)
    pool = case.host_class(device_pool, 1.0, 0, page_size, layout=layout, transfer_policy=policy, staging_ring=ring)
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

        result = pool.backup_from_device_all_layer(device_pool, host_slots, bench.slots(device_pages, page_size))

        check_path(result, pool, policy)
        assert torch.equal(bench.read_pages(pool), expected)
        assert bench.same(case.rows(device_pool), before)

        bench.fill(device_pool)
        loaded = case.rows(device_pool)
        new_slots = bench.slots(new_pages, page_size)
        for layer in range(pool.layer_num):
            check_path(pool.load_to_device_per_layer(device_pool, host_slots, new_slots, layer), pool, policy)
        for component, saved in zip(loaded, before, strict=True):
            for layer, saved_layer in zip(component, saved, strict=True):
                layer.view(total, rows, -1)[new_pages] = saved_layer.view(total, rows, -1)[device_pages]
        assert bench.same(case.rows(device_pool), loaded)
        assert torch.equal(bench.read_pages(pool), expected)
    pool.destroy()


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_both_io_backends_and_the_all_layer_load_give_the_same_bytes(bench, case_name, layout, io_backend):
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    device_pool = case.make(9, page_size, "cpu")
    host_pool = case.host_class(device_pool, 2.0, 0, page_size, layout=layout)
    bench.fill(device_pool)
    before = case.rows(device_pool)
    slots = bench.slots(torch.randperm(9), page_size)
    host_slots = host_pool.alloc(9 * page_size)
    host_pool.backup_from_device_all_layer(device_pool, host_slots, slots, io_backend)
    bench.fill(device_pool)
    host_pool.load_to_device_all_layer(None, host_slots, slots, io_backend)
    assert bench.same(case.rows(device_pool), before)


def test_an_empty_transfer_moves_nothing(bench, case_name, layout):
    case = bench.cases[case_name]
    page_size = case.page_sizes[0]
    device_pool = case.make(3, page_size, "cpu")
    bench.fill(device_pool)
    host_pool = case.host_class(device_pool, 1.0, 0, page_size, layout=layout)
    host_pool.buffer.copy_(bench.random_bytes(host_pool.buffer.numel()))
    before, host_before = case.rows(device_pool), host_pool.buffer.clone()
    none = torch.empty(0, dtype=torch.int64)
    host_pool.backup_from_device_all_layer(device_pool, none, none, "kernel")
    host_pool.load_to_device_per_layer(device_pool, none, none, 0, "kernel")
    assert torch.equal(host_pool.buffer, host_before)
    assert bench.same(case.rows(device_pool), before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_either_type_are_taken(bench, case_name, dtype):
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    device_pool = case.make(5, page_size, "cpu")
    bench.fill(device_pool)
    before = case.rows(device_pool)
    host_pool = case.host_class(device_pool, 1.0, 0, page_size)
    slots = bench.slots(torch.randperm(5), page_size).to(dtype)
    host_slots = bench.slots(torch.randperm(5), page_size).to(dtype)
    host_pool.backup_from_device_all_layer(device_pool, host_slots, slots)
    bench.fill(device_pool)
    host_pool.load_to_device_all_layer(device_pool, host_slots, slots)
    assert bench.same(case.rows(device_pool), before)
