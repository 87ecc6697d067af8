"""EvictionQueue: what may leave a tier, the least valuable first; NamespaceUsage: a namespace's queues and pages."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from .policies import NO_QUOTA, Quota

Rank = tuple[float, ...]
"""Priority, value if there is one, tick of the last use; lower leaves first."""


class Queueable(Protocol):
    """Has an order, for equal ranks, and a word in which each queue sets its bit."""

    queued: int

    def __lt__(self, other: Any, /) -> bool: ...


Item = TypeVar("Item", bound=Queueable)


_MIN_CLEANUP = 64
"""Entries below which a queue is not cleaned up."""


class EvictionQueue(Generic[Item]):
    """A heap whose entries may be outdated; these are dropped when popped, or when there are too many.

    Parameters
    ----------
    bit
        This queue's bit of ``queued``.
    rank
        Current rank of an item. When it falls, the bit is cleared and the item offered again; the old entry stays in
        the heap as a leftover.
    evictable
        Whether an item may leave now.

    Invariant: every evictable item has the bit, and an entry that is not above its rank. So code that makes an item
    evictable offers it, and an entry above its item's rank is a leftover.
    """

    def __init__(self, bit: int, rank: Callable[[Item], Rank], evictable: Callable[[Item], bool]) -> None:
        self._bit = bit
        self._rank = rank
        self.evictable = evictable
        self._heap: list[tuple[Any, ...]] = []
        self._clean_up_at = _MIN_CLEANUP

    def __len__(self) -> int:
        """Entries, outdated ones included; at most half as many again as evictable items."""
        return len(self._heap)

    def offer(self, item: Item, entry: tuple[Any, ...] | None = None) -> tuple[Any, ...] | None:
        """Add an item, unless it is in the queue or may not leave.

        Returns its new entry, which another queue of the same ranks can share if the item is offered to it right after.
        """
        if not item.queued & self._bit and self.evictable(item):
            if len(self._heap) >= self._clean_up_at:
                self._clean_up()
            item.queued |= self._bit
            entry = (*self._rank(item), item) if entry is None else entry
            heapq.heappush(self._heap, entry)
        return entry

    def pop(self) -> Item | None:
        """Remove and return the evictable item of the lowest rank."""
        while self._heap:
            *rank, item = heapq.heappop(self._heap)
            if not item.queued & self._bit:
                continue
            item.queued &= ~self._bit
            if not self.evictable(item):
                continue
            if tuple(rank) == self._rank(item):
                found: Item = item
                return found
            self.offer(item)
        return None

    def clear(self) -> None:
        """Drop every entry; the items must not be used again."""
        self._heap.clear()

    def _clean_up(self) -> None:
        """Drop leftovers and what may not leave, such as nodes that got children; amortized, a few steps an offer."""
        kept = []
        for entry in self._heap:
            item = entry[-1]
            if not item.queued & self._bit:
                continue
            if not self.evictable(item):
                item.queued &= ~self._bit
            elif entry[:-1] <= self._rank(item):
                # Cleared until the end, so that a second entry is not kept.
                item.queued &= ~self._bit
                kept.append(entry)
        for entry in kept:
            entry[-1].queued |= self._bit
        heapq.heapify(kept)
        self._heap = kept
        self._clean_up_at = max(_MIN_CLEANUP, len(kept) * 3 // 2)

    def __contains__(self, item: Item) -> bool:
        return bool(item.queued & self._bit)


class TierQueues(NamedTuple):
    """Leaves that may leave the device, those that may leave the host, and those that only backups keep there."""

    device: EvictionQueue[Any]
    host: EvictionQueue[Any]
    unsaved: EvictionQueue[Any]


@dataclass(eq=False)
class NamespaceUsage:
    """Pages of one namespace, and its own eviction queues if it has a quota.

    Its nodes, its matches and its quota keep it alive; it goes with the last of them.
    """

    quota: Quota = NO_QUOTA
    queues: TierQueues | None = None
    device_pages: int = 0
    host_pages: int = 0


NO_USAGE = NamespaceUsage()
"""That of the root, which has no pages."""
