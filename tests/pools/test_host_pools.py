"""Host pools: sizes, layouts, views, page memory, slots, life and errors, the same for every kind."""

import math

import pytest
import torch

from hicache_kernels import HostLayout
from hicache_pools import (
    HostMemoryBudget,
    HostMemoryBudgetError,
    HostMemoryOptions,
    HostPoolGroup,
    MambaPoolHost,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    NullPoolHost,
    PoolEntry,
    attach_host_buffer,
)
from hicache_pools.host_pools import base as host_pool_base
from hicache_pools.pool_entry import REQUIRED_POOL_ATTRIBUTES

ATTRIBUTES = (
    "size",
    "page_num",
    "page_size",
    "layout",
    "layer_num",
    "can_use_jit",
    "can_use_write_back_jit",
    "staging_page_capacity",
    "staging_token_capacity",
    "alloc",
    "free",
    "available_size",
    "clear",
    "destroy",
    "backup_from_device_all_layer",
    "load_to_device_per_layer",
    "capabilities",
    "alloc_pages",
    "free_pages",
    "page_bytes",
    "page_parts",
    "page_memory",
    "read_page",
    "write_page",
    "geometry",
)


# -- what engines and groups read


def test_every_pool_has_the_attributes_that_engines_and_groups_read(bench, case_name):
    _, pool = bench.make(case_name)
    for name in (*ATTRIBUTES, *REQUIRED_POOL_ATTRIBUTES, "buffer", "transfer"):
        assert hasattr(pool, name), name
    assert pool.size == pool.page_num * pool.page_size == 6 * pool.device_pool.page_size
    assert pool.layer_num == pool.device_pool.layer_num
    assert pool.page_bytes * pool.page_num == pool.buffer.numel()
    assert pool.staging_token_capacity == pool.staging_page_capacity * pool.page_size
    assert pool.can_use_write_back_jit == (pool.staging_page_capacity > 0)
    assert HostPoolGroup([PoolEntry("kv", pool, pool.device_pool, lambda layer: layer)]).size == pool.size


def test_flags_say_what_the_transfers_do_and_why_not_more(bench, case_name):
    _, pool = bench.make(case_name)
    capabilities = pool.capabilities()
    assert capabilities.reason
    assert (pool.can_use_jit, pool.can_use_write_back_jit) == (capabilities.direct, capabilities.staged)
    narrow = any(plane.row_bytes % 16 for plane in pool.transfer.planes)
    assert not (narrow and capabilities.staged)
    if narrow:
        assert "16" in capabilities.reason or capabilities.build_error


def test_a_pool_whose_rows_are_no_multiple_of_16_has_no_staged_path_and_still_transfers():
    device_pool = MLATokenToKVPool(64, 16, torch.uint8, 16, 4, 2)
    pool = MLATokenToKVPoolHost(device_pool, 1.0, 0, 16, transfer_policy="staged")
    assert not pool.can_use_write_back_jit
    assert pool.staging_page_capacity == 0
    assert "20 bytes" in pool.capabilities().reason or pool.capabilities().build_error
    slots = torch.arange(64)
    device_pool.kv_buffer[1].random_(0, 256)
    result = pool.backup_from_device_all_layer(device_pool, slots, slots)
    assert result.path != "staged"
    assert torch.equal(pool.kv_buffer[:, 1], device_pool.kv_buffer[1])


def test_without_memory_for_staging_the_flag_is_false_and_transfers_work(bench, monkeypatch):
    from hicache_kernels.staging import StagingLane, StagingRing

    def no_memory(*_):
        raise torch.OutOfMemoryError("asked for more than there is")

    monkeypatch.setattr(StagingLane, "chunk_pages", no_memory)
    for policy in ("auto", "staged", "direct"):
        device_pool, pool = bench.make("mha", staging_ring=StagingRing("cpu"), transfer_policy=policy)
        assert not pool.can_use_write_back_jit
        assert pool.staging_page_capacity == 0
        if not pool.capabilities().build_error:
            assert "no memory for staging" in pool.capabilities().reason
        slots = torch.arange(pool.size)
        for io_backend in ("kernel", "direct"):
            pool.buffer.zero_()
            result = pool.backup_from_device_all_layer(device_pool, slots, slots, io_backend)
            assert result.path == pool.capabilities().path_write_back or io_backend == "direct"
            assert torch.equal(bench.row_bytes(pool.k_buffer[:, 0]), bench.row_bytes(device_pool.k_buffer[0]))


