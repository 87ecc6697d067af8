"""PlaneTransfer on CPU: compiled paths bit for bit against the reference, choices, and refusals."""

import logging
import random
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_kernels import (
    DeviceRows,
    HostLayout,
    HostRows,
    HostStrides,
    Plane,
    PlaneTransfer,
    host_strides,
    movers,
    paths,
    planner,
    transfer,
)
from hicache_kernels.checks import check_indices
from hicache_kernels.constants import H200
from hicache_kernels.staging import Direction, StagingRing, default_ring

LAYOUTS = list(HostLayout)
PATHS = ("staged", "direct")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8)


def now() -> None:
    """The compiled CPU modules are done when they return."""


def check_all(pool, transfer_, host, device, policy):
    pool.check_write_back(host, device, transfer_.write_back, now, policy=policy)
    pool.check_load(host, device, transfer_.load, now, policy=policy)
    layer = random.randrange(transfer_.layers)
    pool.check_load(host, device, transfer_.load, now, layer=layer, policy=policy)


@st.composite
def shapes(draw):
    """Pools of up to 64 MiB, mostly far smaller."""
    limit = draw(st.sampled_from([1, 1, 1, 2, 8, 64])) << 20
    page_size = draw(st.sampled_from([1, 2, 3, 16, 64, 256]))
    pages = draw(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129]))
    elements = draw(st.lists(st.sampled_from([4, 12, 16, 48, 256, 576, 1152, 4096, 16384]), min_size=1, max_size=3))
    layers = draw(st.integers(1, 128))
    while sum(elements) * layers * page_size * pages > limit:
        if layers > 1:
            layers //= 2
        elif page_size > 1:
            page_size = max(1, page_size // 4)
        elif max(elements) > 16:
            elements = [min(e, 16) for e in elements]
        else:
            break
    return {
        "layout": draw(st.sampled_from(LAYOUTS)),
        "elements": elements,
        "layers": layers,
        "pages": pages,
        "page_size": page_size,
        "form": draw(st.sampled_from(["slot_major", "strided", "block_major", "joint_blocks", "head_major"])),
        "gap": draw(st.sampled_from([0, 0, 16, 4])),
        "separate": draw(st.booleans()),
    }


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=shapes(), data=st.data())
def test_any_shape_moves_bit_for_bit_on_every_path(pools, compiled, shape, data):
    pool = pools.random_pool(**shape)
    count = data.draw(st.integers(0, pool.pages))
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32]))
    host = pool.slots(pools.random_pages(pool.pages, count, runs=data.draw(st.booleans())), dtype)
    device = pool.slots(torch.randperm(pool.pages + 1)[:count], dtype)
    size = min(buffer.numel() for buffer in pool.host)
    boundaries = data.draw(st.lists(st.integers(0, size), max_size=4))
    transfer_ = PlaneTransfer(pool.planes, ring=StagingRing("cpu", pages=64), boundaries=boundaries)
    policies = ["direct"] + ["staged"] * (min(p.row_bytes % 16 == 0 for p in pool.planes))
    policy = data.draw(st.sampled_from(policies))
    pool.check_write_back(host, device, transfer_.write_back, now, policy=policy)
    layer = data.draw(st.one_of(st.none(), st.integers(0, shape["layers"] - 1)))
    pool.check_load(host, device, transfer_.load, now, layer=layer, policy=policy)


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129])
def test_chunks_of_a_64_page_staging_ring_meet_without_a_seam(pools, compiled, layout, count, policy):
    pool = pools.random_pool(layout, (32, 16), layers=2, pages=130, page_size=2)
    transfer_ = PlaneTransfer(pool.planes, ring=StagingRing("cpu", pages=64))
    host = pool.slots(pools.random_pages(130, count, runs=True))
    device = pool.slots(torch.randperm(131)[:count])
    check_all(pool, transfer_, host, device, policy)


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("destinations", [[0, 1, 2], [5, 3, 4]])
def test_guard_bytes_in_gaps_stay_untouched(pools, compiled, layout, separate, destinations, policy):
    pool = pools.random_pool(layout, (48, 16), gap=64, form="strided", separate=separate)
    check_all(pool, PlaneTransfer(pool.planes), pool.slots(destinations), pool.slots([6, 0, 3]), policy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", PATHS)
def test_rows_of_any_dtype_move_as_bytes(pools, compiled, dtype, policy):
    tensors = [torch.randint(0, 256, (12, 64), dtype=torch.uint8) for _ in range(2)]
    viewed = [tensor.view(dtype).view(12, 2, -1) for tensor in tensors]
    (strides,) = host_strides("page_first", [64], layers=2, pages=3, page_size=4)
    buffer = torch.zeros(64 * 2 * 12, dtype=torch.uint8)
    plane = Plane("kv", 64, DeviceRows.slot_major(viewed), HostRows(buffer, strides, 3, 4))
    pool = pools.RandomPool([plane], [buffer], tensors, 3, 4)
    check_all(pool, PlaneTransfer([plane]), pool.slots([2, 0]), pool.slots([0, 1]), policy)


def test_addresses_beyond_4_gib_on_both_sides(compiled):
    # Memory that is never touched costs nothing; only the ends of both pools are.
    row, pages = 16384, 300_000
    device_rows = torch.empty((pages + 1, row), dtype=torch.uint8)
    buffer = torch.empty(pages * row, dtype=torch.uint8)
    (strides,) = host_strides("page_first", [row], layers=1, pages=pages, page_size=1)
    plane = Plane("kv", row, DeviceRows.slot_major([device_rows]), HostRows(buffer, strides, pages, 1))
    host = torch.tensor([pages - 1, 0, pages - 3, pages - 2])
    device = torch.tensor([1, pages, pages - 1, 0])
    for policy in PATHS:
        content = torch.randint(0, 256, (4, row), dtype=torch.uint8)
        device_rows[device] = content
        PlaneTransfer([plane]).write_back(host, device, policy=policy)
        assert torch.equal(buffer.view(pages, row)[host], content)
        device_rows[device] = 0
        PlaneTransfer([plane]).load(host, device, policy=policy)
        assert torch.equal(device_rows[device], content)


def test_threads_share_a_ring_without_mixing_bytes(pools, compiled):
    ring = StagingRing("cpu", pages=2)
    failures = []

    def work(pool):
        transfer_ = PlaneTransfer(pool.planes, ring=ring, policy="staged")
        host, device = pool.slots(torch.randperm(16)), pool.slots(torch.randperm(17)[:16])
        for _ in range(10):
            before = [tensor.clone() for tensor in pool.rows]
            transfer_.write_back(host, device)
            for tensor in pool.rows:
                tensor[device] = 0
            transfer_.load(host, device)
            if not all(torch.equal(a, b) for a, b in zip(pool.rows, before, strict=True)):
                failures.append(pool)

    threads = [threading.Thread(target=work, args=(pools.random_pool("page_first", pages=16),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_page_larger_than_the_budget_grows_the_ring(pools, compiled):
    pool = pools.random_pool("page_first", (4096, 4096), pages=6)
    transfer_ = PlaneTransfer(pool.planes, ring=StagingRing("cpu", budget_bytes=4096), policy="staged")
    check_all(pool, transfer_, pool.slots([5, 0, 1]), pool.slots([0, 2, 1]), "staged")


def test_pools_of_different_page_sizes_share_a_ring(pools, compiled):
    ring = StagingRing("cpu", budget_bytes=1 << 16)
    for element in (16, 1024, 64):
        pool = pools.random_pool("page_first_direct", (element,), pages=20)
        transfer_ = PlaneTransfer(pool.planes, ring=ring)
        check_all(pool, transfer_, pool.slots(torch.randperm(20)), pool.slots(torch.randperm(21)[:20]), "staged")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["slot_major", "strided", "block_major", "joint_blocks", "head_major"])
def test_runs_on_both_sides_are_copied_without_staging(pools, compiled, monkeypatch, layout, form):
    monkeypatch.setattr(movers, "MIN_COPY_BYTES", 1)
    monkeypatch.setattr(movers, "MIN_COPY_WIDTH", 1)
    pool = pools.random_pool(layout, (64, 32), pages=20, form=form, gap=random.choice([0, 16]))
    boundaries = sorted(random.sample(range(1, 1000), 3))
    transfer_ = PlaneTransfer(pool.planes, policy="staged", boundaries=boundaries)
    host, device = pool.slots([3, 4, 5, 0, 1, 9]), pool.slots([7, 8, 9, 10, 11, 0])
    check_all(pool, transfer_, host, device, "staged")
    without = transfer.BOTH_RUNS in transfer_.write_back(host, device).reason
    assert without == (form != "joint_blocks")


def test_scattered_or_short_runs_go_through_staging(pools, compiled):
    pool = pools.random_pool("page_first_direct", (64, 32), pages=20)
    transfer_ = PlaneTransfer(pool.planes, policy="staged")
    for pages in ([3, 4, 5], [5, 3, 9]):
        host, device = pool.slots(pages), pool.slots(pages)
        assert transfer.BOTH_RUNS not in transfer_.write_back(host, device).reason
        assert transfer.BOTH_RUNS not in transfer_.load(host, device).reason


# ---- results, plans and fallbacks


def test_results_count_bytes_and_runs(pools, compiled):
    pool = pools.random_pool("page_first", (64, 32), layers=3, pages=16, page_size=4)
    transfer_ = PlaneTransfer(pool.planes)
    host, device = pool.slots([3, 4, 5, 9, 0, 1]), pool.slots([0, 1, 2, 3, 4, 5])
    for policy, copies in (("staged", 3), ("direct", 0)):
        result = transfer_.write_back(host, device, policy=policy)
        assert (result.path, result.bytes, result.runs, result.copies) == (policy, 6 * 4 * 3 * 96, 3, copies)
        assert result.device_released is None
        assert transfer_.load(host, device, layer=1, policy=policy).bytes == 6 * 4 * 96


def test_indices_written_to_between_calls_are_read_anew(pools, compiled):
    pool = pools.random_pool("page_first")
    transfer_ = PlaneTransfer(pool.planes, policy="staged")
    host, device = pool.slots([1, 2]), pool.slots([3, 4])
    transfer_.load(host, device, layer=0)
    host.copy_(pool.slots([6, 0]))
    pool.check_load(host, device, transfer_.load, now, layer=1)


def test_a_forbidden_sm_path_leaves_the_staged_one(pools, compiled):
    pool = pools.random_pool("page_first")
    result = PlaneTransfer(pool.planes).write_back(pool.slots([1]), pool.slots([2]), block_quota=0)
    assert result.path == "staged"
    assert "block_quota is 0" in result.reason


def test_rows_that_staging_cannot_take_are_named(pools, compiled):
    pool = pools.random_pool("page_first", (20,))
    transfer_ = PlaneTransfer(pool.planes)
    capabilities = transfer_.capabilities()
    assert not capabilities.staged
    assert capabilities.direct
    assert "rows of 20 bytes" in capabilities.reason
    with pytest.raises(planner.PathUnavailableError, match="rows of 20 bytes"):
        transfer_.write_back(pool.slots([1]), pool.slots([2]), policy="staged")


def test_rows_that_are_no_multiple_of_4_bytes_take_the_reference(pools, compiled):
    pool = pools.random_pool("page_first", (6,))
    transfer_ = PlaneTransfer(pool.planes)
    host, device = pool.slots([1, 5]), pool.slots([2, 0])
    pool.check_write_back(host, device, transfer_.write_back, now)
    assert transfer_.write_back(host, device).path == "reference"


def test_without_a_compiler_the_reference_takes_over_and_says_so_once(pools, monkeypatch, caplog):
    monkeypatch.setattr(paths, "load_module", lambda name, device_type: None)
    monkeypatch.setattr(paths, "unavailable_reason", lambda name, device_type: f"no compiler for {name}")
    paths.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pool = pools.random_pool("page_first")
            transfer_ = PlaneTransfer(pool.planes)
            host, device = pool.slots([1, 5]), pool.slots([2, 0])
            pool.check_write_back(host, device, transfer_.write_back, now)
            pool.check_load(host, device, transfer_.load, now)
    assert [record.message for record in caplog.records if "no compiler" in record.message][1:] == []
    capabilities = transfer_.capabilities()
    assert (capabilities.path_write_back, capabilities.path_load) == ("reference", "reference")
    assert capabilities.build_error == "no compiler for staged"
    with pytest.raises(IndexError, match="host_indices"):
        transfer_.write_back(pool.slots([8]), pool.slots([0]))


def test_the_shared_ring_is_one_a_device():
    assert default_ring("cpu") is default_ring(torch.device("cpu"))
    assert default_ring("cpu").lane(Direction.LOAD) is not default_ring("cpu").lane(Direction.WRITE_BACK)


# ---- refusals


@pytest.mark.parametrize(
    ("host", "device", "error", "message"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 36], IndexError, "device_indices contains slot 36"),
        ([0, 1, 2, 3], [0, 1, 2, -1], IndexError, "device_indices contains slot -1"),
        ([32, 33, 34, 35], [0, 1, 2, 3], IndexError, "host_indices contains slot 35"),
        ([-4, -3, -2, -1], [0, 1, 2, 3], IndexError, "host_indices contains slot -4"),
        ([0, 1, 3, 2], [0, 1, 2, 3], ValueError, r"host_indices\[0:4\] starts with \[0, 1, 3, 2\]"),
        ([0, 1, 2, 3, 5, 6, 7, 8], [*range(8)], ValueError, r"host_indices\[4:8\] starts with \[5, 6, 7, 8\]"),
        ([0, 1, 2], [0, 1, 2], ValueError, "host_indices has 3 slots"),
        ([0, 1, 2, 3], [*range(8)], ValueError, "host_indices has 4 slots and device_indices 8"),
    ],
)
@pytest.mark.parametrize("call", ["write_back", "load"])
def test_bad_indices_are_refused_before_a_byte_moves(pools, host, device, error, message, call):
    pool = pools.random_pool("page_first")
    before = [t.clone() for t in (*pool.rows, *pool.host)]
    with pytest.raises(error, match=message):
        getattr(PlaneTransfer(pool.planes), call)(torch.tensor(host), torch.tensor(device))
    assert all(torch.equal(a, b) for a, b in zip((*pool.rows, *pool.host), before, strict=True))


def test_the_scan_of_the_modules_and_numpy_agree(pools, compiled):
    scan = compiled("staged")["scan_indices"]
    for _ in range(50):
        page_size, pages = random.choice([1, 2, 5]), random.randint(1, 9)
        pool = pools.random_pool("page_first", (16,), layers=1, pages=pages, page_size=page_size)
        host = pool.slots(pools.random_pages(pages, random.randint(1, pages), runs=True))
        device = torch.randint(-1, pages * page_size + 1, host.shape)
        if random.random() < 0.5:
            host[random.randrange(len(host))] += random.choice([-1, 1, pages * page_size])
        found = torch.empty(len(host) // page_size, dtype=torch.int64)
        runs = scan(host, device, found, page_size, pages * page_size, pages * page_size, 0, 0)
        assert scan(host, device, found[:0], page_size, pages * page_size, pages * page_size, 0, 0) == runs
        try:
            checked = check_indices(
                host,
                device,
                page_size=page_size,
                host_slots=pages * page_size,
                device_slots=pages * page_size,
                device=torch.device("cpu"),
            )
        except (ValueError, IndexError):
            assert runs == -1
        else:
            assert runs == checked.runs
            assert torch.equal(found, checked.pages)


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        (torch.zeros(4), TypeError, "dtype torch.float32"),
        (torch.zeros((2, 2), dtype=torch.int64), ValueError, "shape"),
        (torch.arange(8)[::2], ValueError, "contiguous"),
        ([0, 1, 2, 3], TypeError, "list"),
    ],
)
def test_wrong_forms_name_the_tensor(pools, indices, error, message):
    pool = pools.random_pool("page_first")
    good = pool.slots([0])
    with pytest.raises(error, match=f"host_indices.*{message}"):
        PlaneTransfer(pool.planes).load(indices, good)
    with pytest.raises(error, match=f"device_indices.*{message}"):
        PlaneTransfer(pool.planes).load(good, indices)


