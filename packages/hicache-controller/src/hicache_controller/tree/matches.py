"""Matches: pins what requests match, until they release it or its time is over."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..engine_calls import EngineCalls
from ..interrupts import interruptibly
from .keys import Tokens
from .namespaces import NO_USAGE, NamespaceUsage
from .node import TreeNode
from .radix_tree import RadixTree
from .results import Match


class Matches:
    """Every match that is pinned, and those that are kept for some seconds."""

    def __init__(self, tree: RadixTree, clock: Callable[[], float], calls: EngineCalls) -> None:
        self._tree = tree
        self._calls = calls
        self._clock = clock
        self._pinned: set[Match] = set()
        self._timed: list[tuple[float, int, Match]] = []
        self._order = itertools.count()

    def pin(
        self,
        keys: bytes,
        node: TreeNode,
        pages: int,
        *,
        owner: NamespaceUsage = NO_USAGE,
        priority: int = 0,
        tokens: Tokens | None = None,
    ) -> Match:
        """Pin the restorable prefix of ``pages`` pages that ends with ``node``."""
        device_pages, above = pages, node
        while above.device is None and above.parent is not None:
            device_pages -= above.pages
            above = above.parent
        device_pin, host_pin = self._tree.pin_windows(node)
        self._tree.lock(above, device=True)
        if device_pages < pages:
            self._tree.lock(node, device=False)
        match = Match(
            keys, device_pages, pages - device_pages, above, node, device_pin, host_pin, owner, priority, tokens
        )
        self._pinned.add(match)
        return match

    def pin_other(self, match: Match, node: TreeNode, pages: int) -> Match:
        """Pin another prefix of the same request."""
        return self.pin(match.keys, node, pages, owner=match.owner, priority=match.priority, tokens=match.tokens)

    def check(self, match: Match) -> None:
        """Raise ValueError unless the match is pinned."""
        if match not in self._pinned:
            raise ValueError("match was released, or another one replaced it; accepted is one that is pinned")

    def unpin(self, match: Match) -> None:
        """Unpin a match."""
        self.check(match)
        self._pinned.remove(match)
        self._tree.unlock(match.device_node, device=True)
        if match.host_pages:
            self._tree.unlock(match.node, device=False)
        self._tree.unpin(match.device_pin, match.host_pin)

    @contextmanager
    def handing_out(self, match: Match) -> Iterator[None]:
        """Unpin a match that the caller does not get, as the block or a callback of the engine raised.

        Interrupts come before and after the block, as one at the end of the call would take its result along.
        """
        try:
            self.raise_pending()
            yield
            self.raise_pending()
        except BaseException:
            self.unpin(match)
            raise

    def raise_pending(self) -> None:
        """Raise what a callback of the engine has raised, or an interrupt that has arrived."""
        self._calls.raise_first()
        interruptibly(_do_nothing)

    def keep(self, match: Match, seconds: float) -> None:
        """Pin what a match covers once more, for some seconds."""
        kept = self.pin_other(match, match.node, match.pages)
        heapq.heappush(self._timed, (self._clock() + seconds, next(self._order), kept))

    def expire(self) -> int:
        """Unpin what was to be kept until now; returns how many pins there were."""
        expired = 0
        while self._timed and self._timed[0][0] <= self._clock():
            self.unpin(heapq.heappop(self._timed)[2])
            expired += 1
        return expired

    def clear(self) -> None:
        """Forget every match."""
        self._pinned.clear()
        self._timed.clear()


def _do_nothing() -> None:
    pass
