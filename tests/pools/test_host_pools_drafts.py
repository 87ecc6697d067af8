"""Packed drafts: their layers follow the owner's in every slot, move with them, and are addressed on their own."""

from types import SimpleNamespace

import pytest
import torch

from hicache_pools import (
    DSAIndexerPoolHost,
    DSATokenToKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    PoolEntry,
    unwrap_draft_pool,
)
from hicache_pools.simulation import fill_randomly, read_slots


def pool(layers, **change):
    shape = {"size": 64, "page_size": 16, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 8} | change
    return MHATokenToKVPool(**shape, layer_num=layers)


def wrapped(draft, how):
    if how == "entry":
        return PoolEntry("draft", None, draft, lambda layer: layer)
    if how == "hybrid":
        return SimpleNamespace(full_kv_pool=draft)
    if how == "twice":
        return SimpleNamespace(device_pool=SimpleNamespace(full_kv_pool=draft))
    return draft


def host_pool(owner, drafts, layout="page_first", how="bare", kind=MHATokenToKVPoolHost):
    return kind(owner, 1.0, 0, 16, layout=layout, packed_draft_device_pools=[wrapped(d, how) for d in drafts])


@pytest.mark.parametrize("how", ["bare", "entry", "hybrid", "twice"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_one_write_back_saves_owner_and_drafts_and_each_layer_is_loaded_by_its_address(layout, how):
    owner, drafts = pool(3), [pool(1), pool(2)]
    host = host_pool(owner, drafts, layout, how)
    assert (host.layer_num, owner.layer_num, host.geometry.layers) == (6, 3, 6)
    for each in (owner, *drafts):
        fill_randomly(each)
    slots = (torch.randperm(4)[:, None] * 16 + torch.arange(16)).flatten()
    before = [read_slots(each, slots) for each in (owner, *drafts)]
    host_slots = host.alloc(64)
    result = host.backup_from_device_all_layer(owner, host_slots, slots)
    assert result.bytes == 4 * host.page_bytes
    for each in (owner, *drafts):
        fill_randomly(each)

    for layer in range(3):
        host.load_to_device_per_layer(owner, host_slots, slots, layer)
    assert_same(read_slots(owner, slots), before[0])
    assert not torch.equal(read_slots(drafts[0], slots)["k"], before[1]["k"])

    given = host._wrapped_drafts
    host.load_to_device_per_layer(given[0], host_slots, slots, 0, is_draft=True)
    host.load_to_device_per_layer(drafts[1], host_slots, slots, 0, is_draft=True)
    # Counted over all drafts where the owner, or no pool, is given.
    host.load_to_device_per_layer(owner, host_slots, slots, 2, "kernel", is_draft=True)
    for draft, saved in zip(drafts, before[1:], strict=True):
        assert_same(read_slots(draft, slots), saved)


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_both_host_pools_of_a_sparse_model_take_its_draft():
    def sparse(layers):
        return DSATokenToKVPool(64, 16, torch.bfloat16, 16, 4, layers, index_head_dim=16, quant_block_size=16)

    owner, draft = sparse(2), sparse(1)
    for each in (owner, draft):
        fill_randomly(each)
    slots = torch.arange(64)
    before = read_slots(draft, slots)
    for kind in (MLATokenToKVPoolHost, DSAIndexerPoolHost):
        host = host_pool(owner, [draft], kind=kind)
        host.backup_from_device_all_layer(owner, slots, slots)
        for component in draft.components:
            if component.name in kind.component_names:
                component.tensors[0].zero_()
        host.load_to_device_per_layer(draft, slots, slots, 0, is_draft=True)
    assert_same(read_slots(draft, slots), before)


def test_a_latent_pool_takes_a_draft_of_latents():
    owner, draft = (MLATokenToKVPool(64, 16, torch.bfloat16, 16, 4, layers) for layers in (2, 1))
    assert host_pool(owner, [draft], kind=MLATokenToKVPoolHost).layer_num == 3


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (pool(1, head_dim=4), "element shape"),
        (pool(1, head_num=4), "element shape"),
        (pool(1, dtype=torch.float16), "dtype"),
        (pool(1, size=32), "rows 32"),
        (
            MHATokenToKVPool.from_buffers(
                k=[torch.zeros(64, 3, 8, dtype=torch.bfloat16)[:, :2]],
                v=[torch.zeros(64, 3, 8, dtype=torch.bfloat16)[:, :2]],
                page_size=16,
            ),
            "strides",
        ),
    ],
)
def test_a_draft_that_does_not_fit_its_owner_is_refused(draft, message):
    with pytest.raises(ValueError, match=rf"packed_draft_device_pools\[0\]: k has {message}"):
        host_pool(pool(2), [draft])


def test_a_draft_to_which_the_owners_indices_mean_something_else_is_refused():
    with pytest.raises(ValueError, match=r"packed_draft_device_pools\[1\] has page_size 32; the owner has 16"):
        host_pool(pool(2), [pool(1), pool(1, page_size=32)])
    table = torch.arange(64).flip(0)
    with pytest.raises(ValueError, match=r"packed_draft_device_pools\[0\] has an index_translation of its own"):
        host_pool(pool(2), [pool(1, index_translation=table)])
    assert host_pool(pool(2, index_translation=table), [pool(1, index_translation=table)]).layer_num == 3


def test_a_draft_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="component 'k' is not in this MLATokenToKVPool"):
        host_pool(pool(2), [MLATokenToKVPool(64, 16, torch.bfloat16, 16, 4, 1)])
    with pytest.raises(TypeError, match="packed_draft_device_pools holds a object"):
        host_pool(pool(2), [object()])
    itself = SimpleNamespace()
    itself.device_pool = itself
    with pytest.raises(TypeError, match="packed_draft_device_pools holds a SimpleNamespace"):
        unwrap_draft_pool(itself)
    assert unwrap_draft_pool(wrapped(draft := pool(1), "twice")) is draft


def test_layers_of_drafts_are_checked_against_the_draft_they_are_of():
    owner, drafts = pool(3), [pool(1), pool(2)]
    host = host_pool(owner, drafts)
    slots = torch.arange(64)
    with pytest.raises(ValueError, match="layer_id is 3; layers of the pool: 3"):
        host.load_to_device_per_layer(owner, slots, slots, 3)
    with pytest.raises(ValueError, match="layer_id is 1; layers of the draft: 1"):
        host.load_to_device_per_layer(drafts[0], slots, slots, 1, is_draft=True)
    with pytest.raises(ValueError, match="layer_id is 3; layers of all drafts together: 3"):
        host.load_to_device_per_layer(None, slots, slots, 3, is_draft=True)
    with pytest.raises(ValueError, match="device_pool is another"):
        host.load_to_device_per_layer(pool(1), slots, slots, 0, is_draft=True)
    with pytest.raises(ValueError, match="layer_id is 0; layers of all drafts together: 0"):
        host_pool(owner, []).load_to_device_per_layer(owner, slots, slots, 0, is_draft=True)
