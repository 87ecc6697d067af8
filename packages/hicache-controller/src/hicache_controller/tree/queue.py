"""EvictionQueue: what may leave a tier, the least valuable first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

Rank = tuple[float, float, int]
"""Priority, value, tick of the last use; lower leaves first."""


class Queueable(Protocol):
    """Anything with an order, for equal ranks, and a word of bits in which queues note that it is in them."""

    queued: int

    def __lt__(self, other: Any, /) -> bool: ...


Item = TypeVar("Item", bound=Queueable)


class EvictionQueue(Generic[Item]):
    """A heap whose entries may be out of date; that is found out when they are popped.

    Parameters
    ----------
    bit
        Bit of ``queued`` that is this queue's.
    rank
        Rank of an item now; it only ever grows while the item waits.
    evictable
        Whether an item may leave now.

    Invariant: every evictable item is in the heap, once; so whoever makes one evictable offers it.
    """

    def __init__(self, bit: int, rank: Callable[[Item], Rank], evictable: Callable[[Item], bool]) -> None:
        self._bit = bit
        self._rank = rank
        self._evictable = evictable
        self._heap: list[tuple[float, float, int, Item]] = []

    def offer(self, item: Item) -> None:
        """Let an item wait, unless it does or may not leave."""
        if not item.queued & self._bit and self._evictable(item):
            item.queued |= self._bit
            heapq.heappush(self._heap, (*self._rank(item), item))

    def pop(self) -> Item | None:
        """Take out the evictable item of the lowest rank."""
        while self._heap:
            *rank, item = heapq.heappop(self._heap)
            item.queued &= ~self._bit
            if not self._evictable(item):
                continue
            if tuple(rank) == self._rank(item):
                return item
            self.offer(item)
        return None

    def __contains__(self, item: Item) -> bool:
        return bool(item.queued & self._bit)
