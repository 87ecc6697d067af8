"""FileStorage where there is no room: on the disk, for descriptors, or for the end of a call; no file is left over."""

import errno
import logging
import os
import subprocess
from pathlib import Path

import pytest

from hicache_controller.storage import FileStorage, page_file, page_writer

pytestmark = pytest.mark.usefixtures("reading")


class SmallDisk:
    """Has room for some files, however many bytes each has; writing over one takes no room."""

    def __init__(self, monkeypatch, root, files, code):
        self.root, self.files, self.code, self.real = root, files, code, page_file.write_page
        self.refused = 0
        monkeypatch.setattr(page_writer, "write_page", self.write_page)

    def write_page(self, path, *args, over, **how):
        if not over and len(files_of(self.root)) >= self.files:
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code), path)
        self.real(path, *args, over=over, **how)


def files_of(root):
    return [name for _, _, names in os.walk(Path(root) / "pages") for name in names]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("capacity", [None, 1 << 30])
def test_a_disk_smaller_than_the_capacity_takes_new_pages_for_old_ones(
    tmp_path, fingerprint, fake_pool, new_keys, chain, monkeypatch, caplog, code, capacity
):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=capacity, threads=2)
    disk = SmallDisk(monkeypatch, tmp_path, 20, code)
    pool, removed = fake_pool(), []
    storage.register_mem_pool_host(pool)
    storage.set_removal_listener(lambda keys, name: removed.extend(keys))
    contents, everything = pool.fill(range(6)), []
    for _ in range(10):
        keys = new_keys(6)
        assert storage.batch_set(keys, pool.slots(range(6)), parents=chain(keys)) == [True] * 6
        assert storage.batch_get(keys, pool.slots(range(10, 16))) == [True] * 6
        assert [pool.read(page) for page in range(10, 16)] == contents
        everything += keys
    stats = storage.stats()
    assert disk.refused
    assert (stats.write_errors, stats.backing_off, stats.pages, stats.evicted) == (0, False, 20, 40)
    there = storage.batch_exists_each(everything)
    assert there[-18:] == [True] * 18
    assert set(removed) == {key for key, exists in zip(everything, there, strict=True) if not exists}
    assert len(files_of(tmp_path)) == 20
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    assert "quota is full; pages are evicted" in caplog.text
    storage.check_integrity()
    storage.close()


def test_a_disk_that_others_have_filled_costs_no_page_for_a_store_that_would_not_fit(
    tmp_path, fingerprint, fake_pool, new_keys, monkeypatch
):
    storage = FileStorage(tmp_path, fingerprint=fingerprint)
    pool, keys = fake_pool(), new_keys(3)
    storage.register_mem_pool_host(pool)
    assert all(storage.batch_set(keys, pool.slots(range(3))))
    SmallDisk(monkeypatch, tmp_path, 0, errno.ENOSPC)
    assert storage.batch_set(new_keys(4), pool.slots(range(4))) == [False] * 4
    assert storage.batch_exists(keys) == 3
    assert (storage.stats().evicted, storage.stats().backing_off) == (0, True)
    storage.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", disk], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("page_bytes", [1024, 100_000])
def test_a_small_file_system_goes_on_storing(small_disk, fingerprint, fake_pool, new_keys, page_bytes):
    storage = FileStorage(small_disk, fingerprint=fingerprint, capacity_bytes=1 << 30, threads=4)
    pool = fake_pool(page_bytes=page_bytes)
    storage.register_mem_pool_host(pool)
    for _ in range(200 if page_bytes < 4096 else 20):
        contents, keys = pool.fill(range(4)), new_keys(4)
        assert storage.batch_set(keys, pool.slots(range(4))) == [True] * 4
        assert storage.batch_get(keys, pool.slots(range(4, 8))) == [True] * 4
        assert [pool.read(page) for page in range(4, 8)] == contents
    stats = storage.stats()
    assert stats.evicted
    assert (stats.write_errors, stats.backing_off, stats.pages) == (0, False, len(files_of(small_disk)))
    storage.close()


@pytest.mark.parametrize("call", ["open", "ftruncate"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES, errno.EIO])
def test_a_file_to_write_over_that_does_not_open_leaves_nothing_behind(
    tmp_path, fingerprint, fake_pool, new_keys, monkeypatch, call, code
):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=16 * 4096)
    small, large = fake_pool(), fake_pool(page_bytes=2048)
    storage.register_mem_pool_host(small)
    storage.register_mem_pool_host(large, "large")
    assert all(storage.batch_set(new_keys(16), small.slots(range(16))))
    contents, real, failed = large.fill(range(8)), getattr(os, call), []

    def failing(target, how, *args, **options):
        if call == "ftruncate" or (os.path.basename(target).startswith(".") and not how & os.O_CREAT):
            failed.append(target)
            raise OSError(code, os.strerror(code))
        return real(target, how, *args, **options)

    with monkeypatch.context() as broken:
        broken.setattr(os, call, failing)
        for _ in range(5):
            keys = new_keys(8)
            assert storage.batch_set(keys, large.slots(range(8)), name="large") == [True] * 8
            assert storage.batch_get(keys, large.slots(range(8, 16)), name="large") == [True] * 8
            assert [large.read(page) for page in range(8, 16)] == contents
    assert failed
    names = files_of(tmp_path)
    assert not [name for name in names if name.startswith(".")]
    assert len(names) == storage.stats().pages == 16
    assert storage.stats().write_errors == 0
    storage.check_integrity()
    storage.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_page_that_lacked_what_others_of_its_call_held_is_stored_after_them(
    tmp_path, fingerprint, fake_pool, new_keys, chain, monkeypatch, code
):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, threads=4)
    pool, keys = fake_pool(), new_keys(8)
    storage.register_mem_pool_host(pool)
    contents, left = pool.fill(range(8)), {keys[3], keys[6]}

    def lacking(path, views, page, **how):
        if page.key in left:
            left.remove(page.key)
            raise OSError(code, os.strerror(code), path)
        page_file.write_page(path, views, page, **how)

    monkeypatch.setattr(page_writer, "write_page", lacking)
    assert storage.batch_set(keys, pool.slots(range(8)), parents=chain(keys)) == [True] * 8
    assert not left
    assert storage.batch_get(keys, pool.slots(range(20, 28))) == [True] * 8
    assert [pool.read(page) for page in range(20, 28)] == contents
    assert storage.stats().write_errors == 0
    storage.close()


def test_a_call_that_is_interrupted_leaves_no_file_behind(tmp_path, fingerprint, fake_pool, new_keys, monkeypatch):
    storage, pool = FileStorage(tmp_path, fingerprint=fingerprint), fake_pool()
    storage.register_mem_pool_host(pool)
    for interrupted in ("write_page", "rename"):
        real, calls = getattr(page_writer, interrupted, None) or os.rename, []

        def interrupt(*args, real=real, calls=calls, **how):
            calls.append(args)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return real(*args, **how)

        with monkeypatch.context() as broken:
            broken.setattr(page_writer if interrupted == "write_page" else os, interrupted, interrupt)
            with pytest.raises(KeyboardInterrupt):
                storage.batch_set(new_keys(8), pool.slots(range(8)))
        assert not [name for name in files_of(tmp_path) if name.startswith(".")]
    assert len(files_of(tmp_path)) == 3
    assert storage.batch_set(new_keys(8), pool.slots(range(8))) == [True] * 8
    storage.close()
