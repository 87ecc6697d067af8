"""Transfers on a GPU, bit for bit against the reference, and the order they keep across streams."""

import functools
import random
import threading

import pytest
import torch

from hicache_kernels import HostLayout, Plan, PlaneTransfer, direct_cost, movers, planner
from hicache_kernels.checks import CHECK_VARIABLE
from hicache_kernels.staging import Direction, StagingRing
from hicache_kernels.transfer import BOTH_RUNS

pytestmark = pytest.mark.gpu

LAYOUTS = list(HostLayout)
PATHS = ("staged", "direct")


def wait() -> None:
    torch.cuda.synchronize()


@pytest.mark.sanitizer
@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["slot_major", "strided", "block_major", "joint_blocks", "head_major"])
def test_every_device_form_and_layout_round_trips_bit_for_bit(pools, gpu, layout, form, policy):
    pool = pools.random_pool(
        layout, (64, 128, 64), pages=70, page_size=random.choice([1, 4, 16]), form=form, device=gpu
    )
    transfer = PlaneTransfer(pool.planes, ring=StagingRing(gpu, pages=16))
    host = pool.slots(pools.random_pages(70, 50, runs=random.random() < 0.5))
    device = pool.slots(torch.randperm(71)[:50])
    pool.check_write_back(host, device, transfer.write_back, wait, policy=policy)
    pool.check_load(host, device, transfer.load, wait, policy=policy)
    layer = random.randrange(3)
    pool.check_load(host, device, transfer.load, wait, layer=layer, policy=policy)


@pytest.mark.parametrize("_attempt", range(24))
def test_any_shape_moves_bit_for_bit(pools, gpu, _attempt):
    shape = pools.random_shape()
    pool = pools.random_pool(**shape, device=gpu)
    count, dtype = random.randint(0, pool.pages), random.choice([torch.int32, torch.int64])
    host = pool.slots(pools.random_pages(pool.pages, count, runs=random.random() < 0.5), dtype)
    device = pool.slots(torch.randperm(pool.pages + 1)[:count], dtype)
    if random.random() < 0.5:
        device = device.to(gpu)
    size = min(buffer.numel() for buffer in pool.host)
    boundaries = sorted(random.sample(range(size), min(size, 3)))
    transfer = PlaneTransfer(pool.planes, ring=StagingRing(gpu, pages=64), boundaries=boundaries)
    capabilities = transfer.capabilities()
    for policy in [path for path in PATHS if getattr(capabilities, path)]:
        pool.check_write_back(host, device, transfer.write_back, wait, policy=policy)
        layer = random.choice([None, random.randrange(shape["layers"])])
        pool.check_load(host, device, transfer.load, wait, layer=layer, policy=policy)


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("to_device", [False, True])
def test_what_an_operation_reads_later_outlives_its_caller(pools, gpu, policy, to_device):
    pool = pools.random_pool("page_first_direct", (256, 256), layers=8, pages=256, page_size=4, device=gpu)
    pages, slots = torch.randperm(256), torch.randperm(257)[:256]

    def call(host, device, **options):
        transfer = PlaneTransfer(pool.planes, policy=policy, ring=StagingRing(gpu, pages=16))
        transfer.capabilities()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)
            given = host.clone(), device.clone()
            (transfer.load if to_device else transfer.write_back)(*given, **options)
            for indices in given:
                indices.fill_(-1)
        del transfer, given, indices
        # Whatever was let go too early is overwritten now, while the operation still waits.
        garbage = [torch.full((1 << shift,), -1, dtype=torch.int64, device=gpu) for shift in range(4, 22)]
        pinned = [torch.full((1 << shift,), -1, dtype=torch.int64, pin_memory=True) for shift in range(4, 16)]
        assert garbage
        assert pinned

    check = pool.check_load if to_device else pool.check_write_back
    check(pool.slots(pages), pool.slots(slots), call, wait)


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 129])
def test_chunks_of_a_64_page_staging_ring_meet_without_a_seam(pools, gpu, count, policy):
    layout = random.choice(LAYOUTS)
    pool = pools.random_pool(layout, (32, 32), pages=140, page_size=2, device=gpu)
    transfer = PlaneTransfer(pool.planes, ring=StagingRing(gpu, pages=64))
    for runs in (False, True):
        host = pool.slots(pools.random_pages(140, count, runs=runs))
        device = pool.slots(torch.randperm(141)[:count])
        pool.check_write_back(host, device, transfer.write_back, wait, policy=policy)
        pool.check_load(host, device, transfer.load, wait, policy=policy)


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("destinations", [[0, 1, 2], [5, 3, 4]])
def test_guard_bytes_in_gaps_stay_untouched(pools, gpu, layout, destinations, policy):
    pool = pools.random_pool(layout, (48, 16), page_size=4, gap=64, form="strided", device=gpu)
    transfer = PlaneTransfer(pool.planes)
    host, device = pool.slots(destinations), pool.slots([6, 0, 3])
    pool.check_write_back(host, device, transfer.write_back, wait, policy=policy)
    pool.check_load(host, device, transfer.load, wait, policy=policy)


