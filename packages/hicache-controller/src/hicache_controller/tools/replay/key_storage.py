"""A storage of keys alone, for replays that move no bytes."""

from __future__ import annotations

from collections.abc import Mapping

from ...storage import MemoryStorage
from ...storage.base import RegisteredPool


class KeyStorage(MemoryStorage):
    """Keeps keys without pages, and counts for each what its page would have.

    Parameters
    ----------
    page_bytes
        Bytes of a page, by pool.
    capacity_bytes
        Most bytes that the pages would have; None for no limit.
    """

    def __init__(self, page_bytes: Mapping[str, int], capacity_bytes: int | None) -> None:
        super().__init__(capacity_bytes)
        self._page_bytes = dict(page_bytes)

    def store_pages(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: list[bytes | None]
    ) -> list[bool]:
        """Store keys, counting what their pages would have."""
        return super().store_pages(pool._replace(page_bytes=self._page_bytes[pool.name]), keys, pages, parents)
