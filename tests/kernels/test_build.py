"""The loader on a tiny module of its own: builds once, shares, survives kills and full disks, and never raises."""

import errno
import json
import logging
import multiprocessing
import os
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.kernels.workshop import SOURCE, Workshop, add, in_child

from hicache_kernels import build, compilers, info, probe
from hicache_kernels.aot import build_aot
from hicache_kernels.probe import ModuleLoader
from hicache_kernels.spec import ModuleSpec, module_specs


def test_second_process_loads_what_the_first_built_without_starting_a_compiler(workshop: Workshop) -> None:
    first = workshop.loader()
    assert add(first, 41) == 42
    assert first.outcome("main", "cpu").origin == "built"
    starts = workshop.starts()
    second = workshop.loader()
    assert add(second, 1) == 2
    assert second.outcome("main", "cpu").origin == "cache"
    assert workshop.starts() == starts


def test_eight_processes_at_once_compile_once_and_all_load(workshop: Workshop) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(8)

    def load() -> None:
        barrier.wait()
        os._exit(0 if add(workshop.loader(), 1) == 2 else 1)

    children = [in_child(load) for _ in range(8)]
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * 8
    assert workshop.compilations() == 1
    assert len(workshop.libraries()) == 1
    assert workshop.hidden() == []


def test_eight_threads_at_once_compile_once(workshop: Workshop) -> None:
    loader = workshop.loader()
    barrier = threading.Barrier(8)

    def load(value: int) -> int:
        barrier.wait()
        return add(loader, value)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(load, range(8))) == list(range(1, 9))
    assert workshop.compilations() == 1


def test_a_module_in_the_making_is_not_waited_for(workshop: Workshop) -> None:
    workshop.gate.touch()
    for pipe in (workshop.started, workshop.release):
        os.mkfifo(pipe)
    loader = workshop.loader()
    assert loader.outcome_so_far("main", "cpu") is None
    workshop.started.read_text()
    assert loader.outcome_so_far("main", "cpu") is None  # the compiler hangs, and once more is not begun
    workshop.gate.unlink()
    workshop.release.write_text("go on\n")
    outcome = loader.outcome("main", "cpu")
    assert loader.outcome_so_far("main", "cpu") is outcome
    assert workshop.compilations() == 1


def test_the_attempt_in_the_background_ends_by_itself(workshop: Workshop) -> None:
    loader = workshop.loader()
    before = set(threading.enumerate())
    assert loader.outcome_so_far("main", "cpu") is None
    for thread in set(threading.enumerate()) - before:
        assert thread.daemon
        thread.join()
    outcome = loader.outcome_so_far("main", "cpu")
    assert outcome is not None
    assert outcome.module is not None, outcome.reason


