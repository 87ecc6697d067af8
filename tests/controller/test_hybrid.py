"""Operations over several pools: an attention anchor with a packed draft, recurrent states, and a sidecar."""

import pytest
import torch

from hicache_controller.controller import HiCacheController
from hicache_controller.hybrid import HybridCacheController, SidecarPoolSpec
from hicache_controller.layer_map import layer_plan
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_settings import StorageSettings
from hicache_pools.device_pools import DSATokenToKVPool, MambaPool, MHATokenToKVPool
from hicache_pools.extents import ExtentAllocator
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import DSAIndexerPoolHost, MambaPoolHost, MHATokenToKVPoolHost, NullPoolHost
from hicache_pools.pool_transfer import PoolHitPolicy, PoolTransfer

PAGE = 4
PAGES = 16
STATES = 6
ATTENTION, RECURRENT = {0: 0, 2: 1}, {1: 0, 3: 1}
"""Model layers of the two kinds, and the layers of their pools."""


class Failing:
    """Makes the next calls of a method fail."""

    def __init__(self, monkeypatch, pool, name):
        self.left = 0
        self.inner = getattr(pool, name)
        monkeypatch.setattr(pool, name, self)

    def __call__(self, *args, **kwargs):
        if self.left:
            self.left -= 1
            raise RuntimeError("injected")
        return self.inner(*args, **kwargs)


def random_layers(slots, heads, dim, layers=2):
    return [torch.randint(0, 256, (slots, heads, dim), dtype=torch.uint8) for _ in range(layers)]


class HybridStack:
    def __init__(self, *, states=STATES, host_states=STATES, **options):
        slots = PAGES * PAGE
        self.attention = MHATokenToKVPool.from_buffers(
            k=random_layers(slots, 2, 8), v=random_layers(slots, 2, 4), page_size=PAGE
        )
        self.draft = MHATokenToKVPool.from_buffers(
            k=random_layers(slots, 2, 8, 1), v=random_layers(slots, 2, 4, 1), page_size=PAGE
        )
        self.side = MHATokenToKVPool.from_buffers(
            k=random_layers(slots, 1, 8), v=random_layers(slots, 1, 8), page_size=PAGE
        )
        self.mamba = MambaPool.from_buffers(
            conv=[[torch.randint(0, 256, (states, 6), dtype=torch.uint8) for _ in range(2)]],
            temporal=[torch.randn(states, 4, 4) for _ in range(2)],
        )
        self.allocators = {"kv": ExtentAllocator(PAGES, PAGE), "mamba": ExtentAllocator(states)}
        self.hosts = {
            "kv": MHATokenToKVPoolHost(
                self.attention, 1, 0, PAGE, pin_memory=False, packed_draft_device_pools=(self.draft,)
            ),
            "mamba": MambaPoolHost(self.mamba, 1, 0, 1, pin_memory=False, pages=host_states),
            "side": MHATokenToKVPoolHost(self.side, 1, 0, PAGE, pin_memory=False, layout="page_first_direct"),
        }
        mappers = {"kv": ATTENTION.get, "side": ATTENTION.get, "mamba": RECURRENT.get}
        pools = {"kv": self.attention, "mamba": self.mamba, "side": self.side}
        self.group = HostPoolGroup(
            PoolEntry(
                name,
                self.hosts[name],
                pools[name],
                mappers[name],
                device_alloc_fn=self.allocators[name].alloc if name in self.allocators else None,
                device_free_fn=self.allocators[name].free if name in self.allocators else None,
                packed_draft_device_pools=(self.draft,) if name == "kv" else (),
            )
            for name in pools
        )
        options.setdefault("sidecars", [SidecarPoolSpec("side", "kv")])
        self.controller = HybridCacheController(
            self.group, storage=StorageSettings(retry_seconds=0, batch_pages=2, max_wait_seconds=30), **options
        )

    def tensors(self):
        anchor = [t for pool in (self.attention, self.draft, self.side) for c in pool.components for t in c.tensors]
        return anchor, [t for c in self.mamba.components for t in c.tensors]

    def compute(self, slots, states):
        anchor, recurrent = self.tensors()
        for tensors, rows in ((anchor, slots), (recurrent, states)):
            for tensor in tensors:
                fresh = torch.randint(0, 256, tensor[rows].shape)
                tensor[rows] = fresh.to(tensor.dtype)
        return self.rows(slots, states)

    def rows(self, slots, states):
        anchor, recurrent = self.tensors()
        return [t[slots].clone() for t in anchor], [t[states].clone() for t in recurrent]

    def written(self, pages=3, states=2, node_id=1):
        """Host slots and state slots of something written that left the device, and its rows."""
        slots = self.allocators["kv"].alloc(pages * PAGE)
        state_slots = self.allocators["mamba"].alloc(states)
        rows = self.compute(slots, state_slots)
        transfer = PoolTransfer("mamba", device_indices=state_slots)
        host = self.controller.write(slots, node_id=node_id, pool_transfers=[transfer])
        self.controller.start_writing()
        (ack,) = self.controller.poll_writes(wait=True)
        assert ack.error is None
        self.controller.evict_device(slots)
        self.controller.evict_device(state_slots, pool="mamba")
        self.compute(torch.arange(PAGES * PAGE), torch.arange(len(self.tensors()[1][0])))
        return host, transfer.host_indices, rows

    def loaded(self, host, states, node_id=1):
        transfer = PoolTransfer("mamba", host_indices=states)
        slots = self.controller.load(host, node_id=node_id, pool_transfers=[transfer])
        consumer = self.controller.start_loading()
        self.controller.layer_done_counter.set_consumer(consumer)
        self.controller.layer_done_counter.wait_until(self.controller.layer_num - 1)
        (ack,) = self.controller.poll_loads(wait=True)
        assert ack.error is None
        rows = self.rows(slots, transfer.device_indices)
        self.controller.evict_device(slots)
        self.controller.evict_device(transfer.device_indices, pool="mamba")
        return rows

    def used(self):
        return {
            "kv": PAGES - self.allocators["kv"].available_pages,
            "mamba": self.allocators["mamba"].page_num - self.allocators["mamba"].available_pages,
            **{
                f"host {name}": (pool.size - pool.available_size()) // pool.page_size
                for name, pool in self.hosts.items()
            },
        }


