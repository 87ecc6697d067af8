"""The list of specs: complete, and with keys that change with the sources and nothing else."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hicache_kernels.spec import CSRC, DEVICE_TYPES, TRANSFER_MODULES, module_device_type, module_specs


def test_modules_that_move_rows_have_a_spec_for_every_device_type_and_files_one() -> None:
    specs = module_specs()
    expected = {(name, device_type) for name in TRANSFER_MODULES for device_type in DEVICE_TYPES} | {("files", "cpu")}
    assert {(spec.name, spec.device_type) for spec in specs} == expected
    assert len({spec.key for spec in specs}) == len(specs)
    assert len({spec.source_key() for spec in specs}) == len(specs)


def test_source_key_is_the_same_wherever_the_package_lies(tmp_path: Path) -> None:
    copy = shutil.copytree(CSRC, tmp_path / "elsewhere" / "sources")
    assert [spec.source_key() for spec in module_specs(copy)] == [spec.source_key() for spec in module_specs()]


@pytest.mark.parametrize("change", ["content", "name", "moved"])
def test_source_key_changes_with_what_goes_in(tmp_path: Path, change: str) -> None:
    copy = shutil.copytree(CSRC, tmp_path / "csrc")
    (copy / "include" / "extra.h").write_text("one")
    spec = module_specs(copy)[0]
    before = spec.source_key()
    if change == "content":
        (copy / "include" / "extra.h").write_text("two")
    elif change == "name":
        (copy / "include" / "extra.h").rename(copy / "include" / "other.h")
    else:
        (copy / "include" / "extra.h").rename(copy / spec.name / "extra.h")
    assert spec.source_key() != before


def test_source_key_does_not_depend_on_who_compiles() -> None:
    spec = module_specs()[0]
    assert replace(spec, flags=(*spec.flags, "-DX")).source_key() == spec.source_key()


def test_source_key_of_one_module_ignores_the_others(tmp_path: Path) -> None:
    copy = shutil.copytree(CSRC, tmp_path / "csrc")
    before = {spec.key: spec.source_key() for spec in module_specs(copy)}
    (copy / "staged" / "extra.h").write_text("")
    changed = {spec.key for spec in module_specs(copy) if spec.source_key() != before[spec.key]}
    assert changed == {f"staged-{device_type}" for device_type in DEVICE_TYPES}


def test_amd_devices_are_distinguished_from_nvidia_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert module_device_type(torch.device("cuda", 1)) == "cuda"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert module_device_type(torch.device("cuda")) == "rocm"
    assert module_device_type(torch.device("cpu")) == "cpu"
    assert module_device_type(torch.device("xpu")) == "xpu"


def test_runtime_device_types_are_named_in_the_one_device_header_only() -> None:
    naming = {
        path.relative_to(CSRC).as_posix()
        for path in CSRC.rglob("*")
        if path.is_file() and any(word in path.read_text() for word in ("kDLCUDA", "kDLROCM"))
    }
    assert naming == {"include/hicache/device.h"}
