"""HostBlocks: which blocks the host keeps, on which pages, and what leaves first; no bytes, and no vLLM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from hicache_kernels.validation import one_of
from hicache_pools import ExtentAllocator

from .settings import EVICTIONS

MAX_COUNTED_USES = 64
"""With ``lfu``, blocks used this often or more are in the order of their last use alone."""


class BlockState(Enum):
    """Whether the host has a block."""

    MISSING = auto()
    ASKED = auto()
    """Storage is asked whether it has it."""
    PENDING = auto()
    """Its bytes are on their way."""
    READY = auto()


class Taken(NamedTuple):
    """Pages taken for blocks, and the blocks that left to make room.

    Attributes
    ----------
    keys, pages
        Blocks that are new, in the order they were given, and a page for each.
    evicted
        Blocks that the host no longer keeps.
    """

    keys: list[bytes]
    pages: list[int]
    evicted: list[bytes]


@dataclass(slots=True)
class _Block:
    page: int
    ready: bool = False
    pins: int = 0
    uses: int = 0
    failed: bool = False


class HostBlocks:
    """Blocks by key, as long as they are kept.

    A block is pending from :meth:`take` to :meth:`finish`, and can leave when it is ready and not pinned. Heads of
    prefixes stay longer than their tails, as :meth:`touch` is given them in order.

    Parameters
    ----------
    pages
        Pages of the host.
    eviction
        ``lru``, ``lfu`` or ``slru``. What counts as a use is a load.

    Invariant
    ---------
    A page is free in the allocator, or has exactly one block. ``_idle`` has the blocks that are ready and not pinned,
    each once, under the number that decides what leaves first, and there in the order of their last uses.
    """

    def __init__(self, pages: int, eviction: str = "lru") -> None:
        self._most_uses = {"lru": 0, "slru": 1, "lfu": MAX_COUNTED_USES}[one_of("eviction", eviction, EVICTIONS)]
        self._allocator = ExtentAllocator(pages, 1)
        self._blocks: dict[bytes, _Block] = {}
        self._idle: dict[int, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def pages(self) -> int:
        """Pages of the host."""
        return self._allocator.page_num

    @property
    def free_pages(self) -> int:
        """Pages that have no block."""
        return self._allocator.available_pages

    def state(self, key: bytes) -> BlockState:
        """Return whether the host has a block."""
        block = self._blocks.get(key)
        if block is None or (block.ready and block.failed):
            return BlockState.MISSING
        return BlockState.READY if block.ready else BlockState.PENDING

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that blocks of a sequence are used again, heads first; others are ignored."""
        for key in reversed(keys):
            block = self._blocks.get(key)
            if block is not None and block.ready and not block.pins:
                self._idle[self._rank(block)].move_to_end(key)

    def pin(self, keys: Collection[bytes], *, is_use: bool = True) -> list[int]:
        """Keep blocks until :meth:`unpin`, and return their pages in order.

        Parameters
        ----------
        keys
            Blocks that are ready.
        is_use
            Whether this counts as a use.

        Raises
        ------
        KeyError
            Where a block is not ready; nothing is pinned then.
        """
        found = [self._blocks.get(key) for key in keys]
        for key, block in zip(keys, found, strict=True):
            if block is None or not block.ready:
                raise KeyError(f"block {key.hex()} is not ready on the host")
        pages = []
        for key, block in zip(keys, found, strict=True):
            assert block is not None
            self._remove_idle(key, block)
            block.pins += 1
            block.uses += is_use
            pages.append(block.page)
        return pages

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let pinned blocks leave again; those that are gone, as after a reset, are ignored."""
        for key in keys:
            block = self._blocks.get(key)
            if block is None or not block.pins:
                continue
            block.pins -= 1
            if block.failed and not block.pins:
                self._forget(key)
            else:
                self._add_idle(key, block)

    def take(self, keys: Sequence[bytes], *, pinned: bool = False) -> Taken | None:
        """Take pages for those blocks that are not kept yet, and make room by evicting others.

        Parameters
        ----------
        keys
            In order; those that are kept already stay.
        pinned
            Whether the new blocks are pinned once, also when they are ready.

        Returns
        -------
        Taken or None
            None where too few can leave; nothing has changed then.
        """
        new = [key for key in dict.fromkeys(keys) if key not in self._blocks]
        evicted: list[bytes] = []
        short = len(new) - self._allocator.available_pages
        if short > 0:
            found = self._victims(short, set(keys))
            if found is None:
                return None
            evicted = found
            for key in evicted:
                self._remove_idle(key, self._blocks[key])
            self._allocator.free_pages([self._blocks.pop(key).page for key in evicted])
        numbers = self._allocator.alloc_pages(len(new))
        assert numbers is not None
        pages: list[int] = numbers.tolist()
        for key, page in zip(new, pages, strict=True):
            self._blocks[key] = _Block(page, pins=int(pinned))
        return Taken(new, pages, evicted)

    def finish(self, keys: Iterable[bytes], *, success: bool = True) -> list[bytes]:
        """End the way of pending blocks, and return those that are ready now; the others are no longer kept.

        They count as used in the order of their pages, which is that of :meth:`take`: heads last, so that they stay.
        """
        pending = [(self._blocks[key], key) for key in keys if key in self._blocks]
        ready = []
        for block, key in sorted(pending, key=lambda each: -each[0].page):
            if block.ready:
                continue
            if success and not block.failed:
                block.ready = True
                self._add_idle(key, block)
                ready.append(key)
            else:
                self._forget(key)
        return ready[::-1]

    def discard_pages(self, pages: Collection[int]) -> list[bytes]:
        """Stop keeping the blocks of pages that cannot be trusted, and return them.

        Each leaves at once, or when it is finished or no longer pinned.
        """
        wanted = set(pages)
        found = [key for key, block in self._blocks.items() if block.page in wanted and not block.failed]
        for key in found:
            block = self._blocks[key]
            self._remove_idle(key, block)
            block.failed = True
            if block.ready and not block.pins:
                self._forget(key)
        return found

    def reset(self, keep: Collection[bytes] = ()) -> None:
        """Forget every block, and every pin.

        Parameters
        ----------
        keep
            Blocks that storage reads or fills: their pages stay taken until these are unpinned once, or finished.
        """
        kept = {key: self._blocks[key] for key in keep if key in self._blocks}
        for block in kept.values():
            block.failed = True
            block.pins = int(block.ready)
        gone = [block.page for key, block in self._blocks.items() if key not in kept]
        self._blocks = kept
        self._idle.clear()
        self._allocator.free_pages(gone)

    def check_integrity(self) -> None:
        """Raise RuntimeError where the invariant does not hold."""
        self._allocator.check_integrity()
        pages = [block.page for block in self._blocks.values()]
        if len(set(pages)) != len(pages):
            raise RuntimeError("two blocks have one page")
        if len(pages) + self._allocator.available_pages != self._allocator.page_num:
            raise RuntimeError(f"{len(pages)} pages have blocks and {self._allocator.available_pages} are free")
        idle = [(rank, key) for rank, keys in self._idle.items() for key in keys]
        expected = {(self._rank(block), key) for key, block in self._blocks.items() if block.ready and not block.pins}
        if len(idle) != len(expected) or set(idle) != expected:
            raise RuntimeError("the blocks that can leave are not those that are ready and not pinned")

    def _rank(self, block: _Block) -> int:
        return min(block.uses, self._most_uses)

    def _add_idle(self, key: bytes, block: _Block) -> None:
        if block.ready and not block.pins:
            self._idle.setdefault(self._rank(block), OrderedDict())[key] = None

    def _remove_idle(self, key: bytes, block: _Block) -> None:
        if block.ready and not block.pins:
            self._idle[self._rank(block)].pop(key, None)

    def _forget(self, key: bytes) -> None:
        self._allocator.free_pages([self._blocks.pop(key).page])

    def _victims(self, count: int, protected: set[bytes]) -> list[bytes] | None:
        victims: list[bytes] = []
        for rank in sorted(self._idle):
            for key in self._idle[rank]:
                if key not in protected:
                    victims.append(key)
                    if len(victims) == count:
                        return victims
        return None
