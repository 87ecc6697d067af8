"""HiCacheBackend under SGLang's own pools, factory and controller: every byte, every prefix, one copy or one a rank."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if "HICACHE_SGLANG" not in os.environ:  # there it must not hide that SGLang cannot be imported
    pytest.importorskip("sglang", reason="SGLang is not installed; `nox -s sglang` installs it")

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from tests.together.sglang.pools import (
    PAGE_SIZE,
    PAGES,
    config,
    fill,
    keys,
    mha,
    mla,
    open_backend,
    page,
    slots,
)

FIRST = HiCacheStorageExtraInfo(prefix_keys=[])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("make", [mha, mla])
def test_pages_come_back_bit_for_bit_in_another_life_and_nothing_else_is_touched(
    tmp_path: Path, make: Any, layout: str
) -> None:
    host, names = make(layout), keys(3)
    backend = open_backend(config(tmp_path, mla=make is mla), host)
    fill(host)
    expected = [page(host, number) for number in (3, 5, 1)]
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1(names, slots((3, 5, 1)), FIRST) == [True] * 3
    assert backend.batch_exists([*names, *keys(1, "other")]) == 3
    backend.close()

    host = make(layout)
    backend = open_backend(config(tmp_path, mla=make is mla), host)
    host.kv_buffer.zero_()
    assert backend.batch_get_v1(names, slots((0, 7, 2))) == [True] * 3
    for number, wanted in zip((0, 7, 2), expected, strict=True):
        assert torch.equal(page(host, number), wanted)
    assert not any(page(host, number).any() for number in range(PAGES) if number not in (0, 7, 2))
    assert backend.batch_get_v1(keys(1, "other"), slots([9])) == [False]
    backend.close()


@pytest.mark.parametrize("count", [1, 3, 70])
def test_tensors_go_through_a_buffer_bit_for_bit(tmp_path: Path, count: int) -> None:
    host, names = mha(), keys(count)
    backend = open_backend(config(tmp_path, interface_v1=0), host)
    values = [torch.randn(host.get_dummy_flat_data_page().shape).to(torch.float16) for _ in names]
    assert backend.batch_set(names, values)
    assert backend.batch_exists(names) == count
    assert backend.exists(names[0])
    targets = [torch.zeros_like(value) for value in values]
    found = backend.batch_get(names, targets)
    assert all(ours is target for ours, target in zip(found, targets, strict=True))
    assert all(torch.equal(*pair) for pair in zip(targets, values, strict=True))
    (value,) = values[:1]
    assert backend.set("a key that is not a hash", value)
    assert torch.equal(backend.get("a key that is not a hash", torch.zeros_like(value)), value)
    assert backend.get(keys(1, "other")[0], torch.zeros_like(value)) is None
    backend.close()


def test_a_tensor_of_another_size_is_refused_before_anything_is_stored(tmp_path: Path) -> None:
    host, names = mha(), keys(2)
    backend = open_backend(config(tmp_path, interface_v1=0), host)
    value = torch.zeros_like(host.get_dummy_flat_data_page())
    with pytest.raises(ValueError, match="a page has"):
        backend.batch_set(names, [value, value[:-1]])
    with pytest.raises(ValueError, match="values has 1 of Tensor for 2 keys"):
        backend.batch_set(names, [value])
    assert backend.batch_exists(names) == 0
    backend.close()


def test_pages_of_another_layout_are_a_miss(tmp_path: Path) -> None:
    first = open_backend(config(tmp_path), mha("page_first"))
    assert first.batch_set_v1(keys(2), slots((0, 1))) == [True] * 2
    second = open_backend(config(tmp_path), mha("layer_first"))
    assert second.batch_exists(keys(2)) == 0
    for backend in (first, second):
        backend.close()


def test_a_page_whose_predecessor_is_not_stored_is_refused(tmp_path: Path) -> None:
    backend, names = open_backend(config(tmp_path), mha()), keys(3)
    after = HiCacheStorageExtraInfo(prefix_keys=names[:2])
    assert backend.batch_set_v1(names[2:], slots([0]), after) == [False]
    assert backend.batch_set_v1(names[:2], slots((0, 1)), FIRST) == [True] * 2
    assert backend.batch_set_v1(names[2:], slots([2]), after) == [True]
    backend.close()


@pytest.mark.parametrize("seed", range(40))
def test_prefixes_that_are_restorable_are_those_of_the_engines_own_file_backend(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    pools = {PoolName.KV: mha(), PoolName.INDEXER: mla(), PoolName.SWA: mla()}
    ours = open_backend(config(tmp_path), pools[PoolName.KV])
    plain = config(tmp_path)
    plain.extra_config = None
    theirs = HiCacheFile(plain, file_path=str(tmp_path / "theirs"))
    theirs.register_mem_pool_host(pools[PoolName.KV])
    names = keys(draw.randint(1, 10))
    for name, pool in pools.items():
        fill(pool)
        for backend in (ours, theirs):
            backend.register_mem_host_pool_v2(pool, name)
        have = [number for number in range(len(names)) if draw.random() < (0.9 if name is PoolName.KV else 0.6)]
        if have:
            stored = [PoolTransfer(name=name, keys=[names[each] for each in have], host_indices=slots(have))]
            assert ours.batch_set_v2(stored) == theirs.batch_set_v2(stored)
    asked = [
        PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES),
        PoolTransfer(name=PoolName.SWA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=names[-draw.randint(1, 3) :]),
    ]
    draw.shuffle(asked)
    asked = asked[: draw.randint(0, 2)]
    assert ours.batch_exists_v2(names, asked) == theirs.batch_exists_v2(names, asked)
    loaded = [PoolTransfer(name=PoolName.SWA, keys=names, host_indices=slots(range(len(names))))]
    assert ours.batch_get_v2(loaded) == theirs.batch_get_v2(loaded)
    ours.close()


def test_one_lookup_a_pool_answers_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, names = open_backend(config(tmp_path), mha()), keys(8)
    backend.register_mem_host_pool_v2(mla(), PoolName.SWA)
    stored = [PoolTransfer(name=name, keys=names, host_indices=slots(range(8))) for name in (PoolName.KV, PoolName.SWA)]
    backend.batch_set_v2(stored)
    (storage,) = set(backend._owners.values())
    calls = []
    find = storage.find_pages

    def counted(pool: Any, wanted: list[bytes], *, leading: bool) -> list[bool]:
        calls.append(pool.name)
        return find(pool, wanted, leading=leading)

    monkeypatch.setattr(storage, "find_pages", counted)
    window = PoolTransfer(name=PoolName.SWA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=names[-2:])
    assert backend.batch_exists_v2(names, [window]).restorable_prefix_pages == list(range(1, 9))
    assert calls == ["kv", "swa"]
    backend.close()


def test_a_pool_that_nothing_is_known_of_or_whose_indices_do_not_fit_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend, names = open_backend(config(tmp_path), mha()), keys(2)
    assert backend.batch_set_v1(names, slots((0, 1))) == [True] * 2
    unknown = PoolTransfer(name=PoolName.SWA, keys=names, host_indices=slots((0, 1)))
    short = PoolTransfer(name=PoolName.KV, keys=names, host_indices=slots([0]))
    with caplog.at_level(logging.ERROR):
        assert backend.batch_set_v2([unknown, short]) == {PoolName.SWA: [False] * 2, PoolName.KV: [False] * 2}
    assert "pool kv has 4 indices for 2 keys of 4 slots" in caplog.text
    for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
        asked = [PoolTransfer(name=PoolName.SWA, hit_policy=policy)]
        assert backend.batch_exists_v2(names, asked) == PoolTransferResult(0, {PoolName.KV: 2}, [])
    with pytest.raises(ValueError, match="accepted are all_pages and trailing_pages"):
        backend.batch_exists_v2(names, [PoolTransfer(name=PoolName.SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])
    backend.close()


# Ranks


def test_latents_are_stored_once_for_all_ranks_of_a_group(tmp_path: Path) -> None:
    host, names = mla(), keys(2)
    fill(host)
    first = open_backend(config(tmp_path, mla=True, tp_size=2), host)
    assert first.batch_set_v1(names, slots((0, 1)), FIRST) == [True] * 2
    other = mla()
    other.kv_buffer.zero_()
    second = open_backend(config(tmp_path, mla=True, tp_rank=1, tp_size=2), other)
    assert second.batch_get_v1(names, slots((4, 5))) == [True] * 2
    assert all(torch.equal(page(other, there), page(host, here)) for here, there in ((0, 4), (1, 5)))
    for backend in (first, second):
        backend.close()


def test_keys_and_values_are_stored_for_each_rank(tmp_path: Path) -> None:
    hosts = [mha(), mha()]
    backends = [open_backend(config(tmp_path, tp_rank=rank, tp_size=2), host) for rank, host in enumerate(hosts)]
    for host in hosts:
        fill(host)
    assert backends[0].batch_set_v1(keys(1), slots([0]), FIRST) == [True]
    assert backends[1].batch_exists(keys(1)) == 0
    assert backends[1].batch_set_v1(keys(1), slots([0]), FIRST) == [True]
    expected = [page(host, 0) for host in hosts]
    for backend, host, wanted in zip(backends, hosts, expected, strict=True):
        assert backend.batch_get_v1(keys(1), slots([3])) == [True]
        assert torch.equal(page(host, 3), wanted)
        backend.close()


@pytest.mark.parametrize(("name", "make"), [(PoolName.MAMBA, mla), (PoolName.DRAFT, mha)])
def test_states_and_a_draft_of_keys_and_values_are_stored_for_each_rank_of_a_model_with_latents(
    tmp_path: Path, name: PoolName, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    states = [make(), make()]
    with caplog.at_level(logging.WARNING):
        backends = [open_backend(config(tmp_path, mla=True, tp_rank=rank, tp_size=2), mla()) for rank in (0, 1)]
        for backend, state in zip(backends, states, strict=True):
            fill(state)
            backend.register_mem_host_pool_v2(state, name)
    assert ("sharded over ranks" in caplog.text) == (name is PoolName.DRAFT)
    stored = [PoolTransfer(name=name, keys=keys(1), host_indices=slots([0]))]
    assert backends[0].batch_set_v2(stored) == {name: [True]}
    assert backends[1].batch_get_v2(stored) == {name: [False]}
    assert backends[1].batch_set_v2(stored) == {name: [True]}
    loaded = [PoolTransfer(name=name, keys=keys(1), host_indices=slots([2]))]
    for backend, state in zip(backends, states, strict=True):
        wanted = page(state, 0)
        assert backend.batch_get_v2(loaded) == {name: [True]}
        assert torch.equal(page(state, 2), wanted)
        backend.close()


def test_an_anchor_without_memory_is_stored_as_pages_that_exist(tmp_path: Path) -> None:
    host, side, names = LogicalHostPool(PAGES * PAGE_SIZE, PAGE_SIZE), mla(), keys(3)
    backend = open_backend(config(tmp_path, mla=True), host)
    backend.register_mem_host_pool_v2(host, PoolName.KV)
    backend.register_mem_host_pool_v2(side, PoolName.DEEPSEEK_V4_C4)
    fill(side)
    assert backend.batch_set_v1(names, slots((0, 1, 2)), FIRST) == [True] * 3
    parts = [PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, keys=names[:2], host_indices=slots((0, 1)))]
    assert backend.batch_set_v2(parts) == {PoolName.DEEPSEEK_V4_C4: [True] * 2}
    found = backend.batch_exists_v2(names, [PoolTransfer(name=PoolName.DEEPSEEK_V4_C4)])
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
    assert backend.batch_get_v1(names, slots((3, 4, 5))) == [True] * 3
    backend.close()


def test_another_pool_under_a_known_name_is_refused(tmp_path: Path) -> None:
    host = mha()
    backend = open_backend(config(tmp_path), host)
    backend.register_mem_host_pool_v2(host, PoolName.KV)
    with pytest.raises(ValueError, match="host_pool_name is 'kv'; another pool is registered under it"):
        backend.register_mem_host_pool_v2(mha(), PoolName.KV)
    backend.close()


class WithoutMemory:
    """A host pool that cannot name the memory of its pages."""

    page_size, size, layout = PAGE_SIZE, PAGES * PAGE_SIZE, "page_first"


def test_a_pool_that_cannot_name_its_memory_is_refused_by_name(tmp_path: Path) -> None:
    backend = open_backend(config(tmp_path), mha())
    with pytest.raises(ValueError, match=r"pool swa \(WithoutMemory, layout page_first\) cannot be stored: "):
        backend.register_mem_host_pool_v2(WithoutMemory(), PoolName.SWA)
    assert backend.batch_exists_v2(keys(1), [PoolTransfer(name=PoolName.SWA)]).kv_hit_pages == 0
    backend.close()


# Settings


def test_which_weights_a_model_has_is_needed_and_found_in_its_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing says which weights 'org/model' has; add revision or weights_hash"):
        open_backend(config(tmp_path, revision=None), mha())
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    local = config(tmp_path, revision=None)
    local.model_name = str(model)
    first = open_backend(local, mha())
    assert first.batch_set_v1(keys(1), slots([0])) == [True]
    (model / "config.json").write_text('{"layers": 3}')
    second = open_backend(local, mha())
    assert second.batch_exists(keys(1)) == 0
    for backend in (first, second):
        backend.close()


def test_a_key_that_is_not_known_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extra-config has folder; accepted are storage, "):
        open_backend(config(tmp_path, folder="/l3"), mha())


# SGLang's controller


@pytest.mark.parametrize("zero_copy", [True, False])
def test_the_engines_controller_stores_and_loads_pages_by_both_of_its_ways(tmp_path: Path, zero_copy: bool) -> None:
    host, names = mha(), keys(4)
    controller = HiCacheController.__new__(HiCacheController)
    controller.storage_host_pool = controller.mem_pool_host = host
    controller.page_size = PAGE_SIZE
    controller.storage_backend = open_backend(config(tmp_path, interface_v1=int(zero_copy)), host)
    fill(host)
    expected = [page(host, number) for number in range(4)]
    store = controller._page_set_zero_copy if zero_copy else controller._generic_page_set
    load = controller._page_get_zero_copy if zero_copy else controller._generic_page_get
    assert store(names, slots(range(4)), FIRST)
    host.kv_buffer.zero_()
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
    assert load(operation, [*names, *keys(1, "other")], slots(range(8, 13))) == 4
    for number, wanted in zip(range(8, 12), expected, strict=True):
        assert torch.equal(page(host, number), wanted)
    controller.storage_backend.close()


def test_a_damaged_page_is_a_miss_and_the_others_come(tmp_path: Path) -> None:
    host, names = mha(), keys(3)
    backend = open_backend(config(tmp_path), host)
    fill(host)
    assert backend.batch_set_v1(names, slots((0, 1, 2)), FIRST) == [True] * 3
    (storage,) = set(backend._owners.values())
    damaged = Path(storage.page_path(bytes.fromhex(names[1])))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 3] ^= 1
    damaged.write_bytes(content)
    assert backend.batch_get_v1(names, slots((5, 6, 7))) == [True, False, True]
    assert torch.equal(page(host, 5), page(host, 0))
    assert torch.equal(page(host, 7), page(host, 2))
    assert backend.batch_exists(names) == 1
    assert backend.clear()
    assert backend.batch_exists(names) == 0
    backend.close()
