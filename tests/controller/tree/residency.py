"""Which prefixes are in which tier, by what the tree reports: the simplest model of a tree there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache_controller.tree import CacheEvent, Change, Tier

POOLS = ("kv", "swa", "mamba")


class Residency:
    """Sets of page keys by pool and tier, kept by the events.

    ``windows`` has the pages that a prefix needs of each windowed pool.
    """

    def __init__(self, windows: Mapping[str, int]) -> None:
        self.windows = windows
        self.where: dict[tuple[str, Tier], set[bytes]] = {(pool, tier): set() for pool in POOLS for tier in Tier}

    def listen(self, event: CacheEvent) -> None:
        known = self.where[event.pool, event.tier]
        keys = set(event.keys)
        assert event.keys
        if event.change is Change.STORED:
            assert event.tier is Tier.STORAGE or not keys & known, f"{event} reports what was stored already"
            known |= keys
        else:
            assert keys <= known, f"{event} reports what was never stored"
            known -= keys

    def longest(self, keys: Sequence[bytes], *tiers: Tier) -> int:
        """The longest prefix of which every pool has what it needs in some of the tiers."""

        def have(pool: str, wanted: Sequence[bytes]) -> bool:
            return all(any(key in self.where[pool, tier] for tier in tiers) for key in wanted)

        return next(
            length
            for length in range(len(keys), -1, -1)
            if have("kv", keys[:length])
            and all(have(pool, keys[max(0, length - window) : length]) for pool, window in self.windows.items())
        )
