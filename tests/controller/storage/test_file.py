"""FileStorage where the medium works: bytes, order, capacity, names."""

import os
import stat
import threading

import pytest

from hicache_controller.storage import FileStorage, Fingerprint, file, page_reader, page_writer
from hicache_controller.storage.file_pages import FilePages
from hicache_controller.storage.page_writer import PageWriter

pytestmark = pytest.mark.usefixtures("reading")


@pytest.fixture
def storage(tmp_path, fingerprint):
    with_open = FileStorage(tmp_path / "cache", fingerprint=fingerprint, threads=2)
    yield with_open
    with_open.check_integrity()
    with_open.close()


def test_files_are_0600_and_directories_0700(tmp_path, fingerprint, fake_pool, new_keys):
    before = os.umask(0)
    try:
        with_open = FileStorage(tmp_path / "a", fingerprint=fingerprint)
        pool = fake_pool()
        with_open.register_mem_pool_host(pool)
        with_open.batch_set(new_keys(3), pool.slots(range(3)))
    finally:
        os.umask(before)
    modes = {}
    for root, directories, files in os.walk(tmp_path / "a"):
        modes |= {os.path.join(root, d): 0o700 for d in directories} | {os.path.join(root, f): 0o600 for f in files}
    assert {path: stat.S_IMODE(os.stat(path).st_mode) for path in modes} == modes
    with_open.close()


@pytest.mark.parametrize("key", [b"../../../../etc/x", b"/", b"\x00", b"..", b"a/b\x00\n"])
def test_keys_cannot_leave_the_directory(tmp_path, storage, fake_pool, key):
    pool = fake_pool()
    storage.register_mem_pool_host(pool)
    contents = pool.fill([0])
    assert storage.batch_set([key], pool.slots([0])) == [True]
    assert os.path.realpath(storage.page_path(key)).startswith(str(tmp_path / "cache" / "pages") + "/")
    assert os.path.isfile(storage.page_path(key))
    assert storage.batch_get([key], pool.slots([1])) == [True]
    assert pool.read(1) == contents[0]
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("name", ["", "../kv", "kv/x", "a" * 65, "kv\n", "k v"])
def test_pool_names_that_could_leave_the_directory_are_refused(storage, fake_pool, name):
    with pytest.raises(ValueError, match="name is"):
        storage.register_mem_pool_host(fake_pool(), name)


def test_nothing_but_pages_and_the_leftovers_of_dead_writers_is_removed(tmp_path, fingerprint, fake_pool, new_keys):
    with_open = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=64 << 10)
    pool = fake_pool()
    with_open.register_mem_pool_host(pool)
    shard = tmp_path / "pages" / "00"
    mine = [tmp_path / "notes.txt", shard / "notes.txt", shard / ".hidden", tmp_path / "pages" / "x"]
    for path in mine:
        path.write_text("mine")
    with_open.batch_set(new_keys(40), pool.slots(range(40)))
    with_open.clear()
    with_open.close()
    FileStorage(tmp_path, fingerprint=fingerprint).close()
    assert all(path.read_text() == "mine" for path in mine)


def test_capacity_is_that_of_the_whole_directory(tmp_path, fake_pool, new_keys, chain):
    """Two ranks write alternately; neither knows of the other's pages until it looks."""
    capacity = 1 << 20
    pool = fake_pool(page_bytes=12 * 1024)
    ranks = [
        FileStorage(
            tmp_path, fingerprint=Fingerprint("m", "1", tp_rank=rank, tp_size=2), capacity_bytes=capacity, threads=1
        )
        for rank in range(2)
    ]
    for with_open in ranks:
        with_open.register_mem_pool_host(pool)
    for length in [5] * 10 + [1] * 60:
        for with_open in ranks:
            keys = new_keys(length)
            assert all(with_open.batch_set(keys, pool.slots(range(length)), parents=chain(keys)))
            used = sum(
                os.stat(os.path.join(root, name)).st_blocks * 512
                for root, _, names in os.walk(tmp_path / "pages")
                for name in names
            )
            assert used <= capacity
    for with_open in ranks:
        with_open.check_integrity()
        assert with_open.stats().evicted
        with_open.close()


