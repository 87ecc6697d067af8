"""What a storage reports of the parts of pages it removes on its own, or finds removed."""

import contextlib
import os
import shutil
import threading

import pytest

from hicache_controller.storage import FileStorage, MemoryStorage
from hicache_controller.storage.contract import FaultyStorage
from hicache_pools import PoolHitPolicy, PoolTransfer

PAGE = 1024


@pytest.fixture(params=["memory", "file"])
def open_storage(request, tmp_path, fingerprint):
    """Storages with room for so many pages."""
    opened = []

    def make(pages=None):
        if request.param == "memory":
            storage = MemoryStorage(None if pages is None else pages * PAGE)
        else:
            capacity = None if pages is None else pages * 4096
            storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=capacity, threads=1)
        opened.append(storage)
        return storage

    yield make
    for storage in opened:
        storage.check_integrity()
        storage.close()


def listening(storage, pool):
    """Register the pool as ``kv`` and collect the keys reported of it."""
    return listening_to_all(storage, kv=pool)["kv"]


def listening_to_all(storage, **pools):
    """Register pools and collect the keys reported of each."""
    reported = {name: [] for name in pools}
    for name, pool in pools.items():
        storage.register_mem_pool_host(pool, name)
    storage.set_removal_listener(lambda keys, name: reported[name].extend(keys))
    return reported


def test_evicted_pages_are_reported_and_only_they(open_storage, fake_pool, new_keys):
    storage, pool = open_storage(16), fake_pool()
    reported = listening(storage, pool)
    stored = []
    for _ in range(20):
        keys = new_keys(2)
        assert all(storage.batch_set(keys, pool.slots([0, 1]), parents=[None, keys[0]]))
        stored += keys
        there = {key for key in stored if storage.batch_exists([key])}
        assert set(reported) == set(stored) - there
    assert len(reported) == len(set(reported)) == storage.stats().evicted > 0


def test_cleared_pages_are_reported(open_storage, fake_pool, new_keys):
    storage, pool, keys = open_storage(), fake_pool(), new_keys(5)
    reported = listening(storage, pool)
    storage.batch_set(keys, pool.slots(range(5)))
    assert reported == []
    storage.clear()
    assert sorted(reported) == sorted(keys)


def test_the_listener_may_use_the_storage_and_other_threads_may_meanwhile(open_storage, fake_pool, new_keys):
    storage, pool, keys = open_storage(), fake_pool(), new_keys(3)
    storage.register_mem_pool_host(pool)
    seen = []

    def ask(removed, name):
        thread = threading.Thread(target=lambda: seen.append((removed, storage.batch_exists(keys), storage.stats())))
        thread.start()
        thread.join(timeout=20)
        storage.batch_set(keys[:1], pool.slots([0]))

    storage.set_removal_listener(ask)
    storage.batch_set(keys, pool.slots(range(3)))
    storage.clear()
    assert [(sorted(removed), there) for removed, there, _ in seen] == [(sorted(keys), 0)]
    assert storage.batch_exists(keys) == 1


def test_what_the_listener_raises_stays_with_it(open_storage, fake_pool, new_keys, caplog):
    storage, pool, keys = open_storage(), fake_pool(), new_keys(3)
    storage.register_mem_pool_host(pool)

    def fail(keys, name):
        raise LookupError("listener")

    storage.set_removal_listener(fail)
    assert all(storage.batch_set(keys, pool.slots(range(3))))
    storage.clear()
    assert storage.stats().pages == 0
    assert "removal listener failed on 3 keys of pool kv" in caplog.text
    storage.set_removal_listener(None)
    assert all(storage.batch_set(keys, pool.slots(range(3))))
    storage.clear()
    assert caplog.text.count("removal listener failed") == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_second_listener_is_refused_until_the_first_is_let_go(open_storage, fake_pool, new_keys, wrapped):
    storage, pool, keys = open_storage(), fake_pool(), new_keys(2)
    storage = FaultyStorage(storage) if wrapped else storage
    storage.register_mem_pool_host(pool)
    first, second = [], []

    def report_first(reported, name):
        first.extend(reported)

    storage.set_removal_listener(report_first)
    storage.set_removal_listener(report_first)
    with pytest.raises(RuntimeError, match=r"callback is .*; set_removal_listener\(None\) must come first"):
        storage.set_removal_listener(lambda reported, name: second.extend(reported))
    storage.batch_set(keys, pool.slots(range(2)))
    storage.clear()
    assert sorted(first) == sorted(keys)
    assert second == []
    storage.set_removal_listener(None)
    storage.set_removal_listener(lambda reported, name: second.extend(reported))
    storage.batch_set(keys, pool.slots(range(2)))
    storage.clear()
    assert (len(first), sorted(second)) == (2, sorted(keys))


