"""A host pool of plain bytes, for tests of storages."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class ByteGeometry:
    """The format of a :class:`BytePool`, which the digest of a storage covers."""

    layout: str = "page_first"
    dtypes: tuple[str, ...] = ("uint8",)
    page_size: int = 4
    components: tuple[tuple[str, int], ...] = (("k", 64), ("v", 64))
    layers: int = 2


class BytePool:
    """A host pool of flat bytes with everything that a storage needs of a pool.

    Parameters
    ----------
    pages, page_size, page_bytes
        Pages of the pool; slots and bytes of a page.
    parts
        Pieces of a page that lie apart in memory, as in layer_first.
    geometry
        Fields of :class:`ByteGeometry` that differ from its defaults.

    Attributes
    ----------
    buffer
        uint8 ``[pages * page_bytes]``: the memory of all pages.
    """

    def __init__(
        self, pages: int = 64, page_size: int = 4, page_bytes: int = 1024, parts: int = 1, **geometry: Any
    ) -> None:
        self.page_num = pages
        self.page_size = page_size
        self.page_bytes = page_bytes
        self.geometry = ByteGeometry(page_size=page_size, **geometry)
        self.parts = parts
        self.buffer = torch.zeros(pages * page_bytes, dtype=torch.uint8)
        self._memory = memoryview(self.buffer.numpy())  # type: ignore[arg-type]

    def page_memory(self, page: int) -> tuple[memoryview, ...]:
        """Return writable views of a page's parts."""
        size = self.page_bytes // self.parts
        starts = ((part * self.page_num + page) * size for part in range(self.parts))
        return tuple(self._memory[start : start + size] for start in starts)

    def fill(self, pages: Iterable[int]) -> list[bytes]:
        """Put fresh random bytes into pages; return what each holds now."""
        contents = []
        for page in pages:
            for view in self.page_memory(page):
                view[:] = os.urandom(len(view))
            contents.append(self.read(page))
        return contents

    def read(self, page: int) -> bytes:
        """Return the bytes of a page."""
        return b"".join(self.page_memory(page))

    def slots(self, pages: Iterable[int]) -> torch.Tensor:
        """Return the slot indices of pages, int64 ``[pages * page_size]``, as ``batch_get`` and ``batch_set`` take."""
        rows = torch.as_tensor(list(pages), dtype=torch.int64)[:, None] * self.page_size
        return (rows + torch.arange(self.page_size)).flatten()
