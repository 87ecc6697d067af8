"""FileStorage where the medium works: bytes, order, capacity, names."""

import os
import stat

import pytest

from hicache_controller.storage import FileStorage, Fingerprint


@pytest.fixture
def storage(tmp_path, fingerprint):
    with_open = FileStorage(tmp_path / "cache", fingerprint=fingerprint, threads=2)
    yield with_open
    with_open.check_integrity()
    with_open.close()


@pytest.mark.parametrize("parts", [1, 4, 1024])
def test_pages_come_back_bit_for_bit(storage, fake_pool, new_keys, chain, parts):
    pool = fake_pool(pages=40, page_bytes=64 * 1024, parts=parts)
    storage.register_mem_pool_host(pool)
    keys, source, target = new_keys(20), list(range(5, 25)), [39 - p for p in range(20)]
    target = [p for p in range(25, 40)] + [0, 1, 2, 3, 4]
    contents = pool.fill(source)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set(keys, pool.slots(source), parents=chain(keys)) == [True] * 20
    assert storage.batch_exists(keys) == 20
    assert storage.batch_get(keys, pool.slots(target)) == [True] * 20
    assert [pool.read(p) for p in target] == contents
    assert [pool.read(p) for p in source] == contents
