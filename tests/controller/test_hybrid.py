"""Operations over several pools: an attention anchor with a packed draft, recurrent states, and a sidecar."""

import pytest
import torch
from tests.controller.hybrid_stack import (
    PAGE,
    PAGES,
    Failing,
    same,
    used,
)

from hicache_controller.hybrid import HybridCacheController
from hicache_controller.layer_map import layer_plan
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import NullPoolHost
from hicache_pools.pool_transfer import PoolTransfer


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_every_pool_comes_back_bit_for_bit(make_hybrid, synchronous, io_backend):
    stack = make_hybrid(synchronous=synchronous, io_backend=io_backend)
    first, second = stack.written(3, 2), stack.written(2, 1)
    for host, states, rows in (first, second, first):
        assert same(stack.loaded(host, states), rows)
    assert stack.used() == used(0, 0, 5, 3)


def test_layers_of_all_pools_and_drafts_are_counted_in_model_order(make_hybrid):
    stack = make_hybrid()
    plan = layer_plan(stack.group.entries)
    assert plan.maps == {"kv": (0, None, 1, None), "mamba": (None, 0, None, 1), "side": (0, None, 1, None)}
    assert plan.draft_maps["kv"] == ((None, None, None, None, 0),)
    assert stack.controller.layer_num == stack.controller.layer_done_counter.layers == 5


def test_merged_operations_move_every_pool_of_each(make_hybrid):
    stack = make_hybrid()
    written = []
    for node in range(3):
        slots, states = stack.allocators["kv"].alloc(2 * PAGE), stack.allocators["mamba"].alloc(node)
        rows = stack.compute(slots, states)
        transfers = [PoolTransfer("mamba", device_indices=states)] if node else []
        host = stack.controller.write(slots, node_id=node, pool_transfers=transfers)
        written.append((host, transfers[0].host_indices if transfers else states, rows, slots, states))
    stack.controller.start_writing()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert ack.node_ids == (0, 1, 2)
    for _, _, _, slots, states in written:
        stack.controller.evict_device(slots)
        if len(states):
            stack.controller.evict_device(states, pool="mamba")
    for host, states, rows, _, _ in written[1:]:
        assert same(stack.loaded(host, states), rows)


def test_no_room_in_one_pool_is_none_and_takes_nothing(make_hybrid):
    stack = make_hybrid(host_states=2)
    slots, states = stack.allocators["kv"].alloc(2 * PAGE), stack.allocators["mamba"].alloc(3)
    transfer = PoolTransfer("mamba", device_indices=states)
    assert stack.controller.write(slots, node_id=1, pool_transfers=[transfer]) is None
    assert transfer.host_indices is None
    assert stack.used() == used(2, 3)
    stack.allocators["kv"].clear()
    stack.allocators["mamba"].clear()
    host, state_hosts, _ = stack.written(2, 2)
    stack.allocators["mamba"].alloc(5)
    back = PoolTransfer("mamba", host_indices=state_hosts)
    assert stack.controller.load(host, node_id=2, pool_transfers=[back]) is None
    assert back.device_indices is None
    assert stack.used() == used(0, 5, 2, 2)


@pytest.mark.parametrize("pool", ["kv", "mamba", "side"])
@pytest.mark.parametrize("synchronous", [True, False])
def test_a_pool_that_fails_in_the_middle_loses_no_slot_of_any(make_hybrid, monkeypatch, pool, synchronous):
    stack = make_hybrid(synchronous=synchronous)
    host, states, rows = stack.written(3, 2)
    back = Failing(monkeypatch, stack.hosts[pool], "load_to_device_per_layer")
    back.left = 1
    transfer = PoolTransfer("mamba", host_indices=states)
    stack.controller.load(host, node_id=1, pool_transfers=[transfer])
    stack.controller.start_loading()
    assert "injected" in str(stack.controller.poll_loads(wait=True)[0].error)
    assert transfer.device_indices is None
    assert stack.used() == used(0, 0, 3, 2)
    out = Failing(monkeypatch, stack.hosts[pool], "backup_from_device_all_layer")
    out.left = 1
    slots, state_slots = stack.allocators["kv"].alloc(PAGE), stack.allocators["mamba"].alloc(1)
    transfer = PoolTransfer("mamba", device_indices=state_slots)
    stack.controller.write(slots, node_id=2, pool_transfers=[transfer])
    stack.controller.start_writing()
    assert "injected" in str(stack.controller.poll_writes(wait=True)[0].error)
    assert transfer.host_indices is None
    assert stack.used() == used(1, 1, 3, 2)
    stack.controller.evict_device(slots)
    stack.controller.evict_device(state_slots, pool="mamba")
    assert same(stack.loaded(host, states), rows)


def test_slots_of_every_other_pool_go_back_where_the_engine_does_not_take_one_pools(make_hybrid):
    stack = make_hybrid()
    host, states, _ = stack.written(3, 2)
    stack.hosts["mamba"].load_to_device_per_layer = None  # not callable: the load fails
    entry = stack.group.get_entry("kv")
    free, refusals = entry.device_free_fn, [RuntimeError("the engine does not take them")]

    def refusing(slots):
        if refusals:
            raise refusals.pop()
        free(slots)

    entry.device_free_fn = refusing
    stack.controller.load(host, node_id=1, pool_transfers=[PoolTransfer("mamba", host_indices=states)])
    stack.controller.start_loading()
    with pytest.raises(RuntimeError, match="does not take them"):
        stack.controller.poll_loads(wait=True)
    assert stack.used() == used(3, 0, 3, 2)
    assert stack.controller.poll_loads()[0].error is not None


