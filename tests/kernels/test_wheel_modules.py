"""Modules of a platform wheel: used before the cache and a build; one that does not fit is named in the log."""

import ctypes
import json
from pathlib import Path

import pytest
from tests.kernels.workshop import Workshop, add

from hicache_kernels import build, probe
from hicache_kernels.build import NATIVE_FLAG, build_key, for_this_machine, processor_features, read_record
from hicache_kernels.compilers import find_compiler
from hicache_kernels.probe import ModuleLoader, warn_once
from hicache_kernels.spec import module_specs


@pytest.fixture
def wheel(workshop: Workshop, tmp_path: Path) -> Path:
    """A directory of modules built of the workshop's sources, as a wheel has one."""
    out = tmp_path / "modules"
    out.mkdir(mode=0o700)
    spec = workshop.spec()
    build.compile_module(spec, find_compiler("cpu"), build.target_archs("cpu"), out)
    workshop.log.unlink()
    warn_once.cache_clear()
    return out


def loader(workshop: Workshop, wheel: Path) -> ModuleLoader:
    return ModuleLoader(workshop.specs(), cache=workshop.cache, wheel=wheel)


def test_the_wheels_module_is_used_without_compiler_or_cache(workshop: Workshop, wheel: Path) -> None:
    modules = loader(workshop, wheel)
    assert add(modules, 1) == 2
    outcome = modules.outcome("main", "cpu")
    assert (outcome.origin, outcome.path) == ("wheel", wheel / "main-cpu.so")
    assert workshop.starts() == 0
    assert not workshop.cache.exists()


def test_a_directory_of_modules_that_the_user_names_comes_before_the_wheel(
    workshop: Workshop, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    named.mkdir(mode=0o700)
    build.compile_module(workshop.spec(), find_compiler("cpu"), build.target_archs("cpu"), named)
    monkeypatch.setenv("HICACHE_KERNELS_PREBUILT", str(named))
    modules = loader(workshop, wheel)
    assert add(modules, 1) == 2
    assert modules.outcome("main", "cpu").origin == "prebuilt"


@pytest.mark.parametrize("misfit", ["sources", "arch", "tvm-ffi", "library gone", "record gone", "cut off", "garbage"])
def test_a_module_of_the_wheel_that_does_not_fit_is_named_once_and_built_instead(
    workshop: Workshop, wheel: Path, caplog: pytest.LogCaptureFixture, misfit: str
) -> None:
    library = wheel / "main-cpu.so"
    record = json.loads(library.with_suffix(".json").read_text())
    if misfit == "sources":
        (workshop.csrc / "include" / "shared.h").write_text("#define ADDED (1)\n")
    elif misfit in ("arch", "tvm-ffi"):
        other = {"archs": ["vax"]} if misfit == "arch" else {"tvm_ffi_version": "0.0.1"}
        library.with_suffix(".json").write_text(json.dumps({**record, **other}))
    elif misfit == "library gone":
        library.unlink()
    elif misfit == "record gone":
        library.with_suffix(".json").unlink()
    else:
        size = library.stat().st_size
        library.write_bytes(bytes(size if misfit == "garbage" else size - 1))
    for _ in range(2):
        assert add(loader(workshop, wheel), 1) == 2
    lines = [entry.getMessage() for entry in caplog.records if "the wheel" in entry.getMessage()]
    assert len(lines) == 1
    assert str(library) in lines[0]
    assert workshop.compilations() == 1


def test_a_module_newer_than_the_driver_is_named_once_with_both_and_built_instead(
    workshop: Workshop, wheel: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        @staticmethod
        def cuDriverGetVersion(version: object) -> int:  # noqa: N802  the driver's own name
            version._obj.value = 12090  # type: ignore[attr-defined]
            return 0

    real = ctypes.CDLL
    monkeypatch.setattr(
        probe.ctypes, "CDLL", lambda name, *rest: Driver() if name == "libcuda.so.1" else real(name, *rest)
    )
    library = wheel / "main-cpu.so"
    record = json.loads(library.with_suffix(".json").read_text())
    library.with_suffix(".json").write_text(json.dumps({**record, "toolkit_major": 13}))
    for _ in range(2):
        modules = loader(workshop, wheel)
        assert add(modules, 1) == 2
        assert modules.outcome("main", "cpu").origin != "wheel"
    (line,) = [entry.getMessage() for entry in caplog.records if "the wheel" in entry.getMessage()]
    assert f"{library} is of CUDA 13, which needs driver 580; the driver here supports CUDA 12.9" in line
    assert workshop.compilations() == 1


def test_a_build_for_this_machine_comes_first_where_the_environment_asks(
    workshop: Workshop, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HICACHE_KERNELS_BUILD", "1")
    modules = loader(workshop, wheel)
    assert add(modules, 1) == 2
    outcome = modules.outcome("main", "cpu")
    assert outcome.origin == "built"
    assert outcome.path is not None
    record = read_record(outcome.path)
    assert record is not None
    assert NATIVE_FLAG in record.flags
    monkeypatch.setenv("HICACHE_KERNELS_BUILD", "0")
    assert loader(workshop, wheel).outcome("main", "cpu").origin == "wheel"


def test_the_wheels_module_serves_where_a_build_was_asked_for_and_fails(
    workshop: Workshop, wheel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HICACHE_KERNELS_BUILD", "1")
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    monkeypatch.setenv("PATH", "")
    modules = loader(workshop, wheel)
    assert modules.outcome("main", "cpu").origin == "wheel"
    assert "main-cpu is the wheel's, not one built for this machine: no g++ found" in caplog.text


def test_an_installation_without_modules_says_nothing_of_a_wheel(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert loader(workshop, tmp_path / "none").outcome("main", "cpu").origin == "built"
    assert "wheel" not in caplog.text


def test_a_build_in_the_cache_is_for_the_processor_it_was_made_on(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, compiler = for_this_machine(workshop.spec()), find_compiler("cpu")
    here = build_key(spec, compiler, ["x"])
    monkeypatch.setattr(build, "processor_features", lambda: "of another machine")
    assert build_key(spec, compiler, ["x"]) != here
    assert build_key(workshop.spec(), compiler, ["x"]) == build_key(workshop.spec(), compiler, ["x"])


@pytest.mark.parametrize("line", ["flags\t\t: sse avx2 avx512f", "Features\t: avx512f sse avx2"])
def test_features_of_a_processor_are_read_as_linux_lists_them(tmp_path: Path, line: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n\nprocessor\t: 1\n{line}\n")
    assert processor_features(tmp_path / "cpuinfo") == "avx2 avx512f sse"
    assert processor_features(tmp_path / "missing") == ""


def test_only_code_for_the_cpu_is_built_for_the_processor_here() -> None:
    changed = {spec.device_type for spec in module_specs() if for_this_machine(spec) != spec}
    assert changed <= {"cpu"}