# -- sizes


def test_the_ratio_sizes_a_pool_by_slots_and_a_host_size_by_bytes(bench, case_name):
    device_pool, pool = bench.make(case_name, ratio=2.5)
    assert pool.page_num == int(6 * 2.5)
    _, sized = bench.make(case_name, ratio=99.0, host_size=(7.5 * pool.page_bytes) / 1e9)
    assert sized.page_num == 7
    exact = type(pool)(device_pool, 0, 0, pool.page_size, pages=3)
    assert (exact.page_num, exact.size) == (3, 3 * pool.page_size)


def test_element_sizes_come_from_shapes_alone(bench):
    _, indexer = bench.make("dsa_indexer")
    page_size = indexer.page_size
    assert indexer.indexer_page_stride_size == page_size * (8 + 4)
    assert indexer.page_bytes == indexer.layer_num * indexer.indexer_page_stride_size
    _, rows_of_8 = bench.make("dsa_indexer_small_rows")
    assert rows_of_8.indexer_page_stride_size == 96 * rows_of_8.page_size // 8
    _, mamba = bench.make("mamba")
    assert mamba.page_bytes == 2 * (6 * 3 * 2 + 4 * 3 * 2 + 2 * 4 * 4 * 4 + 2 * 8 + 4)
    device_pool = bench.make("deepseek_v4_c128")[0]
    paged = bench.cases["deepseek_v4_c128"].host_class(device_pool, 1.0, 0, 256)
    assert paged.page_bytes == 2 * 2 * 48


def test_an_index_buffer_of_wide_elements_is_measured_once(bench):
    from hicache_pools import DSAIndexerPoolHost, DSATokenToKVPool

    kv = bench.layers((32, 1, 20), torch.bfloat16, "cpu")
    index_k = bench.layers((4, 24), torch.float32, "cpu")
    pool = DSAIndexerPoolHost(DSATokenToKVPool.from_buffers(kv=kv, index_k=index_k, page_size=8), 1.0, 0, 8)
    assert pool.indexer_page_stride_size == 96
    assert pool.index_k_with_scale_buffer.dtype is torch.float32


# -- layouts


@pytest.mark.parametrize("kind", ["cpu", "cuda", "hip", "xpu", "hpu", "mps", "npu", "musa"])
def test_a_requested_layout_is_never_rewritten_whatever_the_device(bench, case_name, layout, kind, monkeypatch):
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    device_pool = case.make(4, page_size, "cpu")
    if kind == "hip":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    if kind == "npu":
        device_pool.device = torch.device("privateuseone")
    elif kind != "musa":
        device_pool.device = torch.device("cuda" if kind == "hip" else kind)
    else:
        device_pool.device = torch.device("privateuseone", 0)
    pool = case.host_class(device_pool, 1.0, 0, page_size, layout=layout, pin_memory=False)
    assert pool.layout == layout
    assert pool.geometry.layout == layout
    pool.write_page(1, data := bench.random_bytes(pool.page_bytes))
    assert torch.equal(pool.read_page(1), data)


def test_page_first_is_the_default(bench, case_name):
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    assert case.host_class(case.make(4, page_size, "cpu"), 1.0, 0, page_size).layout == "page_first"


@pytest.mark.parametrize("case_name", ["mamba", "deepseek_v4_state"])
def test_pools_of_states_refuse_layer_first_and_pages_of_several_slots(bench, case_name):
    case = bench.cases[case_name]
    device_pool = case.make(4, 1, "cpu")
    with pytest.raises(ValueError, match="layout is 'layer_first'; accepted are page_first, page_first_direct"):
        case.host_class(device_pool, 1.0, 0, layout="layer_first")
    with pytest.raises(ValueError, match="page_size is 2"):
        case.host_class(device_pool, 1.0, 0, 2)


# -- views


def test_views_show_the_bytes_of_each_layer_under_the_names_engines_use(bench, case_name, layout):
    device_pool, pool = bench.make(case_name, layout=layout)
    slots = torch.randperm(6)
    pool.backup_from_device_all_layer(
        device_pool, torch.arange(pool.size), bench.slots(slots, pool.page_size), "kernel"
    )
    case, rows = bench.cases[case_name], pool.geometry.rows_per_page
    for component, expected in zip(pool.geometry.components, case.rows(device_pool), strict=True):
        for layer, view in enumerate(pool.component_layers(component.name)):
            flat = view.flatten(0, 1) if layout == "page_first_direct" else view
            assert torch.equal(bench.row_bytes(flat), expected[layer].view(6, rows, -1)[slots].flatten(0, 1))
            assert view.dtype == pool.device_pool.component(component.name).dtype
            assert view.untyped_storage().data_ptr() == pool.buffer.untyped_storage().data_ptr()


