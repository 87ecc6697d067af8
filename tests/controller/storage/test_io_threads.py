"""The threads that move pages, and how many of them a batch gets."""

import os
import threading

import pytest
from tests.conftest import needs

from hicache_controller.storage import FileStorage, io_threads, page_reader
from hicache_controller.storage.io_threads import IoThreads
from hicache_controller.storage.page_reader import is_cached

MB = 1 << 20
WAIT_SECONDS = 30


@pytest.fixture
def threads():
    made = IoThreads(6)
    yield made
    made.shutdown()


class Crowd:
    """Work that counts how many do it at once, and holds each until so many have come or no other can."""

    def __init__(self, wanted):
        self.barrier = threading.Barrier(wanted)
        self.here, self.most = 0, 0
        self.lock = threading.Lock()

    def __call__(self, item):
        with self.lock:
            self.here += 1
            self.most = max(self.most, self.here)
        self.barrier.wait(WAIT_SECONDS)
        with self.lock:
            self.here -= 1
        return item


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("count", "item_bytes"), [(0, MB), (1, MB), (3, 10), (40, 70_000), (200, MB)])
def test_results_come_in_order(threads, count, item_bytes, waits):
    items = list(range(count))
    assert threads.map(lambda item: item * 3, items, item_bytes, waits=waits) == [item * 3 for item in items]


@pytest.mark.parametrize(("waits", "cpus", "at_once"), [(True, 2, 6), (False, 2, 2), (False, 1, 1), (False, 100, 4)])
def test_work_that_waits_gets_all_threads_and_busy_work_a_few(threads, monkeypatch, waits, cpus, at_once):
    monkeypatch.setattr(io_threads, "_CPUS", cpus)
    crowd = Crowd(at_once)
    assert threads.map(crowd, list(range(6 * at_once)), MB, waits=waits) == list(range(6 * at_once))
    assert crowd.most == at_once


@pytest.mark.parametrize(
    ("items", "item_bytes", "waits", "cpus", "worth"),
    [
        (100, MB, True, 1, 6),
        (100, MB, False, 1, 1),
        (100, MB, False, 5, 5),
        (100, MB, False, 100, 6),
        (3, MB, False, 100, 3),
        (3, 4096, False, 100, 1),
        (200, 4096, True, 100, 3),
        (0, MB, True, 100, 1),
    ],
)
def test_compiled_work_gets_a_thread_a_cpu(threads, monkeypatch, items, item_bytes, waits, cpus, worth):
    monkeypatch.setattr(io_threads, "_CPUS", cpus)
    assert threads.worth(items, item_bytes, waits=waits, compiled=True) == worth


def test_compiled_work_may_have_a_limit_of_its_own(monkeypatch):
    monkeypatch.setattr(io_threads, "_CPUS", 100)
    threads = IoThreads(6, 20)
    many = {"items": 100, "item_bytes": MB}
    assert threads.worth(**many, waits=False, compiled=True) == 20
    assert threads.worth(**many, waits=True, compiled=True) == 6
    threads.shutdown()


@pytest.mark.parametrize(("given", "waiting", "cached"), [(None, 8, 16), (3, 3, 3)])
def test_a_storage_takes_more_threads_for_cached_pages_unless_set(
    tmp_path, fingerprint, monkeypatch, given, waiting, cached
):
    monkeypatch.setattr(io_threads, "_CPUS", 100)
    storage = FileStorage(tmp_path, fingerprint=fingerprint, threads=given)
    found = [storage._threads.worth(100, MB, waits=waits, compiled=True) for waits in (True, False)]
    storage.close()
    assert found == [waiting, cached]


def test_small_work_stays_on_the_callers_thread(threads):
    done_by = threads.map(lambda _: threading.get_ident(), list(range(20)), 4096, waits=True)
    assert set(done_by) == {threading.get_ident()}


def test_a_failure_is_raised_once_nothing_is_done_any_more(threads):
    inside, release, errors = threading.Event(), threading.Event(), []

    def call():
        caller = threading.get_ident()

        def work(item):
            if threading.get_ident() == caller:
                inside.wait(WAIT_SECONDS)
                raise LookupError(f"item {item}")
            inside.set()
            release.wait(WAIT_SECONDS)

        try:
            threads.map(work, [0, 1], MB, waits=True)
        except LookupError as error:
            errors.append(error)

    calling = threading.Thread(target=call)
    calling.start()
    assert inside.wait(WAIT_SECONDS)
    calling.join(0.2)
    assert calling.is_alive()
    release.set()
    calling.join(WAIT_SECONDS)
    assert len(errors) == 1
    assert threads.map(lambda item: item, [1, 2], MB, waits=True) == [1, 2]


def test_a_failure_on_another_thread_is_raised_too(threads):
    caller, failed = threading.get_ident(), threading.Event()

    def work(item):
        if threading.get_ident() == caller:
            failed.wait(WAIT_SECONDS)
            return item
        failed.set()
        raise LookupError(f"item {item}")

    with pytest.raises(LookupError, match="item"):
        threads.map(work, [0, 1], MB, waits=True)


def test_a_file_is_in_the_page_cache_as_long_as_reading_it_does_not_wait(tmp_path):
    path = str(tmp_path / "page")
    assert not is_cached(path)
    with open(path, "wb") as written:
        written.write(os.urandom(300_000))
        written.flush()
        os.fsync(written.fileno())
        needs(is_cached(path), "this kernel does not say what is in the page cache")
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    # Some file systems keep what they should drop.
    cached = is_cached(path)
    with open(path, "rb") as read:
        try:
            at_once = os.preadv(read.fileno(), [bytearray(300_000)], 0, os.RWF_NOWAIT) == 300_000
        except BlockingIOError:
            at_once = False
    assert cached == at_once
    with open(path, "rb") as read:
        read.read()
    assert is_cached(path)


@pytest.mark.parametrize("cached", [False, True])
def test_pages_in_the_page_cache_are_busy_work_and_others_wait(
    tmp_path, fingerprint, fake_pool, new_keys, monkeypatch, cached, reading
):
    storage, pool, keys = FileStorage(tmp_path, fingerprint=fingerprint), fake_pool(), new_keys(5)
    storage.register_mem_pool_host(pool)
    assert all(storage.batch_set(keys, pool.slots(range(5))))
    asked, used = [], []
    monkeypatch.setattr(page_reader, "is_cached", lambda path: asked.append(path) or cached)
    real = storage._threads.worth
    monkeypatch.setattr(storage._threads, "worth", lambda *args, **how: used.append(how) or real(*args, **how))
    assert all(storage.batch_get(keys, pool.slots(range(5))))
    assert used == [{"waits": not cached, "compiled": reading == "compiled"}]
    assert set(asked) <= {storage.page_path(keys[0]), storage.page_path(keys[-1])}
    storage.close()
