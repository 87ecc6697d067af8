"""The project's speed targets, held against a report: pure, so that the judgement can be tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..layout import HostLayout
from ..staging import Direction
from .builds import BUILD_CORES
from .cases import MAX_CTAS, SMALL_PAGE_SIZE, WIDE_SHARE_BYTES, Case, Pattern
from .measure import Measurement
from .report import CaseResult, Report

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """One target and the worst figure found for it.

    Attributes
    ----------
    what
        What is asked.
    limit, at_least
        The bound, and whether figures must lie above it.
    worst
        The figure farthest on the wrong side; None where nothing was measured.
    where
        Where it was found.
    missed, of
        How many of the figures miss the limit.
    """

    what: str
    limit: float
    at_least: bool
    worst: float | None
    where: str
    missed: int
    of: int

    @property
    def holds(self) -> bool | None:
        """Whether every figure is within the limit; None where there is none."""
        return None if self.worst is None else self.missed == 0


def describe(case: Case) -> str:
    """Name a case in a few words."""
    quota = "" if case.block_quota is None else f", at most {case.block_quota} CTAs"
    return (
        f"{case.shape.row_bytes} x {case.shape.layers} x {case.shape.planes}, page {case.page_size} "
        f"({case.page_bytes >> 10} KiB), {case.layout.value}, {case.pattern.value}, {case.direction.value}, "
        f"{case.policy}{quota}"
    )


def _target(what: str, limit: float, figures: Iterable[tuple[float, str]], *, at_least: bool = True) -> Target:
    found = sorted(figures, reverse=not at_least)
    missed = [figure for figure, _ in found if (figure < limit if at_least else figure > limit)]
    worst, where = found[0] if found else (None, "not measured")
    return Target(what, limit, at_least, worst, where, len(missed), len(found))


def _figures(
    results: Iterable[CaseResult], wanted: Callable[[Case], bool], figure: Callable[[Case, Measurement], float]
) -> Iterator[tuple[float, str]]:
    for result in results:
        if result.measurement.path != "none" and wanted(result.case):
            yield figure(result.case, result.measurement), describe(result.case)


def _ratio(_: Case, measurement: Measurement) -> float:
    return measurement.ratio


def _submit_milliseconds(_: Case, measurement: Measurement) -> float:
    return measurement.submit_seconds * 1e3


def _direct(direction: Direction) -> Callable[[Case], bool]:
    return lambda case: (
        case.direction is direction
        and case.policy == "direct"
        and case.block_quota == MAX_CTAS
        and not case.layer_by_layer
    )


def evaluate_targets(report: Report) -> tuple[Target, ...]:
    """Hold a report against the targets, in the order of the project's table."""
    cases = report.cases
    to_host, to_device = _direct(Direction.WRITE_BACK), _direct(Direction.LOAD)
    return (
        *_write_back_targets(report),
        _target("direct D2H, at most 8 CTAs: bandwidth", 0.93, _figures(cases, to_host, _ratio)),
        _target("direct H2D, at most 8 CTAs: bandwidth", 0.91, _figures(cases, to_device, _ratio)),
        *_load_targets(cases),
        *_small_targets(report.small),
        *_overlap_targets(report),
        auto_target(cases),
        *_build_targets(report),
    )


def _write_back_targets(report: Report) -> Iterator[Target]:
    def wanted(policy: str, pattern: Pattern, least: int = 0, most: int = 1 << 62) -> Callable[[Case], bool]:
        return lambda case: (
            case.direction is Direction.WRITE_BACK
            and case.policy == policy
            and case.pattern is pattern
            and case.block_quota is None
            and least <= case.page_bytes < most
        )

    cases = report.cases
    run, scattered = wanted("staged", Pattern.RUN), wanted("staged", Pattern.SCATTERED, MIB)
    yield _target("staged write-back, runs: bandwidth", 0.98, _figures(cases, run, _ratio))
    busy = _figures(cases, run, _submit_milliseconds)
    yield _target("staged write-back, runs: caller busy, ms", 0.5, busy, at_least=False)
    pages = "staged write-back, scattered pages from 1 MB"
    yield _target(f"{pages}: bandwidth", 0.92, _figures(cases, scattered, _ratio))
    busy = _figures(cases, scattered, _submit_milliseconds)
    yield _target(f"{pages}: caller busy, ms", 2.0, busy, at_least=False)
    auto = _figures(cases, wanted("auto", Pattern.SCATTERED, 20_000, MIB), _ratio)
    yield _target("auto write-back, scattered pages of 20 to 1000 KB: bandwidth", 0.92, auto)
    full = [] if report.full_staging is None else [report.full_staging]
    shares = _figures(full, lambda _: True, lambda _, measurement: measurement.release_share)
    what = "device slots released, staging as large as the operation: share of the time"
    yield _target(what, 0.05, shares, at_least=False)


