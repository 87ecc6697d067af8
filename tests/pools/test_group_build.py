"""build_host_pool_group: entries, layer mappers, and the split of the host memory, for each kind of model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_pools import (
    DeepSeekV4PagedPool,
    DeepSeekV4StatePool,
    DSAIndexerPoolHost,
    DSATokenToKVPool,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    NullPoolHost,
    PoolName,
    PoolTransfer,
)
from hicache_pools.build_group import INDEX_SOURCES, PoolSpec, build_host_pool_group, layer_mapper
from hicache_pools.group import HostPoolGroup
from hicache_pools.host_pools import HostMemoryOptions
from hicache_pools.memory_budget import HostMemoryBudget, HostMemoryBudgetError

PAGE = 16


def mha(slots: int = 16 * PAGE, layers: int = 2) -> MHATokenToKVPool:
    return MHATokenToKVPool(slots, PAGE, torch.float16, 2, 8, layers)


def mamba(slots: int = 8, layers: int = 2) -> MambaPool:
    return MambaPool(slots, [(4, 4)], (2, 8), torch.bfloat16, torch.float32, layers)


def dsa(layers: int = 2) -> DSATokenToKVPool:
    return DSATokenToKVPool(8 * PAGE, PAGE, torch.uint8, 56, 8, layers, index_head_dim=128)


def pages(group: HostPoolGroup) -> dict[str, int]:
    return {str(entry.name): entry.host_pool.page_num for entry in group.entries}


def mapped(group: HostPoolGroup, name: str, model_layers: int) -> list[int | None]:
    return [group.get_entry(name).layer_mapper(layer) for layer in range(model_layers)]


def random_bytes(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).random_(0, 256)


def test_one_attention_pool_is_a_group_of_one_anchor() -> None:
    group = build_host_pool_group({"kv": mha()}, page_size=PAGE, host_to_device_ratio=1.5)
    assert pages(group) == {"kv": 24}
    assert group.anchor_entry.is_primary_index_anchor
    assert group.anchor_entry.name is PoolName.KV
    assert mapped(group, "kv", 3) == [0, 1, None]
    group.destroy()


@pytest.mark.parametrize("host_size", [2e-4, 7.7e-4, 1e-3])
def test_host_size_is_shared_so_that_each_pool_mirrors_the_same_multiple(host_size: float) -> None:
    group = build_host_pool_group(
        {
            "mamba": PoolSpec(mamba(), layers=[1, 4]),
            "kv": PoolSpec(mha(), layers=[0, 3]),
            "swa": PoolSpec(mha(4 * PAGE, 1), layers=[2]),
        },
        page_size=PAGE,
        host_size=host_size,
    )
    used = sum(entry.host_pool.buffer.numel() for entry in group.entries)
    page_bytes = {str(entry.name): entry.host_pool.page_bytes for entry in group.entries}
    device_pages = {"mamba": 8, "kv": 16, "swa": 4}
    assert host_size * 1e9 - sum(page_bytes.values()) < used <= host_size * 1e9
    ratio = host_size * 1e9 / sum(page_bytes[name] * count for name, count in device_pages.items())
    assert pages(group) == {name: int(count * ratio) for name, count in device_pages.items()}
    assert group.anchor_entry.name == "kv"
    assert [mapped(group, name, 5) for name in ("kv", "mamba", "swa")] == [
        [0, None, None, 1, None],
        [None, 0, None, None, 1],
        [None, None, 0, None, None],
    ]
    assert group.get_pool("mamba").page_size == 1
    group.destroy()


def test_a_sparse_attention_pool_makes_two_host_pools_with_the_same_pages() -> None:
    group = build_host_pool_group({"kv": dsa()}, page_size=PAGE, host_size=1e-3)
    assert isinstance(group.get_pool("kv"), MLATokenToKVPoolHost)
    assert isinstance(group.get_pool("indexer"), DSAIndexerPoolHost)
    assert group.get_pool("kv").page_num == group.get_pool("indexer").page_num
    used = sum(entry.host_pool.buffer.numel() for entry in group.entries)
    page_bytes = sum(entry.host_pool.page_bytes for entry in group.entries)
    assert 1e6 - page_bytes < used <= 1e6
    group.destroy()


def test_deepseek_v4_has_an_anchor_without_bytes_and_pools_on_its_slots() -> None:
    page = 256
    group = build_host_pool_group(
        {
            "swa": MLATokenToKVPool(2 * page, page, torch.uint8, 56, 8, 4),
            "deepseek_v4_c4": PoolSpec(DeepSeekV4PagedPool(4 * page, page, 4, 64, 2, indexer_bytes=16), layers=[1, 3]),
            "deepseek_v4_c128": PoolSpec(DeepSeekV4PagedPool(4 * page, page, 128, 64, 1), layers=[2]),
            "deepseek_v4_c4_state": DeepSeekV4StatePool(16, (8,), torch.float32, 2),
            "deepseek_v4_c128_state": DeepSeekV4StatePool(16, (8,), torch.float32, 1),
        },
        page_size=page,
        host_to_device_ratio=2,
    )
    assert isinstance(group.anchor_entry.host_pool, NullPoolHost)
    assert pages(group) == {
        "kv": 8,
        "swa": 4,
        "deepseek_v4_c4": 8,
        "deepseek_v4_c128": 8,
        "deepseek_v4_c4_state": 32,
        "deepseek_v4_c128_state": 32,
    }
    assert mapped(group, "kv", 4) == [None] * 4
    assert mapped(group, "deepseek_v4_c4", 4) == [None, 0, None, 1]
    assert INDEX_SOURCES[PoolName.DEEPSEEK_V4_C4] is PoolName.KV
    group.destroy()


def test_a_mixed_group_brings_every_byte_back_in_one_operation() -> None:
    kv, states = dsa(), mamba()
    group = build_host_pool_group({"kv": kv, "mamba": states}, page_size=PAGE, host_to_device_ratio=2)
    tensors = [*kv.kv_buffer, *kv.index_k_with_scale_buffer, *states.conv_buffer[0], *states.temporal_buffer]
    for tensor in tensors:
        random_bytes(tensor)
    before = [tensor.clone() for tensor in tensors]
    device = torch.randperm(8)[:3]
    kv_device = (device[:, None] * PAGE + torch.arange(PAGE)).flatten()
    host = group.alloc(3 * PAGE)
    transfers = [
        PoolTransfer("mamba", device_indices=torch.randperm(8)[:2]),
        PoolTransfer("indexer", indices_from_pool="kv"),
    ]
    assert group.resolve_host_transfers(transfers, primary_device_indices=kv_device, primary_host_indices=host)
    everything = [PoolTransfer("kv", host, kv_device), *transfers]
    for transfer in everything:
        entry = group.get_entry(transfer.name)
        entry.host_pool.backup_from_device_all_layer(
            entry.device_pool, transfer.host_indices, transfer.device_indices, "kernel"
        )
    for tensor in tensors:
        random_bytes(tensor)
    for transfer in everything:
        entry = group.get_entry(transfer.name)
        for model_layer in range(4):
            layer = entry.layer_mapper(model_layer)
            if layer is not None:
                entry.host_pool.load_to_device_per_layer(
                    entry.device_pool, transfer.host_indices, transfer.device_indices, layer, "kernel"
                )
    rows = [kv_device, kv_device, device, device] + [transfers[0].device_indices] * 4
    for tensor, old, moved in zip(tensors, before, rows, strict=True):
        assert torch.equal(tensor[moved].view(torch.uint8), old[moved].view(torch.uint8))
    group.release_transfers(transfers)
    group.destroy()


def test_packed_drafts_are_layers_of_their_owner_and_count_in_the_split() -> None:
    draft = dsa(layers=1)
    group = build_host_pool_group(
        {"kv": PoolSpec(dsa(), packed_draft_device_pools=[draft])}, page_size=PAGE, host_size=1e-3
    )
    assert [entry.host_pool.layer_num for entry in group.entries] == [3, 3]
    assert group.get_entry("kv").packed_draft_device_pools == (draft,)
    assert sum(entry.host_pool.buffer.numel() for entry in group.entries) <= 1e6
    group.destroy()


def test_a_pool_may_have_a_fixed_number_of_pages_and_the_others_share_the_rest() -> None:
    group = build_host_pool_group({"kv": mha(), "mamba": PoolSpec(mamba(), pages=5)}, page_size=PAGE, host_size=1e-3)
    assert pages(group)["mamba"] == 5
    kv = group.get_pool("kv")
    left = 1_000_000 - group.get_pool("mamba").buffer.numel()
    assert kv.page_num == left // kv.page_bytes
    group.destroy()


def test_shared_memory_and_layout_are_those_of_every_pool() -> None:
    group = build_host_pool_group(
        {"kv": dsa(), "mamba": mamba()}, page_size=PAGE, layout="page_first_direct", allocator_type="shared"
    )
    assert all(entry.host_pool.host_buffer.shared_name for entry in group.entries)
    assert all(entry.host_pool.layout == "page_first_direct" for entry in group.entries)
    group.destroy()


@pytest.mark.parametrize(
    ("device_pools", "arguments", "message"),
    [
        ({}, {}, "device_pools is empty"),
        ({"kv": mha()}, {"page_size": 0}, "page_size is 0"),
        ({"kv": mha()}, {"host_to_device_ratio": 0.01}, "host_to_device_ratio 0.01 leaves no page for pool kv"),
        ({"kv": mha(), "swa": mha()}, {"host_size": 1e-6}, "host_size 1e-06 GB leaves no page for pool kv"),
        ({"kv": PoolSpec(mha(), layers=[0, 1, 2])}, {}, r"layers is \[0, 1, 2\]; the pool has 2"),
        ({"kv": PoolSpec(mha(), layers=[1, 1])}, {}, "each serves one model layer"),
        ({"kv": dsa(), "indexer": mha()}, {}, "indexer"),
        ({"kv": mha(), "draft": PoolSpec(mha(), indices_from_pool="swa")}, {}, "draft uses the slots of swa"),
        ({"kv": mha(), "draft": PoolSpec(mha(), indices_from_pool="kv", pages=3)}, {}, "draft has pages=3"),
        (
            {
                "kv": mha(),
                "draft": PoolSpec(mha(), indices_from_pool="kv"),
                "tail": PoolSpec(mha(), indices_from_pool="draft"),
            },
            {},
            "tail uses the slots of draft, which has none",
        ),
        ({"kv": mha(), "mamba": mamba()}, {"layout": "layer_first"}, "layer_first"),
        ({"kv": mha()}, {"host_size": float("inf")}, "host_size is inf; it must be finite"),
        ({"kv": mha()}, {"host_to_device_ratio": float("nan")}, "host_to_device_ratio is nan; it must be finite"),
        ({"kv": PoolSpec(mha(), pages=100)}, {"host_size": 1e-6}, "host_size is 1e-06 GB; the pools with a number of"),
        (
            {PoolName.DEEPSEEK_V4_C128: DeepSeekV4PagedPool(1024, 128, 128, 16, 2)},
            {"page_size": 64, "host_size": 64.0},
            "page_size is 64; a row of kv in device_pools.* covers 128 slots",
        ),
    ],
)
def test_a_bad_argument_is_named(device_pools: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_host_pool_group(device_pools, **({"page_size": PAGE} | arguments))


def test_an_unknown_device_pool_is_named_with_the_way_out() -> None:
    class Other:
        pass

    with pytest.raises(TypeError, match=r"Other.*host_pool_type"):
        build_host_pool_group({"kv": Other()}, page_size=PAGE)  # type: ignore[dict-item]


def test_all_pools_together_must_fit_the_budget(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 200 kB\n")
    options = HostMemoryOptions(budget=HostMemoryBudget(0, proc_root=tmp_path, cgroup_root=tmp_path))
    pools = {"kv": mha(), "swa": mha()}
    build_host_pool_group(pools, page_size=PAGE, host_size=2e-4, memory_options=options).destroy()
    with pytest.raises(HostMemoryBudgetError):  # each of the two would fit
        build_host_pool_group(pools, page_size=PAGE, host_size=3e-4, memory_options=options)


def test_pools_made_before_one_that_fails_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed = []
    destroy = MLATokenToKVPoolHost.destroy
    monkeypatch.setattr(MLATokenToKVPoolHost, "destroy", lambda self: (destroyed.append(self), destroy(self))[1])

    class Failing(DSAIndexerPoolHost):
        def __init__(self, *_: object, **__: object) -> None:
            raise OSError("no memory")

    plain = MLATokenToKVPool(8 * PAGE, PAGE, torch.uint8, 56, 8, 2)
    with pytest.raises(OSError, match="no memory"):
        build_host_pool_group({"kv": plain, "x": PoolSpec(dsa(), host_pool_type=Failing)}, page_size=PAGE)
    assert len(destroyed) == 1


def test_a_layer_mapper_maps_what_the_pool_has() -> None:
    assert [layer_mapper(2)(layer) for layer in (-1, 0, 1, 2)] == [None, 0, 1, None]
    assert [layer_mapper(2, [7, 3])(layer) for layer in (3, 7, 0)] == [1, 0, None]