@pytest.mark.sanitizer
@pytest.mark.parametrize("row_bytes", [4, 12, 16, 24, 48, 576, 1152, 16384])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_direct_moves_any_multiple_of_4_bytes(pools, gpu, row_bytes, dtype):
    pool = pools.random_pool(random.choice(LAYOUTS), (row_bytes,), layers=5, pages=20, page_size=2, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy="direct")
    host, device = pool.slots(torch.randperm(20), dtype), pool.slots(torch.randperm(21)[:20], dtype)
    pool.check_write_back(host, device.to(gpu), transfer.write_back, wait)
    pool.check_load(host, device.to(gpu), transfer.load, wait)


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row_bytes", [256, 576, 1152, 2048, 16384])
def test_bulk_copies_move_long_rows(pools, gpu, monkeypatch, row_bytes, layout):
    monkeypatch.setattr(direct_cost, "LAYER_EVENT_SECONDS", 0.0)
    monkeypatch.setattr(movers, "BULK_BLOCKS", 1)
    monkeypatch.setattr(movers, "BULK_LOAD_ROW_BYTES", 256)
    monkeypatch.setattr(movers, "BULK_MULTIPLE", 16)
    form, dtype = random.choice(["slot_major", "block_major"]), random.choice([torch.int32, torch.int64])
    pool = pools.random_pool(layout, (row_bytes, row_bytes), layers=4, pages=75, page_size=2, form=form, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy="direct")
    for count in (1, 73):
        host, device = pool.slots(torch.randperm(75)[:count], dtype), pool.slots(torch.randperm(76)[:count], dtype)
        pool.check_write_back(host, device, transfer.write_back, wait)
        pool.check_load(host, device, transfer.load, wait, block_quota=random.randint(1, 9))
        pool.check_load(host, device, transfer.load, wait, layer_events=True, block_quota=random.randint(1, 9))


def test_all_layers_of_a_small_direct_load_share_an_event_recorded_after_their_rows(pools, gpu):
    pool = pools.random_pool(random.choice(LAYOUTS), (256, 256), layers=7, pages=75, page_size=2, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy="direct")
    host, device = pool.slots(torch.randperm(75)[:9]), pool.slots(torch.randperm(76)[:9])
    pool.check_load(host, device, transfer.load, wait, layer_events=True)
    torch.cuda._sleep(50_000_000)
    result = transfer.load(host, device, layer_events=True)
    assert len(result.layer_done) == 7
    assert len(set(result.layer_done)) == 1
    assert not result.layer_done[0].query()
    wait()
    assert result.layer_done[0].query()


