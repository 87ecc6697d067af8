"""Several pools in storage: a prefix counts as far as every pool has what it needs."""

import pytest
import torch
from tests.controller.hybrid_stack import (
    PAGE,
    same,
)

from hicache_controller.storage.memory import MemoryStorage
from hicache_pools.pool_transfer import PoolHitPolicy, PoolTransfer


def stored(stack, pages=3, skip=()):
    """Keys of something in storage: each attention page, and the state after the last of them."""
    host, states, rows = stack.written(pages, 1)
    keys = [torch.randint(0, 256, (16,), dtype=torch.uint8).numpy().tobytes() for _ in range(pages)]
    transfer = PoolTransfer("mamba", states, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    stack.controller.backup(host, keys, node_id=1, pool_transfers=[transfer])
    (ack,) = stack.controller.poll_backups(wait=True)
    stack.controller.evict_host(host)
    stack.controller.evict_host(states, pool="mamba")
    for pool in stack.hosts.values():
        pool.buffer.random_(0, 256)
    return keys, rows, ack


def state_of(keys, host_indices=None):
    return PoolTransfer("mamba", host_indices, keys=keys[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES)


@pytest.mark.parametrize("synchronous", [True, False])
def test_every_pool_survives_in_storage(make_hybrid, synchronous):
    stack = make_hybrid(synchronous=synchronous)
    stack.controller.attach_storage_backend(MemoryStorage())
    keys, rows, ack = stored(stack)
    assert (ack.stored_pages, ack.error, ack.pool_pages) == (3, None, {"mamba": 1})
    assert stack.controller.storage_exists([*keys, bytes(16)], pool_transfers=[state_of(keys)]) == 3
    host, states = stack.group.alloc(3 * PAGE), stack.group.alloc(1, "mamba")
    transfer = state_of(keys, states)
    assert stack.controller.prefetch(host, keys, request_id="r", pool_transfers=[transfer]).wait() == 3
    assert same(stack.loaded(host, states), rows)
    counted = stack.controller.metrics.snapshot()
    for name, pages in (("kv", 3), ("mamba", 1), ("side", 3)):
        moved = pages * stack.hosts[name].page_bytes
        for direction in ("write_back", "load"):
            assert counted.total("transfer_bytes", direction=direction, pool=name) == moved
        for operation in ("backup", "prefetch"):
            assert counted.total("storage_pages", operation=operation, pool=name) == pages


def test_a_prefix_counts_only_where_every_pool_has_what_it_needs(make_hybrid):
    stack = make_hybrid()
    storage = MemoryStorage()
    stack.controller.attach_storage_backend(storage)
    keys, _, _ = stored(stack)
    # The only state is that of page 3, so a prefix of two pages cannot be restored.
    assert stack.controller.storage_exists(keys[:2], pool_transfers=[state_of(keys[:2])]) == 0
    assert stack.controller.storage_exists(keys[:2]) == 2
    host, states = stack.group.alloc(2 * PAGE), stack.group.alloc(1, "mamba")
    transfer = state_of(keys[:2], states)
    assert stack.controller.prefetch(host, keys[:2], request_id="r", pool_transfers=[transfer]).wait() == 0


def test_every_length_that_can_be_restored_comes_from_one_look_at_the_storage(make_hybrid, monkeypatch):
    stack = make_hybrid()
    stack.controller.attach_storage_backend(MemoryStorage())
    assert stack.controller.storage_restorable_lengths([bytes(16)]) == []
    host, states, _ = stack.written(5, 3)
    keys = [torch.randint(0, 256, (16,), dtype=torch.uint8).numpy().tobytes() for _ in range(5)]
    saved = [keys[0], keys[2], keys[3]]
    transfer = PoolTransfer("mamba", states, keys=saved, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    stack.controller.backup(host, keys, node_id=1, pool_transfers=[transfer])
    assert stack.controller.poll_backups(wait=True)[0].error is None
    longer = [*keys, bytes(16)]
    assert stack.controller.storage_restorable_lengths(longer) == [1, 2, 3, 4, 5]
    assert stack.controller.storage_restorable_lengths(longer, pool_transfers=[state_of(longer)]) == [1, 3, 4]
    assert stack.controller.storage_restorable_lengths(keys[:2], pool_transfers=[state_of(keys)]) == [1]
    two_states = PoolTransfer("mamba", keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert stack.controller.storage_restorable_lengths(longer, pool_transfers=[two_states]) == [1, 4]
    assert stack.controller.storage_exists(longer, pool_transfers=[state_of(longer)]) == 4
    with monkeypatch.context() as ranks:
        # Another rank has the states of pages 0, 1 and 2.
        ranks.setattr(stack.controller.agreement, "smallest", lambda mine: list(map(min, mine, [1, 1, 1, 0, 0, 0])))
        assert stack.controller.storage_restorable_lengths(longer, pool_transfers=[state_of(longer)]) == [1, 3]
    stack.controller.detach_storage_backend()
    assert stack.controller.storage_restorable_lengths(keys) == []


def test_a_sidecar_page_that_is_not_stored_ends_the_prefix_of_all(make_hybrid, monkeypatch):
    stack = make_hybrid()
    storage = MemoryStorage()
    store = storage.batch_set

    def without_second(keys, host_indices, *, name="kv", parents=None):
        stored = store(keys, host_indices, name=name, parents=parents)
        return [ok and (name, key) != ("side", bytes([1] * 16)) for ok, key in zip(stored, keys, strict=True)]

    monkeypatch.setattr(storage, "batch_set", without_second)
    stack.controller.attach_storage_backend(storage)
    host, _, _ = stack.written(2, 1)
    keys = [bytes([n] * 16) for n in range(2)]
    stack.controller.backup(host, keys, node_id=1)
    (ack,) = stack.controller.poll_backups(wait=True)
    assert ack.stored_pages == 1
    assert "1 of 2 pages" in str(ack.error)


def test_an_ack_tells_how_many_of_the_last_pages_of_each_pool_are_stored(make_hybrid, monkeypatch):
    stack = make_hybrid()
    storage = MemoryStorage()
    store = storage.batch_set

    def without_second_state(keys, host_indices, *, name="kv", parents=None):
        stored = store(keys, host_indices, name=name, parents=parents)
        return [ok and (name, key) != ("mamba", bytes([1] * 16)) for ok, key in zip(stored, keys, strict=True)]

    monkeypatch.setattr(storage, "batch_set", without_second_state)
    stack.controller.attach_storage_backend(storage)
    host, states, _ = stack.written(2, 2)
    keys = [bytes([n] * 16) for n in range(2)]
    transfer = PoolTransfer("mamba", states, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)
    stack.controller.backup(host, keys, node_id=1, pool_transfers=[transfer])
    (ack,) = stack.controller.poll_backups(wait=True)
    assert (ack.stored_pages, ack.pool_pages) == (2, {"mamba": 1})
    assert "pool mamba" in str(ack.error)
