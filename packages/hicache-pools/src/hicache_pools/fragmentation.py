"""How well host pages stay together under real traffic: a trace's allocation pattern replayed on several strategies.

What is replayed
----------------
Each request names its prompt as a list of block ids (512 tokens a block; equal ids at equal places mean an equal
prefix). Blocks that are cached already are matched from the front; the rest is allocated, as nodes of a prefix tree:

- **one node a request**: all new blocks of a request are one node, one allocation;
- **nodes of n blocks**: new blocks are cut where their place in the request is a multiple of n, one allocation a piece.

A node is never split: a request that matches a part of a node becomes a child of the whole node. Before a node is
allocated, leaves are evicted until enough pages are free: the least recently used first, by the timestamps of the
requests that matched them; among equal timestamps, the one that became a leaf first. The request's own path stays.

**Pages per run** is all pages over all runs of the allocations made in a range of requests, where a run is a stretch
of pages that is consecutive in the order the strategy returned them: one copy of a transfer.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .extents import ExtentAllocator
from .trace import TraceRequest

PageArray = npt.NDArray[np.int64]


class PageStrategy(Protocol):
    """What the replay needs of an allocator."""

    @property
    def available_pages(self) -> int:
        """Pages that are free."""

    def alloc_pages(self, n: int) -> PageArray | None:
        """Take ``n`` pages, int64 ``[n]``, or None."""

    def free_pages(self, pages: PageArray) -> int:
        """Give pages back."""


class FifoPages:
    """Comparison: a first-in-first-out list of free pages, the free list most engines keep."""

    def __init__(self, pages: int) -> None:
        self._free: deque[int] = deque(range(pages))

    @property
    def available_pages(self) -> int:
        """Pages that are free."""
        return len(self._free)

    def alloc_pages(self, n: int) -> PageArray | None:
        """Take the ``n`` pages that have been free longest, in that order."""
        if n > len(self._free):
            return None
        return np.fromiter((self._free.popleft() for _ in range(n)), dtype=np.int64, count=n)

    def free_pages(self, pages: PageArray) -> int:
        """Give pages back, to the end of the list in the order given."""
        self._free.extend(pages.tolist())
        return len(pages)


class BestFitPages:
    """Comparison: plain best fit, lowest address first among equal runs, coalescing; written for clarity alone."""

    def __init__(self, pages: int) -> None:
        self.available_pages = pages
        self._by_size = [(pages, 0)]
        self._size_at = {0: pages}
        self._start_before = {pages: 0}

    def alloc_pages(self, n: int) -> PageArray | None:
        """Take ``n`` pages from the smallest run that holds them, else the largest runs first."""
        if n > self.available_pages:
            return None
        self.available_pages -= n
        parts = []
        while n:
            size, start = self._by_size[min(bisect_left(self._by_size, (n, 0)), len(self._by_size) - 1)]
            self._remove(start, size)
            used = min(n, size)
            if used < size:
                self._add(start + used, size - used)
            parts.append(np.arange(start, start + used, dtype=np.int64))
            n -= used
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def free_pages(self, pages: PageArray) -> int:
        """Give pages back and join them with their free neighbours."""
        ordered = np.sort(pages)
        for part in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            start, end = int(part[0]), int(part[-1]) + 1
            if start in self._start_before:
                before = self._start_before[start]
                self._remove(before, start - before)
                start = before
            if end in self._size_at:
                after = self._size_at[end]
                self._remove(end, after)
                end += after
            self._add(start, end - start)
        self.available_pages += len(pages)
        return len(pages)

    def _add(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_before[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start], self._start_before[start + size]


STRATEGIES: Mapping[str, Callable[[int], PageStrategy]] = {
    "fifo": FifoPages,
    "best fit": BestFitPages,
    "extents": ExtentAllocator,
}
"""Name to constructor (from a number of pages) of every strategy in the report; ``extents`` is this package's."""


