"""The directory of a file storage: whose it has to be, its modes, and what is at the paths of pages and locks."""

import logging
import os
import socket
import stat
from pathlib import Path

import pytest

from hicache_controller.storage import FileStorage, Fingerprint
from hicache_controller.storage.page_file import FOOTER_BYTES

pytestmark = pytest.mark.usefixtures("reading")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give away files and make devices")


def directory(path, size):
    os.mkdir(path)


def link(path, size):
    os.symlink("x" * size, path)


def link_to_a_file(path, size):
    (Path(path).parent / "other").write_bytes(os.urandom(size))
    os.symlink("other", path)


def pipe(path, size):
    os.mkfifo(path)


def unix_socket(path, size):
    before = os.getcwd()
    os.chdir(os.path.dirname(path))  # an address has little room
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("s")
        os.rename("s", path)
    finally:
        os.chdir(before)


def device(path, size):
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


OBSTACLES = [directory, link, link_to_a_file, pipe, unix_socket, pytest.param(device, marks=needs_root)]


@pytest.fixture
def blocked(request, tmp_path, fingerprint, fake_pool, new_keys):
    """A storage, a pool and eight keys, and something that is no file at the path of the third."""
    # An empty directory has a size of 4 KiB on many file systems, a link that of its target's name.
    pool = fake_pool(page_bytes=512 if request.param is link else 4096 - FOOTER_BYTES)
    storage = FileStorage(tmp_path / "cache", fingerprint=fingerprint)
    storage.register_mem_pool_host(pool)
    keys = new_keys(8)
    request.param(storage.page_path(keys[2]), pool.page_bytes + FOOTER_BYTES)
    yield storage, pool, keys
    storage.check_integrity()
    storage.close()


@pytest.mark.parametrize("blocked", OBSTACLES, indirect=True)
def test_what_is_no_file_at_a_pages_path_never_counts_and_keeps_no_other_page_out(blocked, tmp_path, fingerprint):
    storage, pool, keys = blocked
    others = [key for key in keys if key != keys[2]]
    assert storage.batch_exists_each(keys) == storage.batch_get(keys, pool.slots(range(8))) == [False] * 8
    assert not storage.stats().backing_off
    again = FileStorage(tmp_path / "cache", fingerprint=fingerprint)
    assert again.stats().pages == 0
    again.close()
    contents = pool.fill(range(8))
    for _ in range(3):
        stored = storage.batch_set(keys, pool.slots(range(8)))
        assert stored == storage.batch_exists_each(keys)
        assert stored[:2] + stored[3:] == [True] * 7
        assert storage.batch_get(keys, pool.slots(range(20, 28))) == stored
        assert [pool.read(20 + i) for i in range(8) if stored[i]] == [contents[i] for i in range(8) if stored[i]]
    stats = storage.stats()
    assert (stats.backing_off, stats.skipped) == (False, 0)
    assert stats.pages == sum(stored)
    names = [name for _, _, names in os.walk(tmp_path / "cache" / "pages") for name in names]
    assert not [name for name in names if name.startswith(".")]
    storage.clear()
    assert storage.batch_exists_each(others) == [False] * 7


def test_a_directory_at_a_pages_path_stays_its_page_is_refused_and_so_are_those_after_it(
    tmp_path, fingerprint, fake_pool, new_keys, chain, caplog
):
    storage, pool, keys = FileStorage(tmp_path, fingerprint=fingerprint), fake_pool(), new_keys(5)
    storage.register_mem_pool_host(pool)
    path = storage.page_path(keys[2])
    os.mkdir(path)
    for _ in range(3):
        assert storage.batch_set(keys, pool.slots(range(5)), parents=chain(keys)) == [True, True, False, False, False]
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"storage {tmp_path}: {path} is not a file, so its page cannot be stored; remove it"
    ]
    assert os.path.isdir(path)
    assert (storage.stats().write_errors, storage.stats().pages) == (3, 2)
    os.rmdir(path)
    assert storage.batch_set(keys, pool.slots(range(5)), parents=chain(keys)) == [True] * 5
    storage.close()


@pytest.mark.parametrize("put", OBSTACLES)
def test_pages_whose_files_others_replaced_leave_like_all(tmp_path, fingerprint, fake_pool, new_keys, put):
    storage = FileStorage(tmp_path, fingerprint=fingerprint, capacity_bytes=8 * 4096)
    pool, keys, removed = fake_pool(), new_keys(8), []
    storage.register_mem_pool_host(pool)
    storage.set_removal_listener(lambda keys, name: removed.extend(keys))
    assert all(storage.batch_set(keys, pool.slots(range(8))))
    os.unlink(storage.page_path(keys[7]))  # which leaves first
    put(storage.page_path(keys[7]), 100)
    for _ in range(3):
        new = new_keys(8)
        assert storage.batch_set(new, pool.slots(range(8))) == [True] * 8
    assert sorted(removed[:8]) == sorted(keys)
    assert (storage.stats().pages, storage.stats().backing_off) == (8, False)
    storage.check_integrity()
    storage.close()


@pytest.mark.parametrize("name", ["lock", "gate"])
@pytest.mark.parametrize("put", [link_to_a_file, pipe, directory])
def test_a_lock_that_is_no_file_is_refused(tmp_path, fingerprint, name, put):
    FileStorage(tmp_path / "cache", fingerprint=fingerprint).close()
    path = tmp_path / "cache" / name
    path.unlink()
    put(str(path), 10)
    with pytest.raises(OSError, match=f"cannot be used as storage.*{name}"):
        FileStorage(tmp_path / "cache", fingerprint=fingerprint)
    assert os.listdir(tmp_path / "cache" / "writers") == []


