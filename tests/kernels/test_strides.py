"""Host memory of any shape: axes in any order, gaps on every level, boundaries anywhere, offsets beyond 4 GiB."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_kernels import DeviceRows, HostLayout, HostRows, HostStrides, Plane, PlaneTransfer, pieces
from hicache_kernels.staging import StagingRing

PATHS = ("staged", "direct")
GUARDED = ([0, 1, 2], [5, 3, 4])


def now() -> None:
    """The compiled CPU modules are done when they return."""


@st.composite
def nests(draw):
    """Strides of a pool whose axes nest in any order with a gap after each step, and its components."""
    alignment = draw(st.sampled_from([4, 16]))
    gap = st.sampled_from([0, 0, alignment, 3 * alignment, 256])
    elements = [alignment * n for n in draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))]
    counts = {
        "page": 6 + draw(st.integers(0, 3)),
        "layer": draw(st.integers(1, 5)),
        "slot": draw(st.sampled_from([1, 2, 5])),
    }
    offset = draw(gap)
    offsets = []
    for element in elements:
        offsets.append(offset)
        offset += element + draw(gap)
    step, strides = offset + draw(gap), {}
    for axis in draw(st.permutations(list(counts))):
        strides[axis] = step
        step = step * counts[axis] + draw(gap)
    placed = [HostStrides(start, strides["page"], strides["layer"], strides["slot"]) for start in offsets]
    return alignment, elements, counts, placed, step + 256 + sum(offsets)


@pytest.mark.parametrize("destinations", GUARDED)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(nest=nests(), data=st.data())
def test_bytes_between_rows_stay_whatever_the_order_of_the_axes(pools, compiled, nest, data, destinations):
    alignment, elements, counts, placed, size = nest
    pages, page_size = counts["page"], counts["slot"]
    buffer = torch.empty(size, dtype=torch.uint8)
    planes, rows = [], []
    for number, (element, strides) in enumerate(zip(elements, placed, strict=True)):
        form = data.draw(st.sampled_from(pools.DEVICE_FORMS))
        device, row_bytes, tensors = pools.device_rows(
            form, (pages + 1) * page_size, page_size, element, counts["layer"], torch.device("cpu")
        )
        planes.append(Plane(f"component{number}", row_bytes, device, HostRows(buffer, strides, pages, page_size)))
        rows += tensors
    pool = pools.RandomPool(planes, [buffer], rows, pages, page_size)
    boundaries = data.draw(st.lists(st.integers(0, size), max_size=5))
    ring = StagingRing("cpu", pages=data.draw(st.sampled_from([1, 2, 64])))
    transfer = PlaneTransfer(planes, boundaries=boundaries, ring=ring)
    host, device = pool.slots(destinations), pool.slots([6, 0, 3])
    policy = data.draw(st.sampled_from(PATHS if alignment == 16 and transfer.capabilities().staged else ("direct",)))
    pool.check_write_back(host, device, transfer.write_back, now, policy=policy)
    layer = data.draw(st.one_of(st.none(), st.integers(0, counts["layer"] - 1)))
    pool.check_load(host, device, transfer.load, now, layer=layer, policy=policy)


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("row_bytes", [16, 4096, 16384])
def test_the_smallest_and_the_longest_rows_and_layers_move(pools, compiled, layout, policy, row_bytes):
    layers, pages, page_size = random.choice([(128, 3, 1), (1, 2, 256), (128, 1, 4)])
    pool = pools.random_pool(layout, (row_bytes,), layers=layers, pages=pages, page_size=page_size)
    transfer = PlaneTransfer(pool.planes, policy=policy)
    host, device = pool.slots(torch.randperm(pages)), pool.slots(torch.randperm(pages + 1)[:pages])
    pool.check_write_back(host, device, transfer.write_back, now)
    pool.check_load(host, device, transfer.load, now)
    pool.check_load(host, device, transfer.load, now, layer=layers - 1)


def far_pool(outermost: str):
    """Three pages of two layers, 5 GiB apart on ``outermost``: memory that is never touched costs nothing."""
    far, row, page_size = 5 << 30, 256, 2
    strides = {
        "page": HostStrides(64, far, row, 2 * row),
        "layer": HostStrides(64, 2 * row, far, row),
        "slot": HostStrides(64, 2 * row, row, far),
    }[outermost]
    steps = {"page": 2, "layer": 1, "slot": 1}[outermost]
    buffer = torch.empty(steps * far + 4096, dtype=torch.uint8)
    slots = torch.empty((3 * page_size, 3 << 30), dtype=torch.uint8)
    device = [slots[:, 256 * layer : 256 * (layer + 1)] for layer in range(2)]
    return Plane("kv", row, DeviceRows.slot_major(device), HostRows(buffer, strides, 3, page_size)), device


@pytest.mark.parametrize("policy", PATHS)
@pytest.mark.parametrize("outermost", ["page", "layer", "slot"])
def test_every_stride_may_lead_beyond_4_gib_on_both_sides(compiled, outermost, policy):
    plane, device_rows = far_pool(outermost)
    transfer = PlaneTransfer([plane], policy=policy)
    buffer, strides = plane.host.buffer, plane.host.strides
    host, device = torch.tensor([4, 5, 0, 1]), torch.tensor([1, 5, 4, 0])
    content = torch.randint(0, 256, (2, 4, 256), dtype=torch.uint8)
    for layer in range(2):
        device_rows[layer][device] = content[layer]
    transfer.write_back(host, device)
    for layer in range(2):
        for position, slot in enumerate(host.tolist()):
            start = strides.offset + slot // 2 * strides.page + layer * strides.layer + slot % 2 * strides.slot
            assert torch.equal(buffer[start : start + 256], content[layer, position])
        device_rows[layer][device] = 0
    transfer.load(host, device)
    assert all(torch.equal(device_rows[layer][device], content[layer]) for layer in range(2))


@pytest.mark.parametrize("layout", list(HostLayout))
def test_a_long_run_may_meet_a_boundary_in_every_row(pools, compiled, layout):
    pool = pools.random_pool(layout, (256,), layers=2, pages=20_000, page_size=1)
    size = pool.host[0].numel()
    transfer = PlaneTransfer(pool.planes, policy="staged", boundaries=range(16, size, 64))
    slots = torch.arange(20_000)
    pool.check_write_back(slots, slots, transfer.write_back, now)
    pool.check_load(slots, slots, transfer.load, now)
    assert transfer.write_back(slots, slots).copies >= size // 64


def test_pieces_of_overlapping_address_ranges_stay_apart(pools, compiled):
    # Layer-first components that interleave by layer: neither is contiguous, and no piece swallows the other's bytes.
    buffer = torch.empty(4096, dtype=torch.uint8)
    planes, rows = [], []
    for number in range(2):
        device, row_bytes, tensors = pools.device_rows("slot_major", 18, 2, 32, 3, torch.device("cpu"))
        strides = HostStrides(number * 512, 64, 1024, 32)
        planes.append(Plane(f"component{number}", row_bytes, device, HostRows(buffer, strides, 8, 2)))
        rows += tensors
    assert len(pieces.find_pieces(planes, layers=3)) == 2
    pool = pools.RandomPool(planes, [buffer], rows, 8, 2)
    transfer = PlaneTransfer(planes, policy="staged")
    host, device = pool.slots([0, 1, 2, 7]), pool.slots([3, 8, 0, 1])
    pool.check_write_back(host, device, transfer.write_back, now)
    pool.check_load(host, device, transfer.load, now)


@pytest.mark.parametrize("outermost", ["page", "layer", "slot"])
@pytest.mark.parametrize("layers", [1, 2])
def test_no_copy_has_a_pitch_that_the_runtimes_refuse(compiled, outermost, layers):
    plane, _ = far_pool(outermost)
    layout = pieces.staging_layout([plane], layers=layers, chunk_pages=3)
    copies = torch.zeros((64, 6), dtype=torch.int64)
    nowhere = torch.empty(0, dtype=torch.int64)
    count = compiled("staged")["plan_copies"](layout.pieces, torch.arange(3), nowhere, 2 - layers, copies)
    assert (copies[:count, 2] * copies[:count, 3]).sum() == 3 * layers * 2 * 256
    assert all(
        height == 1 or max(host, staging) < 1 << 31 for _, _, _, height, host, staging in copies[:count].tolist()
    )
