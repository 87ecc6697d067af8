"""Pages of SGLang's host pools as a storage takes them: where they lie, or through a buffer; needs no SGLang."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ...storage import HiCacheStorage

FLAT = "kv_flat"
"""Name of the pages that go through a buffer: they are in another order than those of the host pool."""

_BUFFER_PAGES = 64

Result = TypeVar("Result")


@dataclass(frozen=True)
class PageFormat:
    """What decides the meaning of a page's bytes."""

    pool: str
    layout: str
    dtype: str
    page_size: int
    layers: int
    tag: str
    parts: tuple[int, ...]


class HostPages:
    """Pages of a host pool where they lie, found by its ``get_page_buffer_meta``.

    Parameters
    ----------
    pool
        SGLang's host pool.
    has_bytes
        Whether it has memory. The anchor of a model without a full KV pool has none, only pages that exist or not.

    Raises
    ------
    AttributeError, NotImplementedError, ValueError
        Where the pool cannot name its pages' memory: it has no such method, or refuses its layout.
    """

    def __init__(self, pool: Any, *, has_bytes: bool = True) -> None:
        self._pool = pool
        self._has_bytes = has_bytes
        self.page_size = int(pool.page_size)
        self.page_num = int(pool.size) // self.page_size
        parts = tuple(size for _, size in self._parts(0))
        self.page_bytes = sum(parts)
        self.geometry = PageFormat(
            type(pool).__name__,
            str(pool.layout),
            str(pool.dtype),
            self.page_size,
            int(pool.layer_num),
            str(pool.storage_format_tag),
            parts,
        )

    def page_memory(self, page: int) -> tuple[memoryview, ...]:
        """Return writable views of a page's parts, in the pool's order."""
        return tuple(
            memoryview((ctypes.c_char * size).from_address(address)).cast("B") for address, size in self._parts(page)
        )

    def _parts(self, page: int) -> list[tuple[int, int]]:
        if not self._has_bytes:
            return []
        first = page * self.page_size
        addresses, sizes = self._pool.get_page_buffer_meta(torch.arange(first, first + self.page_size))
        return [(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]


class FlatPages:
    """Pages as tensors, for SGLang's calls that move no host pages: each is copied through a buffer here.

    Parameters
    ----------
    pool
        SGLang's host pool, whose flat pages are stored.
    storage
        Where.
    """

    page_size = 1
    page_num = _BUFFER_PAGES

    def __init__(self, pool: Any, storage: HiCacheStorage) -> None:
        like = pool.get_dummy_flat_data_page()
        self.page_bytes = like.numel() * like.element_size()
        self.geometry = PageFormat(
            type(pool).__name__,
            f"flat {pool.layout}",
            str(like.dtype),
            int(pool.page_size),
            int(pool.layer_num),
            str(pool.storage_format_tag),
            (self.page_bytes,),
        )
        self._storage = storage
        self._buffer = torch.empty((self.page_num, self.page_bytes), dtype=torch.uint8)
        self._lock = threading.Lock()  # guards the buffer, which loads and backups share
        storage.register_mem_pool_host(self, FLAT)

    def page_memory(self, page: int) -> tuple[memoryview, ...]:
        """Return the view of a page of the buffer."""
        return (memoryview(self._buffer[page].numpy()).cast("B"),)  # type: ignore[arg-type]  # numpy has the protocol

    def load(self, keys: Sequence[bytes], targets: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Fill tensors of a page each; return each, or None where its page is not there.

        Raises
        ------
        ValueError
            Where a tensor has not the bytes of a page.
        """
        for target in targets:
            self._check(target)

        def take(found: list[bool], numbers: range) -> list[torch.Tensor | None]:
            return [
                _fill(targets[number], self._buffer[page]) if there else None
                for page, (number, there) in enumerate(zip(numbers, found, strict=True))
            ]

        return self._in_turns(len(keys), lambda numbers, slots: take(self._get(keys, numbers, slots), numbers))

    def store(self, keys: Sequence[bytes], values: Sequence[torch.Tensor]) -> list[bool]:
        """Store tensors of a page each; return for each whether it is stored; ValueError as :meth:`load`."""
        for value in values:
            self._check(value)

        def put(numbers: range, slots: torch.Tensor) -> list[bool]:
            for page, number in enumerate(numbers):
                self._buffer[page].copy_(values[number].contiguous().view(torch.uint8).reshape(-1))
            return self._storage.batch_set([keys[number] for number in numbers], slots, name=FLAT)

        return self._in_turns(len(keys), put)

    def _get(self, keys: Sequence[bytes], numbers: range, slots: torch.Tensor) -> list[bool]:
        return self._storage.batch_get([keys[number] for number in numbers], slots, name=FLAT)

    def _in_turns(self, count: int, call: Callable[[range, torch.Tensor], list[Result]]) -> list[Result]:
        results: list[Result] = []
        for first in range(0, count, self.page_num):
            numbers = range(first, min(first + self.page_num, count))
            with self._lock:
                results += call(numbers, torch.arange(len(numbers)))
        return results

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.numel() * tensor.element_size() != self.page_bytes:
            raise ValueError(
                f"the tensor has {tensor.numel() * tensor.element_size()} bytes; a page has {self.page_bytes}"
            )


def _fill(target: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
    return target.copy_(page.view(target.dtype).reshape(target.shape))
