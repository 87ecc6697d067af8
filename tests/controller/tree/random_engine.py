"""An engine with everything random about it: pools, policies, storage, and what fails."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tests.controller.tree.residency import Residency

from hicache_controller.hashing import Namespace
from hicache_controller.policies import EVICTION_STRATEGIES, PrefetchPolicy, WritePolicy
from hicache_controller.storage import FileStorage, Fingerprint, HiCacheStorage, MemoryStorage
from hicache_controller.storage.contract import FaultyStorage
from hicache_controller.tree import CacheEvent, Match, Quota
from hicache_pools import ExtentAllocator

NAMESPACES = (None, Namespace(adapter="a"), Namespace(salt="b"))
PAGE_KEY_BYTES = 16
HELD_SECONDS = 0.005
"""How long a held transfer or call to storage takes; nothing depends on it, except what overlaps."""


@dataclass(eq=False)
class Request:
    """A request that runs: its match on the device, and its own pages after it."""

    match: Match
    pages: Any = field(default_factory=lambda: np.empty(0, np.int64))
    windows: dict[str, Any] = field(default_factory=dict)


class InjectedError(RuntimeError):
    """What a callback of the engine raises on purpose."""


class EngineAllocator(ExtentAllocator):
    """Raises at times, keeps in ``refused`` what it did not take back then, and overwrites pages that are freed."""

    def __init__(self, pages: int, page_size: int) -> None:
        super().__init__(pages, page_size)
        self.refused: set[int] = set()
        self.raise_sometimes: Callable[[], None] = lambda: None
        self.overwrite: Callable[[Iterable[int]], None] = lambda pages: None

    def alloc(self, n_slots: int) -> torch.Tensor | None:
        self.raise_sometimes()
        return super().alloc(n_slots)

    def alloc_pages(self, n: int) -> Any:
        self.raise_sometimes()
        return super().alloc_pages(n)

    def free(self, indices: torch.Tensor) -> int:
        pages = set(self.owned_pages(indices).tolist())
        self.refused |= pages
        self.raise_sometimes()
        self.refused -= pages
        self.overwrite(pages)
        return super().free(indices)

    def free_pages(self, pages: Any) -> int:
        self.overwrite(map(int, pages))
        return super().free_pages(pages)

    def free_refused(self) -> None:
        """Take back what the tree does not have any more."""
        super().free_pages(sorted(self.refused))
        self.refused.clear()


class BriefHang(threading.Event):
    """Holds calls for a moment each while it is clear."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(HELD_SECONDS if timeout is None else timeout)


def random_storage(random: Random, directory: Path, hang: BriefHang, page_bytes: int) -> FaultyStorage | None:
    """A storage of random kind and size that breaks some pages, or none."""
    kind = random.choice((None, "memory", "memory", "file", "file"))
    if kind is None:
        return None
    full = random.random() < 0.3
    inner: HiCacheStorage
    if kind == "memory":
        inner = MemoryStorage(random.randint(1, 8) * page_bytes if full else None)
    else:
        fingerprint = Fingerprint(model="org/model", revision=str(random.random()))
        inner = FileStorage(
            directory, fingerprint=fingerprint, capacity_bytes=random.randint(4, 40) * 4096 if full else None, threads=1
        )
    every = [random.choice((0, 0, 3, 7)) for _ in range(3)]
    return FaultyStorage(
        inner,
        fail_store_every=every[0],
        fail_load_every=every[1],
        flip_every=every[2] if kind == "file" else 0,
        hang=hang,
    )


def storage_settings(random: Random) -> dict[str, Any]:
    return {
        "prefetch_policy": random.choice(list(PrefetchPolicy)),
        "prefetch_timeout_seconds": random.choice((0.0, 1.0)),
        "batch_pages": random.choice((1, 2, 64)),
        "backup_queue_pages": random.choice((3, 16384)),
        "prefetch_queue_pages": random.choice((4, 65536)),
        "backup_retries": random.choice((0, 2)),
        "max_wait_seconds": random.choice((0.0, 0.002, 30.0)),
        "back_off_seconds": random.choice((0.0, 5.0)),
    }