def test_buffers_have_the_axes_of_their_layout():
    device_pool = MHATokenToKVPool(64, 16, torch.bfloat16, 2, 8, 3, v_head_dim=4)
    shapes = {"layer_first": (3, 64), "page_first": (64, 3), "page_first_direct": (4, 3, 16)}
    for layout, shape in shapes.items():
        pool = MHATokenToKVPoolHost(device_pool, 1.0, 0, 16, layout=layout)
        assert pool.k_buffer.shape == (*shape, 2, 8)
        assert pool.v_buffer.shape == (*shape, 2, 4)
        assert len(pool.k_data_refs) == len(pool.v_data_refs) == 3
    mla = MLATokenToKVPoolHost(MLATokenToKVPool(64, 16, torch.bfloat16, 16, 4, 3), 1.0, 0, 16)
    assert mla.kv_buffer.shape == (64, 3, 1, 20)
    assert [t.shape for t in mla.data_refs] == [(64, 1, 20)] * 3


def test_every_kind_has_its_buffers(bench):
    names = {
        "dsa_indexer": ("index_k_with_scale_buffer", "index_k_data_refs"),
        "deepseek_v4_c4": ("kv_buffer", "data_refs", "indexer_buffer", "indexer_data_refs"),
        "deepseek_v4_state": ("state_buffer",),
        "mamba": ("conv_buffer", "temporal_buffer", "side_buffer"),
    }
    for case_name, buffers in names.items():
        pool = bench.make(case_name)[1]
        for name in buffers:
            assert len(getattr(pool, name)) > 0
    assert set(bench.make("mamba")[1].side_buffer) == {"steps", "flags"}


def test_a_view_that_a_type_cannot_have_is_refused_with_the_reason(bench):
    from hicache_pools import MambaPool

    conv, temporal = (bench.layers((4, n), d, "cpu") for n, d in ((3, torch.uint8), (2, torch.float32)))
    pool = MambaPoolHost(MambaPool.from_buffers(conv=conv, temporal=temporal), 1.0, 0)
    with pytest.raises(ValueError, match="temporal is float32, but its elements lie"):
        _ = pool.temporal_buffer
    assert pool.conv_buffer[0].shape == (4, 2, 3)


# -- pages


def test_page_memory_is_the_page_and_writable_without_a_copy(bench, case_name, layout):
    _, pool = bench.make(case_name, layout=layout)
    for page in range(pool.page_num):
        pool.write_page(page, bench.random_bytes(pool.page_bytes))
    pages = bench.read_pages(pool)
    for page in torch.randperm(pool.page_num).tolist():
        parts = pool.page_parts(page)
        assert len(parts) == (1 if layout != "layer_first" else pool.layer_num * len(pool.geometry.components))
        assert sum(part.size for part in parts) == pool.page_bytes
        memory = pool.page_memory(page)
        assert b"".join(memory) == pages[page].numpy().tobytes()
        assert [part.tobytes() for part in memory] == [
            pool.buffer[offset : offset + size].numpy().tobytes() for offset, size in parts
        ]
        memory[-1][-1] = 255 - memory[-1][-1]
        pages[page, -1] = 255 - pages[page, -1]
        assert torch.equal(bench.read_pages(pool), pages)


def test_pages_cover_the_buffer_and_never_overlap(bench, case_name, layout):
    _, pool = bench.make(case_name, layout=layout)
    covered = torch.zeros(pool.buffer.numel(), dtype=torch.int32)
    for page in range(pool.page_num):
        for offset, size in pool.page_parts(page):
            covered[offset : offset + size] += 1
    assert bool((covered == 1).all())


