"""What every storage does alike: pools with hit policies, the factory, the memory backend, the one that fails."""

import threading
import uuid

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_controller.storage import (
    FileStorage,
    HiCacheStorage,
    MemoryStorage,
    StorageBackendFactory,
)
from hicache_controller.storage.faults import FaultyStorage
from hicache_pools import MHATokenToKVPool, MHATokenToKVPoolHost, NullPoolHost, PoolHitPolicy, PoolTransfer


@pytest.fixture(params=["memory", "file"])
def storage(request, tmp_path, fingerprint):
    opened = MemoryStorage() if request.param == "memory" else FileStorage(tmp_path, fingerprint=fingerprint)
    yield opened
    opened.check_integrity()
    opened.close()


@given(st.data())
def test_a_prefix_counts_as_far_as_every_pool_can_restore_it(data):
    """Against the definition: the longest prefix of which each pool has what its policy needs."""
    length = data.draw(st.integers(0, 10))
    there = {name: data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for name in POOLS}
    windows = {name: data.draw(st.none() | st.integers(1, 4)) for name in ("swa", "mamba")}
    storage = MemoryStorage()
    keys = [bytes([i]) for i in range(length)]
    for name, present in there.items():
        pool = BookkeepingPool()
        storage.register_mem_pool_host(pool, name)
        for i in range(length):
            if present[i]:
                storage.batch_set([keys[i]], pool.slots([i]), name=name)
    transfers = [PoolTransfer("indexer")] + [
        PoolTransfer(name, keys=None if w is None else keys[:1] * w, hit_policy=PoolHitPolicy.TRAILING_PAGES)
        for name, w in windows.items()
    ]
    expected = max(
        n
        for n in range(length + 1)
        if all(there["kv"][:n])
        and all(there["indexer"][:n])
        and all(all(there[name][max(0, n - (w or 1)) : n]) for name, w in windows.items())
    )
    assert storage.batch_exists_pools(keys, transfers) == expected


POOLS = ("kv", "indexer", "swa", "mamba")


class BookkeepingPool:
    page_num, page_size, page_bytes, geometry = 16, 1, 0, None

    def page_memory(self, page):
        raise AssertionError("a pool without bytes has no memory to ask for")

    def slots(self, pages):
        return torch.as_tensor(pages)


