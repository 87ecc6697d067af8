"""When pages are written to the host, and which leave a tier first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..hashing import Namespace
from ..policies import WritePolicy as WritePolicy


class EvictionStrategy(Protocol):
    """Decides the order in which the unlocked leaves of a tier leave it; the tail of a prefix always precedes its head.

    Of two leaves the one with the lower priority leaves first, then the one with the lower value, then the one that was
    used longer ago.
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


class LeastRecentlyUsed:
    """What was used longest ago leaves first."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Return the tick."""
        return tick


class LeastFrequentlyUsed:
    """What was used least often leaves first; of equals, what was used longer ago."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Return the uses."""
        return hits


class SizeAware:
    """Uses a page decide, above the value of what was last evicted, so that former favourites age.

    A long run of pages that was used once leaves before a short one, which costs little room for as many hits.
    """

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        """Return the uses a page, above the clock."""
        return clock + hits / max(pages, 1)


STRATEGIES: dict[str, type[EvictionStrategy]] = {
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "size_aware": SizeAware,
}
"""Strategies by name."""


def eviction_strategy(strategy: EvictionStrategy | str) -> EvictionStrategy:
    """Return a strategy, by name or as it is; ValueError for an unknown name."""
    if not isinstance(strategy, str):
        return strategy
    if strategy not in STRATEGIES:
        raise ValueError(f"eviction is {strategy!r}; accepted are {', '.join(STRATEGIES)}, and any EvictionStrategy")
    return STRATEGIES[strategy]()


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
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must not be negative")


NO_QUOTA = Quota()
NO_NAMESPACE = Namespace()
