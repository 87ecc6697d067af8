"""CacheEvent: what a router needs to choose a server by its cache; Events: reports them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ..engine_calls import EngineCalls
from .keys import KEY_BYTES, Tokens, key_list
from .node import Held, TreeNode
from .presence import Run


class Tier(StrEnum):
    """Where pages are."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


def tier(*, device: bool) -> Tier:
    """Return the device's tier, or the host's."""
    return Tier.DEVICE if device else Tier.HOST


class Change(StrEnum):
    """What happened to them there."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Pages that are in a tier now, or no longer.

    For storage, events cover what the tree knows: pages that it stored or found there, once each, and which of them
    storage has removed. Other processes may store more.

    Attributes
    ----------
    change, tier, pool
        What, where, and of which pool.
    keys
        Page keys, in order.
    parent
        Key of the page before them; None at a sequence's start.
    tokens
        Token ids of the pages, int64; None where the request came without them, and for what left storage.
    """

    change: Change
    tier: Tier
    pool: str
    keys: tuple[bytes, ...]
    parent: bytes | None
    tokens: Tokens | None


Listener = Callable[[CacheEvent], object]
"""Called for each event, in the order of events, on the thread that uses the tree; must not call the tree."""


class Events:
    """Reports what nodes and window parts have in the tiers.

    Parameters
    ----------
    listener
        Called for each event; None: nothing is reported.
    anchor
        Name of the anchor's pool.
    page_size
        Tokens a page.
    calls
        Keeps what the listener raises until the public call ends.
    """

    def __init__(self, listener: Listener | None, anchor: str, page_size: int, calls: EngineCalls) -> None:
        self.listener = listener
        self.anchor = anchor
        self._page_size = page_size
        self._calls = calls

    def held(self, change: Change, held: Held, *, device: bool, skip: int = 0) -> None:
        """Report what a node or a window part has on the device or on the host, except its last ``skip`` pages."""
        if self.listener is None:
            return
        node, pool = self.place(held)
        first, end = node.pages - held.count(device=device), node.pages - skip
        keys = tuple(key_list(node.keys[first * KEY_BYTES : end * KEY_BYTES]))
        self.run(change, tier(device=device), pool, Run(keys, node.key_before(first)), node, first)

    def place(self, held: Held) -> tuple[TreeNode, str]:
        """Return the node of whose pages something has some, and the pool that they are in."""
        return (held, self.anchor) if isinstance(held, TreeNode) else (held.node, held.name)

    def run(
        self, change: Change, tier: Tier, pool: str, run: Run, node: TreeNode | None = None, first: int = 0
    ) -> None:
        """Report keys that follow each other; their tokens are those of ``node`` from page ``first`` on."""
        if self.listener is None:
            return
        tokens = None
        if node is not None and node.tokens is not None:
            tokens = node.tokens[first * self._page_size : (first + len(run.keys)) * self._page_size]
        self._calls.call(self.listener, CacheEvent(change, tier, pool, run.keys, run.parent, tokens))
