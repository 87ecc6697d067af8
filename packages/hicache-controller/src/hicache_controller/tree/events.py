"""CacheEvent: what routers that choose a server by its cache want to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from .keys import Tokens


class Tier(StrEnum):
    """Where pages are."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Change(StrEnum):
    """What happened to them there."""

    STORED = "stored"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Pages that can be had from a tier now, or no longer.

    Storage is told of as far as the tree knows: pages that it stored or found there, once each, and those of them that
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
