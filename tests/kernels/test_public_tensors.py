"""Every public entry names the argument that is not a tensor with memory, a list of them, or what it takes instead."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hicache_kernels
from hicache_kernels import DeviceRows, HostRows, HostStrides, Plane, PlaneTransfer, jit_kernel, pointer_table

BAD: dict[str, Any] = {
    "None": None,
    "number": 5,
    "text": "tensor",
    "object": object(),
    "meta": torch.empty(16, 16, device="meta"),
    "sparse": torch.eye(16).to_sparse(),
}
INDICES = torch.arange(4)


def rows(*tensors: Any) -> DeviceRows:
    return DeviceRows.slot_major(tensors or [torch.zeros(8, 16, dtype=torch.uint8)])


def plane(**parts: Any) -> Plane:
    buffer = parts.get("buffer", torch.zeros(128, dtype=torch.uint8))
    host = HostRows(buffer, HostStrides(0, 64, 64, 16), 2, 4)
    return Plane("kv", 16, parts.get("device", rows()), parts.get("host", host))


def transfer(**given: Any) -> PlaneTransfer:
    return PlaneTransfer([plane()], **given)


def one_layer(bad: Any, number: int) -> object:
    cache = torch.zeros(8, 16)
    given = [cache, INDICES, cache.clone(), INDICES]
    given[number] = bad
    return jit_kernel.transfer_hicache_one_layer_mla(*given)


def all_layers(bad: Any, number: int) -> object:
    table = pointer_table([torch.zeros(8, 16)])
    given = [table, INDICES, table, INDICES]
    given[number] = bad
    return jit_kernel.transfer_hicache_all_layer_mla(*given, cache_src_stride_bytes=64, cache_dst_stride_bytes=64)


def staged(bad: Any, number: int) -> object:
    given = [pointer_table([torch.zeros(8, 16)]), INDICES, INDICES, torch.zeros(4, 1, 16), torch.zeros(8, 1, 16)]
    given[number] = bad
    return jit_kernel.transfer_hicache_all_layer_mla_staged_lf_pf(*given, page_size=4)


CALLS: dict[str, list[tuple[str, Callable[[Any], object]]]] = {
    "DeviceRows": [
        ("tensors[1]", lambda bad: DeviceRows.slot_major([torch.zeros(8, 16), bad])),
        ("tensors[0]", lambda bad: DeviceRows.block_major([bad])),
        ("tensors", lambda bad: DeviceRows.head_major(bad)),
    ],
    "HostRows": [("host.buffer of plane kv", lambda bad: PlaneTransfer([plane(buffer=bad)]))],
    "Plane": [
        ("device of plane kv", lambda bad: PlaneTransfer([plane(device=bad)])),
        ("host of plane kv", lambda bad: PlaneTransfer([plane(host=bad)])),
        (
            "device.tensors of plane kv[0]",
            lambda bad: PlaneTransfer([plane(device=DeviceRows((bad,), (0,), 1, 8, 0, 1, 16))]),
        ),
    ],
    "PlaneTransfer": [
        ("planes[0]", lambda bad: PlaneTransfer([bad])),
        ("host_indices", lambda bad: transfer().write_back(bad, INDICES)),
        ("device_indices", lambda bad: transfer().write_back(INDICES, bad)),
        ("host_indices", lambda bad: transfer().load(bad, INDICES, layer=0)),
        ("device_indices", lambda bad: transfer().load(INDICES, bad)),
        ("ring", lambda bad: transfer(ring=0.5 if bad is None else bad)),
    ],
    "pointer_table": [
        ("tensors[1]", lambda bad: pointer_table([torch.zeros(4), bad])),
        ("tensors", lambda bad: pointer_table(bad)),
    ],
    "jit_kernel": [
        ("cache_dst", lambda bad: one_layer(bad, 0)),
        ("indices_dst", lambda bad: one_layer(bad, 1)),
        ("cache_src", lambda bad: one_layer(bad, 2)),
        ("indices_src", lambda bad: one_layer(bad, 3)),
        ("ptr_dst", lambda bad: all_layers(bad, 0)),
        ("indices_dst", lambda bad: all_layers(bad, 1)),
        ("ptr_src", lambda bad: all_layers(bad, 2)),
        ("indices_src", lambda bad: all_layers(bad, 3)),
        ("ptr_src", lambda bad: staged(bad, 0)),
        ("src_indices", lambda bad: staged(bad, 1)),
        ("dst_indices", lambda bad: staged(bad, 2)),
        ("staging", lambda bad: staged(bad, 3)),
        ("dst", lambda bad: staged(bad, 4)),
    ],
}
WITHOUT_TENSORS = {
    "Capabilities",
    "Compute",
    "Direction",
    "HostLayout",
    "HostStrides",
    "PathUnavailableError",
    "Plan",
    "StagingRing",
    "TransferPolicy",
    "TransferResult",
    "host_bytes",
    "host_strides",
}


def test_every_public_name_is_tried_or_takes_no_tensor() -> None:
    assert set(hicache_kernels.__all__) == (set(CALLS) - {"jit_kernel"}) | WITHOUT_TENSORS


@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
@pytest.mark.parametrize(
    ("name", "call"),
    [pytest.param(name, call, id=f"{entry}-{name}") for entry, calls in CALLS.items() for name, call in calls],
)
def test_what_is_not_a_tensor_with_memory_is_named(name: str, call: Callable[[Any], object], bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(name)} (is|lies|has|of)\b"):
        call(bad)


@pytest.mark.parametrize("how", ["resized", "written to", "replaced", "slice of resized"])
def test_a_table_that_no_longer_shows_its_tensors_is_refused(how: str) -> None:
    sources = [torch.zeros(4096, 16) for _ in range(3)]
    source, target = pointer_table(sources), pointer_table([torch.zeros(4096, 16) for _ in range(3)])
    if how.endswith("resized"):
        sources[1].untyped_storage().resize_(0)
    elif how == "replaced":
        sources[1].set_(torch.zeros(4096, 16))
    else:
        source[1] = 8
    if how.startswith("slice"):
        source, target = source[1:2], target[1:2]
    rows = torch.arange(64)
    with pytest.raises(ValueError, match=r"^ptr_src\S* was (made from a tensor|written to)"):
        jit_kernel.transfer_hicache_all_layer_mla(
            target, rows, source, rows, cache_src_stride_bytes=64, cache_dst_stride_bytes=64
        )
    with pytest.raises(ValueError, match=r"^ptr_src\S* was (made from a tensor|written to)"):
        jit_kernel.transfer_hicache_all_layer_mla_staged_lf_pf(
            source, rows, rows, torch.zeros(64, len(source), 16), torch.zeros(64, len(source), 16), page_size=64
        )