@pytest.mark.sanitizer
@pytest.mark.parametrize("elements", [(16,), (20,), (128, 128), (512, 64), (2048, 2048)])
def test_one_kernel_loads_all_layers_with_an_event_after_each(pools, gpu, monkeypatch, elements):
    monkeypatch.setattr(direct_cost, "LAYER_EVENT_SECONDS", 0.0)
    pool = pools.random_pool(random.choice(LAYOUTS), elements, layers=7, pages=75, page_size=2, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy="direct")
    for count in (1, 73):
        host, device = pool.slots(torch.randperm(75)[:count]), pool.slots(torch.randperm(76)[:count])
        pool.check_load(host, device, transfer.load, wait, layer_events=True, block_quota=random.randint(1, 9))


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("most", [2, 8])
def test_copies_of_several_layers_fill_every_row(pools, gpu, layout, most):
    pool = pools.random_pool(layout, (64, 128), layers=13, pages=40, page_size=2, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy="staged", ring=StagingRing(gpu, pages=16))
    host, device = pools.random_pages(40, 37, runs=True), pool.slots(torch.randperm(41)[:37])
    mover = transfer._paths.staged

    def load(_host, slots, *, layer):
        assert layer is None
        stream = torch.cuda.current_stream()
        mover.load(host, slots.to(gpu), stream, first_layer=0, end_layer=13, layers_each=most)

    pool.check_load(pool.slots(host), device, load, wait)


@pytest.mark.sanitizer
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ahead", "each"), [(1, 2), (2, 4), (1, 13), (0, 13), (3, 4)])
@pytest.mark.parametrize("layer_events", [False, True])
def test_layers_that_go_ahead_and_those_that_follow_all_come(
    pools, gpu, monkeypatch, layout, ahead, each, layer_events
):
    plan = Plan("staged", "by the test", 1.0, 2, each, direct_layers=ahead, in_order=each < 13)
    monkeypatch.setattr(planner, "plan_load", lambda *_, **__: plan)
    pool = pools.random_pool(
        layout, random.choice([(64, 128), (1024, 1024)]), layers=13, pages=40, page_size=2, device=gpu
    )
    transfer = PlaneTransfer(pool.planes, ring=StagingRing(gpu, pages=16))
    host, device = pools.random_pages(40, 37, runs=True), pool.slots(torch.randperm(41)[:37])
    pool.check_load(pool.slots(host), device, transfer.load, wait, layer_events=layer_events)


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("to_device", [False, True])
def test_an_operation_of_a_new_shape_does_not_wait_for_the_stream(pools, gpu, policy, to_device):
    pool = pools.random_pool("page_first_direct", (2048, 2048), layers=8, pages=64, page_size=2, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy=policy, ring=StagingRing(gpu, budget_bytes=64 << 20))
    call = transfer.load if to_device else transfer.write_back
    call(pool.slots(torch.arange(1)), pool.slots(torch.arange(1)))
    wait()
    host, device = pool.slots(torch.arange(60)), pool.slots(torch.randperm(64)[:60])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
        held = stream.record_event()
        call(host, device, **({"layer_events": True} if to_device else {}))
        assert not held.query()
    stream.synchronize()


