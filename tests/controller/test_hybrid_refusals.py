"""Pools and transfers of operations over several pools that do not fit raise, and change nothing."""

import pytest
import torch
from tests.controller.hybrid_stack import (
    PAGE,
    PAGES,
    random_layers,
    same,
    used,
)

from hicache_controller.controller import HiCacheController
from hicache_controller.hybrid import HybridCacheController, SidecarPoolSpec
from hicache_controller.layer_map import layer_plan
from hicache_controller.storage.memory import MemoryStorage
from hicache_pools.device_pools import DSATokenToKVPool
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import DSAIndexerPoolHost
from hicache_pools.pool_transfer import PoolHitPolicy, PoolTransfer


def test_a_mapper_that_does_not_cover_its_pool_is_an_error(make_hybrid):
    stack = make_hybrid()
    entry = stack.group.get_entry("mamba")
    for mapper, message in (
        (lambda layer: 0, r"gives no model layer for its layers \[1\]"),
        (lambda layer: layer + 1, "gives layer 2 for model layer 1; the pool has 2 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_plan([PoolEntry("x", entry.host_pool, entry.device_pool, mapper)])


def test_host_slots_that_nobody_owns_are_refused_in_every_pool(make_hybrid):
    stack = make_hybrid()
    controller = stack.controller
    controller.attach_storage_backend(MemoryStorage())
    host, states, rows = stack.written()
    gone = states[:1].clone()
    controller.evict_host(gone, pool="mamba")
    keys = [bytes([number]) * 16 for number in range(3)]
    calls = (
        lambda transfer: controller.load(host, node_id=2, pool_transfers=[transfer]),
        lambda transfer: controller.backup(host, keys, node_id=2, pool_transfers=[transfer]),
        lambda transfer: controller.prefetch(host, keys, request_id="r", pool_transfers=[transfer]),
    )
    used = [pool.available_size() for pool in (*stack.hosts.values(), *stack.allocators.values())]
    for call in calls:
        for slots in (gone, torch.cat((states[1:], gone)), states[[1, 1]]):
            transfer = PoolTransfer("mamba", slots, keys=keys[: len(slots)], hit_policy=PoolHitPolicy.TRAILING_PAGES)
            with pytest.raises(ValueError, match=r"not pages .* pool mamba"):
                call(transfer)
    with pytest.raises(ValueError, match=r"not pages .* pool mamba"):
        controller.write(
            stack.allocators["kv"].alloc(PAGE), node_id=3, pool_transfers=[PoolTransfer("mamba", gone, torch.arange(1))]
        )
    with pytest.raises(ValueError, match="shares the slots of window, which has no transfer here"):
        controller.backup(
            host,
            keys,
            node_id=2,
            pool_transfers=[PoolTransfer("side", host, keys=keys, indices_from_pool="window")],
        )
    assert used[:3] == [pool.available_size() for pool in stack.hosts.values()]
    loaded = PoolTransfer("mamba", states[1:])
    slots = controller.load(host, node_id=4, pool_transfers=[loaded])
    controller.start_loading()
    assert [ack.error for ack in controller.poll_loads(wait=True)] == [None]
    anchor, recurrent = stack.rows(slots, loaded.device_indices)
    assert all(map(torch.equal, anchor, rows[0]))
    assert all(map(torch.equal, recurrent, (then[1:] for then in rows[1])))


def test_a_sidecar_with_fewer_slots_than_it_shares_is_refused_at_the_call(make_hybrid):
    stack = make_hybrid()
    stack.hosts["side"].size = PAGE
    device = stack.allocators["kv"].alloc(2 * PAGE)
    before = stack.hosts["kv"].available_size()
    with pytest.raises(ValueError, match="host_indices of pool side runs from"):
        stack.controller.write(device, node_id=1)
    assert stack.hosts["kv"].available_size() == before
    assert stack.controller.start_writing() is None


def test_bad_transfers_raise_and_change_nothing(make_hybrid):
    stack = make_hybrid()
    slots = stack.allocators["kv"].alloc(2 * PAGE)
    states = torch.arange(2)
    for transfers, error, message in (
        ([PoolTransfer("nothing", device_indices=states)], KeyError, "no pool is called nothing"),
        ([PoolTransfer("kv", device_indices=states)], ValueError, "names kv"),
        ([PoolTransfer("mamba", device_indices=states)] * 2, ValueError, "names mamba"),
        ([PoolTransfer("mamba", device_indices=states + 5)], ValueError, "runs from 5 to 6"),
        ([PoolTransfer("mamba")], ValueError, "none of host_indices"),
        ([PoolTransfer("mamba", torch.arange(3), states)], ValueError, "3 host indices and 2 device indices"),
        ([PoolTransfer("mamba", states)], ValueError, "2 host indices and None device indices"),
    ):
        with pytest.raises(error, match=message):
            stack.controller.write(slots, node_id=1, pool_transfers=transfers)
        assert stack.used() == used(2)
        assert stack.controller.start_writing() is None


def test_an_unknown_sidecar_is_an_error(make_hybrid):
    with pytest.raises(KeyError, match="no pool is called other"):
        make_hybrid(sidecars=[SidecarPoolSpec("other", "kv")])
    stack = make_hybrid(sidecars=[])
    with pytest.raises(KeyError, match="no pool is called other"):
        stack.controller.add_sidecar(SidecarPoolSpec("side", "other"))
    stack.controller.add_sidecar(SidecarPoolSpec("side", "kv"))
    host, states, rows = stack.written()
    assert same(stack.loaded(host, states), rows)


def test_storage_transfers_that_do_not_fit_raise(make_hybrid):
    stack = make_hybrid()
    stack.controller.attach_storage_backend(MemoryStorage())
    host, states, _ = stack.written(2, 2)
    keys = [bytes([n] * 16) for n in range(2)]
    for transfer, message in (
        (PoolTransfer("mamba", states), "has no keys"),
        (PoolTransfer("mamba", keys=keys), "has no host_indices"),
        (PoolTransfer("mamba", states[:1], keys=keys[:1]), "1 keys; with the hit policy all_pages"),
        (PoolTransfer("mamba", states, keys=keys[:1], hit_policy="trailing_pages"), "2 slots for 1 keys"),
    ):
        with pytest.raises(ValueError, match=message):
            stack.controller.backup(host, keys, node_id=1, pool_transfers=[transfer])
    assert stack.controller.poll_backups(wait=True) == []


def test_rows_that_stand_for_a_page_are_written_whole():
    slots = PAGES * PAGE
    device = DSATokenToKVPool.from_buffers(
        kv=random_layers(slots, 1, 8),
        index_k=[torch.randint(0, 256, (PAGES, 16), dtype=torch.uint8) for _ in range(2)],
        page_size=PAGE,
    )
    host = DSAIndexerPoolHost(device, 1, 0, PAGE, pin_memory=False)
    controller = HiCacheController(HostPoolGroup([PoolEntry("indexer", host, device, lambda layer: layer)]))
    order = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    with pytest.raises(ValueError, match="not whole rows; accepted are 4 neighbours each"):
        controller.write(order, node_id=1)
    assert host.available_size() == slots
    controller.write(torch.tensor([4, 5, 6, 7, 0, 1, 2, 3]), node_id=1)
    controller.start_writing()
    assert [ack.error for ack in controller.poll_writes(wait=True)] == [None]
    assert controller.shutdown()


def test_no_controller_knows_about_drafts():
    """A draft is a transfer like any other: nothing in a controller is there for drafts alone."""
    names = [name for kind in HybridCacheController.__mro__[:-1] for name in vars(kind)]
    assert not [name for name in names if "draft" in name]
