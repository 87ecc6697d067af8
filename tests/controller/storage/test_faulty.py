"""The storage that fails on purpose fails where it should, and nowhere else."""

import threading

import pytest

from hicache_controller.storage import FileStorage, MemoryStorage
from hicache_controller.storage.contract import FaultyStorage


@pytest.fixture(params=["memory", "file"])
def storage(request, tmp_path, fingerprint):
    opened = MemoryStorage() if request.param == "memory" else FileStorage(tmp_path, fingerprint=fingerprint)
    yield opened
    opened.check_integrity()
    opened.close()


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
