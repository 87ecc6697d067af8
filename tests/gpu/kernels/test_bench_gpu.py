"""Calibration and the benchmark on a GPU: every figure is there and makes sense; its size is for benchmarks to say."""

from dataclasses import replace

import pytest
import torch

from hicache_kernels import HostLayout, calibrate, losses
from hicache_kernels.bench import Buffers, Case, Pattern, Report, disturbances, disturbing_cases, grid, run_benchmark
from hicache_kernels.bench.cases import Shape
from hicache_kernels.bench.interference import measure_duplex
from hicache_kernels.bench.measure import plain_copy_seconds
from hicache_kernels.constants import H200
from hicache_kernels.staging import Direction

pytestmark = pytest.mark.gpu


def test_calibration_measures_every_constant_and_keeps_them(gpu, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HICACHE_KERNELS_CACHE", str(tmp_path))
    # Other tests may use the device meanwhile.
    monkeypatch.setattr(calibrate, "MAX_SPREAD", 1e9)
    monkeypatch.setattr(calibrate, "wrong_figure", lambda _: None)
    measured = calibrate.measure(gpu)
    path = calibrate.cache_path(torch.device("cuda", torch.cuda.current_device()))
    calibrate.write_constants(path, measured)
    assert calibrate.read_constants(path) == measured
    for direction in (measured.write_back, measured.load):
        rates = [rate for _, rate in direction.direct_rates]
        assert 0 < min(rates) <= max(rates) < 10 * direction.copy_bytes_per_second


def test_losses_are_measured_next_to_every_mover(gpu, monkeypatch) -> None:
    # Other tests may use the device meanwhile.
    monkeypatch.setattr(calibrate, "MAX_SPREAD", 1e9)
    monkeypatch.setattr(losses, "MAX_SPREAD", 1e9)
    measured = calibrate.measure(gpu, losses=True)
    assert measured.losses_measured
    for direction in (measured.write_back, measured.load):
        assert [ctas for ctas, _ in direction.direct_losses] == list(calibrate.CTAS)
        for loss in (direction.staged_loss, *(loss for _, loss in direction.direct_losses)):
            assert 0 <= min(loss.prefill, loss.decode) <= max(loss.prefill, loss.decode) < 1


def test_calibration_is_refused_during_capture(gpu, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HICACHE_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrate, "_known", {})
    tensor = torch.zeros(1, device=gpu)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor += 1
        constants = calibrate.device_constants(gpu)
    assert constants is H200
    assert not calibrate._known


def test_a_tiny_benchmark_fills_every_part_of_the_report(gpu) -> None:
    cases = list(grid([Shape(256, 4, 2)], (16,), (HostLayout.PAGE_FIRST_DIRECT,)))
    report = run_benchmark(cases, device=gpu, size=32 << 20, repeats=1, constants=H200, interference=False)
    assert [result.case for result in report.cases] == cases
    for result in report.cases:
        assert result.measurement.bytes == 32 << 20
        assert 0 < result.measurement.release_share <= 1
        assert 0 < result.measurement.first_layer_share <= 1
        assert result.measurement.idle_seconds > 0
    assert report.full_staging is not None
    assert report.duplex is not None
    assert Report.from_json(report.to_json()) == report


def test_graphs_run_during_transfers_in_both_directions(gpu) -> None:
    buffers = Buffers.allocate(64 << 20, gpu)
    plain = {direction: plain_copy_seconds(buffers, direction) for direction in Direction}
    cases = list(disturbing_cases(quotas=(2,)))
    found = list(disturbances(buffers, plain, cases, repeats=1))
    assert {(d.workload, d.case) for d in found} == {(name, case) for name in ("prefill", "decode") for case in cases}
    assert all(d.slowdown > 0 and d.ratio > 0 and d.of_plain > 0 for d in found)
    assert measure_duplex(buffers, repeats=1, operations=1) is not None


def test_pages_moved_by_the_benchmark_are_the_right_ones(gpu) -> None:
    from hicache_kernels.bench import BenchPool
    from hicache_kernels.bench.measure import submit

    case = Case(Shape(256, 4, 2), 16, HostLayout.PAGE_FIRST, Pattern.SCATTERED, Direction.WRITE_BACK, "staged")
    buffers = Buffers.allocate(1 << 20, gpu)
    before = buffers.rows.clone()
    pool = BenchPool.build(case, buffers)
    for policy in ("staged", "direct"):
        buffers.rows.copy_(before)
        buffers.host.zero_()
        submit(pool, replace(case, policy=policy))
        torch.cuda.synchronize()
        buffers.rows.zero_()
        submit(pool, replace(case, policy=policy, direction=Direction.LOAD))
        torch.cuda.synchronize()
        assert torch.equal(buffers.rows[: pool.bytes], before[: pool.bytes])