def test_a_page_or_its_data_of_a_wrong_size_is_refused(bench):
    _, pool = bench.make("mla")
    for page in (-1, pool.page_num):
        with pytest.raises(ValueError, match=f"page is {page}; it must be at (least 0|most 5)"):
            pool.page_parts(page)
    with pytest.raises(ValueError, match="data has shape"):
        pool.write_page(0, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="float32"):
        pool.write_page(0, torch.zeros(pool.page_bytes))
    with pytest.raises(TypeError, match="data is a bytes"):
        pool.write_page(0, bytes(pool.page_bytes))
    with pytest.raises(TypeError, match=r"page is 1\.0; it must be a whole number"):
        pool.page_parts(1.0)
    with pytest.raises(TypeError, match="layer_id is None; it must be a whole number"):
        pool.load_to_device_per_layer(None, torch.arange(64), torch.arange(64), None)


# -- slots


def test_slots_are_owned_and_given_back(bench, case_name):
    _, pool = bench.make(case_name)
    size = pool.page_size
    first, second = pool.alloc(2 * size), pool.alloc(3 * size)
    assert first.dtype is torch.int64
    assert sorted(torch.cat([first, second]).tolist())[-1] < pool.size
    assert not set(first.tolist()) & set(second.tolist())
    assert pool.alloc(2 * size) is None
    assert pool.available_size() == size
    with pytest.raises(ValueError, match="n_slots"):
        pool.alloc(-size)
    first_copy = first.clone()
    first.zero_()
    assert pool.free(first_copy) == 2 * size
    with pytest.raises(ValueError):
        pool.free(first_copy)
    assert pool.available_size() == 3 * size
    pages = pool.alloc_pages(2)
    assert pool.free_pages(pages) == 2
    pool.clear()
    assert pool.available_size() == pool.size
    pool.allocator.check_integrity()


# -- construction


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layout": "page_last"}, ValueError, "layout is 'page_last'; accepted are layer_first, page_first"),
        ({"transfer_policy": "fast"}, ValueError, "transfer_policy is 'fast'; accepted are auto, staged, direct"),
        ({"transfer_policy": "reference"}, ValueError, "transfer_policy is 'reference'"),
        ({"allocator_type": "magic"}, ValueError, "allocator_type is 'magic'; accepted are default, shared"),
        ({"device": "cuda"}, ValueError, "device is 'cuda'"),
        ({"page_size": 0}, ValueError, "page_size is 0"),
        ({"pages": 0}, ValueError, "pages is 0"),
        ({"pages": 2.0}, TypeError, "pages is 2.0; it must be a whole number"),
        ({"page_size": "16"}, TypeError, "page_size is '16'; it must be a whole number"),
        ({"host_size": math.nan}, ValueError, "host_size is nan; it must be finite"),
        ({"host_size": math.inf}, ValueError, "host_size is inf; it must be finite"),
        ({"host_size": "4"}, TypeError, "host_size is '4'; it must be a number"),
        ({"host_to_device_ratio": math.nan}, ValueError, "host_to_device_ratio is nan; it must be finite"),
        ({"host_to_device_ratio": 0.01}, ValueError, "host_to_device_ratio is 0.01"),
        ({"host_size": 1e-9}, ValueError, "host_size is 1e-09 GB"),
        (
            {"device_pool": object()},
            TypeError,
            "device_pool is a object; MHATokenToKVPoolHost takes a MHA",
        ),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_accepted(change, error, message):
    device_pool = MHATokenToKVPool(64, 16, torch.bfloat16, 2, 8, 2)
    arguments = {"device_pool": device_pool, "host_to_device_ratio": 1.0, "host_size": 0, "page_size": 16} | change
    with pytest.raises(error, match=message):
        MHATokenToKVPoolHost(**arguments)


def test_the_page_size_is_the_device_pools_unless_it_is_given(bench, case_name):
    case = bench.cases[case_name]
    device_pool = case.make(4, case.page_sizes[0], "cpu")
    assert case.host_class(device_pool, 1.0, 0).page_size == device_pool.page_size


def test_page_sizes_must_hold_whole_rows(bench):
    device_pool = bench.cases["deepseek_v4_c128"].make(4, 256, "cpu")
    with pytest.raises(ValueError, match="page_size is 64; it must be a positive multiple of the 128 slots of a row"):
        bench.cases["deepseek_v4_c128"].host_class(device_pool, 1.0, 0, 64)