def used(kv=0, mamba=0, host_kv=0, host_mamba=0):
    return {"kv": kv, "mamba": mamba, "host kv": host_kv, "host mamba": host_mamba, "host side": 0}


def same(left, right):
    return all(torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


@pytest.fixture
def make_hybrid():
    made = []

    def make(**options):
        made.append(HybridStack(**options))
        return made[-1]

    yield make
    for stack in made:
        assert stack.controller.shutdown(30)
        stack.controller.check_integrity()


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


def test_a_mapper_that_does_not_cover_its_pool_is_an_error(make_hybrid):
    stack = make_hybrid()
    entry = stack.group.get_entry("mamba")
    for mapper, message in (
        (lambda layer: 0, r"gives no model layer for its layers \[1\]"),
        (lambda layer: layer + 1, "gives layer 2 for model layer 1; the pool has 2 layers"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_plan([PoolEntry("x", entry.host_pool, entry.device_pool, mapper)])


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


def test_a_sidecar_with_fewer_slots_than_it_shares_is_refused_at_the_call(make_hybrid):
    stack = make_hybrid()
    stack.hosts["side"].size = PAGE
    device = stack.allocators["kv"].alloc(2 * PAGE)
    before = stack.hosts["kv"].available_size()
    with pytest.raises(ValueError, match="host_indices of pool side runs from"):
        stack.controller.write(device, node_id=1)
    assert stack.hosts["kv"].available_size() == before
    assert stack.controller.start_writing() is None


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


# Storage


def stored(stack, pages=3, skip=()):
    """Keys of something in storage: each attention page, and the state behind the last of them."""
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
    # The only state is behind page 3, so a prefix of two pages cannot be restored.
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
    behind = [keys[0], keys[2], keys[3]]
    transfer = PoolTransfer("mamba", states, keys=behind, hit_policy=PoolHitPolicy.TRAILING_PAGES)
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


def test_no_controller_knows_about_drafts():
    """A draft is a transfer like any other: nothing in a controller is there for drafts alone."""
    names = [name for kind in HybridCacheController.__mro__[:-1] for name in vars(kind)]
    assert not [name for name in names if "draft" in name]


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


def test_an_anchor_without_bytes_takes_the_device_of_the_pools_beside_it():
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