def test_parts_that_leave_are_reported_by_pool(open_storage, fake_pool, new_keys):
    storage, pool = open_storage(16), fake_pool()
    reported = listening_to_all(storage, kv=pool, mamba=pool)
    heads, tails = [], []
    for _ in range(12):
        head, tail = new_keys(2)
        assert all(storage.batch_set([head, tail], pool.slots([0, 1]), parents=[None, head]))
        assert all(storage.batch_set([tail], pool.slots([1]), parents=[head], name="mamba"))
        heads.append(head)
        tails.append(tail)
        for name, stored in (("kv", heads + tails), ("mamba", tails)):
            there = {key for key in stored if storage.batch_exists([key], name=name)}
            assert set(reported[name]) == set(stored) - there
            assert len(reported[name]) == len(set(reported[name]))
    assert reported["mamba"]
    reported["kv"].clear()
    reported["mamba"].clear()
    left = {name: {key for key in heads + tails if storage.batch_exists([key], name=name)} for name in reported}
    storage.clear()
    assert {name: set(keys) for name, keys in reported.items()} == left


def test_a_part_that_is_gone_is_reported_of_its_pool_alone(tmp_path, fingerprint, fake_pool, new_keys):
    storage, pool, keys = FileStorage(tmp_path, fingerprint=fingerprint), fake_pool(), new_keys(2)
    reported = listening_to_all(storage, kv=pool, mamba=fake_pool())
    for name in reported:
        assert all(storage.batch_set(keys, pool.slots([0, 1]), name=name))
    os.unlink(storage.page_path(keys[1], "mamba"))
    assert storage.batch_exists(keys, name="mamba") == 1
    assert reported == {"kv": [], "mamba": [keys[1]]}
    assert storage.batch_exists(keys) == 2
    storage.close()


def test_parts_of_other_pools_than_are_registered_are_not_reported(tmp_path, fingerprint, fake_pool, new_keys):
    pool, keys = fake_pool(), new_keys(2)
    with contextlib.closing(FileStorage(tmp_path, fingerprint=fingerprint)) as before:
        for name in ("kv", "mamba"):
            before.register_mem_pool_host(pool, name)
            assert all(before.batch_set(keys, pool.slots([0, 1]), name=name))
    storage = FileStorage(tmp_path, fingerprint=fingerprint)
    reported = listening_to_all(storage, kv=pool, swa=fake_pool(), mamba=fake_pool(layers=3))
    storage.clear()
    assert {name: sorted(removed) for name, removed in reported.items()} == {"kv": sorted(keys), "swa": [], "mamba": []}
    storage.close()


def test_what_a_lookup_noticed_is_reported_though_it_fails_at_a_later_pool(tmp_path, fingerprint, fake_pool, new_keys):
    storage, pool, keys = FileStorage(tmp_path, fingerprint=fingerprint), fake_pool(), new_keys(3)
    reported = listening_to_all(storage, kv=pool, mamba=fake_pool())
    for name in reported:
        assert all(storage.batch_set(keys, pool.slots(range(3)), name=name))
    os.unlink(storage.page_path(keys[1], "mamba"))
    needed = [PoolTransfer(name, hit_policy=PoolHitPolicy.TRAILING_PAGES) for name in ("mamba", "swa")]
    with pytest.raises(KeyError, match="swa"):
        storage.batch_exists_pools(keys, needed)
    assert reported == {"kv": [], "mamba": [keys[1]]}
    storage.close()


