"""Calibration where there is no GPU: what is kept on disk, and what happens when it cannot be."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_kernels import calibrate
from hicache_kernels.constants import CPU, H200, DeviceConstants


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.device:
    monkeypatch.setenv("HICACHE_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "_known", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU (80 GB)")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return torch.device("cuda", 0)


def test_constants_survive_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "constants.json"
    calibrate.write_constants(path, H200)
    assert calibrate.read_constants(path) == H200
    assert [p.name for p in path.parent.iterdir()] == ["constants.json"]


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"source": 1}'])
def test_a_damaged_file_is_no_calibration(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "constants.json"
    assert calibrate.read_constants(path) is None
    path.write_text(damage)
    assert calibrate.read_constants(path) is None


def test_figures_that_make_no_sense_are_no_calibration(tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    fields = dataclasses.asdict(H200)
    fields["load"]["copy_bytes_per_second"] = 0
    path.write_text(json.dumps(fields))
    assert calibrate.read_constants(path) is None


def test_a_device_is_measured_once_and_then_read(fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = dataclasses.replace(H200, source="measured", launch_seconds=7e-6)
    calls = []
    monkeypatch.setattr(calibrate, "measure", lambda device: calls.append(device) or measured)
    assert calibrate.device_constants(fake_gpu) == measured
    assert calibrate.device_constants(fake_gpu) == measured
    calibrate._known.clear()
    assert calibrate.device_constants(fake_gpu) == measured
    assert calls == [fake_gpu]
    assert calibrate.cache_path(fake_gpu).name.startswith("Some-GPU-80-GB-")


def test_a_cache_that_cannot_be_written_is_no_error(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    monkeypatch.setattr(calibrate, "measure", lambda _: H200)
    assert calibrate.device_constants(fake_gpu) == H200


def test_a_device_that_cannot_be_measured_gets_the_defaults_and_a_warning(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: torch.device) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(calibrate, "measure", fail)
    assert calibrate.device_constants(fake_gpu) is H200
    assert not calibrate.cache_path(fake_gpu).exists()
    assert "out of memory" in caplog.text


def busy(constants: DeviceConstants) -> DeviceConstants:
    slow = tuple((ctas, rate / 20) for ctas, rate in constants.load.direct_rates)
    return dataclasses.replace(constants, load=dataclasses.replace(constants.load, direct_rates=slow))


def test_figures_of_a_busy_device_are_measured_again_and_never_kept(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = [busy(H200), busy(H200)]
    monkeypatch.setattr(calibrate, "measure", lambda _: found.pop())
    assert calibrate.device_constants(fake_gpu) is H200
    assert not found
    assert not calibrate.cache_path(fake_gpu).exists()
    assert "direct transfers reach 0.0" in caplog.text
    # Another process does not try at once; later ones do.
    calibrate._known.clear()
    assert calibrate.device_constants(fake_gpu) is H200
    calibrate._known.clear()
    monkeypatch.setattr(calibrate, "BUSY_SECONDS", 0.0)
    measured = dataclasses.replace(H200, source="measured")
    found = [measured, busy(H200)]
    assert calibrate.device_constants(fake_gpu) == measured
    assert calibrate.read_constants(calibrate.cache_path(fake_gpu)) == measured


def test_figures_of_a_busy_device_are_not_read_either(tmp_path: Path) -> None:
    calibrate.write_constants(tmp_path / "constants.json", busy(H200))
    assert calibrate.read_constants(tmp_path / "constants.json") is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"launch_seconds": 1e-3}, "launch_seconds"),
        ({"relayout_bytes_per_second": 5e10}, "relayout_bytes_per_second"),
        ({"write_back": dataclasses.replace(H200.write_back, batch_copy_seconds=1e-3)}, "batch_copy_seconds"),
        ({"load": dataclasses.replace(H200.load, width_efficiency=((512, 0.1), (32768, 0.3)))}, "wide 2-D copies"),
        ({"load": dataclasses.replace(H200.load, direct_rates=())}, "not positive"),
    ],
)
def test_each_wrong_figure_is_named(change: dict[str, Any], reason: str) -> None:
    assert calibrate.wrong_figure(H200) is None
    assert reason in str(calibrate.wrong_figure(dataclasses.replace(H200, **change)))


def test_the_cpu_has_fixed_constants() -> None:
    assert calibrate.device_constants("cpu") is CPU
