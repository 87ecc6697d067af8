"""Calibration where there is no GPU: what is kept on disk, and what happens when it cannot be."""

import dataclasses
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hicache_kernels import calibrate, info
from hicache_kernels.cli import show_planner
from hicache_kernels.constants import CPU, H200, DeviceConstants, DirectionConstants, ModelLoss


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
    monkeypatch.setattr(calibrate, "measure", lambda device, **_: calls.append(device) or measured)
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
    monkeypatch.setattr(calibrate, "measure", lambda _, **__: H200)
    assert calibrate.device_constants(fake_gpu) == H200


def test_a_device_that_cannot_be_measured_gets_the_defaults_and_a_warning(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: torch.device, **__: object) -> None:
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
    monkeypatch.setattr(calibrate, "measure", lambda _, **__: found.pop())
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


def loss_of(ctas: int, loss: ModelLoss) -> DirectionConstants:
    losses = tuple((each, loss if each == ctas else found) for each, found in H200.write_back.direct_losses)
    return dataclasses.replace(H200.write_back, direct_losses=losses)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"launch_seconds": 1e-3}, "launch_seconds"),
        ({"relayout_bytes_per_second": 5e10}, "relayout_bytes_per_second"),
        ({"write_back": dataclasses.replace(H200.write_back, batch_copy_seconds=1e-3)}, "batch_copy_seconds"),
        ({"load": dataclasses.replace(H200.load, width_efficiency=((512, 0.1), (32768, 0.3)))}, "wide 2-D copies"),
        ({"load": dataclasses.replace(H200.load, direct_rates=())}, "not positive"),
        ({"load": dataclasses.replace(H200.load, staged_loss=ModelLoss(0.0, 0.7))}, "load: staged_loss is 0 and 0.7"),
        ({"load": dataclasses.replace(H200.load, staged_loss=ModelLoss(math.nan, 0.0))}, "load: staged_loss is nan"),
        ({"write_back": loss_of(2, ModelLoss(-0.1, 0.1))}, "write_back: the loss next to 2 CTAs is -0.1 and 0.1"),
        ({"write_back": loss_of(2, ModelLoss(0.1, 0.99))}, "write_back: the loss next to 2 CTAs is 0.1 and 0.99"),
        ({"write_back": dataclasses.replace(H200.write_back, direct_losses=())}, "direct_losses are for"),
        (
            {"write_back": dataclasses.replace(H200.write_back, direct_losses=H200.load.direct_losses[::-1])},
            r"direct_losses are for \[8, 4, 2, 1\] CTAs",
        ),
    ],
)
def test_each_wrong_figure_is_named(change: dict[str, Any], reason: str) -> None:
    assert calibrate.wrong_figure(H200) is None
    assert re.search(reason, str(calibrate.wrong_figure(dataclasses.replace(H200, **change))))


def test_the_cpu_has_fixed_constants() -> None:
    assert calibrate.device_constants("cpu") is CPU


def test_constants_of_the_format_before_are_no_calibration(tmp_path: Path) -> None:
    """They lack what a model loses; the name of the file has the format in it, too."""
    fields = dataclasses.asdict(H200)
    del fields["load"]["staged_loss"]
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(fields))
    assert calibrate.read_constants(path) is None
    assert calibrate.FORMAT == 11


def test_the_first_transfer_of_a_process_does_not_wait_for_losses(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(calibrate, "measure", lambda _, losses: asked.append(losses) or H200)
    calibrate.device_constants(fake_gpu)
    assert asked == [False]


def test_a_full_calibration_keeps_losses_for_this_and_later_processes(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = dataclasses.replace(H200, source="measured")
    everything = dataclasses.replace(without, losses_measured=True)
    monkeypatch.setattr(calibrate, "measure", lambda _, losses: everything if losses else without)
    assert calibrate.device_constants(fake_gpu) == without
    assert calibrate.calibrate(fake_gpu) == everything
    assert calibrate.device_constants(fake_gpu) == everything
    calibrate._known.clear()
    assert calibrate.device_constants(fake_gpu) == everything


def test_a_full_calibration_that_fails_raises_and_keeps_what_was_known(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = dataclasses.replace(H200, source="measured")
    monkeypatch.setattr(calibrate, "measure", lambda _, losses: busy(H200) if losses else measured)
    assert calibrate.device_constants(fake_gpu) == measured
    with pytest.raises(RuntimeError, match="direct transfers reach"):
        calibrate.calibrate(fake_gpu)
    assert calibrate.device_constants(fake_gpu) == measured
    assert calibrate.read_constants(calibrate.cache_path(fake_gpu)) == measured


def test_the_cpu_is_not_calibrated() -> None:
    with pytest.raises(ValueError, match="device is cpu; it must be a GPU"):
        calibrate.calibrate("cpu")


def test_info_shows_kept_losses_and_those_of_an_h200_where_none_are_kept(
    fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "devices", lambda: ("Some GPU",))
    (default,) = info.planner_states()
    assert default.losses == "as on an H200"
    assert "until the first transfer measures" in default.constants
    assert ("load, direct, 2 CTAs", H200.load.loss(2).prefill, H200.load.loss(2).decode) in default.shares
    load = dataclasses.replace(H200.load, staged_loss=ModelLoss(0.11, 0.22))
    kept = dataclasses.replace(H200, source="measured", load=load, losses_measured=True)
    calibrate.write_constants(calibrate.cache_path(fake_gpu), kept)
    (measured,) = info.planner_states()
    assert (measured.constants, measured.losses) == ("measured", "measured on this device")
    assert ("load, staged", 0.11, 0.22) in measured.shares
    console = Console(width=100, record=True, file=io.StringIO())
    show_planner(measured, console)
    text = console.export_text()
    assert "measured on this device" in text
    assert re.search(r"load, staged +│ +11.0% +│ +22.0%", text)
