"""Pools of every kind with small rows, random bytes, and an oracle of the host layouts without strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hicache_pools import (
    BlockPool,
    BlockPoolHost,
    DeepSeekV4PagedHostPool,
    DeepSeekV4PagedPool,
    DeepSeekV4StateHostPool,
    DeepSeekV4StatePool,
    DevicePool,
    DSAIndexerPoolHost,
    DSATokenToKVPool,
    HostPool,
    MambaPool,
    MambaPoolHost,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
)

LAYERS = 2


@dataclass(frozen=True)
class Case:
    """A kind of pool: how to make its device side, and what reads a layer of a component as ``[rows, ...]``."""

    make: Callable[[int, int, str], DevicePool]
    host_class: type[HostPool]
    page_sizes: tuple[int, ...] = (1, 16, 64)
    row_view: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    components: tuple[str, ...] | None = None
    """Those of the host pool in its order, where they are not the device pool's."""

    @property
    def layouts(self) -> tuple[str, ...]:
        return tuple(str(layout) for layout in self.host_class.layouts)

    def rows(self, pool: DevicePool) -> list[list[torch.Tensor]]:
        """Bytes of every component and layer, uint8 ``[rows, element bytes]``, copied."""
        names = self.components or tuple(component.name for component in pool.components)
        return [[row_bytes(self.row_view(t)) for t in pool.component(name).tensors] for name in names]


def row_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(tensor.shape[0], -1)
    return flat.view(torch.uint8).cpu().clone()


def fill(pool: DevicePool) -> None:
    """Random bytes in every tensor, and in the gaps between strided rows."""
    for component in pool.components:
        for tensor in component.tensors:
            storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            storage.copy_(random_bytes(storage.numel()))


def random_bytes(count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(np.random.default_rng().bytes(count)), dtype=torch.uint8)


def layers(shape: tuple[int, ...], dtype: torch.dtype, device: str, count: int = LAYERS) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]


def mha(pages: int, page_size: int, device: str) -> DevicePool:
    return MHATokenToKVPool(pages * page_size, page_size, torch.bfloat16, 2, 8, LAYERS, device, v_head_dim=4)


def mha_blocks(pages: int, page_size: int, device: str) -> DevicePool:
    k, v = (layers((pages, page_size, 2, dim), torch.float16, device) for dim in (4, 8))
    return MHATokenToKVPool.from_buffers(k=k, v=v, page_size=page_size)


def mha_joint_dim_0(pages: int, page_size: int, device: str) -> DevicePool:
    kv = layers((2, pages, page_size, 2, 8), torch.bfloat16, device)
    return MHATokenToKVPool.from_buffers(kv=kv, page_size=page_size)


def mha_joint_dim_1(pages: int, page_size: int, device: str) -> DevicePool:
    kv = layers((pages, 2, page_size, 2, 8), torch.bfloat16, device)
    return MHATokenToKVPool.from_buffers(kv=kv, page_size=page_size)


def mha_head_major(pages: int, page_size: int, device: str) -> DevicePool:
    k, v = (layers((3, pages * page_size, dim), torch.bfloat16, device) for dim in (8, 16))
    return MHATokenToKVPool.from_buffers(k=k, v=v, page_size=page_size, form="head_major")


def mha_block_head_major(pages: int, page_size: int, device: str) -> DevicePool:
    # In memory: blocks, heads, layers, slots, keys and values.
    whole = torch.zeros((pages, 2, LAYERS, page_size, 16), dtype=torch.bfloat16, device=device)
    return MHATokenToKVPool.from_buffers(kv=whole.unbind(2), page_size=page_size, form="block_head_major")


def mha_strided(pages: int, page_size: int, device: str) -> DevicePool:
    k, v = ([t[:, :2] for t in layers((pages * page_size, 3, dim), torch.float32, device)] for dim in (4, 8))
    return MHATokenToKVPool.from_buffers(k=k, v=v, page_size=page_size)


def mla(pages: int, page_size: int, device: str) -> DevicePool:
    return MLATokenToKVPool(pages * page_size, page_size, torch.bfloat16, 16, 4, LAYERS, device)


def mla_blocks(pages: int, page_size: int, device: str) -> DevicePool:
    kv = layers((pages, page_size, 36), torch.uint8, device)
    return MLATokenToKVPool.from_buffers(kv=kv, page_size=page_size)


