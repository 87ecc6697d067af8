"""Which indices transfers take, how they are read, and what is refused before anything moves."""

import contextlib

import pytest
import torch

from hicache_pools import (
    HostMemoryBudget,
    HostMemoryOptions,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    cpu_simulation,
)
from hicache_pools.simulation import fill_randomly, read_slots


@pytest.mark.parametrize(
    ("host", "device", "error", "message"),
    [
        (torch.arange(16), torch.arange(32), ValueError, "16.*32"),
        (torch.arange(8), torch.arange(8), ValueError, "whole pages of 16"),
        (torch.arange(16) + 8, torch.arange(16), ValueError, "not one page"),
        (torch.arange(16) - 16, torch.arange(16), IndexError, "host_indices contains slot -16"),
        (torch.arange(16) + 96, torch.arange(16), IndexError, "host_indices contains slot 111"),
        (torch.arange(16), torch.arange(16) + 96, IndexError, "device_indices contains slot 111"),
        (torch.arange(16).float(), torch.arange(16), TypeError, "host_indices has dtype"),
        (torch.arange(16), torch.arange(16).view(4, 4), ValueError, "device_indices has shape"),
    ],
)
def test_wrong_indices_are_named_and_nothing_moves(bench, host, device, error, message):
    device_pool = bench.cases["mha"].make(6, 16, "cpu")
    bench.fill(device_pool)
    pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16)
    pool.buffer.copy_(before := bench.random_bytes(pool.buffer.numel()))
    with pytest.raises(error, match=message):
        pool.backup_from_device_all_layer(device_pool, host, device)
    with pytest.raises(error, match=message):
        pool.load_to_device_per_layer(device_pool, host, device, 0)
    assert torch.equal(pool.buffer, before)


@pytest.mark.parametrize("side", ["host_indices", "device_indices"])
@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        (torch.arange(16).flip(0), ValueError, "not one row"),
        (torch.arange(16) + 2, ValueError, "not one row"),
        (torch.arange(16) - 4, IndexError, "contains slot -4"),
        (torch.arange(16) + 4096, IndexError, "contains slot 4111"),
        (torch.arange(14), ValueError, "multiple of the 4 slots of a row"),
    ],
)
def test_slots_of_a_row_must_stay_together(bench, side, indices, error, message):
    device_pool = bench.cases["deepseek_v4_c4"].make(6, 16, "cpu")
    pool = bench.cases["deepseek_v4_c4"].host_class(device_pool, 1.0, 0, 16)
    given = {"host_indices": torch.arange(16), "device_indices": torch.arange(16)} | {side: indices}
    with pytest.raises(error, match=f"{side}.*{message}"):
        pool.backup_from_device_all_layer(device_pool, **given)


def test_indices_changed_in_place_between_two_calls_are_read_again(bench, case_name):
    device_pool, pool = bench.make(case_name)
    before = bench.cases[case_name].rows(device_pool)
    slots = torch.arange(pool.size)
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    bench.fill(device_pool)
    host, device = bench.slots(torch.tensor([0]), pool.page_size), bench.slots(torch.tensor([1]), pool.page_size)
    pool.load_to_device_all_layer(device_pool, host, device)
    host += 2 * pool.page_size
    device += 2 * pool.page_size
    pool.load_to_device_all_layer(device_pool, host, device)
    rows = pool.geometry.rows_per_page
    for now, then in zip(bench.cases[case_name].rows(device_pool), before, strict=True):
        for now_layer, then_layer in zip(now, then, strict=True):
            now_pages, then_pages = now_layer.view(6, rows, -1), then_layer.view(6, rows, -1)
            assert torch.equal(now_pages[[1, 3]], then_pages[[0, 2]])


def test_strided_index_tensors_are_taken(bench):
    device_pool, pool = bench.make("mha_strided")
    slots = torch.stack([torch.arange(pool.size), torch.zeros(pool.size, dtype=torch.int64)], dim=1)[:, 0]
    assert not slots.is_contiguous()
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    assert torch.equal(bench.row_bytes(pool.k_buffer[:, 1]), bench.row_bytes(device_pool.k_buffer[1]))