def test_the_budget_is_asked_before_anything_is_allocated(monkeypatch):
    device_pool = MHATokenToKVPool(64, 16, torch.bfloat16, 2, 8, 2)
    options = HostMemoryOptions(budget=HostMemoryBudget(reserve_bytes=1 << 60))
    monkeypatch.setattr(host_pool_base, "ExtentAllocator", None)  # its arrays grow with the pages
    with pytest.raises(HostMemoryBudgetError):
        MHATokenToKVPoolHost(device_pool, 1.0, 0, 16, memory_options=options)
    with pytest.raises(HostMemoryBudgetError):
        MHATokenToKVPoolHost(device_pool, 1.0, 0, 16, pages=(1 << 31) - 1)


def test_registrations_end_between_pages(bench, case_name, layout):
    class Runtime:
        def __init__(self):
            self.registered = {}

        def register(self, address, nbytes):
            self.registered[address] = nbytes
            return 0

        def unregister(self, address):
            del self.registered[address]
            return 0

        def device_address(self, address):
            return 0, address

        def __getattr__(self, name):
            return lambda *_: 0

    runtime = Runtime()
    case = bench.cases[case_name]
    page_size = case.page_sizes[-1]
    device_pool = case.make(4, page_size, "cpu")
    page_bytes = case.host_class(device_pool, 1.0, 0, page_size).page_bytes
    chunk = max(1 << 16, math.lcm(page_bytes, 4096))
    pages = 4096 * max(1, -(-4 * chunk // (4096 * page_bytes)))
    options = HostMemoryOptions(chunk_bytes=chunk, runtime=runtime, budget=HostMemoryBudget(reserve_bytes=0))
    pool = case.host_class(device_pool, 0, 0, page_size, layout=layout, pages=pages, memory_options=options)
    assert len(runtime.registered) >= 4
    assert sum(runtime.registered.values()) >= pool.buffer.numel()
    boundaries = torch.tensor(pool.transfer.boundaries)
    assert len(boundaries) == len(runtime.registered) - 1
    starts = torch.tensor([part for page in range(0, pages, 7) for part in pool.page_parts(page)])
    inside = (boundaries[:, None] > starts[:, 0]) & (boundaries[:, None] < starts[:, 0] + starts[:, 1])
    assert not bool(inside.any())
    pool.destroy()
    assert runtime.registered == {}


@pytest.mark.parametrize("case_name", ["mha", "mla", "dsa_indexer", "deepseek_v4_c4", "deepseek_v4_state", "mamba"])
def test_shared_memory_is_honoured_by_every_kind_and_seen_by_who_attaches(bench, case_name):
    device_pool, pool = bench.make(case_name, allocator_type="shared")
    slots = torch.arange(pool.size)
    pool.backup_from_device_all_layer(device_pool, slots, slots)
    with attach_host_buffer(pool.host_buffer.shared_name, pin=False, page_bytes=pool.page_bytes) as attached:
        assert torch.equal(attached.tensor, pool.buffer)
    pool.destroy()


# -- a pool without bytes


def test_a_pool_for_bookkeeping_has_slots_and_no_bytes():
    pool = NullPoolHost(10, 4)
    assert (pool.size, pool.layer_num, pool.page_bytes, pool.geometry.components) == (40, 0, 0, ())
    slots = pool.alloc(8)
    result = pool.backup_from_device_all_layer(None, slots, slots)
    assert (result.bytes, pool.load_to_device_per_layer(None, slots, slots, 0).bytes) == (0, 0)
    assert pool.load_to_device_all_layer(None, slots, slots).bytes == 0
    assert pool.page_parts(3) == pool.page_memory(3) == ()
    assert pool.read_page(3).numel() == 0
    pool.write_page(3, torch.empty(0, dtype=torch.uint8))
    assert pool.capabilities().path_write_back == "none"
    assert not pool.can_use_write_back_jit
    with pytest.raises(RuntimeError, match="has no bytes"):
        _ = pool.buffer
    with pytest.raises(RuntimeError, match="has no bytes"):
        _ = pool.transfer
    for name in (*ATTRIBUTES, *REQUIRED_POOL_ATTRIBUTES):
        assert hasattr(pool, name), name
    assert pool.free(slots) == 8
    pool.destroy()
    pool.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        pool.alloc(4)
    with pytest.raises(ValueError, match="pages is 0"):
        NullPoolHost(0, 4)
    with pytest.raises(ValueError, match="layout is 'rows'; accepted are layer_first"):
        NullPoolHost(1, 4, "rows")
    assert NullPoolHost(1, 1, HostLayout.LAYER_FIRST).layout == "layer_first"