@pytest.mark.parametrize("notice", ["exists", "get", "store"])
def test_what_another_process_removed_is_reported_when_it_is_noticed(
    tmp_path, fingerprint, fake_pool, new_keys, notice
):
    capacity = 64 * 4096
    ours, theirs = (FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=capacity) for _ in range(2))
    pool, keys = fake_pool(), new_keys(6)
    reported, reported_there = listening(ours, pool), listening(theirs, pool)
    assert all(ours.batch_set(keys, pool.slots(range(6))))
    theirs.clear()
    assert sorted(reported_there) == sorted(keys)
    assert reported == []
    if notice == "exists":
        assert ours.batch_exists(keys) == 0
        assert reported == keys[:1]
    elif notice == "get":
        assert not any(ours.batch_get(keys, pool.slots(range(6))))
        assert reported == keys
    else:  # looking for room shows the rest
        for _ in range(12):
            ours.batch_set(new_keys(6), pool.slots(range(6)))
        assert set(reported) >= set(keys)
    ours.close()
    theirs.close()


def test_pages_of_another_model_are_not_reported(tmp_path, fingerprint, fake_pool, new_keys):
    other = type(fingerprint)(model="org/other", revision="abc")
    ours = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=16 * 4096)
    pool, foreign = fake_pool(), new_keys(8)
    with_theirs = FileStorage(tmp_path, fingerprint=other)
    with_theirs.register_mem_pool_host(pool)
    assert all(with_theirs.batch_set(foreign, pool.slots(range(8))))
    with_theirs.close()
    reported = listening(ours, pool)
    stored = []
    for _ in range(20):
        stored += (keys := new_keys(1))
        assert all(ours.batch_set(keys, pool.slots([0])))
    assert ours.stats().evicted > len(reported)
    assert set(reported) < set(stored)
    ours.close()


def test_a_removed_directory_is_reported_when_it_is_made_again(tmp_path, fingerprint, fake_pool, new_keys):
    now = [0.0]
    storage = FileStorage(tmp_path / "s", fingerprint=fingerprint, clock=lambda: now[0])
    pool, keys = fake_pool(), new_keys(4)
    reported = listening(storage, pool)
    assert all(storage.batch_set(keys, pool.slots(range(4))))
    shutil.rmtree(tmp_path / "s")
    later = new_keys(2)
    assert not any(storage.batch_set(later, pool.slots(range(2))))
    now[0] += 100
    assert all(storage.batch_set(later, pool.slots(range(2))))
    assert sorted(reported) == sorted(keys)
    storage.close()


def test_parts_that_are_in_a_directory_made_again_are_not_reported(tmp_path, fingerprint, fake_pool, new_keys):
    now = [0.0]
    storage = FileStorage(tmp_path / "s", fingerprint=fingerprint, clock=lambda: now[0])
    pool, keys = fake_pool(), new_keys(2)
    reported = listening_to_all(storage, kv=pool, mamba=fake_pool())
    for name in reported:
        assert all(storage.batch_set(keys, pool.slots(range(2)), name=name))
    shutil.rmtree(tmp_path / "s")
    assert not any(storage.batch_set(new_keys(1), pool.slots([0])))
    with contextlib.closing(FileStorage(tmp_path / "s", fingerprint=fingerprint)) as other:
        other.register_mem_pool_host(pool)
        assert all(other.batch_set(keys, pool.slots(range(2))))
    now[0] += 100
    assert all(storage.batch_set(new_keys(1), pool.slots([0])))
    assert {name: sorted(removed) for name, removed in reported.items()} == {"kv": [], "mamba": sorted(keys)}
    storage.close()