def test_a_layer_out_of_range_is_refused(pools):
    pool = pools.random_pool("page_first")
    for layer in (-1, 3):
        with pytest.raises(IndexError, match=f"layer is {layer}"):
            PlaneTransfer(pool.planes).load(pool.slots([0]), pool.slots([0]), layer=layer)


def test_planes_that_do_not_fit_their_memory_are_refused(pools):
    plane = pools.random_pool("page_first", (64,)).planes[0]
    strides = plane.host.strides
    shifted = HostStrides(strides.offset + 4, strides.page, strides.layer, strides.slot)
    with pytest.raises(ValueError, match="pages end at byte"):
        PlaneTransfer([Plane("kv", 64, plane.device, HostRows(plane.host.buffer, shifted, 8, 4))])
    longer = Plane("kv", 68, plane.device, plane.host)
    with pytest.raises(ValueError, match="plane kv"):
        PlaneTransfer([longer])
    with pytest.raises(ValueError, match="planes is empty"):
        PlaneTransfer([])


def test_planes_of_different_pools_are_refused(pools):
    one, other = (pools.random_pool("page_first", (16,), pages=pages).planes[0] for pages in (4, 5))
    with pytest.raises(ValueError, match="component0: device slots is 24"):
        PlaneTransfer([one, other])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fast"}, "policy is 'fast'; it must be one of auto, staged, direct, reference"),
        ({"boundaries": [8, 1.5]}, r"boundaries\[1\] is 1.5; it must be a whole number"),
        ({"boundaries": [-1]}, r"boundaries\[0\] is -1"),
        ({"boundaries": [1 << 60]}, r"boundaries\[0\] is 1152921504606846976"),
    ],
)
def test_what_a_transfer_cannot_be_made_of_is_named(pools, options, message):
    pool = pools.random_pool("page_first", (64,))
    with pytest.raises((TypeError, ValueError), match=message):
        PlaneTransfer(pool.planes, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "fast"}, ValueError, "policy is 'fast'"),
        ({"block_quota": 1.5}, TypeError, "block_quota is 1.5"),
        ({"layer": "1"}, TypeError, "layer is '1'; it must be an int"),
    ],
)
def test_options_of_a_load_that_make_no_sense_are_named(pools, options, error, message):
    pool = pools.random_pool("page_first", (64,))
    with pytest.raises(error, match=message):
        PlaneTransfer(pool.planes).load(pool.slots([0]), pool.slots([0]), **options)