@pytest.mark.parametrize("policy", PATHS)
def test_large_operation_with_the_shared_ring(pools, gpu, policy):
    pool = pools.random_pool("page_first_direct", (1024, 1024), layers=24, pages=120, page_size=16, device=gpu)
    transfer = PlaneTransfer(pool.planes)
    host, device = pool.slots(pools.random_pages(120, 110, runs=True)), pool.slots(torch.randperm(121)[:110])
    pool.check_write_back(host, device, transfer.write_back, wait, policy=policy)
    pool.check_load(host, device, transfer.load, wait, policy=policy, layer_events=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_on_both_sides_are_copied_without_staging(pools, gpu, monkeypatch, layout):
    monkeypatch.setattr(movers, "MIN_COPY_BYTES", 1)
    monkeypatch.setattr(movers, "MIN_COPY_WIDTH", 1)
    pool = pools.random_pool(layout, (64, 32), pages=20, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy="staged")
    host, device = pool.slots([3, 4, 5, 0, 1, 9]), pool.slots([7, 8, 9, 10, 11, 0])
    pool.check_write_back(host, device, transfer.write_back, wait)
    pool.check_load(host, device, transfer.load, wait, layer_events=True)
    assert BOTH_RUNS in transfer.write_back(host, device).reason


@pytest.mark.sanitizer
def test_separate_buffers_and_boundaries(pools, gpu):
    pool = pools.random_pool("layer_first", (64, 32), pages=12, separate=True, device=gpu)
    boundaries = sorted(random.sample(range(1, 12 * 4 * 32), 5))
    transfer = PlaneTransfer(pool.planes, policy="staged", boundaries=boundaries)
    host, device = pool.slots(torch.arange(12)), pool.slots(torch.randperm(13)[:12])
    pool.check_write_back(host, device, transfer.write_back, wait)
    pool.check_load(host, device, transfer.load, wait)


@pytest.mark.parametrize("policy", PATHS)
def test_write_back_reads_what_the_current_stream_wrote_and_releases_before_host_ready(pools, gpu, policy):
    pool = pools.random_pool("page_first", (4096, 4096), layers=8, pages=64, page_size=8, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy=policy, ring=StagingRing(gpu, budget_bytes=256 << 20))
    host, device = pool.slots(torch.arange(64)), pool.slots(torch.randperm(65)[:64])
    transfer.write_back(host, device)
    wait()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for tensor in pool.rows:
            tensor.fill_(7)
        result = transfer.write_back(host, device)
        result.device_released.wait()
        for tensor in pool.rows:
            tensor.fill_(9)
    result.host_ready.synchronize()
    assert int(pool.host[0].min()) == int(pool.host[0].max()) == 7


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("by_layer", [False, True, "events"])
def test_work_after_a_load_on_the_current_stream_sees_the_rows(pools, gpu, policy, by_layer):
    pool = pools.random_pool("page_first_direct", (2048, 2048), layers=6, pages=64, page_size=8, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy=policy)
    host, device = pool.slots(torch.arange(64)), pool.slots(torch.arange(64))
    transfer.load(host, device)
    wait()
    pool.host[0].fill_(5)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5_000_000)
        for tensor in pool.rows:
            tensor.fill_(1)
        if by_layer == "events":
            transfer.load(host, device, layer_events=True)
            seen = [tensor.clone() for tensor in pool.rows]
        elif by_layer:
            seen = []
            for layer in range(6):
                transfer.load(host, device, layer=layer)
                seen += [pool.rows[layer].clone(), pool.rows[6 + layer].clone()]
        else:
            transfer.load(host, device)
            seen = [tensor.clone() for tensor in pool.rows]
    stream.synchronize()
    assert all(int(tensor[: 64 * 8].min()) == int(tensor[: 64 * 8].max()) == 5 for tensor in seen)


@pytest.mark.parametrize("policy", [*PATHS, "ahead"])
def test_layer_events_are_recorded_in_order_and_after_their_rows(pools, gpu, monkeypatch, policy):
    if policy == "ahead":
        plan = Plan("staged", "by the test", 1.0, 2, 2, direct_layers=2)
        monkeypatch.setattr(planner, "plan_load", lambda *_, **__: plan)
        policy = "auto"
    pool = pools.random_pool("page_first_direct", (2048, 2048), layers=6, pages=64, page_size=8, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy=policy)
    host, device = pool.slots(torch.arange(64)), pool.slots(torch.arange(64)).to(gpu)
    transfer.load(host, device)
    wait()
    pool.host[0].fill_(5)
    for tensor in pool.rows:
        tensor.fill_(1)
    loading, reading = torch.cuda.Stream(), torch.cuda.Stream()
    loading.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(loading):
        torch.cuda._sleep(5_000_000)
        result = transfer.load(host, device, layer_events=True)
    seen = []
    with torch.cuda.stream(reading):
        for layer in range(6):
            result.layer_done[layer].wait()
            seen += [pool.rows[layer].clone(), pool.rows[6 + layer].clone()]
    reading.synchronize()
    assert len(result.layer_done) == 6
    assert all(int(tensor[: 64 * 8].min()) == int(tensor[: 64 * 8].max()) == 5 for tensor in seen)