def test_the_pages_used_last_stay(tmp_path, fingerprint, fake_pool, new_keys):
    """Room for ten pages of 4 KiB; four of them are read before five more come."""
    with_open = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=10 * 4096)
    pool = fake_pool()
    with_open.register_mem_pool_host(pool)
    keys = new_keys(10)
    for key in keys:
        with_open.batch_set([key], pool.slots([0]))
    used = [0, 3, 4, 8]
    for i in used:
        assert with_open.batch_get([keys[i]], pool.slots([1])) == [True]
    assert all(with_open.batch_set(new_keys(5), pool.slots(range(5))))
    there = [i for i in range(10) if with_open.batch_exists([keys[i]])]
    assert there == [0, 3, 4, 8, 9]
    with_open.close()


def test_a_chain_longer_than_the_capacity_keeps_its_head(tmp_path, fingerprint, fake_pool, new_keys, chain):
    with_open = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=10 * 4096)
    pool, keys = fake_pool(), new_keys(30)
    with_open.register_mem_pool_host(pool)
    stored = with_open.batch_set(keys, pool.slots(range(30)), parents=chain(keys))
    assert stored == [True] * 10 + [False] * 20
    assert with_open.batch_exists(keys) == 10
    assert (with_open.stats().no_room, with_open.stats().orphans) == (1, 19)
    with_open.close()


def test_a_page_that_is_there_is_not_written_again(storage, fake_pool, new_keys):
    pool, keys = fake_pool(), new_keys(2)
    storage.register_mem_pool_host(pool)
    assert storage.batch_set(keys, pool.slots(range(2))) == [True, True]
    before = [os.stat(storage.page_path(k)).st_ino for k in keys]
    assert storage.batch_set(keys, pool.slots(range(2))) == [True, True]
    assert [os.stat(storage.page_path(k)).st_ino for k in keys] == before
    assert (storage.stats().stored, storage.stats().present) == (2, 2)


def test_a_directory_that_cannot_be_used_is_an_error_at_once(tmp_path, fingerprint):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file.*cannot be used as storage"):
        FileStorage(tmp_path / "file", fingerprint=fingerprint)
    for wrong in ({"capacity_bytes": 0}, {"threads": 0}):
        with pytest.raises(ValueError, match="is 0; it must be at least 1"):
            FileStorage(tmp_path / "new", fingerprint=fingerprint, **wrong)
    assert not (tmp_path / "new").exists()


def test_new_pages_take_the_files_of_those_that_leave(tmp_path, fingerprint, fake_pool, new_keys):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=6 * 4096)
    pool = fake_pool()
    storage.register_mem_pool_host(pool)
    contents, old, new = pool.fill(range(8)), new_keys(6), new_keys(2)
    assert all(storage.batch_set(old, pool.slots(range(6))))
    files = {os.stat(storage.page_path(key)).st_ino for key in old}
    assert all(storage.batch_set(new, pool.slots(range(6, 8))))
    assert {os.stat(storage.page_path(key)).st_ino for key in new} < files
    assert storage.batch_get(new, pool.slots([20, 21])) == [True, True]
    assert [pool.read(20), pool.read(21)] == contents[6:]
    names = [name for _, _, names in os.walk(tmp_path / "pages") for name in names]
    assert len(names) == 6
    assert not [name for name in names if name.startswith(".")]
    storage.close()


def test_a_file_that_others_may_write_is_not_written_over(tmp_path, fingerprint, fake_pool, new_keys):
    storage = FileStorage(tmp_path / "cache", fingerprint=fingerprint, capacity_bytes=4096)
    pool, keys = fake_pool(), new_keys(3)
    storage.register_mem_pool_host(pool)
    pool.fill(range(3))
    storage.batch_set(keys[:1], pool.slots([0]))
    os.link(storage.page_path(keys[0]), tmp_path / "kept")
    before = (tmp_path / "kept").read_bytes()
    storage.batch_set(keys[1:2], pool.slots([1]))
    assert (tmp_path / "kept").read_bytes() == before
    os.chmod(storage.page_path(keys[1]), 0o666)
    storage.batch_set(keys[2:], pool.slots([2]))
    assert stat.S_IMODE(os.stat(storage.page_path(keys[2])).st_mode) == 0o600
    assert storage.batch_get(keys, pool.slots(range(3))) == [False, False, True]
    storage.close()