def test_cancelled_operations_give_slots_of_every_pool_back(make_hybrid):
    stack = make_hybrid()
    host, states, rows = stack.written(3, 2)
    for started in (False, True) * 20:
        transfer = PoolTransfer("mamba", host_indices=states)
        stack.controller.load(host, node_id=1, pool_transfers=[transfer])
        if started:
            stack.controller.start_loading()
        stack.controller.cancel_load(1)
        stack.controller.engine.drain()
        assert stack.controller.poll_loads() == []
        assert stack.used() == used(0, 0, 3, 2)
    assert same(stack.loaded(host, states), rows)


def test_a_released_transfer_fails_the_operation_alone(make_hybrid):
    stack = make_hybrid()
    controller = stack.controller
    transfers, hosts, rows = [], [], []
    for node in (1, 2):
        slots, states = stack.allocators["kv"].alloc(PAGE), stack.allocators["mamba"].alloc(1)
        rows.append(stack.compute(slots, states))
        transfers.append(PoolTransfer("mamba", device_indices=states))
        hosts.append(controller.write(slots, node_id=node, pool_transfers=[transfers[-1]]))
    stack.group.release_transfers(transfers[:1])
    controller.start_writing()
    acks = controller.poll_writes(wait=True)
    assert {ack.node_ids: str(ack.error) for ack in acks} == {
        (1,): "transfer mamba was released while it was in flight",
        (2,): "None",
    }
    loaded = PoolTransfer("mamba", transfers[1].host_indices)
    slots = controller.load(hosts[1], node_id=3, pool_transfers=[loaded])
    controller.start_loading()
    assert [ack.error for ack in controller.poll_loads(wait=True)] == [None]
    for now, then in zip(stack.rows(slots, loaded.device_indices), rows[1], strict=True):
        assert all(map(torch.equal, now, then))


def test_states_move_without_the_anchor(make_hybrid):
    """A recurrent state is checkpointed where no attention page is new; the anchor's sidecars stay where they are."""
    stack = make_hybrid()
    states = stack.allocators["mamba"].alloc(2)
    nothing = torch.empty(0, dtype=torch.int64)
    _, rows = stack.compute(nothing, states)
    out = PoolTransfer("mamba", device_indices=states)
    assert stack.controller.write(nothing, node_id=1, pool_transfers=[out]).numel() == 0
    stack.controller.start_writing()
    (ack,) = stack.controller.poll_writes(wait=True)
    assert (ack.node_ids, ack.error) == ((1,), None)
    stack.controller.evict_device(states, pool="mamba")
    back = PoolTransfer("mamba", host_indices=out.host_indices)
    assert stack.controller.load(nothing, node_id=2, pool_transfers=[back]).numel() == 0
    stack.controller.start_loading()
    (ack,) = stack.controller.poll_loads(wait=True)
    assert (ack.node_ids, ack.error) == ((2,), None)
    assert same(stack.rows(nothing, back.device_indices), ([t[:0] for t in stack.tensors()[0]], rows))
    stack.controller.load(nothing, node_id=3, pool_transfers=[PoolTransfer("mamba", host_indices=out.host_indices)])
    assert stack.controller.cancel_load(3)
    assert stack.used() == used(0, 2, 0, 2)


def test_an_anchor_without_bytes_takes_the_device_of_the_other_pools():
    class OnGpu:
        device = torch.device("cuda")

    anchor = PoolEntry("kv", NullPoolHost(PAGES, PAGE), None, lambda _: None, is_primary_index_anchor=True)
    window = PoolEntry("swa", NullPoolHost(PAGES, PAGE), OnGpu(), lambda _: None)
    with pytest.raises(ValueError, match="synchronous is True with pools on cuda"):
        HybridCacheController(HostPoolGroup([anchor, window]), synchronous=True)


def test_indices_of_pool_transfers_are_the_callers_again_at_once(make_hybrid):
    stack = make_hybrid()
    slots, states = stack.allocators["kv"].alloc(3 * PAGE), stack.allocators["mamba"].alloc(2)
    rows = stack.compute(slots, states)
    asked = states.clone()
    transfer = PoolTransfer("mamba", device_indices=asked)
    host = stack.controller.write(slots, node_id=1, pool_transfers=[transfer])
    asked.copy_(asked.flip(0))
    stack.controller.start_writing()
    assert stack.controller.poll_writes(wait=True)[0].error is None

    assert same(stack.loaded(host, transfer.host_indices.clone()), rows)

    asked = transfer.host_indices.clone()
    other = PoolTransfer("mamba", host_indices=asked)
    target = stack.controller.load(host, node_id=2, pool_transfers=[other])
    asked.copy_(asked.flip(0))
    stack.controller.start_loading()
    assert stack.controller.poll_loads(wait=True)[0].error is None
    assert same(stack.rows(target, other.device_indices), rows)