@dataclass(frozen=True)
class Fragmentation:
    """What one strategy did on one node size.

    Attributes
    ----------
    strategy
        A key of `STRATEGIES`.
    node_blocks
        Blocks a node at most; None for one node a request.
    allocations, pages, runs
        Number of allocations in the second half of the requests, and what they add up to.
    pages_per_run
        ``pages / runs``: the figure to compare.
    curve
        Pages per run of each window of ``window`` requests, from the first request on; 0.0 where nothing was allocated.
    window
        Requests a window.
    """

    strategy: str
    node_blocks: int | None
    allocations: int
    pages: int
    runs: int
    pages_per_run: float
    curve: tuple[float, ...]
    window: int


@dataclass(frozen=True)
class FragmentationReport:
    """Every strategy on every node size, and what was replayed.

    Attributes
    ----------
    requests
        Requests replayed.
    pool_blocks, pages_per_block
        Size of the pool, in blocks of so many pages.
    results
        One for each pair of node size and strategy.
    """

    requests: int
    pool_blocks: int
    pages_per_block: int
    results: tuple[Fragmentation, ...]

    def to_json(self) -> str:
        """Write the report as a JSON object, figures rounded to two digits."""
        plain: dict[str, Any] = asdict(self)
        for result in plain["results"]:
            result["pages_per_run"] = round(result["pages_per_run"], 2)
            result["curve"] = [round(value, 2) for value in result["curve"]]
        return json.dumps(plain, indent=1)


class _Node:
    """A node of the prefix tree: the blocks it owns, their pages, and how many nodes hang on it."""

    __slots__ = ("blocks", "children", "pages", "parent", "used")

    def __init__(self, parent: _Node | None, blocks: tuple[int, ...], pages: PageArray, used: int) -> None:
        self.parent = parent
        self.blocks = blocks
        self.pages = pages
        self.used = used
        self.children = 0


class _Allocation(NamedTuple):
    request: int
    pages: int
    runs: int


class _Tree:
    """The prefix tree of one replay, over one strategy."""

    def __init__(self, strategy: PageStrategy, pages_per_block: int) -> None:
        self._strategy = strategy
        self._pages_per_block = pages_per_block
        self._owner: dict[int, _Node] = {}
        # (time, order, node); an entry is stale once its node was used again, evicted, or has children.
        self._leaves: list[tuple[int, int, _Node]] = []
        self._order = count()

    def match(self, blocks: Sequence[int], now: int) -> tuple[int, list[_Node]]:
        """Count the leading blocks that are cached, and mark the nodes that hold them (deepest first) as used."""
        matched = 0
        while matched < len(blocks) and blocks[matched] in self._owner:
            matched += 1
        path: list[_Node] = []
        node = self._owner[blocks[matched - 1]] if matched else None
        while node is not None:
            node.used = now
            path.append(node)
            node = node.parent
        return matched, path

    def insert(self, parent: _Node | None, blocks: tuple[int, ...], path: set[_Node], now: int) -> _Node | None:
        """Add a node, evicting what is not on ``path``; None if that frees too little."""
        wanted = len(blocks) * self._pages_per_block
        self._evict(wanted, path)
        pages = self._strategy.alloc_pages(wanted)
        if pages is None:
            return None
        node = _Node(parent, blocks, pages, now)
        if parent is not None:
            parent.children += 1
        for block in blocks:
            self._owner[block] = node
        return node

    def settle(self, node: _Node | None) -> None:
        """Offer a node for eviction if it is a leaf."""
        if node is not None and not node.children:
            heapq.heappush(self._leaves, (node.used, next(self._order), node))

    def _evict(self, wanted: int, path: set[_Node]) -> None:
        passed: list[_Node] = []
        while self._strategy.available_pages < wanted and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if used != node.used or node.children or self._owner.get(node.blocks[0]) is not node:
                continue
            if node in path:
                passed.append(node)
                continue
            self._strategy.free_pages(node.pages)
            for block in node.blocks:
                del self._owner[block]
            if node.parent is not None:
                node.parent.children -= 1
                self.settle(node.parent)
        for node in passed:
            self.settle(node)


