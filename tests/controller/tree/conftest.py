"""A model with full attention, a sliding window and a recurrent state, small enough to fill and empty in a test."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hicache_controller.hybrid import HybridCacheController
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.storage_settings import StorageSettings
from hicache_controller.tree import Match, SequenceKeys, UnifiedRadixCache, WindowComponent
from hicache_pools import (
    ExtentAllocator,
    HostPoolGroup,
    MambaPool,
    MambaPoolHost,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    PoolEntry,
)

PAGE_SIZE = 2
WINDOW = 2
LAYERS = 2


def key(prefix: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr(prefix).encode(), digest_size=16).digest()


def keys_of(words: Sequence[int]) -> list[bytes]:
    """Page keys of a request whose pages are these words."""
    return [key(tuple(words[: i + 1])) for i in range(len(words))]


class Clock:
    """Stands still, so that a pause lasts until the test ends it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Holds calls of one method of an object until it is opened; makes them fail while ``failing``.

    With ``single`` each opening lets one call through.
    """

    def __init__(self, target: Any, method: str) -> None:
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Event()
        self.failing = self.single = False
        original = getattr(target, method)

        def call(*arguments: Any, **options: Any) -> Any:
            self.entered.set()
            assert self._open.wait(30), "the gate was never opened"
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

    ``windows`` and ``states`` say which components there are beside full attention.
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
        row_bytes: int = 8,
        transfer_policy: str = "auto",
        prefetch_policy: str = "wait_complete",
        storage_settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.on, self.row_bytes = on, row_bytes
        self.host_options = {"pin_memory": on != "cpu", "transfer_policy": transfer_policy}
        self.gates: list[Gate] = []
        self.sizes = {"kv": (device_pages, host_pages)}
        self.allocators: dict[str, ExtentAllocator] = {}
        self.device: dict[str, list[torch.Tensor]] = {}
        self.host: dict[str, Any] = {}
        entries = [self._attention("kv", device_pages, host_pages, anchor=True)]
        components = []
        if windows is not None:
            self.sizes["swa"] = windows
            entries.append(self._attention("swa", *windows))
            components.append(WindowComponent.sliding_window("swa", window_tokens=3, page_size=PAGE_SIZE))
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
            self.controller, self.allocators["kv"], page_size=PAGE_SIZE, components=components, **options
        )

    def _attention(self, name: str, device_pages: int, host_pages: int, *, anchor: bool = False) -> PoolEntry:
        shape = (device_pages * PAGE_SIZE, 1, self.row_bytes)
        rows = [torch.zeros(shape, dtype=torch.uint8, device=self.on) for _ in range(2 * LAYERS)]
        pool = MHATokenToKVPool.from_buffers(k=rows[:LAYERS], v=rows[LAYERS:], page_size=PAGE_SIZE)
        host = MHATokenToKVPoolHost(pool, 0, 0, PAGE_SIZE, pages=host_pages, **self.host_options)
        return self._entry(name, pool, host, rows, ExtentAllocator(device_pages, PAGE_SIZE), anchor=anchor)

    def _states(self, device_states: int, host_states: int) -> PoolEntry:
        conv, temporal = (
            [torch.zeros((device_states, size), dtype=torch.uint8, device=self.on) for _ in range(LAYERS)]
            for size in (self.row_bytes, 2 * self.row_bytes)
        )
        pool = MambaPool.from_buffers(conv=conv, temporal=temporal)
        host = MambaPoolHost(pool, 0, 0, 1, pages=host_states, **self.host_options)
        return self._entry("mamba", pool, host, [*conv, *temporal], ExtentAllocator(device_states, 1))

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

    # Bytes

    def expected(self, name: str, page_key: bytes) -> list[torch.Tensor]:
        """Rows of a page of a pool, one tensor a buffer."""
        slots = 1 if name == "mamba" else PAGE_SIZE
        rows = []
        for number, buffer in enumerate(self.device[name]):
            size = slots * buffer[0].numel()
            seed = hashlib.shake_128(page_key + name.encode() + bytes([number])).digest(size)
            rows.append(torch.frombuffer(bytearray(seed), dtype=torch.uint8).reshape(slots, *buffer.shape[1:]))
        return rows

    def _rows(self, name: str, page: int) -> slice:
        slots = 1 if name == "mamba" else PAGE_SIZE
        return slice(page * slots, (page + 1) * slots)

    def fill(self, name: str, keys: Sequence[bytes], pages: Any) -> None:
        for page_key, page in zip(keys, pages, strict=True):
            for buffer, rows in zip(self.device[name], self.expected(name, page_key), strict=True):
                buffer[self._rows(name, int(page))] = rows.to(buffer.device)

    def verify(self, name: str, keys: Sequence[bytes], pages: Any) -> None:
        assert len(keys) == len(pages)
        for page_key, page in zip(keys, pages, strict=True):
            for buffer, rows in zip(self.device[name], self.expected(name, page_key), strict=True):
                assert torch.equal(buffer[self._rows(name, int(page))].cpu(), rows), f"{name} page {page} is wrong"

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
        """Take and fill device pages behind a match, and the windows of their end; None where there is no room."""
        keys = match.rest()[:pages]
        taken = self.cache.alloc_device(pages)
        if taken is None:
            return None
        self.fill("kv", keys, taken)
        windows: dict[str, np.ndarray] = {}
        for name, window in self.windows.items():
            last = keys[max(0, pages - window) :]
            mine = self.cache.alloc_window(name, len(last)) if last else np.empty(0, np.int64)
            if mine is None:
                self.give_back(taken, windows)
                return None
            self.fill(name, last, mine)
            windows[name] = mine
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

    def gate(self, what: str, name: str = "kv") -> Gate:
        """Make a gate before the writes or loads of a pool, or the storage's gets or sets."""
        if what in ("get", "set"):
            gate = Gate(self.storage, f"batch_{what}")
        else:
            method = "backup_from_device_all_layer" if what == "write" else "load_to_device_per_layer"
            gate = Gate(self.host[name], method)
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
