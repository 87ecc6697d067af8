"""A model with full attention, a sliding window and a recurrent state, small enough to fill and empty in a test."""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hicache_controller.hybrid import HybridCacheController
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_settings import StorageSettings
from hicache_controller.tree import (
    Match,
    SequenceKeys,
    UnifiedRadixCache,
    WindowComponent,
    register_hicache_draft_pools,
)
from hicache_pools import (
    ExtentAllocator,
    HostPoolGroup,
    MambaPool,
    MambaPoolHost,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    PoolEntry,
    PoolName,
)

PAGE_SIZE = 2
WINDOW = 2
LAYERS = 2


def key(prefix: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr(prefix).encode(), digest_size=16).digest()


def keys_of(words: Sequence[int]) -> list[bytes]:
    """Page keys of a request whose pages are these words."""
    return [key(tuple(words[: i + 1])) for i in range(len(words))]


@functools.lru_cache(4096)
def expected_rows(source: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """Rows that follow from some bytes."""
    data = bytearray(hashlib.shake_128(source).digest(math.prod(shape)))
    return torch.frombuffer(data, dtype=torch.uint8).reshape(shape)


class Clock:
    """Stands still, so that a pause lasts until the test ends it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Holds calls of one method of an object until it is opened; makes them fail while ``failing``.

    With ``single`` each opening lets one call through. With ``most_seconds`` a call goes on by itself after that time.
    """

    def __init__(self, target: Any, method: str, most_seconds: float | None = None) -> None:
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Event()
        self.failing = self.single = False
        original = getattr(target, method)

        def call(*arguments: Any, **options: Any) -> Any:
            self.entered.set()
            opened = self._open.wait(30 if most_seconds is None else most_seconds)
            assert opened or most_seconds is not None, "the gate was never opened"
            failing = self.failing
            if self.single:
                self.close()
            if failing:
                raise RuntimeError("injected")
            return original(*arguments, **options)

        setattr(target, method, call)

    def close(self) -> None:
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_entered(self) -> None:
        assert self.entered.wait(30), "nobody came to the gate"


class Model:
    """Pools, controller and tree; every row's bytes follow from pool, key and place, so a wrong one is seen.

    ``windows`` and ``states`` are the device and host pages of a sliding window and of a recurrent state, if any.
    """

    def __init__(
        self,
        *,
        device_pages: int = 12,
        host_pages: int = 16,
        windows: tuple[int, int] | None = None,
        states: tuple[int, int] | None = None,
        storage: Any = None,
        controller: type[HybridCacheController] = HybridCacheController,
        synchronous: bool = False,
        on: str = "cpu",
        page_size: int = PAGE_SIZE,
        window_pages: int = WINDOW,
        row_bytes: int = 8,
        transfer_policy: str = "auto",
        prefetch_policy: str = "wait_complete",
        storage_settings: Mapping[str, Any] | None = None,
        allocator: type[ExtentAllocator] = ExtentAllocator,
        **options: Any,
    ) -> None:
        self.on, self.row_bytes, self.page_size = on, row_bytes, page_size
        self.new_allocator = allocator
        self.host_options = {"pin_memory": on != "cpu", "transfer_policy": transfer_policy}
        self.gates: list[Gate] = []
        self.sizes = {"kv": (device_pages, host_pages)}
        self.allocators: dict[str, ExtentAllocator] = {}
        self.drafts: dict[str, str] = {}
        self.device: dict[str, list[torch.Tensor]] = {}
        self.host: dict[str, Any] = {}
        entries = [self._attention("kv", device_pages, host_pages, anchor=True)]
        components = []
        if windows is not None:
            self.sizes["swa"] = windows
            entries.append(self._attention("swa", *windows))
            components.append(WindowComponent("swa", window_pages))
        if states is not None:
            self.sizes["mamba"] = states
            entries.append(self._states(*states))
            components.append(WindowComponent.recurrent_state())
        self.windows = {str(component.name): component.window_pages for component in components}
        self.group = HostPoolGroup(entries)
        self.controller = controller(
            self.group,
            storage=StorageSettings(
                **{
                    "prefetch_policy": prefetch_policy,
                    "retry_seconds": 0.0,
                    "max_wait_seconds": 30.0,
                    **(storage_settings or {}),
                }
            ),
            synchronous=synchronous,
        )
        self.storage = storage
        if storage is not None:
            self.controller.attach_storage_backend(storage)
        self.cache = UnifiedRadixCache(
            self.controller, self.allocators["kv"], page_size=page_size, components=components, **options
        )

    def _attention(self, name: str, device_pages: int, host_pages: int, *, anchor: bool = False) -> PoolEntry:
        rows, pool, host = self._attention_pools(device_pages, host_pages, LAYERS)
        return self._entry(name, pool, host, rows, self.new_allocator(device_pages, self.page_size), anchor=anchor)

    def _attention_pools(self, device_pages: int, host_pages: int, layers: int) -> tuple[list[torch.Tensor], Any, Any]:
        shape = (device_pages * self.page_size, 1, self.row_bytes)
        rows = [torch.zeros(shape, dtype=torch.uint8, device=self.on) for _ in range(2 * layers)]
        pool = MHATokenToKVPool.from_buffers(k=rows[:layers], v=rows[layers:], page_size=self.page_size)
        return rows, pool, MHATokenToKVPoolHost(pool, 0, 0, self.page_size, pages=host_pages, **self.host_options)

    def _states(self, device_states: int, host_states: int) -> PoolEntry:
        conv, temporal = (
            [torch.zeros((device_states, size), dtype=torch.uint8, device=self.on) for _ in range(LAYERS)]
            for size in (self.row_bytes, 2 * self.row_bytes)
        )
        pool = MambaPool.from_buffers(conv=conv, temporal=temporal)
        host = MambaPoolHost(pool, 0, 0, 1, pages=host_states, **self.host_options)
        return self._entry("mamba", pool, host, [*conv, *temporal], self.new_allocator(device_states, 1))

    def _entry(
        self,
        name: str,
        pool: Any,
        host: Any,
        rows: list[torch.Tensor],
        allocator: ExtentAllocator,
        *,
        anchor: bool = False,
    ) -> PoolEntry:
        self.device[name], self.host[name], self.allocators[name] = rows, host, allocator
        return PoolEntry(
            name,
            host,
            pool,
            lambda layer: layer if layer < LAYERS else None,
            is_primary_index_anchor=anchor,
            device_alloc_fn=allocator.alloc,
            device_free_fn=allocator.free,
        )

    def add_draft(self, source: str = "kv", more_host_pages: int = 0) -> None:
        """Register a draft model's pool, of one layer, that shares the slots of the anchor or of the window."""
        device_pages, host_pages = self.sizes[source]
        rows, pool, host = self._attention_pools(device_pages, host_pages + more_host_pages, 1)
        entry = PoolEntry(PoolName.DRAFT, host, pool, lambda layer: 0 if layer == 0 else None)
        self.device["draft"], self.host["draft"], self.drafts["draft"] = rows, host, source
        register_hicache_draft_pools(self.cache, entry=entry, indices_from_pool=source)

    # Bytes

    def expected(self, name: str, page_key: bytes) -> list[torch.Tensor]:
        """Rows of a page of a pool, one tensor a buffer."""
        slots = 1 if name == "mamba" else self.page_size
        shapes = [(slots, *buffer.shape[1:]) for buffer in self.device[name]]
        return [expected_rows(page_key + name.encode() + bytes([i]), shape) for i, shape in enumerate(shapes)]

    def rows(self, name: str, page: int) -> slice:
        slots = 1 if name == "mamba" else self.page_size
        return slice(page * slots, (page + 1) * slots)

    def with_drafts(self, name: str) -> list[str]:
        """Return a pool and those that share its slots."""
        return [name, *(draft for draft, source in self.drafts.items() if source == name)]

    def fill(self, name: str, keys: Sequence[bytes], pages: Any) -> None:
        for each in self.with_drafts(name):
            self._fill(each, keys, pages)

    def _fill(self, name: str, keys: Sequence[bytes], pages: Any) -> None:
        for page_key, page in zip(keys, pages, strict=True):
            for buffer, rows in zip(self.device[name], self.expected(name, page_key), strict=True):
                buffer[self.rows(name, int(page))] = rows.to(buffer.device)

    def verify(self, name: str, keys: Sequence[bytes], pages: Any) -> None:
        for each in self.with_drafts(name):
            self._verify(each, keys, pages)

    def _verify(self, name: str, keys: Sequence[bytes], pages: Any) -> None:
        assert len(keys) == len(pages)
        for page_key, page in zip(keys, pages, strict=True):
            for buffer, rows in zip(self.device[name], self.expected(name, page_key), strict=True):
                assert torch.equal(buffer[self.rows(name, int(page))].cpu(), rows), f"{name} page {page} is wrong"

    def verify_match(self, match: Match) -> None:
        """Check every byte a request would read of a match that is on the device."""
        keys = [match.keys[i : i + 16] for i in range(0, match.pages * 16, 16)]
        self.verify("kv", keys, self.cache.device_page_numbers(match))
        for name, window in self.windows.items():
            self.verify(name, keys[max(0, len(keys) - window) :], self.cache.window_page_numbers(match, name))

    # Requests

    def begin(self, keys: Sequence[bytes] | SequenceKeys, **options: Any) -> Match:
        """Match, prefetch, load back, and check what was found."""
        match = self.cache.load_back(self.cache.prefetch(self.cache.match_prefix(keys, **options)))
        self.verify_match(match)
        return match

    def compute(self, match: Match, pages: int) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
        """Take and fill device pages after a match, and the windows of their end; None where there is no room."""
        keys = match.rest()[:pages]
        taken = self.cache.alloc_device(pages)
        if taken is None:
            return None
        self.fill("kv", keys, taken)
        windows: dict[str, np.ndarray] = {}
        complete = False
        try:
            for name, window in self.windows.items():
                last = keys[max(0, pages - window) :]
                mine = self.cache.alloc_window(name, len(last)) if last else np.empty(0, np.int64)
                if mine is None:
                    return None
                self.fill(name, last, mine)
                windows[name] = mine
            complete = True
        finally:
            if not complete:
                self.give_back(taken, windows)
        return taken, windows

    def give_back(self, pages: np.ndarray, windows: Mapping[str, np.ndarray]) -> None:
        self.allocators["kv"].free_pages(pages)
        for name, mine in windows.items():
            if len(mine):
                self.allocators[name].free_pages(mine)

    def serve(self, words: Sequence[int], keys: Sequence[bytes] | None = None, **options: Any) -> int:
        """Serve a whole request; returns how many pages were cached."""
        keys = keys_of(words) if keys is None else keys
        match = self.begin(keys, **options)
        found = match.pages
        made = self.compute(match, len(keys) - found)
        assert made is not None, "no room for a request of its own"
        pages, windows = made
        result = self.cache.insert(match, pages, windows=windows)
        self.verify_match(result.match)
        self.cache.release(result.match)
        self.cache.poll()
        return found

    def lookup(self, words: Sequence[int]) -> tuple[int, int]:
        """Device and host pages of the match of a request."""
        match = self.cache.match_prefix(keys_of(words))
        self.cache.release(match)
        return match.device_pages, match.host_pages

    def empty(self) -> None:
        """Evict everything, and check that every page of every pool is free then."""
        cache = self.cache
        for _ in range(2):
            cache.drain()
            cache.evict_device(10**6)
            cache.evict_host(10**6)
            for name in self.windows:
                cache.evict_window_device(name, 10**6)
                cache.evict_window_host(name, 10**6)
        cache.drain()  # host pages that a backup read when they were evicted are freed after it
        cache.check_integrity()
        assert cache.stats() == (0, 0, 0)
        for name, (device_pages, host_pages) in self.sizes.items():
            assert self.allocators[name].available_pages == device_pages, name
            assert self.host[name].available_size() == host_pages * self.host[name].page_size, name

    def gate(self, what: str, name: str = "kv", most_seconds: float | None = None) -> Gate:
        """Make a gate before the writes or loads of a pool, or the storage's calls of one kind."""
        if what in ("exists", "get", "set"):
            gate = Gate(self.storage, f"batch_{what}", most_seconds)
        else:
            method = "backup_from_device_all_layer" if what == "write" else "load_to_device_per_layer"
            gate = Gate(self.host[name], method, most_seconds)
        self.gates.append(gate)
        return gate

    # Storage

    def in_storage(self, keys: Sequence[bytes], *pools: str) -> list[int]:
        """How many of some pages storage has, by pool."""
        return [sum(self.storage.find_pages(self.storage._pools[pool], keys, leading=False)) for pool in pools]

    def lose(self, lost: bytes, *pools: str) -> None:
        """Take a page, or its parts of some pools, out of a memory storage, as if found damaged."""
        storage = self.storage
        with storage._lock:
            for pool in pools or tuple(storage._bytes):
                if storage._bytes[pool].pop(lost, None) is not None:
                    storage._index.remove_part(lost, pool)
                    storage.note_removed((lost,), pool)
        storage.report_removed()

    def refuse(self, name: str, refused: bytes) -> Callable[[], None]:
        """Let storage not take one part of a page; returns how to let it again."""
        store = self.storage.store_pages

        def store_but(pool: Any, *jobs: Any) -> list[bool]:
            return [
                (pool.name, key) != (name, refused) and store(pool, [key], *([each] for each in job))[0]
                for key, *job in zip(*jobs, strict=True)
            ]

        self.storage.store_pages = store_but
        return lambda: setattr(self.storage, "store_pages", store)

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        assert self.controller.shutdown(30)
        self.controller.check_integrity()
        if self.storage is not None:
            self.storage.close()


@pytest.fixture
def make_model() -> Iterator[Callable[..., Model]]:
    """Make models; at the end everything is evicted and nothing may be left over."""
    made: list[Model] = []

    def make(**options: Any) -> Model:
        model = Model(**options)
        made.append(model)
        return model

    yield make
    for model in made:
        model.cache.check_integrity()
        model.close()


@pytest.fixture
def model_type() -> type[Model]:
    return Model


@pytest.fixture
def memory_storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture(name="keys_of")
def keys_of_fixture() -> Callable[[Sequence[int]], list[bytes]]:
    return keys_of


@pytest.fixture
def clock() -> Clock:
    return Clock()