def _load_targets(cases: Sequence[CaseResult]) -> Iterator[Target]:
    def wide(pattern: Pattern) -> Callable[[Case], bool]:
        return lambda case: _is_wide(case) and case.policy == "staged" and case.pattern is pattern

    def other(case: Case) -> bool:
        covered = _is_wide(case) and case.pattern is not Pattern.SCATTERED
        return case.direction is Direction.LOAD and case.policy == "auto" and not covered

    def first_layer(case: Case, measurement: Measurement) -> float:
        return measurement.first_layer_share * case.shape.layers

    run, runs = wide(Pattern.RUN), wide(Pattern.RUNS_OF_16)
    name = "staged load-back, wide shares"
    yield _target(f"{name}, run: bandwidth", 0.97, _figures(cases, run, _ratio))
    yield _target(f"{name}, runs of 16: bandwidth", 0.90, _figures(cases, runs, _ratio))
    first = _figures(cases, run, first_layer)
    yield _target(f"{name}, run: first layer, of the time of one", 1.5, first, at_least=False)
    busy = _figures(cases, run, _submit_milliseconds)
    yield _target(f"{name}, run: caller busy, ms", 1.0, busy, at_least=False)
    busy = _figures(cases, runs, _submit_milliseconds)
    yield _target(f"{name}, runs of 16: caller busy, ms", 3.0, busy, at_least=False)
    rest = _figures(cases, other, _ratio)
    yield _target("auto load-back, everything else, layer by layer: bandwidth", 0.88, rest)


def _small_targets(small: Sequence[CaseResult]) -> Iterator[Target]:
    for direction, name, caller, idle in (
        (Direction.WRITE_BACK, "write-back", 40.0, 80.0),
        (Direction.LOAD, "load-back", 60.0, 130.0),
    ):
        found = [(result.measurement, describe(result.case)) for result in small if result.case.direction is direction]
        what = f"{name} of one page of {SMALL_PAGE_SIZE} slots"
        busy = ((measurement.submit_seconds * 1e6, where) for measurement, where in found)
        yield _target(f"{what}: caller busy, us", caller, busy, at_least=False)
        whole = ((measurement.idle_seconds * 1e6, where) for measurement, where in found)
        yield _target(f"{what}: from the call, us", idle, whole, at_least=False)


def _overlap_targets(report: Report) -> Iterator[Target]:
    both = [] if report.duplex is None else [(report.duplex.ratio, "both directions")]
    yield _target("both directions at once, staged, runs: of two plain copies", 0.95, both)
    runs = [d for d in report.disturbances if d.case.policy == "staged" and d.case.pattern is Pattern.RUN]
    slowdowns = [(d.slowdown, f"{d.workload}, {d.case.direction.value}") for d in runs]
    yield _target("graph next to a staged transfer of a run: of its time alone", 1.03, slowdowns, at_least=False)
    loads = [d for d in report.disturbances if d.case.policy == "auto" and d.case.direction is Direction.LOAD]
    decode = [d for d in loads if d.workload == "decode"]
    prefill = [d for d in loads if d.workload == "prefill"]
    what = "decode next to an auto load"
    slowdowns = [(d.slowdown, describe(d.case)) for d in decode]
    yield _target(f"{what}: of its time alone", 1.06, slowdowns, at_least=False)
    yield _target(f"{what}: bandwidth of the load", 0.85, [(d.ratio, describe(d.case)) for d in decode])
    for path, limit in (("staged", 1.05), ("direct", 1.25)):
        slowdowns = [(d.of_plain, describe(d.case)) for d in prefill if d.path == path]
        what = f"prefill next to an auto load that goes {path}: of its time next to a plain copy"
        yield _target(what, limit, slowdowns, at_least=False)


def _build_targets(report: Report) -> Iterator[Target]:
    loads = [(m["seconds"], name) for name, m in report.modules.items() if m["origin"] in ("cache", "prebuilt")]
    yield _target("warm load of a module, s", 0.5, loads, at_least=False)
    builds = [] if report.cold_build_seconds is None else [(report.cold_build_seconds, "one after the other")]
    yield _target(f"cold build of both modules on {BUILD_CORES} cores, s", 60.0, builds, at_least=False)


def _is_wide(case: Case) -> bool:
    return (
        case.direction is Direction.LOAD
        and case.layout is HostLayout.PAGE_FIRST_DIRECT
        and case.layer_page_bytes >= WIDE_SHARE_BYTES
    )


def auto_target(cases: Iterable[CaseResult]) -> Target:
    """Judge the planner: the share of the grid on which auto is within 5% of the better of staged and direct."""
    by_pool: dict[object, dict[str, CaseResult]] = {}
    for result in cases:
        case = result.case
        if result.measurement.path != "none" and case.block_quota is None:
            key = (case.shape, case.page_size, case.layout, case.pattern, case.direction)
            by_pool.setdefault(key, {})[case.policy] = result
    shares = []
    for results in by_pool.values():
        if {"auto", "staged", "direct"} <= results.keys():
            best = max(results[policy].measurement.ratio for policy in ("staged", "direct"))
            shares.append((results["auto"].measurement.ratio / best, describe(results["auto"].case)))
    what, limit = "auto within 5% of the better path: share of the grid", 0.95
    if not shares:
        return Target(what, limit, True, None, "not measured", 0, 0)
    near = sum(share >= 0.95 for share, _ in shares) / len(shares)
    worst_share, where = min(shares)
    return Target(what, limit, True, near, f"worst {worst_share:.3f}: {where}", int(near < limit), 1)
