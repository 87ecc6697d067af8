"""What every storage does alike: pools with hit policies, the factory, the memory backend, the one that fails."""

import os
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


@pytest.fixture(params=["memory", "file", "mooncake"])
def any_storage(request, tmp_path, fresh):
    if request.param == "mooncake":
        opened = request.getfixturevalue("shared")(fresh)
    else:
        opened = MemoryStorage() if request.param == "memory" else FileStorage(tmp_path, fingerprint=fresh)
    yield opened
    opened.close()


@pytest.mark.parametrize("length", [1, 16, 32, 33, 36, 64])
def test_keys_have_up_to_64_bytes(any_storage, fake_pool, length):
    """Such as block hashes of engines: 32 bytes of SHA-256, and 4 more for the number of a group."""
    pool = fake_pool()
    any_storage.register_mem_pool_host(pool)
    keys = [bytes([i]) + os.urandom(length - 1) for i in range(3)] + [os.urandom(64)]
    contents = pool.fill(range(4))
    assert any_storage.batch_set(keys, pool.slots(range(4)), parents=[None, *keys[:-1]]) == [True] * 4
    assert any_storage.batch_exists(keys) == 4
    assert any_storage.batch_get(keys, pool.slots(range(10, 14))) == [True] * 4
    assert [pool.read(page) for page in range(10, 14)] == contents
    others = [bytes([key[0] ^ 0x80]) + key[1:] for key in keys]
    assert any_storage.batch_get(others, pool.slots(range(10, 14))) == [False] * 4
    for call in (
        lambda keys: any_storage.batch_exists(keys),
        lambda keys: any_storage.batch_exists_each(keys),
        lambda keys: any_storage.batch_get(keys, pool.slots([0])),
        lambda keys: any_storage.batch_set(keys, pool.slots([0])),
    ):
        with pytest.raises(ValueError, match="accepted are 1 to 64 bytes"):
            call([bytes(65)])


def test_one_call_says_of_each_page_whether_it_exists(any_storage, fake_pool, new_keys):
    kv, state, keys = fake_pool(), fake_pool(), new_keys(20)
    any_storage.register_mem_pool_host(kv)
    any_storage.register_mem_pool_host(state, "mamba")
    there = {}
    for name, pool in (("kv", kv), ("mamba", state)):
        there[name] = [byte % 2 == 1 for byte in os.urandom(20)]
        stored = [key for key, stores in zip(keys, there[name], strict=True) if stores]
        assert all(any_storage.batch_set(stored, pool.slots(range(len(stored))), name=name))
    assert any_storage.batch_exists_each(keys) == there["kv"]
    assert any_storage.batch_exists_each(keys, name="mamba") == there["mamba"]
    assert any_storage.batch_exists_each([]) == []
    with pytest.raises(KeyError, match="registered pools: kv, mamba"):
        any_storage.batch_exists_each(keys, name="swa")


