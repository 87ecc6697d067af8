"""Block pools: whole blocks come back bit for bit, whatever their layout, and what cannot be rows is refused."""

from collections.abc import Callable

import pytest
import torch

from hicache_pools import BlockPool, BlockPoolHost

BLOCKS = 12


def strided(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of a shape whose dimensions lie in memory in the given order, outermost first."""
    memory = torch.zeros([shape[dim] for dim in order], dtype=dtype)
    return memory.permute([order.index(dim) for dim in range(len(shape))])


LAYOUTS: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
    "joint_heads_first": (lambda: torch.zeros(BLOCKS, 2, 16, 16, dtype=torch.bfloat16), 0, 1),
    "joint_tokens_first": (lambda: strided((BLOCKS, 2, 16, 16), (0, 2, 1, 3), torch.bfloat16), 0, 1),
    "keys_and_values_apart": (lambda: torch.zeros(2, BLOCKS, 16, 2, 8, dtype=torch.float16), 1, 2),
    "keys_and_values_in_a_block": (lambda: torch.zeros(BLOCKS, 2, 16, 2, 8, dtype=torch.float16), 0, 1),
    "apart_in_blocks_in_memory": (lambda: strided((2, BLOCKS, 16, 2, 8), (1, 0, 3, 2, 4), torch.float16), 1, 1),
    "heads_outside_blocks": (lambda: strided((BLOCKS, 16, 4, 8), (2, 0, 1, 3), torch.float32), 0, 4),
    "latent": (lambda: torch.zeros(BLOCKS, 64, 36, dtype=torch.uint8), 0, 1),
    "float8": (lambda: torch.zeros(BLOCKS, 2, 16, 16, dtype=torch.float8_e4m3fn), 0, 1),
    "padded": (lambda: torch.zeros(BLOCKS, 96, dtype=torch.int8)[:, :64], 0, 1),
    "state": (lambda: torch.zeros(BLOCKS, 4, 8, 8, dtype=torch.float32), 0, 1),
}


def fill(tensor: torch.Tensor, data: torch.Tensor) -> None:
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.copy_(data)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_to_other_places_bit_for_bit(name, layout, bench):
    make, block_dim, rows = LAYOUTS[name]
    tensors = [make() for _ in range(3)]
    for tensor in tensors:
        fill(tensor, bench.random_bytes(storage_bytes(tensor).numel()))
    pool = BlockPool.from_buffers(blocks=tensors, block_dim=block_dim)
    assert (pool.size, pool.page_size, pool.layer_num) == (BLOCKS, 1, 3)
    assert pool.components[0].rows.rows_per_layer == rows
    host = BlockPoolHost(pool, 0, 0, layout=layout, pages=5)
    assert host.page_bytes == sum(t.numel() * t.element_size() for t in tensors) // BLOCKS

    before = [tensor.clone().view(torch.uint8) for tensor in tensors]
    blocks, others, pages = torch.tensor([7, 0, 11]), torch.tensor([2, 3, 9]), torch.tensor([4, 0, 2])
    host.backup_from_device_all_layer(None, pages, blocks)
    poison = [storage_bytes(tensor).fill_(0x7F) for tensor in tensors]
    for tensor, bytes_ in zip(tensors, poison, strict=True):
        fill(tensor, bytes_)
    host.load_to_device_all_layer(None, pages, others)
    for tensor, old in zip(tensors, before, strict=True):
        now = tensor.view(torch.uint8)
        assert torch.equal(now.index_select(block_dim, others), old.index_select(block_dim, blocks))
        rest = torch.tensor([block for block in range(BLOCKS) if block not in others])
        assert (now.index_select(block_dim, rest) == 0x7F).all()
    host.destroy()


def test_padding_between_blocks_is_not_moved(bench):
    whole = torch.zeros(BLOCKS, 96, dtype=torch.uint8)
    host = BlockPoolHost(BlockPool.from_buffers(blocks=[whole[:, :64]]), 0, 0, pages=2)
    whole[3] = bench.random_bytes(96)
    host.backup_from_device_all_layer(None, torch.tensor([1]), torch.tensor([3]))
    data = whole[3].clone()
    whole.fill_(1)
    host.load_to_device_all_layer(None, torch.tensor([1]), torch.tensor([8]))
    assert torch.equal(whole[8, :64], data[:64])
    assert (whole[8, 64:] == 1).all()
    host.destroy()


def test_families_are_components_of_one_pool():
    conv, state = ([torch.zeros(BLOCKS, *shape) for _ in range(2)] for shape in ((4, 8), (2, 8, 8)))
    pool = BlockPool.from_buffers(blocks={"conv": conv, "state": state})
    assert [component.name for component in pool.components] == ["conv", "state"]
    assert pool.component("state").element_bytes == 2 * 8 * 8 * 4


def test_shapes_in_the_geometry_are_in_the_order_of_memory():
    seen_alike = (torch.zeros(BLOCKS, 16, 2, 8), strided((BLOCKS, 16, 2, 8), (0, 2, 1, 3), torch.float32))
    shapes = [BlockPool.from_buffers(blocks=[tensor]).components[0].element_shape for tensor in seen_alike]
    assert shapes == [(16, 2, 8), (2, 16, 8)]


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        ({}, {}, "blocks is empty"),
        ([], {}, "blocks is empty"),
        (torch.zeros(4, 8), {}, "blocks is one tensor"),
        ([torch.zeros(4, 8)], {"block_dim": 2}, "block_dim is 2; blocks has shape"),
        ([torch.zeros(4, 8)], {"block_dim": -1}, "block_dim"),
        ([torch.zeros(4, 8), torch.zeros(4, 9)], {}, r"blocks\[1\] has shape"),
        ({"a": [torch.zeros(4, 8)], "b": [torch.zeros(5, 8)]}, {}, "they must agree"),
        ([torch.zeros(8, 4).t()], {}, "no two elements of a block lie together"),
        ([torch.zeros(64).as_strided((4, 8), (4, 1))], {}, "so that blocks overlap"),
    ],
)
def test_what_cannot_be_rows_is_refused(blocks, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        BlockPool.from_buffers(blocks=blocks, **options)


def test_the_host_pool_takes_block_pools_and_pages_of_one_slot_alone():
    pool = BlockPool.from_buffers(blocks=[torch.zeros(4, 8)])
    with pytest.raises(ValueError, match="page_size is 2"):
        BlockPoolHost(pool, 0, 0, 2, pages=1)
    with pytest.raises(ValueError, match="layout"):
        BlockPoolHost(pool, 0, 0, layout="layer_first", pages=1)