def test_two_streams_share_a_small_ring_without_mixing_bytes(pools, gpu):
    ring = StagingRing(gpu, pages=2)
    pairs = []
    for value in (3, 4):
        pool = pools.random_pool("page_first", (2048, 2048), layers=4, pages=32, page_size=8, device=gpu)
        for tensor in pool.rows:
            tensor.fill_(value)
        pairs.append((pool, PlaneTransfer(pool.planes, policy="staged", ring=ring), torch.cuda.Stream(), value))
    wait()
    for repeat in range(4):
        for pool, transfer, stream, _ in pairs:
            host, device = pool.slots(torch.arange(32)), pool.slots(torch.arange(32))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(random.randrange(1, 1_000_000))
                (transfer.write_back if repeat % 2 == 0 else transfer.load)(host, device)
    wait()
    for pool, _, _, value in pairs:
        assert int(pool.host[0].min()) == int(pool.host[0].max()) == value
        assert all(int(t.min()) == int(t.max()) == value for t in pool.rows)


def test_threads_with_their_own_streams_move_at_once(pools, gpu):
    ring = StagingRing(gpu, pages=4)
    failures: list[str] = []

    def work(pool, transfer, policy):
        host = pool.slots(torch.randperm(32))
        device = pool.slots(torch.randperm(33)[:32])
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                before = [t.clone() for t in pool.rows]
                transfer.write_back(host, device, policy=policy).host_ready.synchronize()
                for tensor in pool.rows:
                    tensor.view(-1, tensor.shape[-1])[device.to(gpu)] = 0
                transfer.load(host, device, policy=policy)
                if not all(torch.equal(a, b) for a, b in zip(pool.rows, before, strict=True)):
                    failures.append(policy)

    threads = []
    for policy in ("staged", "direct", "staged", "auto"):
        pool = pools.random_pool("page_first", (512, 512), layers=4, pages=32, page_size=8, device=gpu)
        threads.append(threading.Thread(target=work, args=(pool, PlaneTransfer(pool.planes, ring=ring), policy)))
    wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("to_device", [False, True])
def test_direct_transfers_can_be_captured_in_a_graph(pools, gpu, to_device):
    pool = pools.random_pool("page_first", (256,), pages=16, device=gpu)
    transfer = PlaneTransfer(pool.planes)
    host, device = pool.slots(torch.randperm(16)).to(gpu), pool.slots(torch.randperm(17)[:16]).to(gpu)
    transfer.capabilities()
    wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (transfer.load if to_device else transfer.write_back)(host, device)
    check = pool.check_load if to_device else pool.check_write_back
    check(host, device, lambda *_, **__: graph.replay(), wait)


def test_capture_with_indices_on_the_cpu_is_refused(pools, gpu):
    pool = pools.random_pool("page_first", (256,), pages=16, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy="direct")
    slots = pool.slots(torch.arange(4))
    transfer.capabilities()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="under graph capture"):
        transfer.write_back(slots, slots)


def test_host_indices_on_the_device_allow_the_direct_path_only(pools, gpu):
    pool = pools.random_pool("page_first", (256,), pages=16, device=gpu)
    transfer = PlaneTransfer(pool.planes)
    host, device = pool.slots(torch.randperm(16)).to(gpu), pool.slots(torch.randperm(17)[:16]).to(gpu)
    pool.check_write_back(host, device, transfer.write_back, wait)
    assert transfer.load(host, device).path == "direct"
    with pytest.raises(ValueError, match="host_indices lies on the device"):
        transfer.write_back(host, device, policy="staged")


def test_indices_on_the_device_are_checked_when_asked(pools, gpu, monkeypatch):
    pool = pools.random_pool("page_first", (256,), pages=16, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy="direct")
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    good, bad = pool.slots([1]).to(gpu), pool.slots([17]).to(gpu)
    with pytest.raises(IndexError, match="device_indices contains slot 71"):
        transfer.write_back(good, bad)
    with pytest.raises(IndexError, match="host_indices contains slot"):
        transfer.write_back(bad, good)


def test_unpinned_host_memory_leaves_the_staged_path_only(pools, gpu):
    pool = pools.random_pool("page_first", (256,), pages=16, device=gpu)
    plane = pool.planes[0]
    buffer = torch.empty(plane.host.buffer.numel(), dtype=torch.uint8)
    rows = type(plane.host)(buffer, plane.host.strides, plane.host.pages, plane.host.page_size)
    transfer = PlaneTransfer([type(plane)(plane.name, plane.row_bytes, plane.device, rows)])
    capabilities = transfer.capabilities()
    assert capabilities.staged
    assert not capabilities.direct
    assert "not pinned" in capabilities.reason


