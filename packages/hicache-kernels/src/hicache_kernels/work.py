"""What the planner is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import HostLayout

STAGED = "staged"
DIRECT = "direct"
REFERENCE = "reference"
AT_ONCE_COST = 0.1
"""What a load whose layers come all at once costs on top, as a share of its time: its request waits for all of it."""


@dataclass(frozen=True, slots=True)
class Work:
    """One operation as the planner sees it.

    Attributes
    ----------
    layout
        Host layout of the pool.
    pages, runs
        Host pages to move, and the runs of neighbouring pages they form (after cuts at registration boundaries).
    page_bytes
        Bytes of one page, all layers and planes.
    page_size
        Slots of a page.
    layers
        Model layers of the pool.
    planes
        Planes whose rows lie in separate pieces in a ``layer_first`` buffer: 2 for K and V.
    row_bytes
        Shortest device row.
    """

    layout: HostLayout
    pages: int
    runs: int
    page_bytes: int
    page_size: int
    layers: int
    planes: int = 1
    row_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the whole operation."""
        return self.pages * self.page_bytes

    @property
    def layer_page_bytes(self) -> int:
        """One layer's share of a page."""
        return self.page_bytes // self.layers

    @property
    def layer_width(self) -> int:
        """Longest piece of one layer that is contiguous in a run of pages: the width of its 2-D copies."""
        if self.layout is HostLayout.PAGE_FIRST:
            return self.layer_page_bytes // self.page_size
        if self.layout is HostLayout.PAGE_FIRST_DIRECT:
            return self.layer_page_bytes
        return self.layer_page_bytes // self.planes * self.pages // max(1, self.runs)


@dataclass(frozen=True, slots=True)
class Plan:
    """The path of one operation.

    Attributes
    ----------
    path
        ``"staged"``, ``"direct"`` or ``"reference"``.
    reason
        One sentence: why this path.
    expected_seconds
        What the model expects on the device; 0.0 for the reference, which it does not model.
    block_quota
        CTAs a direct transfer holds, and a staged one with ``direct_layers``; else 0.
    layers_each
        Layers that a copy of a staged load-back takes at most.
    model_loss
        Share of its time that the model loses meanwhile, on top of what a plain copy takes from it, as far as that
        counts: 0.0 for a write-back whose caller does not say what the model computes.
    direct_layers
        Layers of a staged load-back that go directly, ahead of its copies, with ``block_quota`` CTAs.
    in_order
        False where all layers that the copies of a load-back bring come at once, at its end.
    handicap
        Share of its time that the path must be better by to be chosen; no part of what the model loses.
    any_runs
        Whether operations of as many pages in any number of runs have this plan.
    """

    path: str
    reason: str
    expected_seconds: float
    block_quota: int
    layers_each: int = 1
    model_loss: float = 0.0
    direct_layers: int = 0
    in_order: bool = True
    handicap: float = 0.0
    any_runs: bool = False

    @property
    def cost(self) -> float:
        """Seconds that decide: those of the bus, and those that the model loses meanwhile."""
        at_once = 0.0 if self.in_order else AT_ONCE_COST
        return self.expected_seconds * (1 + self.model_loss + self.handicap + at_once)
