"""The benchmark on the CPU, on tiny sizes: what it measures, the tables, files, and the judgement of targets."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hicache_kernels import HostLayout
from hicache_kernels.bench import (
    BenchPool,
    Buffers,
    Case,
    Disturbance,
    Measurement,
    Pattern,
    Report,
    direct_grid,
    evaluate_targets,
    grid,
    measure_case,
    quick_grid,
    run_benchmark,
)
from hicache_kernels.bench import report as bench_report
from hicache_kernels.bench.builds import cold_build_seconds
from hicache_kernels.bench.cases import SHAPES, Shape, small_cases
from hicache_kernels.bench.interference import Duplex
from hicache_kernels.bench.pool import host_pages
from hicache_kernels.bench.report import CaseResult
from hicache_kernels.cli import app
from hicache_kernels.constants import CPU
from hicache_kernels.staging import Direction

TINY = Shape(64, 3, 2)


def tiny_grid() -> list[Case]:
    return list(grid([TINY], (1, 4), (HostLayout.PAGE_FIRST_DIRECT,)))


@pytest.fixture(scope="module")
def report() -> Report:
    return run_benchmark(tiny_grid(), device="cpu", size=1 << 16, repeats=2, constants=CPU)


def test_the_grid_is_the_one_the_targets_speak_of() -> None:
    cases = list(grid())
    pools = {(c.shape, c.page_size, c.layout) for c in cases}
    assert len(pools) == 4 * 3 * 2
    assert {(s.row_bytes, s.layers, s.planes) for s in SHAPES} == {
        (2048, 32, 2),
        (1024, 28, 2),
        (256, 80, 2),
        (1152, 61, 1),
    }
    assert len(set(cases)) == len(cases)
    in_runs = [c for c in cases if c.pattern is Pattern.RUNS_OF_16]
    assert in_runs
    assert all(c.layer_page_bytes >= 32 << 10 and c.direction is Direction.LOAD for c in in_runs)
    assert min(c.shape.row_bytes for c in direct_grid()) == 128
    assert set(quick_grid()) < set(cases)


@pytest.mark.parametrize("pages", [1, 2, 15, 16, 33, 64])
@pytest.mark.parametrize("pattern", list(Pattern))
def test_patterns_name_every_page_once_and_lie_as_they_say(pattern: Pattern, pages: int) -> None:
    order = host_pages(pattern, pages)
    assert sorted(order.tolist()) == list(range(pages))
    neighbours = int((order[1:] == order[:-1] + 1).sum())
    if pattern is Pattern.RUN:
        assert neighbours == pages - 1
    elif pattern is Pattern.SCATTERED and pages > 2:
        assert neighbours <= 1
    elif pattern is Pattern.RUNS_OF_16:
        assert neighbours >= pages // 16 * 15


@pytest.mark.parametrize("case", tiny_grid())
def test_a_case_moves_the_whole_pool(case: Case) -> None:
    buffers = Buffers.allocate(1 << 14, "cpu")
    buffers.host.zero_()
    pool = BenchPool.build(case, buffers)
    if case.direction is Direction.LOAD:
        buffers.host.random_(0, 256)
        buffers.rows.zero_()
    measured = measure_case(case, pool, 1e9, repeats=1)
    assert measured.bytes == pool.bytes == (1 << 14) // case.page_bytes * case.page_bytes
    assert measured.seconds > 0
    assert measured.ratio == pytest.approx(pool.bytes / measured.seconds / 1e9)
    assert measured.idle_ratio == pytest.approx(pool.bytes / measured.idle_seconds / 1e9)
    sides = [buffer[: pool.bytes].sort().values for buffer in (buffers.host, buffers.rows)]
    assert torch.equal(*sides)


@pytest.mark.parametrize("slow", [0, 1, 2, 9])
def test_a_pool_is_measured_again_while_plain_copies_are_slow(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    buffers = Buffers.allocate(1 << 14, "cpu")
    measured: list[Case] = []
    copied = itertools.count()
    real = bench_report.measure_case

    def copies(_: Buffers, direction: Direction, count: int) -> list[float]:
        # The first six are before any pool, then come two before and two after each, in either direction.
        taken = [next(copied) for _ in range(count)]
        return [1.06 if 12 <= place < 12 + 8 * slow and direction is Direction.LOAD else 1.0 for place in taken]

    def measure(case: Case, *arguments: Any, **options: Any) -> Measurement:
        measured.append(case)
        return real(case, *arguments, **options)

    monkeypatch.setattr(bench_report, "plain_copy_samples", copies)
    monkeypatch.setattr(bench_report, "measure_case", measure)
    cases = [case for case in tiny_grid() if case.page_size == 1 and case.pattern is Pattern.RUN]
    usual = {direction: copies(buffers, direction, 6) for direction in Direction}
    found = bench_report._measure_pool(cases, buffers, CPU, usual, 1, attempts=3)
    assert [result.case for result in found] == cases
    attempts = min(slow + 1, 3)
    assert measured == cases * attempts
    # Of attempts that do not count, no plain copy does.
    assert usual[Direction.LOAD] == [1.0] * 6 + [1.06 if slow > 2 else 1.0] * 4


def test_halves_do_not_overlap() -> None:
    first, second = Buffers.allocate(4096, "cpu").halves()
    assert first.size == second.size == 2048
    assert first.host.data_ptr() + 2048 == second.host.data_ptr()


def test_a_report_covers_the_grid_and_survives_json(report: Report) -> None:
    assert [result.case for result in report.cases] == tiny_grid()
    assert set(report.plain_bytes_per_second) == {"write_back", "load"}
    assert report.disturbances == []
    assert report.duplex is None
    assert Report.from_json(report.to_json()) == report


def test_a_report_with_gpu_figures_survives_json(report: Report) -> None:
    full = dataclasses.replace(
        report,
        disturbances=[Disturbance("decode", RUN, "direct", 1.2, 1.1, 0.9)],
        duplex=Duplex(97e9, 93e9, 93 / 97),
        full_staging=report.cases[0],
    )
    assert Report.from_json(full.to_json()) == full


def result(case: Case, **changes: object) -> CaseResult:
    good = Measurement("staged", "", 1, 1, 1.0, 0.99, 1.1, 0.9, 1e-4, 0.04, 1.2 / case.shape.layers)
    return CaseResult(case, dataclasses.replace(good, **changes))


def targets_of(report: Report, *results: CaseResult, **fields: object) -> dict[str, bool | None]:
    changed = dataclasses.replace(report, cases=list(results), **fields)
    return {target.what: target.holds for target in evaluate_targets(changed)}


RUN = Case(SHAPES[0], 16, HostLayout.PAGE_FIRST_DIRECT, Pattern.RUN, Direction.WRITE_BACK, "staged")
LOAD = dataclasses.replace(RUN, direction=Direction.LOAD)


@pytest.mark.parametrize(
    ("what", "graph", "bad"),
    [
        ("decode next to an auto load: of its time alone", {"slowdown": 1.05}, {"slowdown": 1.07}),
        ("decode next to an auto load: bandwidth of the load", {"ratio": 0.86}, {"ratio": 0.84}),
        (
            "prefill next to an auto load that goes staged: of its time next to a plain copy",
            {"workload": "prefill", "of_plain": 1.04},
            {"of_plain": 1.06},
        ),
        (
            "prefill next to an auto load that goes direct: of its time next to a plain copy",
            {"workload": "prefill", "path": "direct", "of_plain": 1.2},
            {"of_plain": 1.3},
        ),
    ],
)
def test_targets_of_loads_next_to_a_model(report: Report, what: str, graph: dict, bad: dict) -> None:
    load = dataclasses.replace(LOAD, policy="auto", pattern=Pattern.SCATTERED)
    good = dataclasses.replace(Disturbance("decode", load, "staged", 1.0, 1.0, 1.0), **graph)
    assert targets_of(report, disturbances=[good])[what] is True
    assert targets_of(report, disturbances=[good, dataclasses.replace(good, **bad)])[what] is False
    assert targets_of(report)[what] is None


@pytest.mark.parametrize(
    ("what", "case", "bad"),
    [
        ("staged write-back, runs: bandwidth", RUN, {"ratio": 0.979}),
        ("staged write-back, runs: caller busy, ms", RUN, {"submit_seconds": 0.00051}),
        (
            "staged write-back, scattered pages from 1 MB: bandwidth",
            dataclasses.replace(RUN, pattern=Pattern.SCATTERED),
            {"ratio": 0.91},
        ),
        (
            "auto write-back, scattered pages of 20 to 1000 KB: bandwidth",
            dataclasses.replace(RUN, pattern=Pattern.SCATTERED, policy="auto", page_size=1),
            {"ratio": 0.91},
        ),
        (
            "direct D2H, at most 8 CTAs: bandwidth",
            dataclasses.replace(RUN, policy="direct", block_quota=8, layer_by_layer=False),
            {"ratio": 0.92},
        ),
        (
            "direct H2D, at most 8 CTAs: bandwidth",
            dataclasses.replace(LOAD, policy="direct", block_quota=8, layer_by_layer=False),
            {"ratio": 0.90},
        ),
        ("staged load-back, wide shares, run: bandwidth", LOAD, {"ratio": 0.96}),
        ("staged load-back, wide shares, run: first layer, of the time of one", LOAD, {"first_layer_share": 1.6 / 32}),
        ("staged load-back, wide shares, run: caller busy, ms", LOAD, {"submit_seconds": 0.0011}),
        (
            "staged load-back, wide shares, runs of 16: bandwidth",
            dataclasses.replace(LOAD, pattern=Pattern.RUNS_OF_16),
            {"ratio": 0.89},
        ),
        (
            "auto load-back, everything else, layer by layer: bandwidth",
            dataclasses.replace(LOAD, page_size=1, policy="auto"),
            {"ratio": 0.87},
        ),
    ],
)
def test_each_target_holds_and_fails_where_it_should(report: Report, what: str, case: Case, bad: dict) -> None:
    assert targets_of(report, result(case))[what] is True
    assert targets_of(report, result(case, **bad))[what] is False
    assert targets_of(report, result(case), result(case, **bad))[what] is False
    assert targets_of(report)[what] is None


@pytest.mark.parametrize(
    ("what", "direction", "bad"),
    [
        ("write-back of one page of 16 slots: caller busy, us", "write_back", {"submit_seconds": 41e-6}),
        ("write-back of one page of 16 slots: from the call, us", "write_back", {"idle_seconds": 81e-6}),
        ("load-back of one page of 16 slots: caller busy, us", "load", {"submit_seconds": 61e-6}),
        ("load-back of one page of 16 slots: from the call, us", "load", {"idle_seconds": 131e-6}),
    ],
)
def test_targets_of_small_operations(report: Report, what: str, direction: str, bad: dict) -> None:
    cases = {case.direction.value: case for case in small_cases(SHAPES[:1])}
    good = {"submit_seconds": 39e-6, "idle_seconds": 79e-6}
    fine = [result(case, **good) for case in cases.values()]
    assert targets_of(report, small=fine)[what] is True
    assert targets_of(report, small=[*fine, result(cases[direction], **{**good, **bad})])[what] is False
    assert targets_of(report)[what] is None


def test_small_operations_move_one_page_of_the_shapes_of_the_grid_that_fit() -> None:
    cases = list(grid(SHAPES[2:3], (1,), (HostLayout.PAGE_FIRST_DIRECT,), ("auto",)))
    report = run_benchmark(cases, device="cpu", size=1 << 20, repeats=1)
    assert [result.case for result in report.small] == list(small_cases(SHAPES[2:3]))
    for found in report.small:
        assert found.measurement.bytes == found.case.page_bytes == 16 * SHAPES[2].slot_bytes
        assert found.measurement.idle_seconds > 0
    assert Report.from_json(report.to_json()) == report
    assert run_benchmark(cases, device="cpu", size=1 << 18, repeats=1).small == []


def test_targets_of_graphs_and_both_directions(report: Report) -> None:
    graph = Disturbance("decode", LOAD, "staged", 1.02, 1.0, 0.9)
    what = "graph next to a staged transfer of a run: of its time alone"
    assert targets_of(report, disturbances=[graph])[what] is True
    assert targets_of(report, disturbances=[graph, dataclasses.replace(graph, slowdown=1.04)])[what] is False
    other = dataclasses.replace(graph, case=dataclasses.replace(LOAD, policy="direct"), slowdown=2.0)
    assert targets_of(report, disturbances=[other])[what] is None
    what = "both directions at once, staged, runs: of two plain copies"
    assert targets_of(report, duplex=Duplex(97e9, 93e9, 0.96))[what] is True
    assert targets_of(report, duplex=Duplex(97e9, 90e9, 0.93))[what] is False


def test_auto_is_held_against_the_better_path(report: Report) -> None:
    what = "auto within 5% of the better path: share of the grid"
    staged, direct, auto = (result(dataclasses.replace(RUN, policy=p)) for p in ("staged", "direct", "auto"))
    assert targets_of(report, staged, direct, auto)[what] is True
    slow = dataclasses.replace(auto, measurement=dataclasses.replace(auto.measurement, ratio=0.93))
    assert targets_of(report, staged, direct, slow)[what] is False
    assert targets_of(report, staged, direct)[what] is None


def test_a_policy_that_cannot_be_followed_is_a_row_without_figures() -> None:
    case = Case(Shape(20, 2, 1), 1, HostLayout.PAGE_FIRST, Pattern.RUN, Direction.WRITE_BACK, "staged")
    measured = measure_case(case, BenchPool.build(case, Buffers.allocate(4096, "cpu")), 1e9)
    assert measured.path == "none"
    assert "staged" in measured.reason


def test_a_buffer_smaller_than_a_page_is_named() -> None:
    with pytest.raises(ValueError, match="buffers of 64 bytes do not hold a page"):
        BenchPool.build(RUN, Buffers.allocate(64, "cpu"))


def test_the_command_writes_json_and_a_picture_and_shows_them_again(tmp_path: Path, report: Report) -> None:
    pytest.importorskip("matplotlib")
    saved, picture = tmp_path / "deep" / "report.json", tmp_path / "deep" / "report.png"
    runner = CliRunner()
    arguments = ["bench", "--device", "cpu", "--mib", "1", "--repeats", "1", "--quick", "--json", str(saved)]
    outcome = runner.invoke(app, [*arguments, "--plot", str(picture)], env={"COLUMNS": "200"})
    assert outcome.exit_code == 0, outcome.output
    assert "staged write-back, runs: bandwidth" in outcome.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = runner.invoke(app, ["bench", "--show", str(saved)], env={"COLUMNS": "200"})
    assert again.exit_code == 0, again.output
    assert "transfers, as shares of a plain copy" in again.output


@pytest.mark.usefixtures("cpu_compiler")
def test_a_cold_build_takes_time_and_leaves_the_cache_alone(compiled, monkeypatch, tmp_path):
    compiled("files")
    monkeypatch.setenv("HICACHE_KERNELS_PREBUILT", str(tmp_path))
    monkeypatch.setenv("HICACHE_KERNELS_CACHE", str(tmp_path / "cache"))
    seconds = cold_build_seconds("cpu", cores=1, modules=["files"])  # it compiles fastest
    assert seconds is not None
    assert seconds > 0.1  # a compiler ran, and nothing came from a cache
    assert not (tmp_path / "cache").exists()


def test_a_build_that_cannot_be_is_not_timed():
    assert cold_build_seconds("vulkan") is None


def test_a_report_of_a_build_comes_back_from_json():
    report = Report({}, {}, {}, CPU, cold_build_seconds=12.5)
    assert Report.from_json(report.to_json()).cold_build_seconds == 12.5
    (target,) = (t for t in evaluate_targets(report) if t.what.startswith("cold build"))
    assert (target.worst, target.holds) == (12.5, True)
