"""Which pages a storage holds and which leaves next: LRU over leaves, so that a suffix never outlives its head."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class PageEntry:
    """One page: its parts (one for each pool that stored something under its key), and the page before it."""

    key: bytes
    parent: bytes | None
    tick: int
    parts: tuple[tuple[str, int], ...] = ()
    queued: bool = False

    def part_bytes(self, part: str) -> int | None:
        """Bytes of a part, or None where the page does not have it."""
        return dict(self.parts).get(part)


class PageIndex:
    """Pages by key, their bytes, and the order in which they leave.

    Not thread-safe: its owner holds a lock. ``tick`` is any number that grows with time.

    Invariants: ``total_bytes`` is the sum over all parts; ``_children[k]`` counts the entries whose parent is ``k``
    (``k`` itself may be missing); every entry without children is queued, and each entry is in the heap at most once.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, PageEntry] = {}
        self._children: dict[bytes, int] = {}
        self._leaves: list[tuple[int, int, PageEntry]] = []
        self._pushes = 0
        self._same_parts: dict[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]] = {}
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[PageEntry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> PageEntry | None:
        """Return the entry of a key, or None."""
        return self._entries.get(key)

    def add(self, key: bytes, part: str, size: int, parent: bytes | None, tick: int) -> None:
        """Add a part of a page; the first to come fixes the page's parent. A part that is there gets the new size."""
        entry = self._entries.get(key)
        if entry is None:
            before_it = None if parent is None else self._entries.get(parent)
            if before_it is not None:
                parent = before_it.key  # one object for both
            entry = self._entries[key] = PageEntry(key, parent, tick)
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            if key not in self._children:
                self._queue(entry)
        entry.tick = max(tick, entry.tick)
        parts = dict(entry.parts)
        if parts.get(part) != size:
            self.total_bytes += size - parts.get(part, 0)
            self._set_parts(entry, parts | {part: size})

    def touch(self, key: bytes, tick: int) -> None:
        """Note a use; unknown keys are ignored. Ancestors count as used for as long as the page is there."""
        entry = self._entries.get(key)
        if entry is not None and tick > entry.tick:
            entry.tick = tick

    def remove_part(self, key: bytes, part: str) -> None:
        """Forget one part, and the page with its last part; unknown ones are ignored."""
        entry = self._entries.get(key)
        parts = {} if entry is None else dict(entry.parts)
        if entry is None or part not in parts:
            return
        self.total_bytes -= parts.pop(part)
        self._set_parts(entry, parts)
        if not parts:
            self.remove(key)

    def remove(self, key: bytes) -> None:
        """Forget a page with all its parts; an unknown key is ignored."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self.total_bytes -= sum(size for _, size in entry.parts)
        if entry.parent is None:
            return
        parent = self._entries.get(entry.parent)
        if parent is not None:
            parent.tick = max(parent.tick, entry.tick)
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            if parent is not None:
                self._queue(parent)

    def oldest_leaf(self, keep: Collection[bytes] = ()) -> PageEntry | None:
        """Return the page to evict next: the least recently used of those without children and not in ``keep``."""
        leaves, kept, found = self._leaves, [], None
        while leaves:
            tick, count, entry = leaves[0]
            if not self._has(entry) or entry.key in self._children:
                entry.queued = False
                heapq.heappop(leaves)
            elif entry.tick > tick:
                heapq.heapreplace(leaves, (entry.tick, count, entry))
            elif entry.key in keep:
                kept.append(heapq.heappop(leaves))
            else:
                found = entry
                break
        for item in kept:
            heapq.heappush(leaves, item)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` where an invariant of the class does not hold."""
        total = sum(size for e in self._entries.values() for _, size in e.parts)
        if total != self.total_bytes:
            raise RuntimeError(f"total_bytes is {self.total_bytes}, the parts sum to {total}")
        children = Counter(entry.parent for entry in self._entries.values() if entry.parent is not None)
        if children != self._children:
            raise RuntimeError("the counts of children differ from the parents the pages name")
        queued = [id(e) for _, _, e in self._leaves if self._has(e)]
        if len(queued) != len(set(queued)):
            raise RuntimeError("a page is queued for eviction twice")
        missing = [k for k, e in self._entries.items() if k not in children and id(e) not in set(queued)]
        if missing:
            raise RuntimeError(f"{len(missing)} pages without children are not queued for eviction")

    def _has(self, entry: PageEntry) -> bool:
        return self._entries.get(entry.key) is entry

    def _set_parts(self, entry: PageEntry, parts: Mapping[str, int]) -> None:
        """Set an entry's parts, to one object for all pages that have the same."""
        same = tuple(parts.items())
        entry.parts = self._same_parts.setdefault(same, same)

    def _queue(self, entry: PageEntry) -> None:
        if entry.queued:
            return
        if len(self._leaves) > 2 * len(self._entries) + 64:
            self._leaves = [item for item in self._leaves if self._has(item[2])]
            heapq.heapify(self._leaves)
        entry.queued = True
        self._pushes += 1
        heapq.heappush(self._leaves, (entry.tick, self._pushes, entry))