def test_an_attempt_that_gets_no_thread_is_made_later(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    loader = workshop.loader()
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", no_thread)
        assert loader.outcome_so_far("main", "cpu") is None
    before = set(threading.enumerate())
    assert loader.outcome_so_far("main", "cpu") is None
    for thread in set(threading.enumerate()) - before:
        thread.join()
    outcome = loader.outcome_so_far("main", "cpu")
    assert outcome is not None
    assert outcome.module is not None, outcome.reason


def test_a_process_forked_during_an_attempt_makes_its_own(workshop: Workshop) -> None:
    workshop.gate.touch()
    for pipe in (workshop.started, workshop.release):
        os.mkfifo(pipe)
    loader = workshop.loader()
    assert loader.outcome_so_far("main", "cpu") is None
    workshop.started.read_text()  # the compiler hangs

    def load() -> None:
        before = set(threading.enumerate())
        assert loader.outcome_so_far("main", "cpu") is None
        (thread,) = set(threading.enumerate()) - before
        thread.join()
        assert add(loader, 1) == 2

    child = in_child(load)
    workshop.gate.unlink()
    workshop.release.write_text("go on\n")
    assert "exited with 1" in str(loader.outcome("main", "cpu").reason)  # as the wrapper does once it is let go
    child.join(60)
    alive = child.is_alive()
    child.kill()
    assert (alive, child.exitcode) == (False, 0)


@pytest.mark.parametrize(
    ("device_type", "archs", "commands"), [("cuda", 1, 1), ("cuda", 3, 2), ("rocm", 2, 1), ("cpu", 1, 1)]
)
def test_only_the_compiler_of_several_architectures_runs_in_threads_never_its_linker(
    tmp_path: Path, device_type: str, archs: int, commands: int
) -> None:
    spec = next(each for each in module_specs() if (each.name, each.device_type) == ("main", device_type))
    names = {"cuda": ["sm_80", "sm_90", "sm_100"], "rocm": ["gfx90a", "gfx942"], "cpu": ["x86_64"]}[device_type][:archs]
    library = tmp_path / "main.so"
    found = build.compile_commands(spec, compilers.Compiler("/bin/false", "/bin/false", ""), names, library)
    assert len(found) == commands
    assert ["-shared" in command for command in found] == [False] * (commands - 1) + [True]
    assert ["--threads=0" in command for command in found] == [True] * (commands - 1) + [False]
    assert str(library) == found[-1][-1]
    if commands > 1:
        assert found[0][-1] in found[-1]


def test_remains_of_a_builder_killed_while_keeping_are_removed(workshop: Workshop) -> None:
    compiler = compilers.find_compiler("cpu")
    entry = workshop.cache / build.build_key(workshop.spec(), compiler, build.target_archs("cpu"))
    remains = workshop.cache / f".{entry.name}.abc"
    remains.mkdir(parents=True)
    (remains / "main-cpu.so").write_bytes(b"half")
    assert add(workshop.loader(), 1) == 2
    assert workshop.hidden() == []


@pytest.mark.parametrize("damage", ["cut off", "overwritten", "no record", "damaged record"])
def test_damaged_build_is_built_again(workshop: Workshop, damage: str) -> None:
    # In a child: the dynamic linker would take a path that this process has loaded for loaded, whatever lies there now.
    in_child(lambda: add(workshop.loader(), 1)).join()
    (library,) = workshop.libraries()
    size = library.stat().st_size
    if damage == "cut off":
        library.write_bytes(library.read_bytes()[: size // 2])
    elif damage == "overwritten":
        library.write_bytes(bytes(size))
    elif damage == "no record":
        library.with_suffix(".json").unlink()
    else:
        library.with_suffix(".json").write_text("{")
    loader = workshop.loader()
    assert add(loader, 1) == 2
    assert loader.outcome("main", "cpu").origin == "built"
    assert workshop.compilations() == 2
    assert workshop.loader().outcome("main", "cpu").origin == "cache"


@pytest.mark.parametrize("change", ["source", "header", "new file", "flags", "compiler"])
def test_a_change_of_what_goes_in_builds_anew(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    add(workshop.loader(), 1)
    specs = workshop.specs()
    expected = 2
    if change == "source":
        (workshop.csrc / "main" / "main.cc").write_text(SOURCE.replace("+ ADDED", "* ADDED"))
        expected = 1
    elif change == "header":
        (workshop.csrc / "include" / "shared.h").write_text("#define ADDED 5\n")
        expected = 6
    elif change == "new file":
        (workshop.csrc / "main" / "more.h").write_text("")
    elif change == "flags":
        specs = tuple(
            ModuleSpec(s.name, s.device_type, s.source_files, s.include_dirs, (*s.flags, "-g")) for s in specs
        )
    else:
        version = "case $1 in --version) echo another; exit;; esac\nexec"
        workshop.compiler.write_text(workshop.compiler.read_text().replace("exec", version))
    loader = ModuleLoader(specs, cache=workshop.cache)
    assert add(loader, 1) == expected
    assert loader.outcome("main", "cpu").origin == "built"


def test_another_modules_sources_do_not_matter(workshop: Workshop) -> None:
    before = workshop.spec().source_key()
    (workshop.csrc / "staged").mkdir()
    (workshop.csrc / "staged" / "staged.cc").write_text("not even C++")
    assert workshop.spec().source_key() == before


def test_full_disk_of_the_cache_still_gives_a_module_and_leaves_nothing(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def copy(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(build.shutil, "copy", copy)
    assert add(workshop.loader(), 1) == 2
    assert workshop.libraries() == []
    assert workshop.hidden() == []
    assert os.strerror(errno.ENOSPC) in caplog.text


def test_full_disk_of_the_temporary_directory_is_one_reason(workshop: Workshop) -> None:
    (workshop.csrc / "main" / "main.cc").write_text("#error no such thing")
    script = 'case "$*" in *--version*) ;; *) echo "x.s: No space left on device" >&2; exit 1;; esac\nexec'
    workshop.compiler.write_text(workshop.compiler.read_text().replace("exec", script))
    reason = workshop.loader().outcome("main", "cpu").reason
    assert reason is not None
    assert "No space left on device" in reason


def test_no_temporary_directory_is_one_reason(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    reason = workshop.loader().outcome("main", "cpu").reason
    assert reason is not None
    assert "no temporary directory" in reason


def test_missing_compiler_is_named(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    outcome = workshop.loader().outcome("main", "cpu")
    assert outcome.module is None
    assert outcome.reason == "no g++ found (looked at CXX, PATH)"


def test_compiler_that_does_not_run_is_one_reason(workshop: Workshop) -> None:
    workshop.compiler.write_text("#!/nowhere/sh\n")
    reason = workshop.loader().outcome("main", "cpu").reason
    assert reason is not None
    assert str(workshop.compiler) in reason


def test_compile_error_gives_the_first_errors_and_is_not_tried_again(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    (workshop.csrc / "main" / "main.cc").write_text(SOURCE + "\nint broken( { }\n" + "int worse[] = nonsense;\n" * 50)
    loader = workshop.loader()
    reason = loader.outcome("main", "cpu").reason
    assert reason is not None
    assert "main.cc:10" in reason
    assert "error" in reason
    assert len(reason) < 2000
    starts = workshop.starts()
    for _ in range(3):
        assert loader.outcome("main", "cpu").reason == reason
    assert workshop.starts() == starts
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert workshop.libraries() == []


def test_missing_symbol_is_found_when_linking(workshop: Workshop) -> None:
    (workshop.csrc / "main" / "main.cc").write_text(SOURCE + "\nint elsewhere();\nint used() { return elsewhere(); }\n")
    reason = workshop.loader().outcome("main", "cpu").reason
    assert reason is not None
    assert "undefined reference to `elsewhere()'" in reason


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "rocm"])
def test_missing_source_is_one_reason(workshop: Workshop, device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setenv("TVM_FFI_ROCM_ARCH_LIST", "gfx90a")
    monkeypatch.setattr(probe, "find_compiler", lambda *a, **k: compilers.Compiler("/bin/false", "/bin/false", ""))
    reason = workshop.loader().outcome("staged", device_type).reason
    assert reason is not None
    assert "staged.c" in reason
    assert "is missing" in reason


def test_unknown_device_type_and_module_are_reasons(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    loader = workshop.loader()
    for _ in range(3):
        assert loader.outcome("main", "xpu").reason == "no kernels for xpu"
        assert loader.outcome("other", "cpu").reason == "no module named 'other'; there are files, main, staged"
    assert len(caplog.records) == 2
    assert probe.load_module("main", "xpu") is None
    assert probe.unavailable_reason("main", "xpu") == "no kernels for xpu"


def test_probe_turns_any_exception_into_a_reason(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(device_type: str) -> tuple[str, ...]:
        raise RuntimeError("driver on fire")

    monkeypatch.setattr(probe, "target_archs", explode)
    assert workshop.loader().outcome("main", "cpu").reason == "loading main-cpu failed: RuntimeError: driver on fire"


def prebuild(workshop: Workshop, out: Path) -> Path:
    (result,) = build_aot(["cpu"], out, specs=[workshop.spec()])
    assert result.library is not None, result.error
    return result.library


def test_prebuilt_module_is_used_without_compiler_or_cache(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = prebuild(workshop, tmp_path / "out")
    starts = workshop.starts()
    monkeypatch.setenv("HICACHE_KERNELS_PREBUILT", str(tmp_path / "out"))
    loader = workshop.loader()
    assert add(loader, 1) == 2
    assert loader.outcome("main", "cpu").origin == "prebuilt"
    assert loader.outcome("main", "cpu").path == library
    assert workshop.starts() == starts
    assert not workshop.cache.exists()


@pytest.mark.parametrize("mismatch", ["sources", "arch", "tvm-ffi", "missing", "cut off", "garbage"])
def test_prebuilt_module_that_does_not_match_is_said_and_built_instead(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mismatch: str
) -> None:
    library = prebuild(workshop, tmp_path / "out")
    record = json.loads(library.with_suffix(".json").read_text())
    said = {
        "sources": "built from other sources",
        "arch": "has code for vax",
        "tvm-ffi": "built with tvm-ffi 0.0.1",
        "missing": "missing or damaged",
        "cut off": "missing or damaged",
        "garbage": "does not load",
    }[mismatch]
    if mismatch == "sources":
        (workshop.csrc / "include" / "shared.h").write_text("#define ADDED (1)\n")
    elif mismatch == "arch":
        library.with_suffix(".json").write_text(json.dumps({**record, "archs": ["vax"]}))
    elif mismatch == "tvm-ffi":
        library.with_suffix(".json").write_text(json.dumps({**record, "tvm_ffi_version": "0.0.1"}))
    elif mismatch == "missing":
        library.unlink()
    else:
        size = library.stat().st_size
        library.write_bytes(bytes(size if mismatch == "garbage" else size - 1))
    monkeypatch.setenv("HICACHE_KERNELS_PREBUILT", str(tmp_path / "out"))
    loader = workshop.loader()
    assert add(loader, 1) == 2
    assert loader.outcome("main", "cpu").origin == "built"
    assert said in caplog.text
    assert str(library) in caplog.text


def test_ahead_of_time_build_replaces_and_reports_errors(workshop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "out"
    library = prebuild(workshop, out)
    before = library.read_bytes()
    (workshop.csrc / "include" / "shared.h").write_text("#error broken\n")
    (result,) = build_aot(["cpu"], out, specs=[workshop.spec()])
    assert result.library is None
    assert result.error is not None
    assert "broken" in result.error
    assert library.read_bytes() == before
    (workshop.csrc / "include" / "shared.h").write_text("#define ADDED 7\n")
    assert prebuild(workshop, out).read_bytes() != before
    assert sorted(path.name for path in out.iterdir()) == ["main-cpu.json", "main-cpu.so"]


def test_loading_leaves_the_environment_alone(workshop: Workshop) -> None:
    before = dict(os.environ)
    add(workshop.loader(), 1)
    assert dict(os.environ) == before


def test_cache_directory_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HICACHE_KERNELS_CACHE", str(tmp_path / "a"))
    assert build.cache_directory() == tmp_path / "a"
    monkeypatch.delenv("HICACHE_KERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert build.cache_directory() == tmp_path / "b" / "hicache-kernels"


def test_user_without_a_home_still_gets_a_module(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in ("HICACHE_KERNELS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert add(ModuleLoader(workshop.specs()), 1) == 2
    assert not info.cache_state().writable


def test_modules_keep_their_inline_helpers_to_themselves(workshop: Workshop) -> None:
    (workshop.csrc / "include" / "shared.h").write_text(
        "#define ADDED counter()\ninline int counter() { static int n; return ++n; }\n"
    )
    outcome = workshop.loader().outcome("main", "cpu")
    assert outcome.path is not None
    symbols = subprocess.run(["nm", "-D", "--defined-only", outcome.path], capture_output=True, text=True, check=True)
    assert "__tvm_ffi_add" in symbols.stdout
    assert "counter" not in symbols.stdout