def test_a_lock_that_becomes_a_link_is_not_followed(tmp_path, fingerprint, fake_pool, new_keys):
    storage, pool = FileStorage(tmp_path / "cache", fingerprint=fingerprint), fake_pool()
    storage.register_mem_pool_host(pool)
    (tmp_path / "cache" / "lock").unlink()
    (tmp_path / "cache" / "lock").symlink_to(tmp_path / "planted")
    assert storage.batch_set(new_keys(2), pool.slots(range(2))) == [False, False]
    assert not (tmp_path / "planted").exists()
    assert storage.stats().write_errors == 1
    storage.close()


@pytest.mark.parametrize(
    ("part", "mode", "advice"),
    [
        (".", 0o777, "o-w"),
        (".", 0o702, "o-w"),
        ("pages", 0o770, "go-w"),
        ("writers", 0o722, "go-w"),
        ("pages/7f", 0o777, "go-w"),
        ("lock", 0o666, "go-w"),
        ("gate", 0o620, "go-w"),
    ],
)
def test_a_directory_that_others_may_write_is_refused(tmp_path, fingerprint, part, mode, advice):
    FileStorage(tmp_path / "cache", fingerprint=fingerprint).close()
    path = os.path.normpath(tmp_path / "cache" / part)
    os.chmod(path, mode)
    with pytest.raises(PermissionError, match=f"{path} has mode 0{mode:o}.*run chmod {advice} on it"):
        FileStorage(tmp_path / "cache", fingerprint=fingerprint)
    assert stat.S_IMODE(os.stat(path).st_mode) == mode
    os.chmod(path, mode & ~0o022)
    FileStorage(tmp_path / "cache", fingerprint=fingerprint).close()


@needs_root
@pytest.mark.parametrize("part", [".", "pages", "writers", "pages/00", "lock"])
def test_a_directory_of_another_user_is_refused(tmp_path, fingerprint, part):
    FileStorage(tmp_path / "cache", fingerprint=fingerprint).close()
    path = os.path.normpath(tmp_path / "cache" / part)
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match=f"{path} belongs to user 65534, not to user 0 or root.*change the owner"):
        FileStorage(tmp_path / "cache", fingerprint=fingerprint)
    os.chown(path, 0, 0)
    FileStorage(tmp_path / "cache", fingerprint=fingerprint).close()


def test_processes_of_one_user_share_a_directory_that_the_group_may_write(tmp_path, fake_pool, new_keys):
    (tmp_path / "cache").mkdir()
    os.chmod(tmp_path / "cache", 0o2775)
    pool, keys = fake_pool(), new_keys(4)
    contents = pool.fill(range(4))
    first, second = (FileStorage(tmp_path / "cache", fingerprint=Fingerprint("m", "1")) for _ in range(2))
    for storage in (first, second):
        storage.register_mem_pool_host(pool)
    assert first.batch_set(keys, pool.slots(range(4))) == [True] * 4
    assert second.batch_get(keys, pool.slots(range(4, 8))) == [True] * 4
    assert [pool.read(page) for page in range(4, 8)] == contents
    first.close()
    second.close()


@pytest.mark.parametrize("umask", [0, 0o77, 0o277, 0o777])
def test_modes_are_0600_and_0700_whatever_the_umask(tmp_path, fingerprint, fake_pool, new_keys, umask):
    top = tmp_path / "a" / "b" / "c"
    before = os.umask(umask)
    try:
        storage = FileStorage(top, fingerprint=fingerprint, capacity_bytes=4 * 4096)
        pool = fake_pool()
        storage.register_mem_pool_host(pool)
        for _ in range(3):
            assert all(storage.batch_set(new_keys(3), pool.slots(range(3))))
    finally:
        os.umask(before)
    modes = {}
    for root, directories, files in os.walk(tmp_path):
        modes |= {os.path.join(root, name): 0o700 for name in directories}
        modes |= {os.path.join(root, name): 0o600 for name in files}
    assert {path: stat.S_IMODE(os.stat(path).st_mode) for path in modes} == modes
    storage.close()


def test_pages_of_an_older_format_are_removed_when_a_storage_is_opened(tmp_path, fingerprint, fake_pool, new_keys):
    storage, pool, keys = FileStorage(tmp_path, fingerprint=fingerprint), fake_pool(), new_keys(3)
    storage.register_mem_pool_host(pool)
    assert all(storage.batch_set(keys, pool.slots(range(3))))
    old, newer = (Path(storage.page_path(key)) for key in keys[:2])
    storage.close()
    data = bytearray(old.read_bytes())
    data[-120:-116] = (1).to_bytes(4, "little")
    old.write_bytes(data[:-FOOTER_BYTES] + data[-128:])  # as long as they were then
    data = bytearray(newer.read_bytes())
    data[-120:-116] = (99).to_bytes(4, "little")
    newer.write_bytes(data)
    storage = FileStorage(tmp_path, fingerprint=fingerprint)
    storage.register_mem_pool_host(pool)
    assert not old.exists()
    assert newer.exists()
    assert (storage.stats().old_format, storage.stats().pages) == (1, 2)
    assert storage.batch_get(keys, pool.slots(range(3))) == [False, False, True]
    storage.close()
