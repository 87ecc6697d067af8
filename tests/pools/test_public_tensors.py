"""Every public entry names the argument that is not a tensor with memory, a list of them, or a pool."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hicache_pools as hp

BAD: dict[str, Any] = {
    "None": None,
    "number": 5,
    "text": "tensor",
    "object": object(),
    "meta": torch.empty(16, 16, device="meta"),
    "sparse": torch.eye(16).to_sparse(),
}
SLOTS = torch.arange(16)


def device_pool() -> hp.MHATokenToKVPool:
    return hp.MHATokenToKVPool(32, 16, torch.uint8, 2, 16, 1)


def host_pool(pool: Any = None) -> hp.HostPool:
    return hp.MHATokenToKVPoolHost(pool or device_pool(), 1.0, 0)


def layers(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape)]


def group(**given: Any) -> hp.HostPoolGroup:
    pool = host_pool()
    return hp.HostPoolGroup([hp.PoolEntry("kv", pool, None, lambda layer: layer, **given)])


def described(component: Any) -> None:
    hp.DevicePool().describe([component], 16)


def translated(table: Any) -> None:
    hp.MHATokenToKVPool(32, 16, torch.uint8, 2, 16, 1, index_translation=table)


def transfer(**given: Any) -> hp.PoolTransfer:
    return hp.PoolTransfer("kv", **given)


Call = Callable[[Any], object]
MHA, MLA, DSA, MAMBA = (
    p.from_buffers for p in (hp.MHATokenToKVPool, hp.MLATokenToKVPool, hp.DSATokenToKVPool, hp.MambaPool)
)
PAGED, STATE = hp.DeepSeekV4PagedPool.from_buffers, hp.DeepSeekV4StatePool.from_buffers
CALLS: dict[str, list[tuple[str, Call]]] = {
    "component_from_tensors": [
        ("x", lambda bad: hp.component_from_tensors("x", bad)),
        ("x[0]", lambda bad: hp.component_from_tensors("x", [bad])),
    ],
    "DevicePool": [("components[0]", described)],
    "MHATokenToKVPool": [
        ("k[1]", lambda bad: MHA(k=[*layers(16, 2, 8), bad], v=layers(16, 2, 8), page_size=16)),
        ("v[0]", lambda bad: MHA(k=layers(16, 2, 8), v=[bad], page_size=16)),
        ("kv[0]", lambda bad: MHA(kv=[bad], page_size=16)),
    ],
    "MLATokenToKVPool": [
        ("kv", lambda bad: MLA(kv=bad, page_size=16)),
        ("kv[0]", lambda bad: MLA(kv=[bad], page_size=16)),
    ],
    "DSATokenToKVPool": [
        ("index_k", lambda bad: DSA(kv=layers(16, 8), index_k=bad, page_size=16)),
        ("index_k[0]", lambda bad: DSA(kv=layers(16, 8), index_k=[bad], page_size=16)),
    ],
    "MambaPool": [
        ("conv", lambda bad: MAMBA(conv=bad)),
        ("conv[0]", lambda bad: MAMBA(conv=[bad])),
        ("temporal", lambda bad: MAMBA(conv=layers(8, 4), temporal=bad)),
        ("temporal[0]", lambda bad: MAMBA(conv=layers(8, 4), temporal=[bad])),
        ("side[x][0]", lambda bad: MAMBA(conv=layers(8, 4), side={"x": [bad]})),
    ],
    "DeepSeekV4PagedPool": [
        ("kv", lambda bad: PAGED(kv=bad, compression_ratio=4, page_size=16)),
        ("indexer", lambda bad: PAGED(kv=layers(8, 4), indexer=bad, compression_ratio=4, page_size=16)),
        ("indexer[0]", lambda bad: PAGED(kv=layers(8, 4), indexer=[bad], compression_ratio=4, page_size=16)),
    ],
    "BlockPool": [
        ("blocks", lambda bad: hp.BlockPool.from_buffers(blocks=bad)),
        ("blocks[0]", lambda bad: hp.BlockPool.from_buffers(blocks=[bad])),
        ("conv[0]", lambda bad: hp.BlockPool.from_buffers(blocks={"conv": [bad]})),
    ],
    "DeepSeekV4StatePool": [
        ("state", lambda bad: STATE(state=bad)),
        ("values[0]", lambda bad: STATE(state={"values": [bad]})),
    ],
    "HostPool": [
        ("device_pool", lambda bad: hp.HostPool(bad, 1.0, 0)),
        ("host_indices", lambda bad: host_pool().backup_from_device_all_layer(None, bad, SLOTS)),
        ("device_indices", lambda bad: host_pool().backup_from_device_all_layer(None, SLOTS, bad)),
        ("host_indices", lambda bad: host_pool().load_to_device_per_layer(None, bad, SLOTS, 0)),
        ("device_indices", lambda bad: host_pool().load_to_device_all_layer(None, SLOTS, bad)),
        ("device_pool", lambda bad: host_pool().load_to_device_all_layer(5.0 if bad is None else bad, SLOTS, SLOTS)),
        ("data", lambda bad: host_pool().write_page(0, bad)),
        ("indices", lambda bad: host_pool().free(bad)),
        (
            "packed_draft_device_pools",
            lambda bad: hp.MHATokenToKVPoolHost(device_pool(), 1.0, 0, packed_draft_device_pools=[bad]),
        ),
    ],
    "ExtentAllocator": [("indices", lambda bad: hp.ExtentAllocator(4, 16).free(bad))],
    "PoolEntry": [("entry", lambda bad: hp.HostPoolGroup([bad])), ("entry", lambda bad: group().add_entry(bad))],
    "HostPoolGroup": [
        ("indices", lambda bad: group().free(bad)),
        ("indices", lambda bad: group(device_alloc_fn=torch.arange, device_free_fn=id).free_device(bad)),
        ("transfers[0]", lambda bad: group().resolve_host_transfers([bad])),
        ("transfers[0]", lambda bad: group().release_transfers([bad])),
    ],
    "PoolTransfer": [
        ("host_indices of transfer kv", lambda bad: group().resolve_device_transfers([transfer(host_indices=bad)])),
        ("device_indices of transfer kv", lambda bad: group().resolve_host_transfers([transfer(device_indices=bad)])),
    ],
    "build_host_pool_group": [
        ("device_pools", lambda bad: hp.build_host_pool_group(bad, page_size=16)),
        ("device_pools['kv']", lambda bad: hp.build_host_pool_group({"kv": bad}, page_size=16)),
    ],
    "PoolSpec": [
        (
            "device_pools['kv']",
            lambda bad: hp.build_host_pool_group(
                {"kv": hp.PoolSpec(bad, host_pool_type=hp.MHATokenToKVPoolHost)}, page_size=16
            ),
        )
    ],
    "unwrap_draft_pool": [("packed_draft_device_pools", hp.unwrap_draft_pool)],
}
HOST_POOLS = {
    name for name in hp.__all__ if isinstance(getattr(hp, name), type) and issubclass(getattr(hp, name), hp.HostPool)
}
WITHOUT_TENSORS = {
    "AllocatorType",
    "BufferForm",
    "ComponentGeometry",
    "DeviceComponent",
    "ExtentStats",
    "HostBuffer",
    "HostMemoryBudget",
    "HostMemoryBudgetError",
    "HostMemoryOptions",
    "HugePages",
    "PagePart",
    "PoolGeometry",
    "PoolHitPolicy",
    "PoolName",
    "allocate_host_buffer",
    "attach_host_buffer",
    "cpu_simulation",
    "layer_mapper",
}
"""DeviceComponent and HostBuffer are made by functions above."""


def test_every_public_name_is_tried_or_takes_no_tensor_and_no_pool() -> None:
    assert set(hp.__all__) == set(CALLS) | HOST_POOLS | WITHOUT_TENSORS


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
@pytest.mark.parametrize(
    ("name", "call"),
    [pytest.param(name, call, id=f"{entry}-{name}") for entry, calls in CALLS.items() for name, call in calls],
)
def test_what_is_not_a_tensor_with_memory_or_a_pool_is_named(name: str, call: Call, bad: Any) -> None:
    if bad is None and name.endswith("of transfer kv"):
        pytest.skip("None is accepted")
    with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(name)}\S* (is|lies|has|holds)\b"):
        call(bad)


@pytest.mark.parametrize(
    "bad", [value for value in BAD.values() if value is not None], ids=[n for n in BAD if n != "None"]
)
def test_optional_tensors_are_named_too(bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^index_translation (is|lies|has)"):
        translated(bad)
    for name in ("primary_host_indices", "primary_device_indices"):
        with pytest.raises((TypeError, ValueError), match=rf"^{name} (is|lies|has)"):
            group().resolve_host_transfers([], **{name: bad})


@pytest.mark.parametrize("name", sorted(HOST_POOLS - {"HostPool", "NullPoolHost"}))
@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_a_host_pool_names_what_is_not_its_device_pool(name: str, bad: Any) -> None:
    with pytest.raises(TypeError, match=f"^device_pool is a .*; {name} takes a "):
        getattr(hp, name)(bad, 1.0, 0)
