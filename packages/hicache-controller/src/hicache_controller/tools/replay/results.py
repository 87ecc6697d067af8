"""What a replay saw."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class VerificationError(RuntimeError):
    """A loaded row that does not hold what it must; the message says where."""


@dataclass
class PathCounts:
    """One path between two tiers: bytes, the seconds it was busy, pages and runs of neighbouring host pages."""

    bytes: int = 0
    seconds: float = 0.0
    pages: int = 0
    runs: int = 0

    @property
    def gb_per_second(self) -> float:
        """Bandwidth in 10**9 bytes a second, 0.0 where nothing moved."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def mean_run(self) -> float:
        """Pages a copy, 0.0 where nothing moved."""
        return self.pages / self.runs if self.runs else 0.0


@dataclass
class PoolCounts:
    """What one host pool moved, in its own pages, and how many of its rows were checked after a load.

    Attributes
    ----------
    written_back, loaded_back
        Pages from device to host, and from host to device.
    stored, fetched
        Pages that were stored (or were in storage already), and that were loaded from storage.
    rows_verified
        Rows compared bit for bit with what they must hold.
    """

    written_back: int = 0
    loaded_back: int = 0
    stored: int = 0
    fetched: int = 0
    rows_verified: int = 0


@dataclass
class ReplayReport:
    """What a replay saw; blocks are complete trace blocks, each counted at the slowest tier its attention came from."""

    requests: int = 0
    tokens: int = 0
    blocks: int = 0
    l1_hits: int = 0
    l2_hits: int = 0
    l3_hits: int = 0
    rows_verified: int = 0
    seconds: float = 0.0
    paths: dict[str, PathCounts] = field(default_factory=dict)
    pools: dict[str, PoolCounts] = field(default_factory=dict)
    history: list[tuple[int, int, int, int]] = field(default_factory=list)
    """For each request: blocks from L1, L2, L3, and missed."""

    @property
    def hits(self) -> int:
        """Blocks found in any tier."""
        return self.l1_hits + self.l2_hits + self.l3_hits

    @property
    def misses(self) -> int:
        """Blocks computed."""
        return self.blocks - self.hits

    def as_json(self) -> dict[str, Any]:
        """Plain data, without the history."""
        data = asdict(self)
        del data["history"]
        for name, path in self.paths.items():
            data["paths"][name] |= {"gb_per_second": path.gb_per_second, "mean_run": path.mean_run}
        return data | {"hits": self.hits, "misses": self.misses}
