"""Every storage passes the contract, and so does one that wraps another; what the base class computes."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_controller.storage import FileStorage, MemoryStorage
from hicache_controller.storage.contract import FaultyStorage, StorageContract
from hicache_pools import MHATokenToKVPool, MHATokenToKVPoolHost, PoolHitPolicy, PoolTransfer


class TestMemoryStorage(StorageContract):
    KEEPS_PAGES = False

    @pytest.fixture
    def open_storage(self):
        return lambda fingerprint, room=None: MemoryStorage(None if room is None else room * 1024)

    def check(self, storage):
        storage.check_integrity()


@pytest.mark.usefixtures("reading")
class TestFileStorage(StorageContract):
    @pytest.fixture
    def open_storage(self, tmp_path):
        return lambda fingerprint, room=None: FileStorage(
            tmp_path, fingerprint=fingerprint, capacity_bytes=None if room is None else room * 4096, threads=2
        )

    def check(self, storage):
        storage.check_integrity()

    def damage(self, storage, key, name):
        with open(storage.page_path(key, name), "r+b") as file:
            at = int.from_bytes(os.urandom(4), "little") % 1024
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << at % 8]))


class TestMooncakeStorage(StorageContract):
    HAS_CAPACITY = False  # its master evicts

    @pytest.fixture
    def open_storage(self, shared):
        return shared

    def damage(self, storage, key, name):
        assert name == "kv"
        at, call = storage.object_name(key), storage._client.call
        data = call("get", at)
        assert call("remove", at, True) == 0
        assert call("put", at, bytes([data[0] ^ 1]) + data[1:]) == 0


class TestFaultyStorage(StorageContract):
    """With no faults asked for it does what the storage inside does."""

    @pytest.fixture
    def open_storage(self, tmp_path):
        return lambda fingerprint, room=None: FaultyStorage(
            FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=None if room is None else room * 4096)
        )


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
