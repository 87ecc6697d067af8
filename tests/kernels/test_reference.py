"""The torch reference against loops over single bytes' places."""

import random

import pytest
import torch

from hicache_kernels import HostLayout, reference


def place(plane, slot, layer):
    strides, size = plane.host.strides, plane.host.page_size
    start = strides.offset + slot // size * strides.page + layer * strides.layer + slot % size * strides.slot
    return plane.host.buffer[start : start + plane.row_bytes]


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("form", ["slot_major", "strided", "block_major"])
def test_rows_of_every_layer_arrive_at_their_place(pools, layout, form):
    pool = pools.random_pool(layout, (24, 8), form=form)
    host, device = pool.slots([5, 3, 4]), pool.slots([0, 8, 2])
    reference.write_back(pool.planes, host, device)
    for index, plane in enumerate(pool.planes):
        for layer in range(3):
            tensor = pool.rows[index * 3 + layer]
            rows = tensor.flatten(0, -2)[:, 16:-16] if form == "strided" else tensor.flatten(0, -2)
            for to, of in zip(host.tolist(), device.tolist(), strict=True):
                assert torch.equal(place(plane, to, layer), rows[of])


def test_a_loaded_layer_leaves_the_others_alone(pools):
    pool = pools.random_pool("page_first", (16, 16))
    before = [tensor.clone() for tensor in pool.rows]
    layer = random.randrange(3)
    host, device = pool.slots([1, 2]), pool.slots([4, 7])
    pool.host[0].random_(0, 256)
    reference.load(pool.planes, host, device, layer)
    for index, (tensor, old) in enumerate(zip(pool.rows, before, strict=True)):
        plane, of_layer = pool.planes[index // 3], index % 3
        for of, to in zip(host.tolist(), device.tolist(), strict=True):
            expected = place(plane, of, of_layer) if of_layer == layer else old[to]
            assert torch.equal(tensor[to], expected)


def test_heads_lie_one_after_the_other_on_the_host(pools):
    pool = pools.random_pool("page_first", (64,), form="head_major")
    (plane,) = pool.planes
    heads = plane.device.rows_per_layer
    assert heads > 1
    host, device = pool.slots([2]), pool.slots([6])
    reference.write_back(pool.planes, host, device)
    for to, of in zip(host.tolist(), device.tolist(), strict=True):
        strides = plane.host.strides
        start = strides.offset + to // 4 * strides.page + strides.layer + to % 4 * strides.slot
        element = plane.host.buffer[start : start + 64]
        assert torch.equal(element, pool.rows[1][:, of].flatten())
