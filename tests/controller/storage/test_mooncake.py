"""MooncakeStorage against a real mooncake_master on loopback, with clients in other processes."""

import importlib.util
import itertools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hicache_controller.storage import StorageBackendFactory, mooncake
from hicache_controller.storage.mooncake import MooncakeStorage
from hicache_pools import NullPoolHost

PROGRAM = Path(__file__).parent / "mooncake_program.py"


class Clock:
    """Stands still, so that a pause lasts until the test ends it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def skip(self):
        self.now += 1000


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def new_storage(fingerprint, clock, own_master):
    """Makes storages that are closed before their master is killed."""
    opened = []

    def make(master, **options):
        options = {"fingerprint": fingerprint, "segment_bytes": 16 << 20, "clock": clock} | options
        opened.append(MooncakeStorage(master=master.address, **options))
        return opened[-1]

    yield make
    for storage in opened:
        storage.close()


@pytest.fixture
def storage(shared, fresh):
    return shared(fresh)


class Peer:
    """A client in another process."""

    def __init__(self, master, segment_bytes):
        command = [sys.executable, str(PROGRAM), master.address, str(segment_bytes)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def ask(self, command, keys):
        self.process.stdin.write(" ".join([command, *(key.hex() for key in keys)]) + "\n")
        self.process.stdin.flush()
        return [character == "1" for character in self.process.stdout.readline().strip()]

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def new_peer():
    peers = []

    def make(master, segment_bytes):
        peers.append(Peer(master, segment_bytes))
        return peers[-1]

    yield make
    for peer in peers:
        peer.kill()


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("mooncake_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def until(condition):
    """Try until it holds; Mooncake's clients come back within a heartbeat, a second or so."""
    gate = threading.Event()
    for _ in range(600):
        if condition():
            return True
        gate.wait(0.02)
    return False


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_two_processes_exchange_pages_bit_for_bit(new_storage, new_peer, own_master, program, new_keys):
    own_master.start()
    peer = new_peer(own_master, 32 << 20)
    pool = program.fake_pool()
    storage = new_storage(own_master, fingerprint=program.FINGERPRINT, segment_bytes=0)
    storage.register_mem_pool_host(pool)
    theirs, ours = new_keys(8), new_keys(8)
    assert peer.ask("set", theirs) == [True] * 8
    assert storage.batch_exists(theirs) == 8
    assert storage.batch_get(theirs, pool.slots(range(8, 16))) == [True] * 8
    assert [pool.read(8 + i) for i in range(8)] == [program.content(key) for key in theirs]
    for page, key in enumerate(ours):
        program.fill(pool, page, program.content(key))
    assert storage.batch_set(ours, pool.slots(range(8))) == [True] * 8
    assert peer.ask("get", [*ours, theirs[0], os.urandom(16)]) == [True] * 9 + [False]

    # All memory is the peer's: with it the pages go, whatever the master believes so far.
    peer.kill()
    assert storage.batch_get(ours, pool.slots(range(8))) == [False] * 8
    stats = storage.stats()
    assert (stats.read_errors, stats.misses, stats.backing_off) == (8, 8, True)
    assert storage.batch_get(ours, pool.slots(range(8))) == [False] * 8
    assert storage.stats().skipped == 8


def test_pages_come_back_and_are_counted(storage, fake_pool, new_keys):
    pool, keys = fake_pool(parts=4, pages=700), new_keys(300)  # more than one call takes
    storage.register_mem_pool_host(pool)
    contents = pool.fill(range(300))
    assert storage.batch_set(keys, pool.slots(range(300)), parents=[None, *keys[:-1]]) == [True] * 300
    assert storage.batch_exists([*keys, b"x"]) == 300
    assert storage.batch_exists([b"x", *keys]) == 0
    assert storage.batch_get([*keys, b"x"], pool.slots(range(350, 651))) == [True] * 300 + [False]
    assert [pool.read(page) for page in range(350, 650)] == contents
    pool.fill(range(300))
    assert storage.batch_set(keys[:2], pool.slots([0, 1])) == [True] * 2
    assert storage.batch_get(keys[:1], pool.slots([699])) == [True]
    assert pool.read(699) == contents[0]
    stats = storage.stats()
    assert (stats.stored, stats.present, stats.hits, stats.misses) == (300, 2, 301, 1)
    assert (stats.bytes_written, stats.bytes_read) == (300 * 1024, 301 * 1024)
    assert not stats.backing_off


