"""Reading pages, compiled and in Python: the same outcomes, and no call waits for the module."""

import ctypes
import errno
import logging
import mmap
import os
import platform
import sys
import types

import pytest
import xxhash

from hicache_controller.storage import FileStorage, page_file, page_reader, xxh3
from hicache_controller.storage.io_threads import IoThreads
from hicache_controller.storage.page_file import Outcome, PageId
from hicache_controller.storage.page_reader import PageRequest, compiled_reads, read_pages
from hicache_kernels import files, probe
from hicache_kernels.probe import LoadOutcome

SIZE = 100_000


@pytest.fixture
def threads():
    made = IoThreads(3)
    yield made
    made.shutdown()


@pytest.fixture
def read(threads, reading):
    """Reads pages."""
    assert compiled_reads() == (reading == "compiled")
    return lambda requests: read_pages(threads, requests)


@pytest.fixture
def request_of(tmp_path):
    """Writes a page and asks for it; the bytes it has, and those that are to have them."""

    def make(name, size=SIZE):
        path, payload = str(tmp_path / name), os.urandom(size)
        page = PageId(b"key", bytes(range(16)), size)
        page_file.write_page(path, [memoryview(payload)], page, parent=None)
        back = memoryview(bytearray(size))
        return PageRequest(path, lambda: (back[: size // 3], back[size // 3 :]), page), payload, back

    return make


@pytest.mark.parametrize("size", [0, 1, 128, SIZE, 3 << 20])
def test_pages_come_back_with_the_time_of_their_files(read, request_of, size):
    pages = [request_of(str(i), size) for i in range(7)]
    found = read([page[0] for page in pages])
    assert found == [(Outcome.HIT, os.stat(request.path).st_mtime_ns) for request, _, _ in pages]
    assert [payload for _, payload, _ in pages] == [bytes(back) for _, _, back in pages]


def flip(position):
    def change(path):
        with open(path, "r+b") as file:
            file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))

    return change


def pipe(path):
    os.unlink(path)
    os.mkfifo(path)


def link(path):
    os.rename(path, path + "x")
    os.symlink(path + "x", path)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (os.unlink, Outcome.MISSING),
        (flip(0), Outcome.DAMAGED),
        (flip(SIZE - 1), Outcome.DAMAGED),
        (flip(-1), Outcome.DAMAGED),
        (flip(-17), Outcome.DAMAGED),
        (lambda path: os.truncate(path, SIZE), Outcome.DAMAGED),
        (lambda path: os.truncate(path, 0), Outcome.DAMAGED),
        (pipe, Outcome.FOREIGN),
        (link, OSError),
    ],
)
def test_a_bad_page_among_good_ones_is_reported(read, request_of, change, outcome):
    pages = [request_of(str(i)) for i in range(3)]
    change(pages[1][0].path)
    first, bad, last = read([page[0] for page in pages])
    assert (first.outcome, last.outcome) == (Outcome.HIT, Outcome.HIT)
    if outcome is OSError:
        assert isinstance(bad, OSError)
        assert bad.filename == pages[1][0].path
    else:
        assert bad.outcome is outcome
    assert [bytes(pages[i][2]) for i in (0, 2)] == [pages[i][1] for i in (0, 2)]


def test_pages_of_another_key_format_and_owner_are_reported(read, request_of, monkeypatch):
    request = request_of("page")[0]
    for other in ({"key": b"other"}, {"fingerprint": bytes(16)}):
        another = request._replace(page=request.page._replace(**other))
        assert read([another])[0].outcome is Outcome.FOREIGN
    with monkeypatch.context() as another:
        user = os.geteuid()
        another.setattr(os, "geteuid", lambda: user + 1)
        assert read([request])[0].outcome is Outcome.WRONG_OWNER
    with open(request.path, "r+b") as file:
        file.seek(-120, os.SEEK_END)
        file.write(b"\x09")
    assert read([request])[0].outcome is Outcome.OLD_FORMAT


def test_good_pages_take_no_second_look(read, request_of, reading, monkeypatch):
    looks = []
    real = page_reader.read_page
    monkeypatch.setattr(page_reader, "read_page", lambda *args, **how: looks.append(args) or real(*args, **how))
    assert all(found.outcome is Outcome.HIT for found in read([request_of(str(i))[0] for i in range(5)]))
    assert len(looks) == (5 if reading == "python" else 0)


@pytest.mark.parametrize("reading", ["compiled"], indirect=True)
def test_files_that_are_missing_or_fail_take_no_second_look(read, request_of, monkeypatch):
    requests = [request_of(name)[0] for name in ("missing", "failing")]
    os.unlink(requests[0].path)
    link(requests[1].path)
    monkeypatch.setattr(page_reader, "read_page", lambda *args, **how: pytest.fail("a slow disk is asked again"))
    missing, failing = read(requests)
    assert missing.outcome is Outcome.MISSING
    assert (failing.errno, failing.filename) == (errno.ELOOP, requests[1].path)