@pytest.mark.parametrize("case_name", ["mha", "mla_blocks", "dsa_indexer", "deepseek_v4_c4", "mamba"])
def test_virtual_indices_are_translated_when_the_transfer_is_queued(bench, case_name):
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    device_pool = case.make(4, page_size, "cpu")
    bench.fill(device_pool)
    physical = torch.randperm(4)
    virtual_pages = torch.randperm(12)[:4]
    table = torch.zeros(12 * page_size, dtype=torch.int32)
    table[bench.slots(virtual_pages, page_size)] = bench.slots(physical, page_size).int()
    device_pool.index_translation = table
    pool = case.host_class(device_pool, 1.0, 0, page_size)
    before = case.rows(device_pool)
    host, virtual = torch.arange(pool.size), bench.slots(virtual_pages, page_size)
    pool.backup_from_device_all_layer(device_pool, host, virtual)
    rows = pool.geometry.rows_per_page
    pages = [[layer.view(4, rows, -1)[physical] for layer in component] for component in before]
    assert torch.equal(bench.read_pages(pool), bench.host_pages("page_first", pages))
    bench.fill(device_pool)
    moved = torch.randperm(4)
    table[virtual] = bench.slots(moved, page_size).int()
    pool.load_to_device_all_layer(device_pool, host, virtual)
    for now, then in zip(case.rows(device_pool), before, strict=True):
        for now_layer, then_layer in zip(now, then, strict=True):
            assert torch.equal(now_layer.view(4, rows, -1)[moved], then_layer.view(4, rows, -1)[physical])
    with pytest.raises(IndexError, match="device_indices contains slot -1"):
        pool.load_to_device_all_layer(device_pool, host, virtual.clone().fill_(-1))


def test_arguments_of_a_transfer_are_checked(bench):
    device_pool, pool = bench.make("mha")
    other, _ = bench.make("mha")
    slots = torch.arange(pool.size)
    with pytest.raises(ValueError, match="io_backend is 'fast'; accepted are kernel, direct"):
        pool.backup_from_device_all_layer(device_pool, slots, slots, "fast")
    with pytest.raises(ValueError, match="device_pool is another MHATokenToKVPool"):
        pool.backup_from_device_all_layer(other, slots, slots)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=f"layer_id is {layer}; (it must be at least 0|layers of the pool: 2)"):
            pool.load_to_device_per_layer(device_pool, slots, slots, layer)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ([0] * 16, TypeError, "is a list; it must be a tensor"),
        (None, TypeError, "is a NoneType; it must be a tensor"),
        (torch.arange(16).numpy(), TypeError, "is a ndarray; it must be a tensor"),
        (torch.arange(16).short(), TypeError, "has dtype torch.int16"),
        (torch.zeros(16, dtype=torch.int64, device="meta"), ValueError, "lies on meta"),
        (torch.arange(64) + 2**62, IndexError, "contains slot 46116860184273879"),
    ],
    ids=["list", "none", "numpy", "short", "elsewhere", "far"],
)
@pytest.mark.parametrize("side", ["host_indices", "device_indices"])
def test_what_are_no_indices_is_named_by_its_side(bench, side, wrong, error, message):
    device_pool, pool = bench.make("mha_blocks")
    given = {"host_indices": torch.arange(64), "device_indices": torch.arange(64)} | {side: wrong}
    with pytest.raises(error, match=f"{side} {message}"):
        pool.backup_from_device_all_layer(device_pool, **given)
    with pytest.raises(error, match=f"{side} {message}"):
        pool.load_to_device_per_layer(device_pool, **given, layer_id=0)


def test_everything_works_in_inference_mode_and_slots_outlive_it(bench, case_name):
    with torch.inference_mode():
        device_pool, pool = bench.make(case_name)
        before = bench.cases[case_name].rows(device_pool)
        slots = bench.slots(torch.randperm(6), pool.page_size)
        host_slots = pool.alloc(pool.size)
        pool.backup_from_device_all_layer(device_pool, host_slots, slots)
        bench.fill(device_pool)
        for layer in range(pool.layer_num):
            pool.load_to_device_per_layer(device_pool, host_slots, slots, layer)
        assert bench.same(bench.cases[case_name].rows(device_pool), before)
    assert not host_slots.is_inference()
    bench.fill(device_pool)
    pool.load_to_device_all_layer(device_pool, host_slots, slots)
    assert bench.same(bench.cases[case_name].rows(device_pool), before)


def test_inference_tensors_changed_in_place_are_read_again(bench):
    device_pool, pool = bench.make("deepseek_v4_c4")
    with torch.inference_mode():
        slots = torch.arange(pool.page_size)
        pool.backup_from_device_all_layer(device_pool, slots, slots)
        slots += 2 * pool.page_size
        pool.backup_from_device_all_layer(device_pool, slots, slots)
    assert torch.equal(bench.row_bytes(pool.data_refs[1])[32:48], bench.row_bytes(device_pool.kv_buffer[1])[32:48])


def test_a_translation_changed_where_torch_does_not_see_it_is_read_again(bench):
    device_pool, pool = bench.make("mha")
    table = torch.arange(pool.size)
    device_pool.index_translation = table
    slots = torch.arange(pool.size)
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    table.numpy()[:] = table.numpy()[::-1].copy()
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    assert torch.equal(bench.row_bytes(pool.k_data_refs[0]), bench.row_bytes(device_pool.k_buffer[0].flip(0)))


