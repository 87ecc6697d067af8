"""No storage ever keeps a suffix without its head, whatever the order of stores, loads and evictions."""

import contextlib
import hashlib
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_controller.storage import FileStorage, Fingerprint, MemoryStorage
from hicache_controller.storage.page_file import FOOTER_BYTES

PAGE = 4096 - FOOTER_BYTES  # with its footer one block

prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=7)
operations = st.lists(
    st.tuples(st.sampled_from(["set", "set", "set", "get", "exists", "reopen"]), prefixes, st.integers(0, 3)),
    max_size=25,
)


@contextlib.contextmanager
def memory_storage(capacity):
    storage = MemoryStorage(capacity)
    yield lambda again: storage
    storage.close()


@contextlib.contextmanager
def file_storage(capacity):
    with tempfile.TemporaryDirectory() as directory:
        opened = []

        def current(again):
            if again and opened:
                opened.pop().close()
            if not opened:
                opened.append(
                    FileStorage(directory, fingerprint=Fingerprint("m", "1"), capacity_bytes=capacity, threads=1)
                )
            return opened[0]

        yield current
        opened.pop().close()


def keys_of(prefix):
    return [hashlib.md5(bytes(prefix[: i + 1])).digest() for i in range(len(prefix))]


@pytest.mark.parametrize(("make", "examples"), [(memory_storage, 100), (file_storage, 10)])
def test_a_stored_page_has_all_pages_before_it(make, examples, fake_pool):
    pool = fake_pool(pages=8, page_bytes=PAGE)

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operations, st.integers(3, 12))
    def check(steps, room):
        unit = 4096 if make is file_storage else PAGE
        contents, everything = {}, {}
        with make(room * unit) as current:
            for what, prefix, start in steps:
                storage = current(what == "reopen")
                storage.register_mem_pool_host(pool)
                keys = keys_of(prefix)
                everything |= {key: keys[:i] for i, key in enumerate(keys)}
                parents = [None, *keys[:-1]]
                keys, parents = keys[min(start, len(keys) - 1) :], parents[min(start, len(keys) - 1) :]
                slots = pool.slots(range(len(keys)))
                if what == "set":
                    filled = pool.fill(range(len(keys)))
                    for key, content in zip(keys, filled, strict=True):
                        if not storage.batch_exists([key]):
                            contents[key] = content
                    storage.batch_set(keys, slots, parents=parents)
                elif what == "get":
                    there = [storage.batch_exists([key]) == 1 for key in keys]
                    assert storage.batch_get(keys, slots) == there
                    for i, key in enumerate(keys):
                        assert not there[i] or pool.read(i) == contents[key]
                else:
                    storage.batch_exists(keys)
                present = {key for key in everything if storage.batch_exists([key])}
                for key in present:
                    assert present.issuperset(everything[key])
                assert len(present) <= room
                assert storage.stats().bytes == len(present) * unit
                storage.check_integrity()
            current(False)

    check()


def test_reading_a_tail_keeps_its_head_from_leaving_first(tmp_path, fingerprint, fake_pool, new_keys, chain):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=8 * 4096)
    pool, old, other = fake_pool(page_bytes=PAGE), new_keys(4), new_keys(4)
    storage.register_mem_pool_host(pool)
    storage.batch_set(old, pool.slots(range(4)), parents=chain(old))
    storage.batch_set(other, pool.slots(range(4)), parents=chain(other))
    assert storage.batch_get(old[2:], pool.slots([0, 1])) == [True, True]
    new = new_keys(4)
    assert all(storage.batch_set(new, pool.slots(range(4)), parents=chain(new)))
    assert (storage.batch_exists(old), storage.batch_exists(other), storage.batch_exists(new)) == (4, 0, 4)
    storage.close()


def test_pages_stored_without_parents_leave_tail_first(tmp_path, fingerprint, fake_pool, new_keys):
    for storage in (
        FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=8 * 4096),
        MemoryStorage(8 * PAGE),
    ):
        pool, keys = fake_pool(page_bytes=PAGE), new_keys(8)
        storage.register_mem_pool_host(pool)
        assert all(storage.batch_set(keys, pool.slots(range(8))))
        assert all(storage.batch_set(new_keys(3), pool.slots(range(3))))
        assert storage.batch_exists(keys) == 5
        assert all(storage.batch_get(keys[:5], pool.slots(range(5))))
        assert all(storage.batch_set(new_keys(5), pool.slots(range(5))))
        assert storage.batch_exists(keys) == 3
        storage.close()


def test_a_page_and_its_sidecar_leave_together(tmp_path, fingerprint, fake_pool, new_keys):
    for storage in (
        FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=4 * 4096),
        MemoryStorage(4 * PAGE),
    ):
        pool, state = fake_pool(page_bytes=PAGE), fake_pool(page_bytes=PAGE, page_size=1)
        storage.register_mem_pool_host(pool)
        storage.register_mem_pool_host(state, "mamba")
        first, second = new_keys(2)
        for key in (first, second):
            assert storage.batch_set([key], pool.slots([0])) == [True]
            assert storage.batch_set([key], state.slots([0]), name="mamba") == [True]
        assert storage.batch_set(new_keys(1), pool.slots([0])) == [True]
        assert [storage.batch_exists([first], name=n) for n in ("kv", "mamba")] == [0, 0]
        assert [storage.batch_exists([second], name=n) for n in ("kv", "mamba")] == [1, 1]
        storage.close()
