"""When pages are written to the host, and which leave a tier first."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Protocol

from hicache_kernels.validation import whole

from ..hashing import Namespace
from ..policies import WritePolicy as WritePolicy

_PROTECTED_HITS = 2
_PROTECTED = 1 << 62
"""What a protected node's value is above those on probation: more ticks than there will be."""
MIN_PRIORITY, MAX_PRIORITY = -(1 << 31), (1 << 31) - 1
"""Bounds of a request's priority."""


class EvictionStrategy(Protocol):
    """Decides the order in which the unlocked leaves of a tier leave it; the tail of a prefix always precedes its head.

    Of two leaves the one with the lower priority leaves first, then the one with the lower value, then the one that was
    used longer ago. A node keeps its value until it is used again, when the new one may be higher or lower; where a
    request diverges inside a node, both parts keep it.
    """

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Value of a node that is being used.

        Parameters
        ----------
        hits
            Times it was used, this one included.
        pages
            Its pages.
        tick
            Grows with every request.
        clock
            Value of the node that was evicted last; 0 in the beginning.
        """


class PlacedEvictionStrategy(Protocol):
    """An :class:`EvictionStrategy` that is also given where a node is and since when.

    A strategy is one if its ``value`` has a parameter ``created`` or ``depth``; it is given both then.
    """

    def value(self, *, hits: int, pages: int, tick: int, clock: float, created: int, depth: int) -> float:
        """Value of a node that is being used.

        Parameters
        ----------
        hits, pages, tick, clock
            As for an :class:`EvictionStrategy`.
        created
            Tick of the request that brought its pages.
        depth
            Pages from the start of the sequence to its end.
        """


AnyStrategy = EvictionStrategy | PlacedEvictionStrategy


class LeastRecentlyUsed:
    """What was used longest ago leaves first."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Return the tick."""
        return tick


class MostRecentlyUsed:
    """What was used last leaves first: of requests that come round in turn, some keep their pages."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Return the tick, negated."""
        return -tick


class LeastFrequentlyUsed:
    """What was used least often leaves first; of equals, what was used longer ago."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Return the uses."""
        return hits


class FirstInFirstOut:
    """What was inserted longest ago leaves first, however often it was used."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float, created: int, depth: int) -> float:
        """Return the tick of the insert."""
        return created


class FirstInLastOut:
    """What was inserted last leaves first, however often it was used."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float, created: int, depth: int) -> float:
        """Return the tick of the insert, negated."""
        return -created


class SegmentedLeastRecentlyUsed:
    """Two segments, each in the order of its last uses: what was used once is on probation and leaves first.

    A second use moves a node to the protected segment, where it stays. So a stream of requests that come once does not
    push out what comes again.
    """

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Return the tick, in the protected segment above all ticks on probation."""
        return tick if hits < _PROTECTED_HITS else tick + _PROTECTED


class SizeAware:
    """Uses a page decide, above the value of what was last evicted, so that former favourites age.

    A long run of pages that was used once leaves before a short one, which costs little room for as many hits.
    """

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Return the uses a page, above the clock."""
        return clock + hits / max(pages, 1)


STRATEGIES: dict[str, type[AnyStrategy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "size_aware": SizeAware,
    "fifo": FirstInFirstOut,
    "filo": FirstInLastOut,
    "mru": MostRecentlyUsed,
    "slru": SegmentedLeastRecentlyUsed,
}
"""Strategies by name."""

_ACCEPTED = f"accepted are {', '.join(STRATEGIES)}, and any EvictionStrategy"


def eviction_strategy(strategy: AnyStrategy | str) -> AnyStrategy:
    """Return a strategy, by name or as it is.

    Raises
    ------
    ValueError, TypeError
        The name is unknown, or the object has no method ``value``.
    """
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise ValueError(f"eviction is {strategy!r}; {_ACCEPTED}")
        return STRATEGIES[strategy]()
    if not callable(getattr(strategy, "value", None)):
        raise TypeError(f"eviction is {strategy!r}; {_ACCEPTED}")
    return strategy


def is_placed(strategy: AnyStrategy) -> bool:
    """Whether a strategy is a :class:`PlacedEvictionStrategy`."""
    return not {"created", "depth"}.isdisjoint(inspect.signature(strategy.value).parameters)


@dataclass(frozen=True, slots=True)
class Quota:
    """Most pages a namespace keeps in a tier; None for no limit.

    A namespace above its quota loses its own leaves first; what is locked stays, and is looked at again when unlocked.
    """

    device_pages: int | None = None
    host_pages: int | None = None

    def __post_init__(self) -> None:
        for name in ("device_pages", "host_pages"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value, least=0)


class TreeSettings(Protocol):
    """What an engine may change while it runs: attributes of :class:`UnifiedRadixCache`."""

    write_policy: WritePolicy
    selective_hits: int
    load_back_pages: int
    load_quota_pages: int | None


NO_QUOTA = Quota()
NO_NAMESPACE = Namespace()
