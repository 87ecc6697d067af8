"""Planes that do not describe memory as it is: refused when they are made, by name, before a byte moves."""

import pytest
import torch

from hicache_kernels import (
    DeviceRows,
    HostLayout,
    HostRows,
    HostStrides,
    Plane,
    PlaneTransfer,
    StagingRing,
    host_strides,
)


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def plane(tensors, *, row_bytes=64, strides=None, pages=8, page_size=4, buffer=None, name="kv") -> Plane:
    if strides is None:
        (strides,) = host_strides("page_first", [row_bytes], layers=len(tensors), pages=pages, page_size=page_size)
    buffer = rows(1 << 16) if buffer is None else buffer
    return Plane(name, row_bytes, DeviceRows.slot_major(tensors), HostRows(buffer, strides, pages, page_size))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeviceRows.slot_major([]), r"tensors is empty; it must hold one \[slots, \.\.\.\] a layer"),
        (lambda: DeviceRows.block_major([]), "tensors is empty"),
        (lambda: DeviceRows.head_major([]), "tensors is empty"),
        (lambda: DeviceRows.slot_major([rows(0, 64)]), r"tensors\[0\] has shape \(0, 64\)"),
        (lambda: DeviceRows.block_major([rows(4, 0, 64)]), r"tensors\[0\] has shape \(4, 0, 64\)"),
        (lambda: DeviceRows.block_major([rows(4)]), r"tensors\[0\] has shape \(4,\)"),
        (lambda: DeviceRows.head_major([rows(0, 4, 64)]), r"tensors\[0\] has shape \(0, 4, 64\)"),
        (lambda: DeviceRows.head_major([rows(2, 4, 8, 64)]), r"it must be \[heads, slots, dim\]"),
        (lambda: DeviceRows.slot_major([rows(8, 64), rows(8, 128)[:, :64]]), r"tensors\[1\] .* like tensors\[0\]"),
        (lambda: DeviceRows.slot_major([rows(8, 64), rows(7, 64)]), r"tensors\[1\] .* like tensors\[0\]"),
        (lambda: DeviceRows.slot_major([rows(8, 64), rows(8, 64).view(torch.int8)]), r"tensors\[1\] is torch.int8"),
        (lambda: DeviceRows.slot_major([rows(8, 128)[:, ::2]]), "elements of a row must be dense"),
        (lambda: DeviceRows.block_major([rows(4, 8, 2, 32).transpose(2, 3)]), "elements of a row must be dense"),
        (lambda: DeviceRows.head_major([rows(2, 8, 64)[:, :, ::2]]), "elements of a row must be dense"),
    ],
)
def test_tensors_that_are_no_rows_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_device_rows_that_overlap_are_refused():
    with pytest.raises(ValueError, match="plane kv: device block stride is 0; it must be at least the 64 bytes"):
        PlaneTransfer([plane([rows(1, 64).expand(36, 64)])])
    with pytest.raises(ValueError, match="plane kv: device block stride is 64; it must be at least the 128 bytes"):
        PlaneTransfer([plane([rows(64, 64)], row_bytes=128)])
    blocks = rows(9, 4, 64).as_strided((9, 4, 64), (128, 64, 1))
    bad = Plane("k", 64, DeviceRows.block_major([blocks]), plane([rows(36, 64)]).host)
    with pytest.raises(ValueError, match="plane k: device block stride is 128; it must be at least the 256 bytes"):
        PlaneTransfer([bad])


@pytest.mark.parametrize(
    ("strides", "axis"),
    [
        ((0, 64, 64), "page"),
        ((512, 0, 128), "layer"),
        ((256, 64, 0), "slot"),
        ((512, 64, 32), "slot"),
        ((128, 64, 64), "slot"),
        ((511, 64, 128), "page"),
    ],
)
def test_host_rows_that_share_bytes_are_refused(strides, axis):
    with pytest.raises(ValueError, match=f"plane kv: host {axis} stride is"):
        PlaneTransfer([plane([rows(36, 64), rows(36, 64)], strides=HostStrides(0, *strides))])


def test_two_planes_on_the_same_host_bytes_are_refused():
    buffer = rows(1 << 16)
    one = plane([rows(36, 64)], buffer=buffer, name="k")
    shifted = HostStrides(32, one.host.strides.page, one.host.strides.layer, one.host.strides.slot)
    for strides in (one.host.strides, shifted):
        other = plane([rows(36, 64)], buffer=buffer, strides=strides, name="v")
        with pytest.raises(ValueError, match=r"plane v: .* plane k, whose elements have 64 bytes"):
            PlaneTransfer([one, other])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pages": 0}, "pages is 0"),
        ({"page_size": 0}, "page_size is 0"),
        ({"row_bytes": 0}, "row_bytes is 0"),
        ({"row_bytes": -64}, "row_bytes is -64"),
        ({"buffer": rows(64, 64)}, "2 dimensions"),
        ({"buffer": rows(1 << 16).view(torch.int16)}, "torch.int16"),
        ({"buffer": rows(1 << 17)[::2]}, "the host buffer has stride 2"),
        ({"buffer": rows(100)}, "the host buffer has 100 bytes"),
    ],
)
def test_geometry_that_is_none_is_refused(change, message):
    strides = HostStrides(0, 256, 64, 64)
    with pytest.raises(ValueError, match=f"plane kv: .*{message}"):
        PlaneTransfer([plane([rows(36, 64)], **({"strides": strides} | change))])


def test_more_slots_than_can_be_counted_are_refused():
    slots = torch.empty((1 << 31, 4), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"plane kv: {1 << 31} device slots; at most {(1 << 31) - 1}"):
        PlaneTransfer([plane([slots], row_bytes=4)])


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("name", ["layers", "pages", "page_size", "element_bytes"])
def test_strides_of_an_impossible_pool_are_refused(layout, name):
    sizes = {"layers": 2, "pages": 3, "page_size": 4}
    with pytest.raises(ValueError, match=name):
        host_strides(
            layout,
            [16, 0 if name == "element_bytes" else 8],
            **(sizes if name == "element_bytes" else sizes | {name: 0}),
        )
    with pytest.raises(
        ValueError, match="layout is 'page_last'; it must be one of layer_first, page_first, page_first_direct"
    ):
        host_strides("page_last", [16], **sizes)


def test_rings_that_cannot_hold_anything_are_refused():
    for arguments, message in (
        ({"device": "meta"}, "device is meta"),
        ({"budget_bytes": 0}, "budget_bytes is 0"),
        ({"pages": 0}, "pages is 0"),
        ({"chunk_bytes": -1}, "chunk_bytes is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            StagingRing(**({"device": "cpu"} | arguments))