def test_no_more_is_written_at_a_time_than_each_writer_keeps_back(
    tmp_path, fingerprint, fake_pool, new_keys, monkeypatch
):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=320 * 4096)
    pool, keys = fake_pool(), new_keys(30)
    storage.register_mem_pool_host(pool)
    pool.fill(range(30))
    chunks, real = [], PageWriter.store
    monkeypatch.setattr(PageWriter, "store", lambda self, jobs: chunks.append(len(jobs)) or real(self, jobs))
    assert all(storage.batch_set(keys, pool.slots(range(30))))
    assert chunks == [10, 10, 10]
    storage.close()


def test_a_page_that_another_process_evicts_during_the_call_does_not_count_as_stored(
    storage, fake_pool, new_keys, monkeypatch
):
    pool, keys, removed = fake_pool(), new_keys(6), []
    storage.register_mem_pool_host(pool)
    storage.set_removal_listener(lambda keys, name: removed.extend(keys))
    monkeypatch.setattr(page_writer, "_CHUNK_PAGES", 2)
    real, chunks = PageWriter.store, []

    def store(*args):
        if len(chunks) == 2:
            os.unlink(storage.page_path(keys[1]))
        chunks.append(args)
        return real(*args)

    monkeypatch.setattr(PageWriter, "store", store)
    assert storage.batch_set(keys, pool.slots(range(6))) == [True, False, True, True, True, True]
    assert len(chunks) == 3
    assert removed == [keys[1]]


def test_many_writers_leave_each_other_room(tmp_path, fake_pool, new_keys):
    pool, keys = fake_pool(), new_keys(40)
    pool.fill(range(2))

    def joined(rank):
        fingerprint = Fingerprint("model", revision="1", tp_rank=rank, tp_size=40)
        storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=1024 * 4096, threads=1)
        storage.register_mem_pool_host(pool)
        return storage

    storages = [joined(0)]
    first = new_keys(2)
    assert all(storages[0].batch_set(first, pool.slots(range(2))))
    for rank in range(1, 40):
        storages.append(joined(rank))
        assert storages[-1].batch_set(keys[rank : rank + 1], pool.slots([0])) == [True]
    assert storages[0].batch_exists(first) == 2
    assert sum(storage.stats().evicted for storage in storages) == 0
    for storage in storages:
        storage.close()


def test_a_page_larger_than_the_capacity_takes_no_others_place(tmp_path, fingerprint, fake_pool, new_keys):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=64 * 4096)
    small, large = fake_pool(), fake_pool(pages=2, page_size=1, page_bytes=65 * 4096)
    storage.register_mem_pool_host(small)
    storage.register_mem_pool_host(large, name="mamba")
    keys = new_keys(10)
    assert all(storage.batch_set(keys, small.slots(range(10))))
    assert storage.batch_set(new_keys(1), large.slots([0]), name="mamba") == [False]
    assert storage.batch_exists(keys) == 10
    assert storage.stats().no_room == 1
    storage.close()


def test_files_that_were_to_be_written_over_leave_where_room_is_still_lacking(
    tmp_path, fingerprint, fake_pool, new_keys
):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=256 * 4096)
    pool, chain = fake_pool(pages=256), new_keys(250)
    storage.register_mem_pool_host(pool)
    assert all(storage.batch_set(chain, pool.slots(range(250)), parents=[None, *chain[:249]]))
    assert all(storage.batch_set(new_keys(6), pool.slots(range(6))))
    more = new_keys(8)
    assert not any(storage.batch_set(more, pool.slots(range(8)), parents=[chain[249], *more[:7]]))
    files = [name for _, _, names in os.walk(tmp_path / "pages") for name in names]
    assert len(files) == storage.stats().pages
    storage.close()