def dsa(pages: int, page_size: int, device: str) -> DevicePool:
    return DSATokenToKVPool(
        pages * page_size, page_size, torch.bfloat16, 16, 4, LAYERS, device, index_head_dim=8, quant_block_size=8
    )


def dsa_small_rows(pages: int, page_size: int, device: str) -> DevicePool:
    kv = layers((pages * page_size, 1, 20), torch.bfloat16, device)
    index_k = layers((pages * page_size // 8, 1, 96), torch.uint8, device)
    return DSATokenToKVPool.from_buffers(kv=kv, index_k=index_k, page_size=page_size, index_page_size=8)


def c4(pages: int, page_size: int, device: str) -> DevicePool:
    return DeepSeekV4PagedPool(pages * page_size, page_size, 4, 48, LAYERS, device, indexer_bytes=20)


def c4_page_rows(pages: int, page_size: int, device: str) -> DevicePool:
    kv = [t[:, : page_size // 4 * 12] for t in layers((pages, page_size // 4 * 12 + 32), torch.uint8, device)]
    return DeepSeekV4PagedPool.from_buffers(kv=kv, compression_ratio=4, page_size=page_size, slots_per_row=page_size)


def c128(pages: int, page_size: int, device: str) -> DevicePool:
    return DeepSeekV4PagedPool(pages * page_size, page_size, 128, 48, LAYERS, device)


def mamba(pages: int, page_size: int, device: str) -> DevicePool:
    return MambaPool(
        pages,
        [(6, 3), (4, 3)],
        (2, 4, 4),
        torch.bfloat16,
        torch.float32,
        LAYERS,
        device,
        side={"steps": ((2,), torch.int64), "flags": ((4,), torch.uint8)},
    )


def v4_state(pages: int, page_size: int, device: str) -> DevicePool:
    state = {
        "values": layers((pages, 8, 4), torch.float32, device),
        "scores": layers((pages, 8), torch.bfloat16, device),
    }
    return DeepSeekV4StatePool.from_buffers(state=state)


def blocks_apart(pages: int, page_size: int, device: str) -> DevicePool:
    return BlockPool.from_buffers(blocks=layers((2, pages, 16, 2, 8), torch.bfloat16, device), block_dim=1)


def blocks_heads_first(pages: int, page_size: int, device: str) -> DevicePool:
    # Seen as [blocks, block, heads, 2 * dim], in memory heads before the tokens of a block, with padding behind.
    whole = layers((pages, 3, 2, 16, 16), torch.float8_e4m3fn, device)
    return BlockPool.from_buffers(blocks=[tensor[:, :2].permute(0, 3, 1, 2, 4) for tensor in whole])


def blocks_of_states(pages: int, page_size: int, device: str) -> DevicePool:
    conv, recurrent = (layers((pages, *shape), torch.float32, device) for shape in ((6, 4), (2, 8, 8)))
    return BlockPool.from_buffers(blocks={"conv": conv, "recurrent": recurrent})


CASES = {
    "blocks_apart": Case(blocks_apart, BlockPoolHost, (1,), row_view=lambda t: t.transpose(0, 1)),
    "blocks_heads_first": Case(
        blocks_heads_first, BlockPoolHost, (1,), row_view=lambda t: t.permute(0, 2, 3, 1, 4).view(torch.uint8)
    ),
    "blocks_of_states": Case(blocks_of_states, BlockPoolHost, (1,)),
    "mha": Case(mha, MHATokenToKVPoolHost),
    "mha_blocks": Case(mha_blocks, MHATokenToKVPoolHost, row_view=lambda t: t.flatten(0, 1)),
    "mha_joint_dim_0": Case(mha_joint_dim_0, MHATokenToKVPoolHost, row_view=lambda t: t.flatten(0, 1)),
    "mha_joint_dim_1": Case(mha_joint_dim_1, MHATokenToKVPoolHost, row_view=lambda t: t.flatten(0, 1)),
    "mha_head_major": Case(mha_head_major, MHATokenToKVPoolHost, row_view=lambda t: t.transpose(0, 1)),
    "mha_block_head_major": Case(
        mha_block_head_major, MHATokenToKVPoolHost, row_view=lambda t: t.transpose(1, 2).flatten(0, 1)
    ),
    "mha_strided": Case(mha_strided, MHATokenToKVPoolHost),
    "mla": Case(mla, MLATokenToKVPoolHost),
    "mla_blocks": Case(mla_blocks, MLATokenToKVPoolHost, row_view=lambda t: t.flatten(0, 1)),
    "dsa_latent": Case(dsa, MLATokenToKVPoolHost, components=("kv",)),
    "dsa_indexer": Case(dsa, DSAIndexerPoolHost, components=("index_k",)),
    "dsa_indexer_small_rows": Case(dsa_small_rows, DSAIndexerPoolHost, (16, 64), components=("index_k",)),
    "deepseek_v4_c4": Case(c4, DeepSeekV4PagedHostPool, (16, 64)),
    "deepseek_v4_c4_page_rows": Case(c4_page_rows, DeepSeekV4PagedHostPool, (16, 64)),
    "deepseek_v4_c128": Case(c128, DeepSeekV4PagedHostPool, (128, 256)),
    "deepseek_v4_state": Case(v4_state, DeepSeekV4StateHostPool, (1,)),
    "mamba": Case(
        mamba,
        MambaPoolHost,
        (1,),
        components=("side[steps]", "temporal", "conv[0]", "conv[1]", "side[flags]"),
    ),
}


def host_pages(layout: str, elements: list[list[torch.Tensor]]) -> torch.Tensor:
    """What pages hold, uint8 ``[pages, page bytes]``.

    ``elements[component][layer]`` is ``[pages, rows of a page, element bytes]``.
    """
    stacked = [torch.stack(component, dim=1) for component in elements]  # [pages, layers, rows, element bytes]
    if layout == "layer_first":
        return torch.cat([component.flatten(1) for component in stacked], dim=1)
    if layout == "page_first":
        return torch.cat([component.transpose(1, 2) for component in stacked], dim=3).flatten(1)
    return torch.cat([component.flatten(2) for component in stacked], dim=2).flatten(1)


@dataclass(frozen=True)
class Bench:
    """What tests of pools share; a fixture, as test directories are not packages."""

    cases: dict[str, Case]
    fill: Callable[[DevicePool], None]
    row_bytes: Callable[[torch.Tensor], torch.Tensor]
    host_pages: Callable[[str, list[list[torch.Tensor]]], torch.Tensor]
    layers: Callable[..., list[torch.Tensor]]
    random_bytes: Callable[[int], torch.Tensor]

    def make(
        self,
        case_name: str,
        *,
        pages: int = 6,
        layout: str = "page_first",
        ratio: float = 1.0,
        host_size: float = 0.0,
        **options: Any,
    ) -> tuple[DevicePool, HostPool]:
        """A device pool with random bytes and its host pool, at the largest page size of the case."""
        case = self.cases[case_name]
        page_size = case.page_sizes[-1]
        device_pool = case.make(pages, page_size, "cpu")
        self.fill(device_pool)
        return device_pool, case.host_class(device_pool, ratio, host_size, page_size, layout=layout, **options)

    def slots(self, pages: torch.Tensor, page_size: int) -> torch.Tensor:
        """Slot indices of whole pages, int64."""
        return (pages.long()[:, None] * page_size + torch.arange(page_size)).flatten()

    def read_pages(self, pool: HostPool) -> torch.Tensor:
        """Every page, uint8 ``[pages, page bytes]``, copied."""
        return torch.stack([pool.read_page(page) for page in range(pool.page_num)])

    def same(self, left: list[list[torch.Tensor]], right: list[list[torch.Tensor]]) -> bool:
        """Whether two answers of ``Case.rows`` are equal."""
        components = zip(left, right, strict=True)
        pairs = [pair for one, other in components for pair in zip(one, other, strict=True)]
        return all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors gain nothing from more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench(CASES, fill, row_bytes, host_pages, layers, random_bytes)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``case_name``, ``layout`` and ``page_size`` once for each supported combination."""
    given = {
        name.strip()
        for mark in metafunc.definition.iter_markers("parametrize")
        for name in (mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0])
    }
    wanted = ({"case_name", "layout", "page_size"} & set(metafunc.fixturenames)) - given
    if wanted == {"case_name", "layout", "page_size"}:
        combinations = [
            (name, layout, page_size)
            for name, case in CASES.items()
            for layout in case.layouts
            for page_size in case.page_sizes
        ]
        metafunc.parametrize("case_name, layout, page_size", combinations)
    elif wanted == {"case_name", "layout"}:
        combinations = [(name, layout) for name, case in CASES.items() for layout in case.layouts]
        metafunc.parametrize("case_name, layout", combinations)
    elif wanted == {"case_name"}:
        metafunc.parametrize("case_name", list(CASES))