class RandomEngine:
    """A model with random settings, its events, and its faults.

    Attributes
    ----------
    model, residency
        The pools with the tree, and what its events say of it.
    wrong
        What the events got wrong.
    now
        The tree's clock.
    raises_in
        Calls of callbacks until one raises; 0 for none.
    """

    def __init__(self, random: Random, model_type: type[Any], directory: Path) -> None:
        self.now = 0.0
        self.raises_in = 0
        self.wrong: list[AssertionError] = []
        self.hang = BriefHang()
        self.hang.set()
        page_size, device_pages, host_pages = random.choice((1, 2, 4)), random.randint(5, 24), random.randint(3, 30)
        windows = (random.randint(4, 12), random.randint(2, 14)) if random.random() < 0.5 else None
        states = (random.randint(3, 8), random.randint(2, 8)) if random.random() < 0.4 else None
        self.settings = {
            "device_pages": device_pages,
            "host_pages": host_pages,
            "page_size": page_size,
            "windows": windows,
            "window_pages": random.randint(1, 3),
            "states": states,
            "synchronous": random.random() < 0.15,
            "write_policy": random.choice(list(WritePolicy)),
            "selective_hits": random.randint(1, 3),
            "eviction": random.choice(EVICTION_STRATEGIES),
            "load_back_pages": random.choice((1, 1, 2, 3)),
            "load_quota_pages": random.choice((None, None, 1, 4)),
            "quotas": {space: random_quota(random) for space in NAMESPACES if random.random() < 0.3},
            "storage_settings": storage_settings(random),
        }
        self.storage = random_storage(random, directory, self.hang, page_bytes=4 * page_size * 8)
        self.model = model = model_type(
            **self.settings,
            storage=self.storage,
            allocator=EngineAllocator,
            listener=self._listen,
            clock=lambda: self.now,
        )
        self.residency = Residency(model.windows)
        if random.random() < 0.3:
            model.add_draft("swa" if windows and random.random() < 0.5 else "kv", random.randint(0, 3))
        for name, allocator in model.allocators.items():
            allocator.raise_sometimes = self._raise_sometimes
            allocator.overwrite = functools.partial(self._overwrite, name)
        parts = [(what, pool) for pool in model.host for what in ("write", "load")]
        if self.storage is not None:
            parts += [(what, "kv") for what in ("exists", "get", "set")]
        self.gates = [model.gate(*part, HELD_SECONDS) for part in parts]

    def stop_faults(self) -> None:
        """Let everything work from now on."""
        self.raises_in = 0
        self.hang.set()
        for gate in self.gates:
            gate.failing = False
            gate.open()

    def _listen(self, event: CacheEvent) -> None:
        try:
            self.residency.listen(event)
            page_size = self.model.page_size
            assert event.tokens is None or len(event.tokens) == len(event.keys) * page_size, "tokens of other pages"
        except AssertionError as error:
            self.wrong.append(error)
        self._raise_sometimes()

    def _overwrite(self, name: str, pages: Iterable[int]) -> None:
        for page in pages:
            for each in self.model.with_drafts(name):
                for buffer in self.model.device[each]:
                    buffer[self.model.rows(name, page)] = 0xEE

    def _raise_sometimes(self) -> None:
        self.raises_in -= 1
        if self.raises_in == 0:
            raise InjectedError("injected")
        self.raises_in = max(self.raises_in, 0)


def random_quota(random: Random) -> Quota:
    return Quota(*(random.choice((None, None, None, 0, 4, 9)) for _ in range(2)))


def key_list(blob: bytes) -> list[bytes]:
    return [blob[i : i + PAGE_KEY_BYTES] for i in range(0, len(blob), PAGE_KEY_BYTES)]
