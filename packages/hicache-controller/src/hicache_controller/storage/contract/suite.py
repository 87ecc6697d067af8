"""What every storage backend has to do, as tests that a backend's own test class inherits."""

from __future__ import annotations

import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

import pytest
import torch

from hicache_pools import MHATokenToKVPool, MHATokenToKVPoolHost, NullPoolHost, PoolHitPolicy, PoolTransfer

from ..base import MAX_KEY_BYTES, HiCacheStorage
from ..fingerprint import Fingerprint
from .byte_pool import BytePool

PAGE_BYTES = 1024
"""Of a page in the tests of capacity."""


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
    def opened(self, open_storage: OpenStorage, fingerprint: Fingerprint) -> Iterator[Callable[..., HiCacheStorage]]:
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
    def storage(self, opened: Callable[..., HiCacheStorage]) -> HiCacheStorage:
        """Return an empty storage."""
        return opened()

    @pytest.fixture
    def pool(self, storage: HiCacheStorage) -> BytePool:
        """Return a pool that is registered with ``storage`` as ``kv``."""
        pool = BytePool()
        storage.register_mem_pool_host(pool)
        return pool

    # Pages and keys

    @pytest.mark.parametrize("parts", [1, 4, 64])
    def test_pages_come_back_bit_for_bit(self, storage: HiCacheStorage, parts: int) -> None:
        pool, keys = BytePool(page_bytes=64 * 1024, parts=parts), _keys(6)
        storage.register_mem_pool_host(pool)
        contents = pool.fill(range(6))
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set(keys, pool.slots(range(6)), parents=_parents(keys)) == [True] * 6
        assert storage.batch_get(keys, pool.slots(range(30, 36))) == [True] * 6
        assert [pool.read(page) for page in range(30, 36)] == contents
        assert [pool.read(page) for page in range(6)] == contents

    @pytest.mark.parametrize("length", [1, 16, 32, 33, 36, MAX_KEY_BYTES])
    def test_keys_have_up_to_64_bytes(self, storage: HiCacheStorage, pool: BytePool, length: int) -> None:
        keys = [bytes([i]) + os.urandom(length - 1) for i in range(3)] + [os.urandom(MAX_KEY_BYTES)]
        contents = pool.fill(range(4))
        assert storage.batch_set(keys, pool.slots(range(4)), parents=_parents(keys)) == [True] * 4
        assert storage.batch_exists(keys) == 4
        assert storage.batch_get(keys, pool.slots(range(10, 14))) == [True] * 4
        assert [pool.read(page) for page in range(10, 14)] == contents
        others = [bytes([key[0] ^ 0x80]) + key[1:] for key in keys]
        assert storage.batch_get(others, pool.slots(range(10, 14))) == [False] * 4

    def test_an_empty_batch_is_accepted(self, storage: HiCacheStorage, pool: BytePool) -> None:
        empty = pool.slots([])
        assert storage.batch_set([], empty) == storage.batch_get([], empty) == storage.batch_exists_each([]) == []
        assert storage.batch_exists([]) == 0

    def test_a_page_that_is_absent_is_not_loaded_and_touches_no_other(
        self, storage: HiCacheStorage, pool: BytePool
    ) -> None:
        keys, contents = _keys(3), pool.fill(range(64))
        assert storage.batch_set(keys[:1], pool.slots([0])) == [True]
        assert storage.batch_get(keys, pool.slots([10, 11, 12])) == [True, False, False]
        assert pool.read(10) == contents[0]
        others = [page for page in range(64) if page not in (10, 11, 12)]
        assert [pool.read(page) for page in others] == [contents[page] for page in others]

    def test_a_page_that_is_there_keeps_its_bytes(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys, contents = _keys(2), pool.fill(range(2))
        assert storage.batch_set(keys, pool.slots(range(2))) == [True, True]
        pool.fill(range(2))
        assert storage.batch_set(keys, pool.slots(range(2))) == [True, True]
        assert storage.batch_get(keys, pool.slots([8, 9])) == [True, True]
        assert [pool.read(8), pool.read(9)] == contents
        assert (storage.stats().stored, storage.stats().present) == (2, 2)

    def test_a_page_whose_parent_is_not_stored_is_refused(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys = _keys(3)
        assert storage.batch_set(keys[1:], pool.slots([1, 2]), parents=keys[:2]) == [False, False]
        assert storage.batch_exists_each(keys) == [False] * 3
        assert storage.batch_set(keys[:1], pool.slots([0]), parents=[None]) == [True]
        assert storage.batch_set(keys[1:], pool.slots([1, 2]), parents=keys[:2]) == [True, True]
        assert storage.stats().orphans == 2
        with pytest.raises(ValueError, match="parents has 1 entries for 2 keys"):
            storage.batch_set(keys[:2], pool.slots([0, 1]), parents=[None])

    # Lookups

    def test_exists_counts_leading_pages(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys = _keys(6)
        stored = [keys[i] for i in (0, 1, 2, 4)]
        assert all(storage.batch_set(stored, pool.slots(range(4))))
        assert [storage.batch_exists(keys[i:]) for i in range(6)] == [3, 2, 1, 0, 1, 0]
        assert storage.batch_exists_each(keys) == [True, True, True, False, True, False]

    def test_pages_of_pools_are_told_apart(self, storage: HiCacheStorage, pool: BytePool) -> None:
        state, keys = BytePool(), _keys(20)
        storage.register_mem_pool_host(state, "mamba")
        there = {}
        for name, each in (("kv", pool), ("mamba", state)):
            there[name] = [byte % 2 == 1 for byte in os.urandom(20)]
            stored = [key for key, stores in zip(keys, there[name], strict=True) if stores]
            assert all(storage.batch_set(stored, each.slots(range(len(stored))), name=name))
        assert {name: storage.batch_exists_each(keys, name=name) for name in there} == there
        with pytest.raises(KeyError, match="registered pools: kv, mamba"):
            storage.batch_exists_each(keys, name="swa")

    def test_restorable_lengths_respect_every_pool(self, storage: HiCacheStorage) -> None:
        """Attention at 0 to 5, a window of two pages at 0, 1, 2, 4, 5, states after 1, 2, 3 and 5."""
        keys = _keys(8)
        for name, present in {"kv": range(6), "swa": [0, 1, 2, 4, 5, 6], "mamba": [1, 2, 3, 5, 7]}.items():
            pool = BytePool()
            storage.register_mem_pool_host(pool, name)
            assert all(storage.batch_set([keys[i] for i in present], pool.slots(present), name=name))
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
        state, keys = BytePool(page_size=1, page_bytes=300), _keys(5)
        storage.register_mem_pool_host(state, "mamba")
        contents = pool.fill(range(5)), state.fill([7])
        stores = [
            PoolTransfer("kv", host_indices=pool.slots(range(5)), keys=keys),
            PoolTransfer("mamba", host_indices=state.slots([7]), keys=keys[4:]),
        ]
        parents = dict(zip(keys, _parents(keys), strict=True))
        assert storage.batch_set_pools(stores, parents=parents) == {"kv": [True] * 5, "mamba": [True]}
        loads = [
            PoolTransfer("kv", host_indices=pool.slots(range(10, 15)), keys=keys),
            PoolTransfer("mamba", host_indices=state.slots([9]), keys=keys[4:]),
        ]
        assert storage.batch_get_pools(loads) == {"kv": [True] * 5, "mamba": [True]}
        assert ([pool.read(page) for page in range(10, 15)], [state.read(9)]) == contents
        with pytest.raises(ValueError, match="pool 'kv' has no keys"):
            storage.batch_get_pools([PoolTransfer("kv", host_indices=pool.slots([0]))])

    def test_a_pool_without_bytes_has_pages_by_name(self, storage: HiCacheStorage) -> None:
        pool, keys = NullPoolHost(8, 2), _keys(4)
        storage.register_mem_pool_host(pool)
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

    def test_another_storage_finds_the_pages(self, opened: Callable[..., HiCacheStorage]) -> None:
        self._skip_unless(self.KEEPS_PAGES)
        pool, keys, first, second = BytePool(), _keys(6), opened(), opened()
        contents = pool.fill(range(6))
        for storage in (first, second):
            storage.register_mem_pool_host(pool)
        assert all(first.batch_set(keys, pool.slots(range(6)), parents=_parents(keys)))
        assert second.batch_get(keys, pool.slots(range(10, 16))) == [True] * 6
        first.close()
        second.close()
        third = opened()
        third.register_mem_pool_host(pool)
        assert third.batch_get(keys, pool.slots(range(20, 26))) == [True] * 6
        assert [pool.read(page) for page in (*range(10, 16), *range(20, 26))] == contents * 2

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
        self, opened: Callable[..., HiCacheStorage], fingerprint: Fingerprint, change: dict[str, Any]
    ) -> None:
        self._skip_unless(self.KEEPS_PAGES)
        fields: dict[str, Any] = {"model": "org/model", "revision": fingerprint.revision, "tp_size": 2}
        pool, keys = BytePool(), _keys(2)
        mine, other = opened(Fingerprint(**fields)), opened(Fingerprint(**fields | change))
        for storage in (mine, other):
            storage.register_mem_pool_host(pool)
        assert all(mine.batch_set(keys, pool.slots(range(2))))
        assert other.batch_exists_each(keys) == other.batch_get(keys, pool.slots([5, 6])) == [False, False]
        other.clear()
        assert mine.batch_get(keys, pool.slots([5, 6])) == [True, True]

    @pytest.mark.parametrize(
        "change", [{"layout": "layer_first"}, {"dtypes": ("int8",)}, {"layers": 4}, {"components": (("kv", 128),)}]
    )
    def test_another_format_of_the_same_size_is_never_loaded(
        self, opened: Callable[..., HiCacheStorage], change: dict[str, Any]
    ) -> None:
        pools, keys = (BytePool(), BytePool(**change), BytePool()), _keys(2)
        storage = opened()
        storage.register_mem_pool_host(pools[0])
        contents = pools[0].fill(range(2))
        assert all(storage.batch_set(keys, pools[0].slots(range(2))))
        with pytest.raises(ValueError, match="another pool"):
            storage.register_mem_pool_host(pools[1])
        if not self.KEEPS_PAGES:
            return
        for pool, found in ((pools[1], False), (pools[2], True)):
            again = opened()
            again.register_mem_pool_host(pool)
            assert again.batch_exists_each(keys) == again.batch_get(keys, pool.slots([5, 6])) == [found] * 2
        assert [pools[2].read(page) for page in (5, 6)] == contents

    # Damage, removal and capacity

    def test_a_damaged_page_is_a_miss_and_is_stored_again(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys, contents = _keys(4), pool.fill(range(4))
        removed: list[bytes] = []
        storage.set_removal_listener(lambda keys, name: removed.extend(keys))
        assert all(storage.batch_set(keys, pool.slots(range(4))))
        self.damage(storage, keys[2], "kv")
        assert storage.batch_get(keys, pool.slots(range(10, 14))) == [True, True, False, True]
        assert removed == [keys[2]]
        assert storage.batch_exists_each(keys) == [True, True, False, True]
        assert storage.batch_set(keys, pool.slots(range(4))) == [True] * 4
        assert storage.batch_get(keys, pool.slots(range(10, 14))) == [True] * 4
        assert [pool.read(page) for page in range(10, 14)] == contents

    def test_clear_removes_every_page(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys = _keys(5)
        assert all(storage.batch_set(keys, pool.slots(range(5))))
        storage.clear()
        assert storage.batch_exists_each(keys) == storage.batch_get(keys, pool.slots(range(5))) == [False] * 5
        assert storage.batch_set(keys, pool.slots(range(5))) == [True] * 5

    @pytest.mark.parametrize("with_parents", [False, True])
    def test_what_a_call_answers_as_stored_is_there(
        self, opened: Callable[..., HiCacheStorage], with_parents: bool
    ) -> None:
        """Twice as many pages as there is room for, some of which are there already."""
        self._skip_unless(self.HAS_CAPACITY)
        storage, pool, keys = opened(room=10), BytePool(), _keys(20)
        storage.register_mem_pool_host(pool)
        contents = pool.fill(range(20))
        for first, count in ((0, 1), (3, 4), (0, 12), (5, 15), (0, 20), (10, 10), (19, 1)):
            these = slice(first, first + count)
            parents = _parents(keys)[these] if with_parents else None
            stored = storage.batch_set(keys[these], pool.slots(range(first, first + count)), parents=parents)
            assert stored == storage.batch_exists_each(keys[these])
            assert with_parents or stored.count(True) >= min(count, 10)
            assert storage.batch_get(keys[these], pool.slots(range(30, 30 + count))) == stored
            assert all(pool.read(30 + i) == contents[first + i] for i in range(count) if stored[i])

    def test_pages_that_made_room_for_another_pool_are_not_answered_as_stored(
        self, opened: Callable[..., HiCacheStorage]
    ) -> None:
        self._skip_unless(self.HAS_CAPACITY)
        storage, pool, keys = opened(room=6), BytePool(), {"kv": _keys(4), "mamba": _keys(4)}
        for name in keys:
            storage.register_mem_pool_host(pool, name)
        transfers = [PoolTransfer(name, host_indices=pool.slots(range(4)), keys=keys[name]) for name in keys]
        stored = storage.batch_set_pools(transfers)
        assert stored == {name: storage.batch_exists_each(keys[name], name=name) for name in keys}
        assert (stored["kv"].count(True), stored["mamba"]) == (2, [True] * 4)

    def test_eviction_keeps_capacity_and_heads_and_is_reported(self, opened: Callable[..., HiCacheStorage]) -> None:
        """Prefixes of random lengths that share their heads: no page is there without those before it."""
        self._skip_unless(self.HAS_CAPACITY)
        storage, pool, rng = opened(room=8), BytePool(), random.Random(os.urandom(8))
        storage.register_mem_pool_host(pool)
        removed: list[bytes] = []
        storage.set_removal_listener(lambda keys, name: removed.extend(keys))
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
            loaded = storage.batch_get(keys, pool.slots(range(20, 20 + len(keys))))
            assert all(pool.read(20 + i) == contents[key] for i, key in enumerate(keys) if loaded[i])
        assert len(removed) == storage.stats().evicted > 0

    # Threads, forks and the end

    def test_threads_store_and_load_at_once(self, storage: HiCacheStorage) -> None:
        pool, shared, wrong = BytePool(page_bytes=4096), _keys(4), []
        storage.register_mem_pool_host(pool)
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

        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_forked_child_is_refused_and_the_parent_goes_on(self, storage: HiCacheStorage, pool: BytePool) -> None:
        keys, contents = _keys(2), pool.fill(range(2))
        assert all(storage.batch_set(keys, pool.slots(range(2))))
        uses: tuple[Callable[[], object], ...] = (
            lambda: storage.batch_exists(keys),
            lambda: storage.clear(),
            lambda: storage.stats(),
            lambda: storage.close(),
        )
        for use in uses:
            assert _in_child(use).startswith(f"RuntimeError: this {type(storage).__name__} was made before a fork")
        assert storage.batch_get(keys, pool.slots([5, 6])) == [True, True]
        assert [pool.read(5), pool.read(6)] == contents

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


def _in_child(call: Callable[[], object]) -> str:
    """Return what a call does in a forked child, as text; SIGALRM ends one that hangs."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads is what is tested
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            text = f"returned {call()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