def test_addresses_beyond_4_gib_on_both_sides(pools, gpu):
    from hicache_kernels import DeviceRows, HostRows, Plane, host_strides

    row, pages = 16384, 300_000
    tensor = torch.empty((pages + 1, row), dtype=torch.uint8, device=gpu)
    buffer = torch.empty(pages * row, dtype=torch.uint8, pin_memory=True)
    (strides,) = host_strides("page_first", [row], layers=1, pages=pages, page_size=1)
    planes = [Plane("kv", row, DeviceRows.slot_major([tensor]), HostRows(buffer, strides, pages, 1))]
    host = torch.cat([torch.arange(pages - 70, pages), torch.tensor([0, 2])])
    device = torch.cat([torch.arange(pages - 71, pages), torch.tensor([1])]).flip(0)
    for policy in PATHS:
        content = torch.randint(0, 256, (72, row), dtype=torch.uint8)
        tensor[device.to(gpu)] = content.to(gpu)
        PlaneTransfer(planes, policy=policy).write_back(host, device)
        wait()
        assert torch.equal(buffer.view(pages, row)[host], content)
        tensor[device.to(gpu)] = 0
        PlaneTransfer(planes, policy=policy).load(host, device)
        assert torch.equal(tensor[device.to(gpu)].cpu(), content)


@pytest.mark.parametrize("policy", PATHS)
def test_every_device_serves_its_own_rows_whatever_device_is_current(pools, gpu, policy):
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        pool = pools.random_pool("page_first_direct", (256, 64), layers=5, pages=40, page_size=4, device=device)
        transfer, done = PlaneTransfer(pool.planes, policy=policy), functools.partial(torch.cuda.synchronize, device)
        for current in range(torch.cuda.device_count()):
            with torch.cuda.device(current):
                host, slots = pool.slots(torch.randperm(40)[:30]), pool.slots(torch.randperm(41)[:30])
                pool.check_write_back(host, slots, transfer.write_back, done)
                pool.check_load(host, slots.to(device), transfer.load, done)
                for layer in (0, 4):
                    pool.check_load(host, slots, transfer.load, done, layer=layer)


@pytest.mark.parametrize("policy", PATHS)
def test_a_default_device_of_the_engine_changes_nothing(pools, gpu, policy):
    pool = pools.random_pool("page_first", (256, 64), layers=5, pages=40, page_size=4, device=gpu)
    host, slots = pool.slots(torch.randperm(40)[:30]), pool.slots(torch.randperm(41)[:30])

    def under(call):
        def called(*arguments, **options):
            with torch.device(gpu):
                return call(*arguments, **options)

        return called

    with torch.device(gpu):
        transfer = PlaneTransfer(pool.planes, policy=policy, ring=StagingRing(gpu, pages=8))
    pool.check_write_back(host, slots, under(transfer.write_back), wait)
    pool.check_load(host, slots, under(transfer.load), wait, layer_events=True)
    pool.check_load(host, slots, under(transfer.load), wait, layer=2)


@pytest.mark.parametrize("policy", PATHS)
def test_copies_never_run_on_a_stream_that_torch_hands_out(pools, gpu, policy):
    """Torch has few streams: an engine's own would share one with the copies, and wait for them."""
    pool = pools.random_pool("page_first_direct", (64,), layers=3, pages=8, page_size=2, device=gpu)
    transfer = PlaneTransfer(pool.planes, policy=policy)
    slots = pool.slots(torch.arange(8))
    transfer.write_back(slots, slots)
    transfer.load(slots, slots, layer_events=True)
    wait()
    handed_out = {torch.cuda.Stream(gpu).cuda_stream for _ in range(100)}
    own = {transfer.ring.lane(direction).stream for direction in Direction} | {*transfer._paths.direct.streams}
    assert handed_out.isdisjoint(stream.cuda_stream for stream in own - {None})
    assert len(own - {None}) >= 2