def test_attention_at_0_and_1_and_states_at_0_and_3_are_one_page(storage, fake_pool, new_keys):
    kv, state = fake_pool(), fake_pool(page_size=1)
    storage.register_mem_pool_host(kv)
    storage.register_mem_pool_host(state, "mamba")
    keys = new_keys(4)
    storage.batch_set(keys[:2], kv.slots([0, 1]))
    storage.batch_set([keys[0], keys[3]], state.slots([0, 3]), name="mamba")
    mamba = PoolTransfer("mamba", hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert storage.batch_exists_pools(keys, [mamba]) == 1


def test_several_pools_are_stored_and_loaded_in_one_call(storage, fake_pool, new_keys, chain):
    kv, state = fake_pool(), fake_pool(page_size=1, page_bytes=300)
    storage.register_mem_pool_host(kv)
    storage.register_mem_pool_host(state, "mamba")
    keys = new_keys(5)
    contents = kv.fill(range(5)), state.fill([7])
    transfers = [
        PoolTransfer("kv", host_indices=kv.slots(range(5)), keys=keys),
        PoolTransfer("mamba", host_indices=state.slots([7]), keys=keys[4:]),
    ]
    parents = dict(zip(keys, chain(keys), strict=True))
    assert storage.batch_set_pools(transfers, parents=parents) == {"kv": [True] * 5, "mamba": [True]}
    targets = [
        PoolTransfer("kv", host_indices=kv.slots(range(10, 15)), keys=keys),
        PoolTransfer("mamba", host_indices=state.slots([9]), keys=keys[4:]),
    ]
    assert storage.batch_get_pools(targets) == {"kv": [True] * 5, "mamba": [True]}
    assert ([kv.read(p) for p in range(10, 15)], [state.read(9)]) == contents
    with pytest.raises(ValueError, match="pool 'kv' has no keys"):
        storage.batch_get_pools([PoolTransfer("kv", host_indices=kv.slots([0]))])


def test_memory_storage_returns_the_bytes_and_counts(fake_pool, new_keys, chain):
    storage, pool, keys = MemoryStorage(), fake_pool(parts=4), new_keys(6)
    storage.register_mem_pool_host(pool)
    contents = pool.fill(range(6))
    assert storage.batch_set(keys, pool.slots(range(6)), parents=chain(keys)) == [True] * 6
    pool.fill(range(6))
    assert storage.batch_get([*keys, b"x"], pool.slots(range(10, 17))) == [True] * 6 + [False]
    assert [pool.read(p) for p in range(10, 16)] == contents
    assert storage.batch_set(keys[:1], pool.slots([0])) == [True]
    stats = storage.stats()
    assert (stats.hits, stats.misses, stats.stored, stats.present, stats.bytes) == (6, 1, 6, 1, 6 * 1024)
    storage.clear()
    assert storage.batch_exists(keys) == storage.stats().bytes == 0
    storage.close()


def test_memory_storage_keeps_its_capacity(fake_pool, new_keys):
    storage, pool = MemoryStorage(5 * 1024), fake_pool()
    storage.register_mem_pool_host(pool)
    for _ in range(20):
        assert all(storage.batch_set(new_keys(3), pool.slots(range(3))))
        assert storage.stats().bytes <= 5 * 1024
        storage.check_integrity()
    with pytest.raises(ValueError, match="capacity_bytes is -1"):
        MemoryStorage(-1)


def test_threads_store_and_load_at_once(storage, fake_pool, new_keys):
    pool = fake_pool(pages=64, page_bytes=4096)
    storage.register_mem_pool_host(pool)
    contents = pool.fill(range(32))
    shared = new_keys(4)
    wrong = []

    def work(lane):
        slots, back = pool.slots(range(lane * 4, lane * 4 + 4)), pool.slots(range(32 + lane * 4, 36 + lane * 4))
        for _ in range(10):
            keys = new_keys(4)
            if storage.batch_set(keys, slots, parents=[None, *keys[:-1]]) != [True] * 4:
                wrong.append("store")
            storage.batch_set(shared, pool.slots(range(4)))
            if storage.batch_get(keys, back) != [True] * 4:
                wrong.append("load")
            if [pool.read(p) for p in range(32 + lane * 4, 36 + lane * 4)] != contents[lane * 4 : lane * 4 + 4]:
                wrong.append("bytes")

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_kth_page_fails(storage, fake_pool, new_keys, k):
    pool, keys = fake_pool(), new_keys(9)
    kth = [i % k == 0 for i in range(1, 10)]
    failing = FaultyStorage(storage, fail_store_every=k)
    failing.register_mem_pool_host(pool)
    contents = pool.fill(range(9))
    assert failing.batch_set(keys, pool.slots(range(9))) == [not fails for fails in kth]
    assert [storage.batch_exists([key]) == 0 for key in keys] == kth
    assert all(storage.batch_set(keys, pool.slots(range(9))))
    failing = FaultyStorage(storage, fail_load_every=k)
    failing.register_mem_pool_host(pool)
    assert failing.batch_get(keys, pool.slots(range(20, 29))) == [not fails for fails in kth]
    assert [pool.read(20 + i) != contents[i] for i in range(9)] == kth


def test_a_flipped_bit_below_the_checksum_is_found(tmp_path, fingerprint, fake_pool, new_keys):
    inner = FileStorage(tmp_path, fingerprint=fingerprint)
    failing, pool, keys = FaultyStorage(inner, flip_every=3), fake_pool(), new_keys(9)
    failing.register_mem_pool_host(pool)
    assert all(failing.batch_set(keys, pool.slots(range(9))))
    assert failing.batch_get(keys, pool.slots(range(9))) == [i % 3 != 0 for i in range(1, 10)]
    failing.close()
    with pytest.raises(ValueError, match="MemoryStorage keeps no files"):
        FaultyStorage(MemoryStorage(), flip_every=1)


def test_a_hanging_storage_goes_on_when_let_go(storage, fake_pool, new_keys):
    gate, pool, results = threading.Event(), fake_pool(), []
    failing = FaultyStorage(storage, hang=gate)
    failing.register_mem_pool_host(pool)
    thread = threading.Thread(target=lambda: results.append(failing.batch_set(new_keys(1), pool.slots([0]))))
    thread.start()
    assert not results
    gate.set()
    thread.join()
    assert results == [[True]]


def test_backends_by_name_and_by_class(tmp_path, fingerprint):
    made = StorageBackendFactory.create("file", directory=tmp_path, fingerprint=fingerprint)
    assert isinstance(made, FileStorage)
    made.close()
    assert isinstance(StorageBackendFactory.create("memory", capacity_bytes=5), MemoryStorage)
    path = "hicache_controller.storage.memory:MemoryStorage"
    assert StorageBackendFactory.load(path) is MemoryStorage
    name = f"test-{uuid.uuid4()}"
    StorageBackendFactory.register(name, path)
    StorageBackendFactory.register(name, path)
    assert name in StorageBackendFactory.names()
    assert issubclass(StorageBackendFactory.load(name), HiCacheStorage)
    with pytest.raises(ValueError, match="already"):
        StorageBackendFactory.register(name, "a:B")
    with pytest.raises(ValueError, match="module:Class"):
        StorageBackendFactory.load("none such")
    with pytest.raises(ValueError, match="has no 'Nothing'"):
        StorageBackendFactory.load("hicache_controller.storage.memory:Nothing")
    with pytest.raises(TypeError, match="not a subclass"):
        StorageBackendFactory.load("collections:Counter")
    with pytest.raises(ImportError):
        StorageBackendFactory.load("no_such_module_here:X")
    for wrong in (("a:b", path), ("", path), ("x", "no colon")):
        with pytest.raises(ValueError, match="accepted is"):
            StorageBackendFactory.register(*wrong)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_of_a_real_pool_come_back_in_every_layout(storage, new_keys, layout):
    layers = [torch.randint(0, 255, (64, 2, 8), dtype=torch.uint8) for _ in range(6)]
    device = MHATokenToKVPool.from_buffers(k=layers[:3], v=layers[3:], page_size=4)
    pool = MHATokenToKVPoolHost(device, 2.0, 0, 4, layout=layout, pin_memory=False)
    storage.register_mem_pool_host(pool)
    pool.buffer.random_(0, 255)
    before = [pool.read_page(page) for page in range(5)]
    keys, slots = new_keys(5), torch.arange(20)
    assert storage.batch_set(keys, slots) == [True] * 5
    assert storage.batch_get(keys, slots + 40) == [True] * 5
    assert all(torch.equal(pool.read_page(10 + i), page) for i, page in enumerate(before))
    pool.destroy()


def test_a_bookkeeping_pool_keeps_books(storage, new_keys):
    pool, keys = NullPoolHost(8, 2), new_keys(4)
    storage.register_mem_pool_host(pool)
    assert storage.batch_set(keys, torch.arange(8)) == [True] * 4
    assert storage.batch_get([*keys, b"x"], torch.arange(10)) == [True] * 4 + [False]