def test_every_restorable_length_of_a_group_comes_from_one_call(any_storage, fake_pool, new_keys):
    """Attention at 0 to 5, a window of two pages at 0, 1, 2, 4, 5, states behind 1, 2, 3 and 5."""
    keys = new_keys(8)
    for name, present in {"kv": range(6), "swa": [0, 1, 2, 4, 5, 6], "mamba": [1, 2, 3, 5, 7]}.items():
        pool = fake_pool()
        any_storage.register_mem_pool_host(pool, name)
        assert all(any_storage.batch_set([keys[i] for i in present], pool.slots(present), name=name))
    window = PoolTransfer("swa", keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    state = PoolTransfer("mamba", hit_policy=PoolHitPolicy.TRAILING_PAGES)
    assert any_storage.restorable_lengths(keys) == [1, 2, 3, 4, 5, 6]
    assert any_storage.restorable_lengths(keys, [window]) == [1, 2, 3, 6]
    assert any_storage.restorable_lengths(keys, [window, state]) == [2, 3, 6]
    assert any_storage.restorable_lengths(keys, [PoolTransfer("swa"), state]) == [2, 3]
    assert any_storage.restorable_lengths(keys[6:], [state]) == []
    assert any_storage.restorable_lengths([]) == []


@pytest.mark.parametrize("with_parents", [False, True])
@pytest.mark.parametrize("backend", ["memory", "file", "faulty"])
def test_what_a_call_answers_as_stored_is_there(tmp_path, fingerprint, fake_pool, new_keys, backend, with_parents):
    """Calls of one page to twice as many as there is room for, some of which are there already."""
    if backend == "memory":
        storage = MemoryStorage(10 * 1024)
    else:
        storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=10 * 4096)
    stores = FaultyStorage(storage) if backend == "faulty" else storage
    pool, keys = fake_pool(), new_keys(20)
    stores.register_mem_pool_host(pool)
    storage.register_mem_pool_host(pool)
    contents = pool.fill(range(20))
    for first, count in ((0, 1), (3, 4), (0, 12), (5, 15), (0, 20), (10, 10), (19, 1)):
        these = slice(first, first + count)
        parents = [None, *keys[:-1]][these] if with_parents else None
        stored = stores.batch_set(keys[these], pool.slots(range(first, first + count)), parents=parents)
        assert stored == storage.batch_exists_each(keys[these])
        if not with_parents:
            assert stored.count(True) >= min(count, 10)
        loaded = pool.slots(range(30, 30 + count))
        assert storage.batch_get(keys[these], loaded) == stored
        assert all(pool.read(30 + i) == contents[first + i] for i in range(count) if stored[i])
    storage.close()


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_pages_that_make_room_for_those_of_another_pool_do_not_count_as_stored(
    tmp_path, fingerprint, fake_pool, new_keys, backend
):
    if backend == "memory":
        storage = MemoryStorage(6 * 1024)
    else:
        storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=6 * 4096)
    transfers = []
    for name in ("kv", "mamba"):
        pool = fake_pool()
        storage.register_mem_pool_host(pool, name)
        transfers.append(PoolTransfer(name, host_indices=pool.slots(range(4)), keys=new_keys(4)))
    stored = storage.batch_set_pools(transfers)
    assert stored == {each.name: storage.batch_exists_each(each.keys, name=each.name) for each in transfers}
    assert (stored["kv"].count(True), stored["mamba"]) == (2, [True] * 4)
    storage.close()


def test_a_page_of_4_heads_is_none_for_a_pool_of_2_heads_of_twice_the_size(request, tmp_path, fresh, new_keys):
    def pool_of(heads, dim):
        layers = [torch.zeros(16, heads, dim, dtype=torch.uint8) for _ in range(4)]
        device = MHATokenToKVPool.from_buffers(k=layers[:2], v=layers[2:], page_size=4)
        return MHATokenToKVPoolHost(device, 1.0, 0, 4, pin_memory=False)

    keys, slots, four, two = new_keys(3), torch.arange(12), pool_of(4, 16), pool_of(2, 32)
    four.buffer.random_(0, 255)
    two.buffer.zero_()
    assert four.page_bytes == two.page_bytes
    for open_one in (
        lambda: FileStorage(tmp_path, fingerprint=fresh),
        lambda: request.getfixturevalue("shared")(fresh),
    ):
        storage = open_one()
        storage.register_mem_pool_host(four)
        assert storage.batch_set(keys, slots) == [True] * 3
        storage.close()
        storage = open_one()
        storage.register_mem_pool_host(two)
        assert storage.batch_exists_each(keys) == storage.batch_get(keys, slots) == [False] * 3
        assert not two.buffer.any()
        storage.close()
        storage = open_one()
        storage.register_mem_pool_host(pool_of(4, 16))
        assert storage.batch_get(keys, slots) == [True] * 3
        storage.close()
    memory = MemoryStorage()  # lives as long as its pools
    memory.register_mem_pool_host(four)
    with pytest.raises(ValueError, match="another pool"):
        memory.register_mem_pool_host(two)


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
    expected = [
        n
        for n in range(1, length + 1)
        if all(there["kv"][:n])
        and all(there["indexer"][:n])
        and all(all(there[name][max(0, n - (w or 1)) : n]) for name, w in windows.items())
    ]
    assert storage.restorable_lengths(keys, transfers) == expected
    assert storage.batch_exists_pools(keys, transfers) == max(expected, default=0)


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
