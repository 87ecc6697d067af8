"""The command line: builds what was asked for, shows what is there, and says in one line what is wrong."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from tests.processes import faults_of_import_orders, run_within_a_gib
from typer.testing import CliRunner

from hicache_kernels import calibrate, cli, info
from hicache_kernels.aot import group_archs
from hicache_kernels.build import read_record
from hicache_kernels.cli import app
from hicache_kernels.constants import H200, ModelLoss
from hicache_kernels.info import kernels_info
from hicache_kernels.probe import wheel_library
from hicache_kernels.spec import module_specs


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    for variable in ("HICACHE_KERNELS_PREBUILT", "TVM_FFI_CUDA_ARCH_LIST", "TVM_FFI_ROCM_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HICACHE_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    return CliRunner()


@pytest.mark.usefixtures("cpu_compiler")
def test_build_makes_a_library_that_info_then_finds(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    result = runner.invoke(app, ["build", "--arch", "cpu", "--module", "files", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"HICACHE_KERNELS_PREBUILT={out}" in result.output
    record = read_record(out / "files-cpu.so")
    assert record is not None
    (spec,) = (spec for spec in module_specs() if spec.key == "files-cpu")
    assert record.source_key == spec.source_key()
    monkeypatch.setenv("HICACHE_KERNELS_PREBUILT", str(out))
    found = json.loads(runner.invoke(app, ["info", "--json"]).output)
    states = {(m["name"], m["device_type"]): m for m in found["modules"]}
    assert states["files", "cpu"]["state"] == "prebuilt"
    assert states["files", "cpu"]["detail"] == str(out / "files-cpu.so")
    assert states["staged", "cpu"]["state"] == ("in the wheel" if wheel_library(module_specs()[0]) else "to build")
    assert "missing or damaged" in states["staged", "cpu"]["note"]


def test_info_names_everything_a_build_depends_on(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    for word in ("torch", "tvm-ffi", str(tmp_path / "cache"), "compilers", "main", "staged", "rocm"):
        assert word in result.output


def test_info_without_compilers_gives_the_reasons(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(info, "wheel_library", lambda spec: None)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HICACHE_KERNELS_CACHE", str(tmp_path / "file" / "cache"))
    found = json.loads(runner.invoke(app, ["info", "--json"]).output)
    states = {(m["name"], m["device_type"]): m for m in found["modules"]}
    assert states["main", "cpu"]["state"] == "unavailable"
    assert states["main", "cpu"]["detail"] == "no g++ found (looked at CXX, PATH)"
    assert not found["cache"]["writable"]


@pytest.mark.usefixtures("cpu_compiler")
def test_loading_info_gives_the_compilers_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: CliRunner
) -> None:
    (tmp_path / "csrc" / "main").mkdir(parents=True)
    (tmp_path / "csrc" / "main" / "main.cc").write_text("#error no good\n")
    found = kernels_info(module_specs(tmp_path / "csrc"), load=True)
    states = {(m.name, m.device_type): m for m in found.modules}
    assert states["main", "cpu"].state == "unavailable"
    assert "no good" in states["main", "cpu"].detail
    (tmp_path / "csrc" / "main" / "main.cc").write_text("")
    states = {(m.name, m.device_type): m for m in kernels_info(module_specs(tmp_path / "csrc"), load=True).modules}
    assert states["main", "cpu"].state == "loaded"
    assert "built" in states["main", "cpu"].detail


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--arch", "cpu,vax"], "arch is 'vax'; it must be 'cpu', or look like 'sm_90' or 'gfx90a'"),
        (["--arch", ","], "arch is empty"),
        (["--arch", "cpu", "--module", "third"], "module is 'third'; it must be one of main, staged, files"),
        (["--arch", "sm_90", "--module", "files"], "it must name one that files is built for, such as 'cpu'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    runner: CliRunner, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    result = runner.invoke(app, ["build", *arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert complaint in result.output
    assert not (tmp_path / "out").exists()


def test_output_directory_that_cannot_be_made_is_exit_code_2(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = runner.invoke(app, ["build", "--arch", "cpu", "--out", str(tmp_path / "file" / "out")])
    assert result.exit_code == 2
    assert f"--out is {tmp_path / 'file' / 'out'}, which cannot be written: Not a directory" in result.output


def test_build_without_a_compiler_names_it_and_exits_1(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(info, "wheel_library", lambda spec: None)
    result = runner.invoke(app, ["build", "--arch", "cpu", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "main-cpu: no g++ found" in result.output
    assert "staged-cpu: no g++ found" in result.output
    assert list((tmp_path / "out").iterdir()) == []


def test_architectures_of_one_device_type_share_a_library() -> None:
    groups = group_archs(["sm_90", "gfx942", "sm_80", "gfx90a", "sm_80"])
    assert groups == {"cuda": ("sm_80", "sm_90"), "rocm": ("gfx90a", "gfx942")}


def test_help_of_build_tells_how_many_builds_run_at_a_time(runner: CliRunner) -> None:
    # In brackets it would be taken for markup, and vanish.
    assert "by default one a processor" in " ".join(runner.invoke(app, ["build", "--help"]).output.split())


# Before torch


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["bench", "--help"], ["info", "--help"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    run = run_within_a_gib("hicache_kernels.cli", *arguments)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["build", "--arch", "vax"], "arch is 'vax'"),
        (["build", "--module", "third"], "module is 'third'"),
        (["bench", "--device", "xyz"], "--device is 'xyz'; accepted are cpu and cuda"),
        (["bench", "--mib", "9" * 12], "--mib is 999999999999; accepted is 1 to"),
        (["bench", "--json", "/dev/null/report.json"], "--json is /dev/null/report.json, which cannot be written"),
        (["bench", "--plot", "picture.txt"], "--plot is picture.txt; a name that ends with one of"),
        (["bench", "--show", "/dev/zero"], "--show is /dev/zero; at most"),
        (["bench", "--show", "no-such-file"], "--show is no-such-file: No such file"),
    ],
)
def test_argument_that_cannot_work_is_one_line_without_torch(arguments: list[str], complaint: str) -> None:
    run = run_within_a_gib("hicache_kernels.cli", *arguments)
    assert run.returncode == 2
    assert run.stderr.startswith(f"hicache-kernels: {complaint}")
    assert run.stderr.count("\n") == 1, run.stderr


def test_file_that_is_not_a_report_is_refused_in_one_line(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    result = runner.invoke(app, ["bench", "--show", str(tmp_path / "report.json")])
    assert result.exit_code == 2
    assert "that is not a report" in result.stderr


def test_missing_matplotlib_is_named_with_its_extra_before_anything_is_measured(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = runner.invoke(app, ["bench", "--plot", str(tmp_path / "picture.png")])
    assert (result.exit_code, result.stderr) == (
        2,
        "hicache-kernels: --plot needs matplotlib: install hicache-kernels[bench]\n",
    )


def test_public_names_do_not_depend_on_what_was_imported_before() -> None:
    assert faults_of_import_orders("hicache_kernels") == ""


def test_calibrate_shows_what_was_measured(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = ModelLoss(0.123, 0.045)
    load = dataclasses.replace(H200.load, staged_loss=loss)
    measured = dataclasses.replace(H200, source="measured on Some GPU", load=load, losses_measured=True)
    asked = []
    monkeypatch.setattr(cli, "find_device", lambda name: name or "cuda")
    monkeypatch.setattr(calibrate, "calibrate", lambda device: asked.append(device) or measured)
    result = runner.invoke(app, ["calibrate"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert asked == ["cuda"]
    for words in ("measured on Some GPU", "measured on this device", "load, staged", "12.3%", "4.5%"):
        assert words in result.output


def test_calibrate_ends_in_one_line_where_it_cannot_or_fails(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: str) -> None:
        raise RuntimeError(f"others use {device}\nand more")

    result = runner.invoke(app, ["calibrate", "--device", "cpu"])
    assert result.exit_code == 2
    assert "device is cpu; it must be a GPU" in result.output
    assert runner.invoke(app, ["calibrate", "--device", "tpu"]).exit_code == 2
    monkeypatch.setattr(cli, "find_device", lambda name: name or "cuda")
    monkeypatch.setattr(calibrate, "calibrate", fail)
    result = runner.invoke(app, ["calibrate", "--device", "cuda"], env={"COLUMNS": "120"})
    assert result.exit_code == 1
    assert result.output.strip() == "hicache-kernels: calibrating cuda failed: others use cuda"