def replay(
    requests: Sequence[TraceRequest],
    strategy: PageStrategy,
    *,
    name: str,
    node_blocks: int | None,
    pages_per_block: int = 32,
    window: int = 100,
) -> Fragmentation:
    """Replay the requests' allocations on one strategy.

    Parameters
    ----------
    requests
        In the order of arrival.
    strategy
        With every page free.
    name
        Its name in the result.
    node_blocks
        Blocks a node at most, at least 1; None for one node a request.
    pages_per_block
        Pages of one block, at least 1.
    window
        Requests a point of the curve, at least 1.

    Raises
    ------
    ValueError
        If a number is out of its range.
    """
    for argument, value in (("node_blocks", node_blocks), ("pages_per_block", pages_per_block), ("window", window)):
        if value is not None and value < 1:
            raise ValueError(f"{argument}={value} is less than 1")
    allocations = list(_allocations(requests, strategy, node_blocks, pages_per_block))
    table = np.array(allocations, dtype=np.int64).reshape(-1, 3)
    second_half = table[table[:, 0] >= len(requests) // 2]
    windows = -(-len(requests) // window)
    pages = np.bincount(table[:, 0] // window, weights=table[:, 1], minlength=windows)
    runs = np.bincount(table[:, 0] // window, weights=table[:, 2], minlength=windows)
    return Fragmentation(
        strategy=name,
        node_blocks=node_blocks,
        allocations=len(second_half),
        pages=int(second_half[:, 1].sum()),
        runs=int(second_half[:, 2].sum()),
        pages_per_run=float(second_half[:, 1].sum() / max(1, second_half[:, 2].sum())),
        curve=tuple((pages / np.maximum(runs, 1)).tolist()),
        window=window,
    )


def fragmentation_report(
    requests: Sequence[TraceRequest],
    *,
    pool_blocks: int = 8000,
    pages_per_block: int = 32,
    node_blocks: Sequence[int | None] = (None, 8),
    strategies: Mapping[str, Callable[[int], PageStrategy]] = STRATEGIES,
) -> FragmentationReport:
    """Replay the requests on every strategy and node size, each on a pool of its own.

    Parameters
    ----------
    requests
        In the order of arrival.
    pool_blocks, pages_per_block
        Size of the pool: ``pool_blocks * pages_per_block`` pages.
    node_blocks
        Node sizes, in blocks; None for one node a request.
    strategies
        Name to constructor from a number of pages.

    Raises
    ------
    ValueError
        If a number is less than 1.
    """
    if pool_blocks < 1:
        raise ValueError(f"pool_blocks={pool_blocks} is less than 1")
    results = tuple(
        replay(
            requests,
            make(pool_blocks * pages_per_block),
            name=name,
            node_blocks=blocks,
            pages_per_block=pages_per_block,
        )
        for blocks in node_blocks
        for name, make in strategies.items()
    )
    return FragmentationReport(len(requests), pool_blocks, pages_per_block, results)


def _allocations(
    requests: Sequence[TraceRequest], strategy: PageStrategy, node_blocks: int | None, pages_per_block: int
) -> Iterator[_Allocation]:
    tree = _Tree(strategy, pages_per_block)
    for number, request in enumerate(requests):
        matched, nodes = tree.match(request.blocks, request.timestamp)
        path = set(nodes)
        last = nodes[0] if nodes else None
        for start, end in _pieces(matched, len(request.blocks), node_blocks):
            node = tree.insert(last, request.blocks[start:end], path, request.timestamp)
            if node is None:
                break
            path.add(node)
            last = node
            runs = 1 + int(np.count_nonzero(np.diff(node.pages) != 1))
            yield _Allocation(number, len(node.pages), runs)
        tree.settle(last)


def _pieces(start: int, end: int, node_blocks: int | None) -> Iterator[tuple[int, int]]:
    """Cut ``start .. end`` at the multiples of ``node_blocks``."""
    while start < end:
        cut = end if node_blocks is None else min(end, start - start % node_blocks + node_blocks)
        yield start, cut
        start = cut