def test_a_ring_of_another_device_is_refused(pools):
    pool = pools.random_pool("page_first", (64,))
    ring = StagingRing("cpu")
    ring.device = torch.device("cuda", 1)
    with pytest.raises(ValueError, match="ring lies on cuda:1; it must lie on cpu"):
        PlaneTransfer(pool.planes, ring=ring)


@pytest.mark.parametrize("elements", [(64,), (64, 32)])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", list(HostLayout))
def test_the_planner_gets_the_layout_that_the_strides_have(pools, layout, page_size, layers, elements):
    pool = pools.random_pool(layout, elements, layers=layers, pages=7, page_size=page_size)
    found = PlaneTransfer(pool.planes)._plans._layout
    if layout is HostLayout.PAGE_FIRST and page_size == 1:
        assert found is HostLayout.PAGE_FIRST_DIRECT  # the same bytes in the same places
    elif layers == 1 and layout is HostLayout.PAGE_FIRST:
        assert found in (HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT)
    else:
        assert found is layout


def test_operations_of_one_shape_are_planned_once(pools, monkeypatch):
    pool = pools.random_pool("page_first", (64,), pages=8, page_size=2)
    transfer = PlaneTransfer(pool.planes)
    planned = []
    plan = transfer._plans._plan
    monkeypatch.setattr(transfer._plans, "_plan", lambda *given: planned.append(given) or plan(*given))
    for pages in ([0, 1], [4, 5], [2, 3]):
        transfer.write_back(pool.slots(pages), pool.slots(pages))
    assert len(planned) == 1
    transfer.write_back(pool.slots([0, 1]), pool.slots([0, 1]), policy="staged")
    transfer.write_back(pool.slots([1, 4]), pool.slots([1, 4]), policy="staged")
    transfer.write_back(pool.slots([0, 1]), pool.slots([0, 1]), policy="direct")
    transfer.load(pool.slots([0, 1]), pool.slots([0, 1]))
    assert len(planned) == 5