@pytest.mark.parametrize("reading", ["compiled"], indirect=True)
def test_pages_are_read_in_python_until_the_module_is_there(threads, request_of, reading, monkeypatch):
    outcomes = iter([None])  # while it is being made: no call waits
    monkeypatch.setattr(page_reader, "load_outcome_so_far", lambda name, device_type: next(outcomes))
    monkeypatch.setattr(page_reader, "read_files", lambda *args, **how: pytest.fail("not loaded yet"))
    request, payload, back = request_of("page")
    assert read_pages(threads, [request])[0].outcome is Outcome.HIT
    assert bytes(back) == payload


@pytest.mark.parametrize("reading", ["compiled"], indirect=True)
@pytest.mark.parametrize("mapped", [0, 1, 2])
def test_the_memory_of_every_page_stays_mapped_while_compiled_code_writes_there(read, request_of, monkeypatch, mapped):
    requests = [request_of(str(i))[0] for i in range(3)]
    memory = mmap.mmap(-1, SIZE)
    requests[mapped] = requests[mapped]._replace(memory=lambda: (memoryview(memory),))
    entry, tried = files._function(), []

    def unmapped_meanwhile(*arguments):
        with pytest.raises(BufferError):
            memory.close()
        tried.append(mapped)
        entry(*arguments)

    monkeypatch.setattr(files, "_function", lambda: unmapped_meanwhile)
    assert [found.outcome for found in read(requests)] == [Outcome.HIT] * 3
    assert tried == [mapped]
    memory.close()


def test_statistics_tell_how_a_storage_reads(tmp_path, fingerprint, reading):
    storage = FileStorage(tmp_path, fingerprint=fingerprint)
    assert storage.stats().compiled_reads == (reading == "compiled")
    storage.close()


@pytest.mark.parametrize("missing", ["module", "xxhash"])
def test_a_storage_without_compiled_reads_says_so_once_and_works(
    tmp_path, fingerprint, fake_pool, new_keys, monkeypatch, caplog, missing
):
    reason = "no g++ found" if missing == "module" else "this build of xxhash does not show its C functions"
    outcome = LoadOutcome(None, reason) if missing == "module" else LoadOutcome(object(), None)
    monkeypatch.setattr(page_reader, "load_outcome_so_far", lambda name, device_type: outcome)
    monkeypatch.setattr(page_reader, "xxh3_checksum", lambda: None)
    probe.warn_once.cache_clear()
    pool, keys = fake_pool(), new_keys(4)
    contents = pool.fill(range(4))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            storage = FileStorage(tmp_path, fingerprint=fingerprint)
            storage.register_mem_pool_host(pool)
            assert all(storage.batch_set(keys, pool.slots(range(4))))
            assert storage.batch_get(keys, pool.slots(range(4, 8))) == [True] * 4
            assert [pool.read(page) for page in range(4, 8)] == contents
            assert not storage.stats().compiled_reads
            storage.close()
    probe.warn_once.cache_clear()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"pages of files are read one by one in Python, which is slower: {reason}"]


@pytest.fixture
def fresh():
    xxh3.xxh3_checksum.cache_clear()
    yield
    xxh3.xxh3_checksum.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_the_checksum_of_xxhash_is_found():
    assert xxh3.xxh3_checksum() is not None
    data = os.urandom(1000)
    number = xxhash.xxh3_128_intdigest(data)
    halves = [ctypes.c_int64(half).value for half in (number, number >> 64)]
    assert xxh3.digest_of(*halves) == xxhash.xxh3_128_digest(data)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("hidden", ["module", "symbols", "other sums"])
def test_a_build_of_xxhash_that_does_not_show_its_functions_is_not_used(monkeypatch, hidden):
    if hidden == "module":
        monkeypatch.delitem(sys.modules, "xxhash._xxhash")
    elif hidden == "symbols":
        monkeypatch.setattr(ctypes, "PyDLL", lambda path: object())
    else:
        monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda data: bytes(16))
    assert xxh3.xxh3_checksum() is None


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("machine", "shown", "warnings"), [("x86_64", 0, 1), ("x86_64", 1, 0), ("aarch64", 0, 0)])
def test_a_build_of_xxhash_without_the_faster_function_is_used_and_said_once(
    monkeypatch, caplog, machine, shown, warnings
):
    real = ctypes.PyDLL(sys.modules["xxhash._xxhash"].__file__)
    names = ["createState", "128bits_reset", "128bits_update", "128bits_digest", "freeState"]
    functions = {f"XXH3_{name}": getattr(real, f"XXH3_{name}") for name in names}
    if shown:
        functions["XXH3_128bits_update_dispatch"] = real.XXH3_128bits_update
    monkeypatch.setattr(ctypes, "PyDLL", lambda path: types.SimpleNamespace(**functions))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert xxh3.xxh3_checksum() is not None
    assert xxh3.xxh3_checksum().update == ctypes.cast(real.XXH3_128bits_update, ctypes.c_void_p).value
    words = f"xxhash {xxhash.VERSION} lacks the checksum for this CPU, so files are summed up slowly"
    assert [record.getMessage() for record in caplog.records] == [words] * warnings
