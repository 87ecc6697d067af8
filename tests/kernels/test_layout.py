"""Host layouts, the pieces found in them, and the copies that a run of pages becomes."""

import random

import numpy as np
import pytest
import torch

from hicache_kernels import HostLayout, host_bytes, host_strides
from hicache_kernels.pieces import PIECE_FIELDS, find_pieces, staging_layout
from hicache_kernels.probe import load_module

LAYOUTS = list(HostLayout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_place_every_byte_of_the_buffer_exactly_once(layout):
    elements = random.choice([[8], [8, 8], [12, 4, 20]])
    sizes = {"layers": random.randint(1, 4), "pages": random.randint(1, 5), "page_size": random.choice([1, 2, 5])}
    covered = np.zeros(host_bytes(elements, **sizes), dtype=np.int64)
    for element, strides in zip(elements, host_strides(layout, elements, **sizes), strict=True):
        for page in range(sizes["pages"]):
            for layer in range(sizes["layers"]):
                for slot in range(sizes["page_size"]):
                    at = strides.offset + page * strides.page + layer * strides.layer + slot * strides.slot
                    covered[at : at + element] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("size", ["layers", "pages", "page_size"])
def test_a_size_that_is_not_positive_is_named(size):
    sizes = {"layers": 1, "pages": 1, "page_size": 1, size: 0}
    with pytest.raises(ValueError, match=f"{size} is 0"):
        host_strides("page_first", [4], **sizes)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="sideways"):
        host_strides("sideways", [4], layers=1, pages=1, page_size=1)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_page_of_interleaved_planes_is_one_piece(pools, layout):
    planes = pools.random_pool(layout, (64, 32, 16)).planes
    (piece,) = find_pieces(planes, layers=3)
    assert piece.width == piece.page_stride == (64 + 32 + 16) * 3 * 4


def test_a_layers_share_of_a_page_is_one_piece_in_page_first_direct(pools):
    planes = pools.random_pool("page_first_direct", (64, 32)).planes
    (piece,) = find_pieces(planes, layers=1)
    assert piece.width == (64 + 32) * 4
    assert piece.slots.count == 1


def test_a_layers_share_of_a_slot_is_one_piece_in_page_first(pools):
    planes = pools.random_pool("page_first", (64, 32)).planes
    (piece,) = find_pieces(planes, layers=1)
    assert piece.width == 64 + 32
    assert (piece.slots.count, piece.slots.stride) == (4, (64 + 32) * 3)


def test_layer_first_has_a_piece_for_each_plane_with_its_layers_as_axis(pools):
    planes = pools.random_pool("layer_first", (64, 32)).planes
    pieces = find_pieces(planes, layers=3)
    assert [piece.width for piece in pieces] == [64 * 4, 32 * 4]
    assert all(piece.layers.count == 3 for piece in pieces)


def test_planes_of_separate_buffers_never_join(pools):
    planes = pools.random_pool("page_first", (64, 32), separate=True).planes
    assert len(find_pieces(planes, layers=3)) == 2


def planned(pools, layout, pages, *, layers, boundaries=(), layer=0, **options):
    """Copies of an operation: int64 array [copies, 6] of host, staging, width, height, host pitch, staging pitch."""
    module = load_module("staged", "cpu")
    pool = pools.random_pool(layout, **options)
    layout_ = staging_layout(pool.planes, layers=layers, chunk_pages=len(pages))
    assert layout_.pieces.shape[1] == PIECE_FIELDS
    base = pool.host[0].data_ptr()
    copies = torch.zeros((10_000, 6), dtype=torch.int64)
    count = module["plan_copies"](
        layout_.pieces,
        torch.tensor(pages, dtype=torch.int64),
        torch.tensor([base + b for b in boundaries], dtype=torch.int64),
        layer,
        copies,
    )
    table = copies[:count].numpy()
    table[:, 0] -= base
    return pool, layout_, table


def covered_bytes(copies, column, pitch, size):
    touched = np.zeros(size, dtype=np.int64)
    for copy in copies:
        for row in range(copy[3]):
            start = copy[column] + row * copy[pitch]
            touched[start : start + copy[2]] += 1
    return touched


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", [1, 3])
def test_copies_cover_the_pages_once_and_nothing_else(pools, compiled, layout, layers):
    pages = random.choice([[0, 1, 2], [5, 3, 4], [7], list(range(8))])
    boundaries = sorted(random.sample(range(1, 1000), random.randint(0, 4)))
    layer = random.randrange(3) if layers == 1 else 0
    pool, layout_, copies = planned(
        pools, layout, pages, layers=layers, boundaries=boundaries, layer=layer, elements=(32, 16), gap=48
    )
    expected = np.zeros(pool.host[0].numel(), dtype=np.int64)
    for plane in pool.planes:
        strides = plane.host.strides
        for page in pages:
            for each in range(3) if layers == 3 else [layer]:
                for slot in range(4):
                    at = strides.offset + page * strides.page + each * strides.layer + slot * strides.slot
                    expected[at : at + plane.row_bytes] += 1
    assert (covered_bytes(copies, 0, 4, len(expected)) == expected).all()
    assert (covered_bytes(copies, 1, 5, layout_.bytes) == 1).all()
    for copy in copies:
        end = copy[0] + (copy[3] - 1) * copy[4] + copy[2]
        assert not any(copy[0] < boundary < end for boundary in boundaries)


def test_neighbouring_pages_of_page_first_are_one_plain_copy(pools, compiled):
    _, _, copies = planned(pools, "page_first", [2, 3, 4, 5], layers=3)
    assert len(copies) == 1
    assert copies[0, 3] == 1


def test_a_layer_of_a_run_of_page_first_direct_is_one_pitched_copy(pools, compiled):
    _, _, copies = planned(pools, "page_first_direct", [2, 3, 4, 5], layers=1, layer=1)
    assert len(copies) == 1
    assert copies[0, 3] == 4


def test_a_run_of_layer_first_is_one_pitched_copy_a_plane(pools, compiled):
    _, _, copies = planned(pools, "layer_first", [2, 3, 4, 5], layers=3)
    assert len(copies) == 2
    assert (copies[:, 3] == 3).all()