def test_small_operations_are_planned_once_for_any_runs(pools, monkeypatch):
    pool = pools.random_pool("page_first", (64,), pages=8, page_size=2)
    transfer = PlaneTransfer(pool.planes, constants=H200)
    planned = []
    plan = transfer._plans._plan
    monkeypatch.setattr(transfer._plans, "_plan", lambda *given: planned.append(given) or plan(*given))
    for pages in ([0, 1], [1, 4], [4, 1], [6, 7]):
        transfer.write_back(pool.slots(pages), pool.slots(pages))
        transfer.load(pool.slots(pages), pool.slots(pages))
    assert len(planned) == 2
    transfer.load(pool.slots([0, 2, 4]), pool.slots([0, 2, 4]))
    transfer.load(pool.slots([0, 2, 4]), pool.slots([0, 2, 4]), compute="decode")
    assert len(planned) == 4


@pytest.mark.parametrize("policy", ["staged", "direct", "reference"])
def test_a_default_device_of_the_engine_changes_nothing(pools, compiled, policy):
    """On the device ``meta`` nothing has bytes: whatever is made there by mistake is an error."""
    pool = pools.random_pool("page_first", (256, 64), pages=12, page_size=4)
    host, slots = pool.slots([3, 4, 5, 1]), pool.slots([0, 11, 2, 7])

    def under(call):
        def called(*arguments, **options):
            with torch.device("meta"):
                return call(*arguments, **options)

        return called

    with torch.device("meta"):
        transfer = PlaneTransfer(pool.planes, policy=policy, ring=StagingRing("cpu", pages=2))
    pool.check_write_back(host, slots, under(transfer.write_back), now)
    pool.check_load(host, slots, under(transfer.load), now)
    pool.check_load(host, slots, under(transfer.load), now, layer=2)