@pytest.mark.parametrize("side", ["k_buffer", "v_buffer"])
def test_memory_that_the_engine_gave_back_is_not_touched(bench, side):
    device_pool, pool = bench.make("mha")
    slots = torch.arange(pool.size)
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    for tensor in getattr(device_pool, side):
        tensor.untyped_storage().resize_(0)
    for use in (
        lambda: pool.backup_from_device_all_layer(device_pool, slots, slots),
        lambda: pool.load_to_device_per_layer(device_pool, slots, slots, 0),
        lambda: pool.load_to_device_all_layer(device_pool, slots, slots),
    ):
        with pytest.raises(RuntimeError, match=rf"{side[0]}\[0\] was described at 0x.* its memory was freed"):
            use()


def test_tensors_that_the_engine_forgets_stay_alive(bench):
    k, v = (bench.layers((64, 2, 8), torch.bfloat16, "cpu") for _ in range(2))
    pool = MHATokenToKVPoolHost(MHATokenToKVPool.from_buffers(k=k, v=v, page_size=16), 1.0, 0, 16)
    k[1].normal_()
    expected = k[1].clone()
    del k, v
    pool.backup_from_device_all_layer(None, torch.arange(64), torch.arange(64))
    assert torch.equal(pool.k_data_refs[1], expected)


def test_tensors_that_require_gradients_move_like_others():
    k, v = ([torch.randn(64, 2, 8, requires_grad=True) for _ in range(2)] for _ in range(2))
    device_pool = MHATokenToKVPool.from_buffers(k=k, v=v, page_size=16)
    expected = [tensor.detach().clone() for tensor in (*k, *v)]
    for simulated in (False, True):
        with cpu_simulation() if simulated else contextlib.nullcontext():
            pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16)
        slots = torch.arange(64)
        pool.backup_from_device_all_layer(device_pool, slots, slots)
        with torch.no_grad():
            for tensor in (*k, *v):
                tensor.zero_()
        pool.load_to_device_all_layer(device_pool, slots, slots)
        assert all(torch.equal(tensor, saved) for tensor, saved in zip((*k, *v), expected, strict=True))


def test_pages_given_twice_stay_inside_their_own_rows(bench):
    """What a destination given twice holds is not promised; that nothing else changes is."""
    device_pool, pool = bench.make("mha")
    before = bench.read_pages(pool)
    rows = bench.cases["mha"].rows(device_pool)
    twice = bench.slots(torch.tensor([2, 2]), pool.page_size)
    pool.backup_from_device_all_layer(device_pool, twice, bench.slots(torch.tensor([1, 3]), pool.page_size))
    after = bench.read_pages(pool)
    others = [page for page in range(6) if page != 2]
    assert torch.equal(after[others], before[others])
    pool.load_to_device_all_layer(device_pool, bench.slots(torch.tensor([1, 3]), pool.page_size), twice)
    for now, then in zip(bench.cases["mha"].rows(device_pool), rows, strict=True):
        for now_layer, then_layer in zip(now, then, strict=True):
            assert torch.equal(now_layer.view(6, -1)[others], then_layer.view(6, -1)[others])


class Unlimited(HostMemoryBudget):
    """Refuses nothing."""

    def check(self, nbytes):
        return self.memory()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("row_bytes", [32, 20])
def test_pages_beyond_4_gib_are_reached(layout, row_bytes):
    """Address space only: the memory of pages that are never touched is never there."""
    device_pool = MLATokenToKVPool(128, 16, torch.uint8, row_bytes, 0, 2)
    pages = 9 * (1 << 29) // (16 * 2 * row_bytes)
    options = HostMemoryOptions(budget=Unlimited())
    pool = MLATokenToKVPoolHost(device_pool, 0, 0, 16, layout=layout, pages=pages, memory_options=options)
    assert pool.buffer.numel() > 1 << 32
    fill_randomly(device_pool)
    pages = torch.tensor([0, pages - 1, pages // 2, pages // 3, pages - 2])
    host, device = ((p[:, None] * 16 + torch.arange(16)).flatten() for p in (pages, torch.randperm(8)[:5]))
    before = read_slots(device_pool, device)
    pool.backup_from_device_all_layer(device_pool, host, device)
    parts = [pool.buffer[offset : offset + size] for offset, size in pool.page_parts(int(pages[1]))]
    assert torch.cat(parts).any()
    fill_randomly(device_pool)
    for layer in range(2):
        pool.load_to_device_per_layer(device_pool, host, device, layer)
    assert torch.equal(read_slots(device_pool, device)["kv"], before["kv"])
    pool.destroy()