def test_more_pages_than_are_read_at_once_keep_their_order(storage, fake_pool, new_keys, monkeypatch):
    pool, keys = fake_pool(), new_keys(10)
    storage.register_mem_pool_host(pool)
    contents = pool.fill(range(10))
    assert all(storage.batch_set(keys, pool.slots(range(10))))
    os.unlink(storage.page_path(keys[4]))
    monkeypatch.setattr(file, "_READ_PAGES", 3)
    target = list(range(20, 30))[::-1]
    assert storage.batch_get(keys, pool.slots(target)) == [i != 4 for i in range(10)]
    assert [pool.read(target[i]) for i in range(10) if i != 4] == [contents[i] for i in range(10) if i != 4]


def test_a_page_that_leaves_while_it_is_read_is_a_miss_not_damage(
    tmp_path, fingerprint, fake_pool, new_keys, monkeypatch, reading
):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=4096, threads=1)
    pool, keys = fake_pool(), new_keys(2)
    storage.register_mem_pool_host(pool)
    pool.fill(range(2))
    storage.batch_set(keys[:1], pool.slots([0]))
    module, name = (page_reader, "read_files") if reading == "compiled" else (os, "preadv")
    real = getattr(module, name)

    def late(*args, **kwargs):
        monkeypatch.setattr(module, name, real)
        assert storage.batch_set(keys[1:], pool.slots([1])) == [True]
        if reading == "python":
            return real(*args, **kwargs)
        # What is read of a file that was opened before: the page that was written over it.
        return real([storage.page_path(keys[1])], *args[1:], **kwargs)

    monkeypatch.setattr(module, name, late)
    assert storage.batch_get(keys[:1], pool.slots([9])) == [False]
    stats = storage.stats()
    assert (stats.misses, stats.damaged, stats.foreign) == (1, 0, 0)
    assert storage.batch_get(keys[1:], pool.slots([9])) == [True]
    storage.close()


@pytest.mark.parametrize("call", ["batch_get", "batch_set"])
def test_closing_waits_until_nothing_touches_the_pool(storage, fake_pool, new_keys, call):
    pool, keys, new = fake_pool(), new_keys(6), new_keys(6)
    storage.register_mem_pool_host(pool)
    contents = pool.fill(range(6))
    assert all(storage.batch_set(keys, pool.slots(range(6))))
    closer = threading.Thread(target=storage.close)
    page_memory, waits = pool.page_memory, []

    def closed_meanwhile(page):
        if closer.ident is None:
            closer.start()
            closer.join(0.2)  # enough for one that does not wait
            waits.append(closer.is_alive())
        return page_memory(page)

    pool.page_memory = closed_meanwhile
    if call == "batch_get":
        assert storage.batch_get(keys, pool.slots(range(6, 12))) == [True] * 6
    else:
        assert storage.batch_set(new, pool.slots(range(6))) == [True] * 6
    closer.join()
    assert waits == [True]
    assert [page for page in range(6, 12) if pool.read(page) in contents] == [*range(6, 12)] * (call == "batch_get")
    with pytest.raises(RuntimeError, match="closed"):
        storage.batch_exists(keys)


def test_a_call_that_begins_as_the_storage_closes_is_refused(storage, fake_pool, new_keys):
    pool = fake_pool()
    storage.register_mem_pool_host(pool)
    storage.close()
    storage._closed = False  # as a call saw it that lost its CPU then
    for call in (storage.batch_get, storage.batch_set):
        with pytest.raises(RuntimeError, match="closed"):
            call(new_keys(2), pool.slots(range(2)))
    with pytest.raises(RuntimeError, match="closed"):
        storage.clear()


def test_a_storage_that_cannot_be_made_leaves_the_directory(tmp_path, fingerprint, monkeypatch):
    def fail(*_):
        raise OSError(5, "no")

    monkeypatch.setattr(FilePages, "scan", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no"):
        FileStorage(tmp_path / "cache", fingerprint=fingerprint)
    assert os.listdir(tmp_path / "cache" / "writers") == []
    assert len(os.listdir("/proc/self/fd")) == len(before)