def test_pages_that_are_asked_for_and_gone_are_reported(storage, fake_pool, new_keys):
    pool, keys, reported = fake_pool(), new_keys(4), []
    storage.register_mem_pool_host(pool)
    storage.set_removal_listener(lambda keys, name: reported.extend((name, key) for key in keys))
    assert all(storage.batch_set(keys, pool.slots(range(4))))
    storage._client.call_in_time("batch_remove", [storage.object_name(key) for key in keys[1:3]], True)
    assert reported == []
    assert storage.batch_get(keys, pool.slots(range(4))) == [True, False, False, True]
    assert reported == [("kv", key) for key in keys[1:3]]


def flipped(data):
    at = int.from_bytes(os.urandom(8), "little") % (8 * (len(data) - 120))
    at += 8 * 120 if at >= 8 * 1024 else 0  # not in the footer's first fields, which say what else may be wrong
    return data[: at // 8] + bytes([data[at // 8] ^ 1 << at % 8]) + data[at // 8 + 1 :]


def of_version_0(data):
    return data[:-120] + bytes(4) + data[-116:]


@pytest.mark.parametrize(
    ("change", "counter"),
    [
        (flipped, "damaged"),
        (lambda data: data[:-1], "damaged"),
        (lambda data: data[:500], "damaged"),
        (lambda data: data + b"x", "damaged"),
        (lambda data: os.urandom(len(data)), "damaged"),
        (of_version_0, "old_format"),
        (None, "foreign"),
    ],
    ids=["flipped", "a byte less", "half", "a byte more", "noise", "older", "of another key"],
)
def test_a_page_that_is_not_what_it_should_be_is_a_miss_counted_and_stored_again(
    storage, fake_pool, new_keys, change, counter
):
    pool, keys, reported = fake_pool(parts=2), new_keys(3), []
    storage.register_mem_pool_host(pool)
    storage.set_removal_listener(lambda keys, name: reported.extend((name, key) for key in keys))
    contents = pool.fill(range(3))
    assert all(storage.batch_set(keys, pool.slots(range(3))))
    names = [storage.object_name(key) for key in keys]
    good = storage._client.call("get", names[1])
    wrong = storage._client.call("get", names[0]) if change is None else change(good)
    assert storage._client.call("remove", names[1], True) == 0
    assert storage._client.call("put", names[1], wrong) == 0
    assert storage.batch_get(keys, pool.slots(range(10, 13))) == [True, False, True]
    assert reported == [("kv", keys[1])]
    assert [pool.read(10), pool.read(12)] == [contents[0], contents[2]]
    stats = storage.stats()
    assert (getattr(stats, counter), stats.misses, stats.read_errors) == (1, 1, 0)
    assert storage.batch_exists(keys) == 1
    assert storage.batch_set(keys, pool.slots(range(3))) == [True] * 3
    assert storage.batch_get(keys, pool.slots(range(10, 13))) == [True] * 3
    assert pool.read(11) == contents[1]


def test_a_page_without_its_head_is_refused(storage, fake_pool, new_keys, monkeypatch):
    pool, keys = fake_pool(), new_keys(4)
    storage.register_mem_pool_host(pool)
    parents = [None, *keys[:-1]]
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_move", None)  # nor is it ever there for others to see
        assert storage.batch_set(keys[1:], pool.slots(range(3)), parents=parents[1:]) == [False] * 3
    assert storage.stats().orphans == 3
    assert storage.batch_exists(keys[1:2]) == 0
    assert storage.batch_set(keys[:1], pool.slots([0]), parents=[None]) == [True]
    assert storage.batch_set(keys[1:], pool.slots(range(3)), parents=parents[1:]) == [True] * 3


def test_a_page_whose_head_could_not_be_stored_goes_again(storage, fake_pool, new_keys, monkeypatch):
    pool, keys = fake_pool(), new_keys(3)
    storage.register_mem_pool_host(pool)
    call = storage._client.call

    def without_the_first(method, *arguments):
        codes = call(method, *arguments)
        if method == "batch_put_from_multi_buffers":
            call("remove", arguments[0][0], True)
            return [-800, *codes[1:]]
        return codes

    monkeypatch.setattr(storage._client, "call", without_the_first)
    assert storage.batch_set(keys, pool.slots(range(3)), parents=[None, *keys[:-1]]) == [False] * 3
    monkeypatch.undo()
    assert [storage.batch_exists([key]) for key in keys] == [0, 0, 0]
    stats = storage.stats()
    assert (stats.write_errors, stats.orphans, stats.stored) == (1, 2, 0)


def must_not_be_called(*_):
    """Mooncake's setup holds the interpreter's lock for seconds where no master answers."""
    raise AssertionError("Mooncake was set up without a master that answers")


def test_a_master_that_is_down_at_the_start_is_found_later(
    new_storage, own_master, fake_pool, new_keys, clock, caplog, monkeypatch
):
    set_up = mooncake.MooncakeClient._set_up
    monkeypatch.setattr(mooncake.MooncakeClient, "_set_up", must_not_be_called)
    storage, pool, keys = new_storage(own_master), fake_pool(), new_keys(3)
    storage.register_mem_pool_host(pool)
    for _ in range(3):
        assert storage.batch_exists(keys) == 0
        assert storage.batch_get(keys, pool.slots(range(3))) == [False] * 3
        assert storage.batch_set(keys, pool.slots(range(3))) == [False] * 3
        storage.clear()
    assert (storage.stats().skipped, storage.stats().backing_off) == (27, True)
    clock.skip()
    assert not storage.wait_ready(10)
    assert len(warnings(caplog)) == 1
    monkeypatch.setattr(mooncake.MooncakeClient, "_set_up", set_up)
    own_master.start()
    assert not storage.wait_ready(10)  # it is too early to try again
    clock.skip()
    assert storage.wait_ready(10)
    contents = pool.fill(range(3))
    assert storage.batch_set(keys, pool.slots(range(3))) == [True] * 3
    assert storage.batch_get(keys, pool.slots(range(9, 12))) == [True] * 3
    assert [pool.read(9 + i) for i in range(3)] == contents
    assert not storage.stats().backing_off


def test_a_master_killed_in_the_middle_is_picked_up_again(new_storage, own_master, fake_pool, new_keys, clock, caplog):
    own_master.start()
    storage, pool, keys = new_storage(own_master), fake_pool(), new_keys(3)
    storage.register_mem_pool_host(pool)
    slots = pool.slots(range(3))
    calls = [
        lambda: storage.batch_exists(keys) == 0,
        lambda: storage.batch_get(keys, slots) == [False] * 3,
        lambda: storage.batch_set(keys, slots) == [False] * 3,
    ]

    def stores():
        clock.skip()  # the store has no memory until its clients have reported theirs to the new master
        return storage.batch_set(keys, slots) == [True] * 3

    for number, call in enumerate(calls, 1):
        assert until(stores)
        before = storage.stats()
        caplog.clear()
        own_master.kill()
        assert call()
        after = storage.stats()
        assert after.skipped == before.skipped
        assert after.read_errors + after.write_errors == before.read_errors + before.write_errors + 1
        assert all(again() for again in calls * 5)
        assert storage.stats().skipped == before.skipped + 45  # the master was not asked
        assert storage.stats().backing_off
        clock.skip()
        assert not storage.wait_ready(10)
        assert all(again() for again in calls)
        assert len(warnings(caplog)) == 1, number
        own_master.start()
        clock.skip()
        assert storage.wait_ready(10)
        assert until(stores)
        contents = pool.fill(range(3))
        storage.clear()
        assert storage.batch_set(keys, slots) == [True] * 3
        assert storage.batch_get(keys, pool.slots(range(9, 12))) == [True] * 3
        assert [pool.read(9 + i) for i in range(3)] == contents


def test_a_master_that_hangs_costs_one_deadline(
    new_storage, own_master, fake_pool, new_keys, clock, caplog, monkeypatch
):
    own_master.start()
    storage, pool, keys = new_storage(own_master, deadline_seconds=3.0), fake_pool(), new_keys(2)
    storage.register_mem_pool_host(pool)
    assert storage.batch_set(keys, pool.slots(range(2))) == [True] * 2
    own_master.stop()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get(keys, pool.slots(range(2))) == [False] * 2
    assert (storage.stats().read_errors, storage.stats().skipped) == (1, 2)
    clock.skip()
    assert not storage.wait_ready(10)
    with monkeypatch.context() as patch:
        patch.setattr(mooncake.MooncakeClient, "_set_up", must_not_be_called)
        late = new_storage(own_master, deadline_seconds=0.3)
        assert not late.wait_ready(10)
    assert len(warnings(caplog)) == 2  # one each
    own_master.go_on()
    clock.skip()
    assert storage.wait_ready(10)
    assert late.wait_ready(10)
    assert storage.batch_exists(keys) == 2


def test_a_call_that_never_returns_is_left_behind(new_storage, own_master, fake_pool, new_keys, caplog):
    storage, gate, over, closed = new_storage(own_master, deadline_seconds=0.1), threading.Event(), [], []

    class Hanging:
        def batch_is_exist(self, names):
            gate.wait()
            over.append(names)
            return [1] * len(names)

        def close(self):
            closed.append(True)

    client = storage._client
    assert not storage.wait_ready(10)
    client._store = Hanging()
    storage.register_mem_pool_host(NullPoolHost(8, 2))
    assert storage.batch_exists(new_keys(2)) == 0
    assert storage.batch_exists(new_keys(2)) == 0
    stats = storage.stats()
    assert (stats.read_errors, stats.skipped) == (1, 2)
    storage.close()
    assert (over, closed) == ([], [])  # closing under a call would crash
    assert "a call hangs" in warnings(caplog)[-1]
    gate.set()


def test_a_full_store_takes_what_fits_and_goes_on(new_storage, own_master, fake_pool, clock, caplog):
    own_master.start()
    storage = new_storage(own_master, segment_bytes=16 << 20)
    pool = fake_pool(pages=8, page_size=1, page_bytes=1 << 20)
    storage.register_mem_pool_host(pool)
    contents = pool.fill(range(8))
    slots, stored, refused = pool.slots(range(8)), [], []
    for number in itertools.count():
        keys = [bytes([number, page]) for page in range(8)]
        done = storage.batch_set(keys, slots, parents=[None, *keys[:-1]])
        stored += [(key, page) for page, key in enumerate(keys) if done[page]]
        refused += [key for page, key in enumerate(keys) if not done[page]]
        assert sorted(done, reverse=True) == done
        if refused:
            break
    stats = storage.stats()
    assert 8 <= len(stored) < 16
    assert stats.no_room >= 1
    assert stats.stored == len(stored)
    assert (stats.skipped, stats.backing_off) == (0, True)
    assert storage.batch_set(refused, pool.slots(range(len(refused)))) == [False] * len(refused)
    assert storage.stats().skipped == len(refused)  # the master was not asked
    assert len(warnings(caplog)) == 1
    for key, page in stored:  # reading goes on
        if storage.batch_get([key], pool.slots([7])) == [True]:
            assert pool.read(7) == contents[page]
    storage.clear()
    clock.skip()
    assert until(lambda: storage.batch_set([b"new"], pool.slots([0])) == [True])
    assert not storage.stats().backing_off


def test_a_page_that_later_ones_of_its_call_push_out_does_not_count_as_stored(
    storage, fake_pool, new_keys, monkeypatch
):
    pool, keys = fake_pool(pages=300), new_keys(300)  # more than one call to Mooncake takes
    storage.register_mem_pool_host(pool)
    call, puts = storage._client.call, []

    def evicting(method, *arguments):
        if method == "batch_put_from_multi_buffers":
            if puts:
                call("batch_remove", puts[0][:2], True)
            puts.append(arguments[0])
        return call(method, *arguments)

    monkeypatch.setattr(storage._client, "call", evicting)
    assert storage.batch_set(keys, pool.slots(range(300))) == [False] * 2 + [True] * 298
    assert len(puts) == 2
    monkeypatch.undo()
    assert storage.batch_exists_each(keys) == [False] * 2 + [True] * 298


def test_a_master_that_is_lost_during_a_call_has_stored_nothing(storage, fake_pool, new_keys, monkeypatch):
    pool, keys = fake_pool(pages=300), new_keys(300)
    storage.register_mem_pool_host(pool)
    call, puts, losses = storage._client.call, [], []

    def lost(method, *arguments):
        puts.extend([method] * (method == "batch_put_from_multi_buffers"))
        return [-900] * len(arguments[0]) if len(puts) == 2 else call(method, *arguments)

    monkeypatch.setattr(storage._client, "call", lost)
    monkeypatch.setattr(storage._client, "lost", losses.append)  # the connection is that of other tests
    assert storage.batch_set(keys, pool.slots(range(300))) == [False] * 300
    assert len(losses) == 1


def test_wrong_arguments_say_so(storage, fake_pool, fresh):
    for options, message in [
        ({"master": "somewhere"}, "master is 'somewhere'"),
        ({"segment_bytes": -1}, "segment_bytes is -1"),
        ({"deadline_seconds": 0}, "deadline_seconds is 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            StorageBackendFactory.create("mooncake", fingerprint=fresh, **options)
    pool = fake_pool()
    del pool.buffer
    with pytest.raises(TypeError, match="lacks buffer"):
        storage.register_mem_pool_host(pool)
    with pytest.raises(KeyError, match="registered pools: none"):
        storage.batch_exists([b"k"])


def test_a_closed_storage_has_left_and_says_so(new_storage, shared_master, fake_pool):
    storage, pool = new_storage(shared_master), fake_pool()
    storage.register_mem_pool_host(pool)
    inner, left = storage._client._store, []

    class Watched:
        def unregister_buffer(self, address):
            left.append(address)
            return inner.unregister_buffer(address)

        def close(self):
            left.append("closed")
            return inner.close()

    storage._client._store = Watched()
    storage.close()
    storage.close()
    assert pool.buffer.data_ptr() in left
    assert len(left) == 3
    assert left[-1] == "closed"
    with pytest.raises(RuntimeError, match="closed"):
        storage.batch_exists([b"k"])


def test_without_the_package_the_error_says_what_to_install(monkeypatch, fresh):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ImportError, match=r"hicache-controller\[mooncake\]"):
        MooncakeStorage(fingerprint=fresh)
