"""GenericStorage: backends that move pages as tensors, and what gives them the calls of a HiCacheStorage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hicache_pools.pool_transfer import PoolTransfer

from .base import ANCHOR, HiCacheStorage, RemovalListener


class GenericStorage(Protocol):
    """A backend that moves pages as tensors, for engines' own; :class:`HiCacheStorage` moves them without a copy."""

    def register_mem_pool_host(self, pool: Any, name: str = ANCHOR) -> None:
        """Learn about a host pool."""

    def batch_exists(self, keys: Sequence[bytes], *, name: str = ANCHOR) -> int:
        """Return how many leading keys have a page."""

    def get(self, key: bytes, *, name: str = ANCHOR) -> torch.Tensor | None:
        """Return a page, uint8 ``[page_bytes]`` on CPU, or None."""

    def set(self, key: bytes, page: torch.Tensor, *, parent: bytes | None = None, name: str = ANCHOR) -> bool:
        """Store a page, and return whether it is stored."""


StorageBackend = HiCacheStorage | GenericStorage


class TensorPages:
    """The calls of a :class:`HiCacheStorage` that a controller makes, on a :class:`GenericStorage`, page by page."""

    def __init__(self, backend: GenericStorage) -> None:
        self._backend = backend
        self._pools: dict[str, Any] = {}

    def register_mem_pool_host(self, pool: Any, name: str = ANCHOR) -> None:
        """Make a host pool known; the anchor without a name, as backends of one pool need not take one."""
        self._backend.register_mem_pool_host(pool, **({} if name == ANCHOR else {"name": name}))
        self._pools[name] = pool

    def set_removal_listener(self, callback: RemovalListener | None) -> None:
        """Do nothing: such a backend reports no removals."""

    def restorable_lengths(self, keys: Sequence[bytes], transfers: Sequence[PoolTransfer] = ()) -> list[int]:
        """Return every length up to the first missing page; none with other pools, whose policies it does not know."""
        if transfers:
            return []
        return list(range(1, min(self._backend.batch_exists(keys), len(keys)) + 1))

    def batch_get(self, keys: Sequence[bytes], host_indices: torch.Tensor, *, name: str) -> list[bool]:
        """Fill host pages; return for each key whether its page is there."""
        found = []
        for key, page in zip(keys, self._page_numbers(host_indices, name), strict=True):
            data = self._backend.get(key, name=name)
            if data is not None:
                self._pools[name].write_page(page, data)
            found.append(data is not None)
        return found

    def batch_set(
        self, keys: Sequence[bytes], host_indices: torch.Tensor, *, parents: Sequence[bytes | None] | None, name: str
    ) -> list[bool]:
        """Store host pages; return for each key whether its page is stored."""
        pages = self._page_numbers(host_indices, name)
        read = self._pools[name].read_page
        return [
            self._backend.set(key, read(page), parent=parent, name=name)
            for key, page, parent in zip(keys, pages, parents or [None] * len(keys), strict=True)
        ]

    def _page_numbers(self, host_indices: torch.Tensor, name: str) -> list[int]:
        size = self._pools[name].page_size
        numbers: list[int] = (host_indices[::size] // size).tolist()
        return numbers
