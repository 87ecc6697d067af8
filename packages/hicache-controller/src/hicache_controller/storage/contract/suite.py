"""What every storage backend has to do, as tests that a backend's own test class inherits."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

import pytest
import torch

from hicache_pools import MHATokenToKVPool, MHATokenToKVPoolHost, NullPoolHost, PoolHitPolicy, PoolTransfer

from ..base import MAX_KEY_BYTES, HiCacheStorage
from ..fingerprint import Fingerprint
from .byte_pool import BytePool

Open = Callable[..., HiCacheStorage]


class OpenStorage(Protocol):
    """Opens a storage; every call opens the same medium, which is empty at the first."""

    def __call__(self, fingerprint: Fingerprint, *, room: int | None = None) -> HiCacheStorage:
        """Open a storage for the pages of ``fingerprint``, with room for ``room`` pages of 1024 bytes in all."""


class StorageContract:
    """Tests that every storage backend passes.

    Subclass it, give it a fixture ``open_storage`` that returns an :class:`OpenStorage`, and set the attributes below
    where the backend does less. Every test opens what it needs and closes it.

    Attributes
    ----------
    KEEPS_PAGES
        Whether pages outlive the object that stored them: another one on the same medium finds them.
    HAS_CAPACITY
        Whether ``open_storage`` obeys ``room``, and the storage itself decides what to evict.
    """

    KEEPS_PAGES: ClassVar[bool] = True
    HAS_CAPACITY: ClassVar[bool] = True

    def damage(self, storage: HiCacheStorage, key: bytes, name: str) -> None:
        """Change a bit of what the medium has of a page of pool ``name``; override it where that can be done."""
        pytest.skip("this backend's medium cannot be damaged by a test")

    def check(self, storage: HiCacheStorage) -> None:
        """Check the storage's own invariants; called before it is closed."""

    # What tests use

    @pytest.fixture
    def open_storage(self) -> OpenStorage:
        """Return a function that opens a storage; a backend's class overrides this."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture open_storage")

    @pytest.fixture
    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of a model that no other test has."""
        return Fingerprint("org/model", os.urandom(8).hex())

    @pytest.fixture
    def opened(self, open_storage: OpenStorage, fingerprint: Fingerprint) -> Iterator[Open]:
        """Open storages that are checked and closed after the test."""
        storages: list[HiCacheStorage] = []

        def open_one(of: Fingerprint = fingerprint, **options: Any) -> HiCacheStorage:
            storages.append(open_storage(of, **options))
            return storages[-1]

        yield open_one
        for storage in storages:
            self.check(storage)
            storage.close()

    @pytest.fixture
    def storage(self, opened: Open) -> HiCacheStorage:
        """Return an empty storage."""
        return opened()

    @pytest.fixture
    def pool(self, storage: HiCacheStorage) -> BytePool:
        """Return a pool that is registered with ``storage`` as ``kv``."""
        return _pool_of(storage)

    # Pages and keys

    @pytest.mark.parametrize("parts", [1, 4, 64])
    def test_pages_come_back_bit_for_bit(self, storage: HiCacheStorage, parts: int) -> None:
        pool, keys = _pool_of(storage, page_bytes=64 * 1024, parts=parts), _keys(6)
        assert storage.batch_exists(keys) == 0
        contents = _store(storage, pool, keys)
        assert _load(storage, pool, keys) == contents
        assert [pool.read(page) for page in range(6)] == contents

    @pytest.mark.parametrize("length", [1, 16, 32, 33, 36, MAX_KEY_BYTES])
    def test_keys_have_up_to_64_bytes(self, storage: HiCacheStorage, pool: BytePool, length: int) -> None:
        keys = [bytes([i]) + os.urandom(length - 1) for i in range(3)] + [os.urandom(MAX_KEY_BYTES)]
        contents = _store(storage, pool, keys)
        assert storage.batch_exists(keys) == 4
        assert _load(storage, pool, keys) == contents
        assert _load(storage, pool, [bytes([key[0] ^ 0x80]) + key[1:] for key in keys]) == [None] * 4

    def test_an_empty_batch_is_accepted(self, storage: HiCacheStorage, pool: BytePool) -> None:
        empty = pool.slots([])
        assert storage.batch_set([], empty) == storage.batch_get([], empty) == storage.batch_exists_each([]) == []
        assert storage.batch_exists([]) == 0

    def test_a_page_that_is_absent_is_not_loaded_and_touches_no_other(
        self, storage: HiCacheStorage, pool: BytePool
    ) -> None:
        keys = _keys(3)
        contents = _store(storage, pool, keys[:1])
        before = contents + pool.fill(range(1, pool.page_num))
        assert _load(storage, pool, keys) == [*contents, None, None]
        assert [pool.read(page) for page in range(pool.page_num - 3)] == before[:-3]

    def test_a_page_that_is_there_keeps_its_bytes(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys = _keys(2)
        contents = _store(storage, pool, keys)
        _store(storage, pool, keys)
        assert _load(storage, pool, keys) == contents
        assert (storage.stats().stored, storage.stats().present) == (2, 2)

    def test_a_page_whose_parent_is_not_stored_is_refused(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys = _keys(3)
        assert storage.batch_set(keys[1:], pool.slots([1, 2]), parents=keys[:2]) == [False, False]
        assert storage.batch_exists_each(keys) == [False] * 3
        _store(storage, pool, keys[:1])
        assert storage.batch_set(keys[1:], pool.slots([1, 2]), parents=keys[:2]) == [True, True]
        assert storage.stats().orphans == 2
        with pytest.raises(ValueError, match="parents has 1 entries for 2 keys"):
            storage.batch_set(keys[:2], pool.slots([0, 1]), parents=[None])

    # Lookups

    def test_exists_counts_leading_pages(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys = _keys(6)
        _store(storage, pool, [keys[i] for i in (0, 1, 2, 4)])
        assert [storage.batch_exists(keys[i:]) for i in range(6)] == [3, 2, 1, 0, 1, 0]
        assert storage.batch_exists_each(keys) == [True, True, True, False, True, False]

    def test_pages_of_pools_are_told_apart(self, storage: HiCacheStorage) -> None:
        keys, there = _keys(20), {}
        for name in ("kv", "mamba"):
            there[name] = [byte % 2 == 1 for byte in os.urandom(20)]
            stored = [key for key, stores in zip(keys, there[name], strict=True) if stores]
            _store(storage, _pool_of(storage, name), stored, name)
        assert {name: storage.batch_exists_each(keys, name=name) for name in there} == there
        with pytest.raises(KeyError, match="registered pools: kv, mamba"):
            storage.batch_exists_each(keys, name="swa")

    def test_restorable_lengths_respect_every_pool(self, storage: HiCacheStorage) -> None:
        """Attention at 0 to 5, a window of two pages at 0, 1, 2, 4, 5, states after 1, 2, 3 and 5."""
        keys = _keys(8)
        for name, present in {"kv": range(6), "swa": [0, 1, 2, 4, 5, 6], "mamba": [1, 2, 3, 5, 7]}.items():
            _store(storage, _pool_of(storage, name), [keys[i] for i in present], name)
        window = PoolTransfer("swa", keys=keys[:2], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        state = PoolTransfer("mamba", hit_policy=PoolHitPolicy.TRAILING_PAGES)
        assert storage.restorable_lengths(keys) == [1, 2, 3, 4, 5, 6]
        assert storage.restorable_lengths(keys, [window]) == [1, 2, 3, 6]
        assert storage.restorable_lengths(keys, [window, state]) == [2, 3, 6]
        assert storage.restorable_lengths(keys, [PoolTransfer("swa"), state]) == [2, 3]
        assert storage.restorable_lengths(keys[6:], [state]) == storage.restorable_lengths([]) == []
        assert storage.batch_exists_pools(keys, [window, state]) == 6
        assert storage.batch_exists_pools(keys[6:], [state]) == 0

    # Several pools, formats and models

    def test_several_pools_move_in_one_call(self, storage: HiCacheStorage, pool: BytePool) -> None:
        state, keys = _pool_of(storage, "mamba", page_size=1, page_bytes=300), _keys(5)
        contents = pool.fill(range(5)), state.fill([7])

        def transfers(pages: range, page: int) -> list[PoolTransfer]:
            return [
                PoolTransfer("kv", host_indices=pool.slots(pages), keys=keys),
                PoolTransfer("mamba", host_indices=state.slots([page]), keys=keys[4:]),
            ]

        everything = {"kv": [True] * 5, "mamba": [True]}
        parents = dict(zip(keys, _parents(keys), strict=True))
        assert storage.batch_set_pools(transfers(range(5), 7), parents=parents) == everything
        assert storage.batch_get_pools(transfers(range(10, 15), 9)) == everything
        assert ([pool.read(page) for page in range(10, 15)], [state.read(9)]) == contents
        with pytest.raises(ValueError, match="pool 'kv' has no keys"):
            storage.batch_get_pools([PoolTransfer("kv", host_indices=pool.slots([0]))])

    def test_a_pool_without_bytes_has_pages_by_name(self, storage: HiCacheStorage) -> None:
        keys = _keys(4)
        storage.register_mem_pool_host(NullPoolHost(8, 2))
        assert storage.batch_set(keys, torch.arange(8)) == [True] * 4
        assert storage.batch_get([*keys, b"x"], torch.arange(10) % 8) == [True] * 4 + [False]

    @pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
    def test_pages_of_a_real_pool_come_back(self, storage: HiCacheStorage, layout: str) -> None:
        layers = [torch.zeros(64, 2, 8, dtype=torch.uint8) for _ in range(4)]
        device = MHATokenToKVPool.from_buffers(k=layers[:2], v=layers[2:], page_size=4)
        pool = MHATokenToKVPoolHost(device, 2.0, 0, 4, layout=layout, pin_memory=False)
        storage.register_mem_pool_host(pool)
        pool.buffer.random_(0, 255)
        before = [pool.read_page(page) for page in range(5)]
        keys, slots = _keys(5), torch.arange(20)
        assert storage.batch_set(keys, slots) == [True] * 5
        assert storage.batch_get(keys, slots + 40) == [True] * 5
        assert all(torch.equal(pool.read_page(10 + i), page) for i, page in enumerate(before))
        storage.close()
        pool.destroy()

    def test_another_storage_finds_the_pages(self, opened: Open) -> None:
        self._skip_unless(self.KEEPS_PAGES)
        keys, first, second = _keys(6), opened(), opened()
        pool = _pool_of(second)
        contents = _store(first, _pool_of(first), keys)
        assert _load(second, pool, keys) == contents
        first.close()
        second.close()
        third = opened()
        assert _load(third, _pool_of(third), keys) == contents

    @pytest.mark.parametrize(
        "change",
        [
            {"model": "org/other"},
            {"revision": "another"},
            {"weights_hash": "1"},
            {"tp_rank": 1},
            {"tp_size": 4},
            {"pp_size": 2},
            {"extra": (("rope", "2"),)},
        ],
    )
    def test_another_model_or_rank_finds_none_of_the_pages(
        self, opened: Open, fingerprint: Fingerprint, change: dict[str, Any]
    ) -> None:
        self._skip_unless(self.KEEPS_PAGES)
        fields: dict[str, Any] = {"model": "org/model", "revision": fingerprint.revision, "tp_size": 2}
        mine, other, keys = opened(Fingerprint(**fields)), opened(Fingerprint(**fields | change)), _keys(2)
        pool, others = _pool_of(mine), _pool_of(other)
        contents = _store(mine, pool, keys)
        assert other.batch_exists_each(keys) == [False, False]
        assert _load(other, others, keys) == [None, None]
        other.clear()
        assert _load(mine, pool, keys) == contents

    @pytest.mark.parametrize(
        "change", [{"layout": "layer_first"}, {"dtypes": ("int8",)}, {"layers": 4}, {"components": (("kv", 128),)}]
    )
    def test_another_format_of_the_same_size_is_never_loaded(self, opened: Open, change: dict[str, Any]) -> None:
        storage, keys = opened(), _keys(2)
        contents = _store(storage, _pool_of(storage), keys)
        with pytest.raises(ValueError, match="another pool"):
            _pool_of(storage, **change)
        if not self.KEEPS_PAGES:
            return
        other, same = opened(), opened()
        pool = _pool_of(other, **change)
        assert other.batch_exists_each(keys) == [False, False]
        assert _load(other, pool, keys) == [None, None]
        assert _load(same, _pool_of(same), keys) == contents

    # Damage, removal and capacity

    def test_a_damaged_page_is_a_miss_and_is_stored_again(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys, removed = _keys(4), _removals(storage)
        contents: list[bytes | None] = [*_store(storage, pool, keys)]
        self.damage(storage, keys[2], "kv")
        assert _load(storage, pool, keys) == [*contents[:2], None, contents[3]]
        assert removed == [keys[2]]
        assert storage.batch_exists_each(keys) == [True, True, False, True]
        assert storage.batch_set(keys, pool.slots(range(4))) == [True] * 4
        assert _load(storage, pool, keys) == contents

    def test_clear_removes_every_page(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys = _keys(5)
        _store(storage, pool, keys)
        storage.clear()
        assert storage.batch_exists_each(keys) == [False] * 5
        assert _load(storage, pool, keys) == [None] * 5
        _store(storage, pool, keys)

    @pytest.mark.parametrize("with_parents", [False, True])
    def test_what_a_call_answers_as_stored_is_there(self, opened: Open, with_parents: bool) -> None:
        """Twice as many pages as there is room for, some of which are there already."""
        self._skip_unless(self.HAS_CAPACITY)
        storage, keys = opened(room=10), _keys(20)
        pool = _pool_of(storage)
        contents = pool.fill(range(20))
        for first, count in ((0, 1), (3, 4), (0, 12), (5, 15), (0, 20), (10, 10), (19, 1)):
            these = slice(first, first + count)
            parents = _parents(keys)[these] if with_parents else None
            stored = storage.batch_set(keys[these], pool.slots(range(first, first + count)), parents=parents)
            assert stored == storage.batch_exists_each(keys[these])
            assert with_parents or stored.count(True) >= min(count, 10)
            expected = [page if done else None for page, done in zip(contents[these], stored, strict=True)]
            assert _load(storage, pool, keys[these]) == expected

    def test_pages_that_made_room_for_another_pool_are_not_answered_as_stored(self, opened: Open) -> None:
        self._skip_unless(self.HAS_CAPACITY)
        storage, keys = opened(room=6), {"kv": _keys(4), "mamba": _keys(4)}
        pools = {name: _pool_of(storage, name) for name in keys}
        transfers = [PoolTransfer(name, host_indices=pools[name].slots(range(4)), keys=keys[name]) for name in keys]
        stored = storage.batch_set_pools(transfers)
        assert stored == {name: storage.batch_exists_each(keys[name], name=name) for name in keys}
        assert (stored["kv"].count(True), stored["mamba"]) == (2, [True] * 4)

    def test_eviction_keeps_capacity_and_heads_and_is_reported(self, opened: Open) -> None:
        """Prefixes of random lengths that share their heads: no page is there without those before it."""
        self._skip_unless(self.HAS_CAPACITY)
        storage, rng = opened(room=8), random.Random(os.urandom(8))
        pool, removed = _pool_of(storage), _removals(storage)
        tree, contents = [_keys(6) for _ in range(3)], {}
        for _ in range(30):
            keys = rng.choice(tree)[: rng.randint(1, 6)]
            for key, content in zip(keys, pool.fill(range(len(keys))), strict=True):
                if not storage.batch_exists([key]):
                    contents[key] = content
            storage.batch_set(keys, pool.slots(range(len(keys))), parents=_parents(keys))
            there = [storage.batch_exists_each(prefix) for prefix in tree]
            assert all(sorted(each, reverse=True) == each for each in there)
            assert sum(map(sum, there)) <= 8
            for key in keys:  # so that the tail is used last
                assert _load(storage, pool, [key])[0] in (contents[key], None)
        assert len(removed) == storage.stats().evicted > 0

    # Threads, forks and the end

    def test_threads_store_and_load_at_once(self, storage: HiCacheStorage) -> None:
        pool, shared, wrong = _pool_of(storage, page_bytes=4096), _keys(4), []
        contents = pool.fill(range(32))

        def work(lane: int) -> None:
            own, back = range(lane * 4, lane * 4 + 4), range(32 + lane * 4, 36 + lane * 4)
            for _ in range(10):
                keys = _keys(4)
                stored = storage.batch_set(keys, pool.slots(own), parents=_parents(keys))
                storage.batch_set(shared, pool.slots(range(4)))
                loaded = storage.batch_get(keys, pool.slots(back))
                same = [pool.read(page) for page in back] == contents[own.start : own.stop]
                if not (all(stored) and all(loaded) and same):
                    wrong.append((stored, loaded, same))

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        assert not wrong

    def test_a_forked_child_is_refused_and_the_parent_goes_on(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys = _keys(2)
        contents = _store(storage, pool, keys)
        uses: tuple[Callable[[], object], ...] = (
            lambda: storage.batch_exists(keys),
            lambda: storage.clear(),
            lambda: storage.stats(),
            lambda: storage.close(),
        )
        for use in uses:
            assert _in_child(use).startswith(f"RuntimeError: this {type(storage).__name__} was made before a fork")
        assert _load(storage, pool, keys) == contents

    def test_a_closed_storage_says_so(self, storage: HiCacheStorage, pool: BytePool) -> None:
        storage.close()
        storage.close()
        for call in (
            lambda: storage.batch_get(_keys(1), pool.slots([0])),
            lambda: storage.batch_set(_keys(1), pool.slots([0])),
            lambda: storage.batch_exists(_keys(1)),
            storage.clear,
            lambda: storage.register_mem_pool_host(pool),
        ):
            with pytest.raises(RuntimeError, match="closed"):
                call()

    def _skip_unless(self, does: bool) -> None:
        if not does:
            pytest.skip("the class says that this backend does less")


def _keys(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def _parents(keys: list[bytes]) -> list[bytes | None]:
    return [None, *keys[:-1]]


def _pool_of(storage: HiCacheStorage, name: str = "kv", **options: Any) -> BytePool:
    """Make a pool, and register it."""
    pool = BytePool(**options)
    storage.register_mem_pool_host(pool, name)
    return pool


def _store(storage: HiCacheStorage, pool: BytePool, keys: list[bytes], name: str = "kv") -> list[bytes]:
    """Store a prefix of fresh random pages, the first ones of the pool, and return the bytes of each."""
    pages = range(len(keys))
    contents = pool.fill(pages)
    assert storage.batch_set(keys, pool.slots(pages), parents=_parents(keys), name=name) == [True] * len(keys)
    return contents


def _load(storage: HiCacheStorage, pool: BytePool, keys: list[bytes]) -> list[bytes | None]:
    """Load pages into the last ones of the pool, and return the bytes of each; None of one that is not loaded."""
    pages = range(pool.page_num - len(keys), pool.page_num)
    loaded = storage.batch_get(keys, pool.slots(pages))
    return [pool.read(page) if done else None for page, done in zip(pages, loaded, strict=True)]


def _removals(storage: HiCacheStorage) -> list[bytes]:
    """Return a list to which the keys of removed pages are added."""
    removed: list[bytes] = []
    storage.set_removal_listener(lambda keys, name: removed.extend(keys))
    return removed


def _in_child(call: Callable[[], object]) -> str:
    """Return what a call does in a forked child, as text; SIGALRM ends one that hangs."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)

    def work() -> None:
        signal.alarm(30)
        try:
            sending.send(f"returned {call()}")
        except BaseException as error:
            sending.send(f"{type(error).__name__}: {error}")

    child = context.Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads is what is tested
        child.start()
    sending.close()
    text: str = receiving.recv()
    child.join()
    return text
