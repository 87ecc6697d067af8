"""EvictionQueue: what may leave a tier, the least valuable first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

Rank = tuple[float, ...]
"""Priority, value where there is one, tick of the last use; lower leaves first."""


class Queueable(Protocol):
    """Anything with an order, for equal ranks, and a word of bits in which queues note that it is in them."""

    queued: int

    def __lt__(self, other: Any, /) -> bool: ...


Item = TypeVar("Item", bound=Queueable)


_FEW = 64
"""Entries that are not worth looking through."""


class EvictionQueue(Generic[Item]):
    """A heap whose entries may be out of date; that is found out when they are popped, or when too many have gathered.

    Parameters
    ----------
    bit
        Bit of ``queued`` that is this queue's.
    rank
        Rank of an item now. Where it falls, the bit is cleared and the item offered again; what its rank was before
        stays in the heap as a leftover.
    evictable
        Whether an item may leave now.

    Invariant: every evictable item has the bit, and an entry that is not above its rank. So what makes an item
    evictable offers it, and an entry above its item's rank is a leftover.
    """

    def __init__(self, bit: int, rank: Callable[[Item], Rank], evictable: Callable[[Item], bool]) -> None:
        self._bit = bit
        self._rank = rank
        self._evictable = evictable
        self._heap: list[tuple[Any, ...]] = []
        self._look_through_at = _FEW

    def __len__(self) -> int:
        """Entries, those of items that may not leave any more included: at most half as many again as may."""
        return len(self._heap)

    def offer(self, item: Item, entry: tuple[Any, ...] | None = None) -> tuple[Any, ...] | None:
        """Let an item wait, unless it does or may not leave.

        Returns its new entry, which another queue of the same ranks can share when it is offered the item right after.
        """
        if not item.queued & self._bit and self._evictable(item):
            if len(self._heap) >= self._look_through_at:
                self._forget_outdated()
            item.queued |= self._bit
            entry = (*self._rank(item), item) if entry is None else entry
            heapq.heappush(self._heap, entry)
        return entry

    def pop(self) -> Item | None:
        """Take out the evictable item of the lowest rank."""
        while self._heap:
            *rank, item = heapq.heappop(self._heap)
            if not item.queued & self._bit:
                continue
            item.queued &= ~self._bit
            if not self._evictable(item):
                continue
            if tuple(rank) == self._rank(item):
                found: Item = item
                return found
            self.offer(item)
        return None

    def clear(self) -> None:
        """Forget every entry, as no item will be offered or popped again."""
        self._heap.clear()

    def _forget_outdated(self) -> None:
        """Drop leftovers and what may not leave, as most nodes get children; a few steps for each offer."""
        kept = []
        for entry in self._heap:
            item = entry[-1]
            if not item.queued & self._bit:
                continue
            if not self._evictable(item):
                item.queued &= ~self._bit
            elif entry[:-1] <= self._rank(item):
                # Cleared until the end, so that a second entry is not kept.
                item.queued &= ~self._bit
                kept.append(entry)
        for entry in kept:
            entry[-1].queued |= self._bit
        heapq.heapify(kept)
        self._heap = kept
        self._look_through_at = max(_FEW, len(kept) * 3 // 2)

    def __contains__(self, item: Item) -> bool:
        return bool(item.queued & self._bit)
