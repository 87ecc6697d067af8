"""FileStorage where the medium does not work: no wrong byte, no exception, and it picks up again."""

import contextlib
import errno
import logging
import os
import resource
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch
import xxhash

from hicache_controller.storage import FileStorage, Fingerprint, file

pytestmark = pytest.mark.usefixtures("reading")

BAD = 3
KEYS = 8


class Clock:
    """Seconds that pass when they are set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stored(tmp_path, fingerprint, fake_pool, new_keys, clock):
    """A storage with eight pages in it, their keys and bytes, and the pool."""
    storage = FileStorage(tmp_path / "cache", fingerprint=fingerprint, threads=2, clock=clock)
    pool, keys = fake_pool(parts=4), new_keys(KEYS)
    storage.register_mem_pool_host(pool)
    contents = pool.fill(range(KEYS))
    assert all(storage.batch_set(keys, pool.slots(range(KEYS)), parents=[None, *keys[:-1]]))
    yield storage, pool, keys, contents
    storage.check_integrity()
    storage.close()


def rewrite(path, change):
    data = bytearray(Path(path).read_bytes())
    changed = change(data)
    Path(path).write_bytes(data if changed is None else changed)


def resealed(data):
    """With a checksum that fits, as a program of another format would have written it."""
    data[-16:] = xxhash.xxh3_128_digest(bytes(data[:-16]))


def torn(path, storage, keys):
    rewrite(path, lambda d: d[: len(d) // 2])


def one_byte_short(path, storage, keys):
    rewrite(path, lambda d: d[:-1])


def one_byte_long(path, storage, keys):
    rewrite(path, lambda d: d + b"x")


def empty(path, storage, keys):
    Path(path).write_bytes(b"")


def zeros(path, storage, keys):
    rewrite(path, lambda d: bytes(len(d)))


def half_zeros(path, storage, keys):
    """As after a power cut: the size is there, the later blocks are not."""
    rewrite(path, lambda d: d[: len(d) // 2] + bytes(len(d) - len(d) // 2))


def flipped_bit(path, storage, keys):
    def flip(data):
        at = int.from_bytes(os.urandom(4), "little") % (8 * len(data))
        data[at // 8] ^= 1 << at % 8

    rewrite(path, flip)


def older_format(path, storage, keys):
    def change(data):
        data[-120:-116] = struct.pack("<I", 0)
        resealed(data)

    rewrite(path, change)


def older_format_of_another_size(path, storage, keys):
    def change(data):
        data[-120:-116] = struct.pack("<I", 0)
        return b"more" + data

    rewrite(path, change)


def another_page(path, storage, keys):
    shutil.copyfile(storage.page_path(keys[0]), path)


def link_to_another_page(path, storage, keys):
    os.unlink(path)
    os.symlink(storage.page_path(keys[0]), path)


def pipe(path, storage, keys):
    os.unlink(path)
    os.mkfifo(path)


def another_owner(path, storage, keys):
    os.chown(path, 65534, 65534)


def another_ranks_page(path, storage, keys):
    other = FileStorage(
        Path(path).parents[2] / "other", fingerprint=Fingerprint("org/model", "abc", tp_rank=1, tp_size=2)
    )
    pool = storage._pools["kv"].pool
    other.register_mem_pool_host(pool)
    other.batch_set([keys[BAD]], pool.slots([BAD]))
    shutil.copyfile(other.page_path(keys[BAD]), path)
    other.close()


FAULTS = [
    (torn, "damaged"),
    (one_byte_short, "damaged"),
    (one_byte_long, "damaged"),
    (empty, "damaged"),
    (zeros, "damaged"),
    (half_zeros, "damaged"),
    *[(flipped_bit, None)] * 12,
    (older_format, "old_format"),
    (older_format_of_another_size, "old_format"),
    (another_page, "foreign"),
    (another_ranks_page, "foreign"),
    (pipe, "foreign"),
    (link_to_another_page, "read_errors"),
    pytest.param(
        another_owner,
        "wrong_owner",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root may give away files"),
    ),
]


@pytest.mark.parametrize(("break_file", "counter"), FAULTS)
def test_a_bad_page_is_a_miss_is_counted_and_removed(stored, break_file, counter):
    storage, pool, keys, contents = stored
    path = storage.page_path(keys[BAD])
    break_file(path, storage, keys)
    target = list(range(20, 20 + KEYS))
    expected = [i != BAD for i in range(KEYS)]
    assert storage.batch_get(keys, pool.slots(target)) == expected
    assert [pool.read(p) for p in target if p != 20 + BAD] == [c for i, c in enumerate(contents) if i != BAD]
    assert not os.path.lexists(path)
    stats = storage.stats()
    assert (stats.hits, stats.misses) == (KEYS - 1, 1)
    assert stats.damaged + stats.foreign + stats.old_format + stats.wrong_owner + stats.read_errors == 1
    assert counter is None or getattr(stats, counter) == 1
    assert not stats.backing_off

    assert storage.batch_exists(keys) == BAD
    assert storage.batch_set([keys[BAD]], pool.slots([BAD]), parents=[keys[BAD - 1]]) == [True]
    assert storage.batch_get(keys, pool.slots(target)) == [True] * KEYS
    assert [pool.read(p) for p in target] == contents


def test_every_single_bit_counts(tmp_path, fingerprint, fake_pool, new_keys):
    storage = FileStorage(tmp_path, fingerprint=fingerprint)
    pool, keys = fake_pool(page_bytes=16), new_keys(1)
    storage.register_mem_pool_host(pool)
    pool.fill([0])
    storage.batch_set(keys, pool.slots([0]))
    path = Path(storage.page_path(keys[0]))
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        assert storage.batch_get(keys, pool.slots([1])) == [False], f"bit {bit} of {8 * len(good)}"
    path.write_bytes(good)
    assert storage.batch_get(keys, pool.slots([1])) == [True]
    storage.close()


def test_a_missing_page_is_a_miss(stored):
    storage, pool, keys, _ = stored
    os.unlink(storage.page_path(keys[BAD]))
    assert storage.batch_exists(keys) == BAD
    assert storage.batch_get(keys, pool.slots(range(20, 28))) == [i != BAD for i in range(KEYS)]


def test_a_page_of_another_size_under_the_same_name_does_not_count_as_there(stored):
    storage, pool, keys, contents = stored
    torn(storage.page_path(keys[BAD]), storage, keys)
    assert storage.batch_exists(keys) == BAD
    assert storage.batch_set(keys, pool.slots(range(KEYS))) == [True] * KEYS
    assert storage.batch_get(keys, pool.slots(range(20, 28))) == [True] * KEYS
    assert pool.read(20 + BAD) == contents[BAD]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_stores_nothing_says_so_once_and_is_tried_again(stored, new_keys, clock, monkeypatch, caplog, code):
    storage, pool, _, contents = stored
    new = new_keys(6)
    real, calls = os.pwritev, []

    def full(file, views, offset):
        calls.append(file)
        if len(calls) == 1:
            return real(file, [views[0][:1]], offset)
        raise OSError(code, os.strerror(code))

    with caplog.at_level(logging.INFO):
        monkeypatch.setattr(os, "pwritev", full)
        for step in (0.0, 0.05, 0.2, 0.1, 1.0, 100.0):
            clock.now += step
            assert storage.batch_set(new, pool.slots(range(6))) == [False] * 6
        assert len([r for r in caplog.records if "cannot store" in r.getMessage()]) == 1
        monkeypatch.undo()
        tried = storage.stats().write_errors
        assert (tried, storage.stats().skipped) == (4, 2 * 6)
        assert storage.stats().backing_off
        assert storage.batch_exists(new) == 0
        files = [name for _, _, names in os.walk(storage._root) for name in names]
        assert not [name for name in files if name.startswith(".")]
        clock.now += 100
        assert storage.batch_set(new, pool.slots(range(6))) == [True] * 6
        assert storage.batch_get(new, pool.slots(range(20, 26))) == [True] * 6
        assert [pool.read(p) for p in range(20, 26)] == contents[:6]
        assert "works again" in caplog.text
    assert not storage.stats().backing_off


def test_a_store_that_fails_half_way_keeps_the_prefix_only(stored, new_keys, monkeypatch):
    storage, pool, _, _ = stored
    new = new_keys(6)
    real, calls = os.pwritev, []

    def sometimes(file, views, offset):
        calls.append(file)
        if len(calls) == 4:
            raise OSError(errno.EIO, "broken")
        return real(file, views, offset)

    monkeypatch.setattr(os, "pwritev", sometimes)
    assert storage.batch_set(new, pool.slots(range(6)), parents=[None, *new[:-1]]) == [True] * 3 + [False] * 3
    assert [storage.batch_exists([key]) for key in new] == [1, 1, 1, 0, 0, 0]


def test_a_directory_that_is_removed_is_made_again(stored, new_keys, clock):
    storage, pool, keys, contents = stored
    shutil.rmtree(storage._root)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get(keys, pool.slots(range(20, 28))) == [False] * KEYS
    assert storage.batch_set(keys, pool.slots(range(KEYS))) == [False] * KEYS
    storage.clear()
    clock.now += 60
    assert storage.batch_set(keys, pool.slots(range(KEYS)), parents=[None, *keys[:-1]]) == [True] * KEYS
    assert storage.batch_get(keys, pool.slots(range(20, 28))) == [True] * KEYS
    assert [pool.read(p) for p in range(20, 28)] == contents
    assert storage.stats().pages == KEYS
    assert os.stat(storage._root).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("capacity", [None, 1 << 20])
def test_permission_that_is_lost_and_given_back(fingerprint, fake_pool, new_keys, clock, capacity):
    with tempfile.TemporaryDirectory() as top:
        as_root = os.geteuid() == 0
        if as_root:
            os.chown(top, 65534, 65534)
            os.seteuid(65534)
        try:
            storage = FileStorage(
                top + "/cache", fingerprint=fingerprint, threads=1, clock=clock, capacity_bytes=capacity
            )
            pool, keys, new = fake_pool(), new_keys(4), new_keys(4)
            storage.register_mem_pool_host(pool)
            contents = pool.fill(range(4))
            assert all(storage.batch_set(keys, pool.slots(range(4))))
            os.chmod(top + "/cache", 0)
            assert storage.batch_get(keys, pool.slots(range(4, 8))) == [False] * 4
            assert storage.stats().backing_off
            assert storage.batch_exists(keys) == 0
            assert storage.batch_set(new, pool.slots(range(4))) == [False] * 4
            storage.clear()
            assert storage.stats().read_errors >= 1
            assert storage.stats().write_errors >= 1
            os.chmod(top + "/cache", 0o700)
            clock.now += 60
            assert storage.batch_get(keys, pool.slots(range(4, 8))) == [True] * 4
            assert [pool.read(p) for p in range(4, 8)] == contents
            assert storage.batch_set(new, pool.slots(range(4))) == [True] * 4
            storage.check_integrity()
            storage.close()

            os.chmod(top + "/cache", 0o500)
            os.chmod(top + "/cache/writers", 0o500)
            with pytest.raises(PermissionError, match="cannot be used as storage"):
                FileStorage(top + "/cache", fingerprint=fingerprint)
            os.chmod(top + "/cache/writers", 0o700)
            os.chmod(top + "/cache", 0o700)
        finally:
            if as_root:
                os.seteuid(0)


def test_a_lock_that_is_never_given_back_is_a_failed_store(stored, new_keys, monkeypatch):
    storage, pool, _, _ = stored
    monkeypatch.setattr("hicache_controller.storage.directory._LOCK_SECONDS", 0.01)
    with storage._files.directory.locked(exclusive=True):
        assert storage.batch_set(new_keys(2), pool.slots(range(2))) == [False, False]
    assert storage.stats().write_errors == 1
    assert storage.stats().backing_off


def works_again(storage, pool, keys, contents, clock):
    """No page was given up: the index and the directory are as before, and all come back once the pause is over."""
    stats = storage.stats()
    assert (stats.read_errors, stats.pages, stats.backing_off) == (KEYS, KEYS, True)
    assert all(os.path.exists(storage.page_path(key)) for key in keys)
    assert storage.batch_get(keys, pool.slots(range(30, 38))) == [False] * KEYS
    assert storage.stats().skipped == KEYS
    clock.now += 1
    assert storage.batch_get(keys, pool.slots(range(30, 38))) == [True] * KEYS
    assert [pool.read(page) for page in range(30, 38)] == contents


def test_pages_outlive_a_process_without_descriptors(stored, clock):
    storage, pool, keys, contents = stored
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        found = storage.batch_get(keys, pool.slots(range(20, 28)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)
    assert found == [False] * KEYS
    works_again(storage, pool, keys, contents, clock)


@pytest.mark.parametrize("code", ["EMFILE", "ENFILE", "ENOMEM", "EFAULT", "EINTR", "EAGAIN"])
def test_an_error_that_is_not_of_the_file_removes_no_page(stored, clock, monkeypatch, code):
    storage, pool, keys, contents = stored
    removed = []
    storage.set_removal_listener(lambda keys, name: removed.extend(keys))
    with monkeypatch.context() as broken:
        broken.setattr(file, "read_pages", lambda *_: [OSError(getattr(errno, code), "no")] * KEYS)
        assert storage.batch_get(keys, pool.slots(range(20, 28))) == [False] * KEYS
    works_again(storage, pool, keys, contents, clock)
    assert removed == []


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (torch.arange(7), "need"),
        (torch.arange(8) + 1, "whole pages"),
        (torch.tensor([0, 1, 2, 3, 4, 5, 7, 6]), "whole pages"),
        (torch.arange(8) + 252, "slots 0 to 255"),
        (torch.arange(8) - 4, "slots 0 to 255"),
        (torch.arange(8).view(2, 4), "shape"),
        (torch.arange(8).float(), "float32"),
    ],
)
def test_indices_that_are_not_whole_pages_of_the_pool_are_refused(stored, indices, words):
    storage, pool, keys, _ = stored
    before = pool.buffer.clone()
    for call in (storage.batch_get, storage.batch_set):
        with pytest.raises(ValueError, match=words):
            call(keys[:2], indices)
    assert torch.equal(pool.buffer, before)


def test_wrong_keys_and_pools_are_refused(stored, fake_pool):
    storage, pool, keys, _ = stored
    for wrong in (b"", bytes(65), "text", 5):
        with pytest.raises(ValueError, match="keys has"):
            storage.batch_exists([wrong])
    with pytest.raises(ValueError, match="parents has 1 entries for 2 keys"):
        storage.batch_set(keys[:2], pool.slots([0, 1]), parents=[None])
    with pytest.raises(KeyError, match="registered pools: kv"):
        storage.batch_exists(keys, name="swa")
    with pytest.raises(ValueError, match="another pool"):
        storage.register_mem_pool_host(fake_pool())
    with pytest.raises(TypeError, match="lacks page_size"):
        storage.register_mem_pool_host(object(), "x")
    storage.register_mem_pool_host(pool)
