"""What is measured: shapes of pools, patterns of host pages, directions and policies, as plain values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ..layout import HostLayout
from ..staging import Direction


class Pattern(StrEnum):
    """How the host pages of an operation lie."""

    RUN = "run"
    """All neighbours: one long run."""
    RUNS_OF_16 = "runs of 16"
    """Runs of 16 neighbouring pages, scattered."""
    RUNS_OF_80 = "runs of 80"
    """Runs of 80 neighbouring pages, scattered."""
    SCATTERED = "scattered"
    """No two pages neighbours."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of a pool.

    Attributes
    ----------
    row_bytes
        Bytes of a row.
    layers
        Model layers.
    planes
        2 for K and V, 1 for a latent cache.
    """

    row_bytes: int
    layers: int
    planes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, all layers and planes."""
        return self.row_bytes * self.layers * self.planes


SHAPES = (Shape(2048, 32, 2), Shape(1024, 28, 2), Shape(256, 80, 2), Shape(1152, 61, 1))
PAGE_SIZES = (1, 16, 64)
LAYOUTS = (HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT)
POLICIES = ("staged", "direct", "auto")
DIRECT_ROWS = (128, 256, 576, 1024, 2048, 4096, 16384)
QUOTAS = (1, 2, 4, 8)
MAX_CTAS = 8
"""CTAs that the targets of the direct path allow."""


@dataclass(frozen=True, slots=True)
class Case:
    """One operation that is measured.

    Attributes
    ----------
    shape, page_size, layout
        The pool.
    pattern
        Its host pages; device pages are always in random order.
    direction, policy, block_quota
        The transfer.
    layer_by_layer
        Whether a load records an event after each layer, as an engine that overlaps it with its layers asks for.
    """

    shape: Shape
    page_size: int
    layout: HostLayout
    pattern: Pattern
    direction: Direction
    policy: str
    block_quota: int | None = None
    layer_by_layer: bool = True

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.shape.slot_bytes * self.page_size

    @property
    def layer_page_bytes(self) -> int:
        """One layer's share of a page."""
        return self.page_bytes // self.shape.layers


def pool_of(case: Case) -> tuple[Shape, int, HostLayout, Pattern]:
    """Return what two cases of one pool have in common."""
    return case.shape, case.page_size, case.layout, case.pattern


def grid(
    shapes: Sequence[Shape] = SHAPES,
    page_sizes: Sequence[int] = PAGE_SIZES,
    layouts: Sequence[HostLayout] = LAYOUTS,
    policies: Sequence[str] = POLICIES,
) -> Iterator[Case]:
    """Every shape, page size and layout, in a run and scattered, both directions, by every policy.

    Loads of wide ``page_first_direct`` shares also come in runs of 16 pages. Cases of one pool follow each other.
    """
    patterns = (Pattern.RUN, Pattern.RUNS_OF_16, Pattern.SCATTERED)
    for shape, page_size, layout in itertools.product(shapes, page_sizes, layouts):
        for direction, pattern in itertools.product(Direction, patterns):
            first = Case(shape, page_size, layout, pattern, direction, policies[0])
            if pattern is Pattern.RUNS_OF_16 and not _wide_load(first):
                continue
            for policy in policies:
                yield Case(shape, page_size, layout, pattern, direction, policy)


def _wide_load(case: Case) -> bool:
    return (
        case.direction is Direction.LOAD
        and case.layout is HostLayout.PAGE_FIRST_DIRECT
        and case.layer_page_bytes >= WIDE_SHARE_BYTES
    )


WIDE_SHARE_BYTES = 32 << 10
"""From here on, 2-D copies of one layer's share of a page reach the full bandwidth."""


def direct_grid(rows: Sequence[int] = DIRECT_ROWS) -> Iterator[Case]:
    """Row sizes of the direct path, held to :data:`MAX_CTAS` CTAs, one page a slot, scattered, in one call."""
    for row_bytes, direction in itertools.product(rows, Direction):
        shape = Shape(row_bytes, max(2, min(64, (64 << 10) // row_bytes)), 2)
        yield Case(shape, 1, HostLayout.PAGE_FIRST, Pattern.SCATTERED, direction, "direct", MAX_CTAS, False)


def quota_grid(quotas: Sequence[int] = QUOTAS) -> Iterator[Case]:
    """Numbers of CTAs of the direct path, on an idle device."""
    for direction, quota in itertools.product(Direction, quotas):
        yield Case(SHAPES[0], 1, HostLayout.PAGE_FIRST_DIRECT, Pattern.SCATTERED, direction, "direct", quota)


PLAIN = "plain copy"
"""Policy of a case that is one copy of all its bytes, which no transfer can disturb the model less than."""


def disturbing_cases(quotas: Sequence[int] = QUOTAS) -> Iterator[Case]:
    """Transfers that are measured next to a model: a run both ways by CTAs, and loads that are hard to place.

    Cases of one pool follow each other, a plain copy first.
    """
    page_first, direct = LAYOUTS
    for direction in Direction:
        run = Case(SHAPES[0], 16, direct, Pattern.RUN, direction, PLAIN)
        yield from (run, replace(run, policy="staged"))
        yield from (replace(run, policy="direct", block_quota=quota) for quota in quotas)
    for shape, page_size, layout, pattern in (
        (SHAPES[2], 16, direct, Pattern.SCATTERED),
        (SHAPES[1], 16, direct, Pattern.SCATTERED),
        (SHAPES[0], 1, direct, Pattern.RUNS_OF_80),
        (SHAPES[0], 1, direct, Pattern.SCATTERED),
        (SHAPES[0], 16, page_first, Pattern.SCATTERED),
    ):
        load = Case(shape, page_size, layout, pattern, Direction.LOAD, PLAIN)
        yield from (load, replace(load, policy="auto"), replace(load, policy="staged"))
        yield replace(load, policy="direct", block_quota=2)


SMALL_PAGE_SIZE = 16


def small_cases(shapes: Iterable[Shape]) -> Iterator[Case]:
    """Pools of which one page is moved at a time, as after a decode step, each way."""
    for shape, direction in itertools.product(shapes, Direction):
        yield Case(shape, SMALL_PAGE_SIZE, HostLayout.PAGE_FIRST_DIRECT, Pattern.SCATTERED, direction, "auto")


def quick_grid() -> tuple[Case, ...]:
    """Two shapes and two page sizes: enough to see whether a change did harm."""
    return tuple(grid(SHAPES[:1] + SHAPES[3:], (1, 16), (HostLayout.PAGE_FIRST_DIRECT,)))
