"""Compilers and architectures: which is found, what it is, and on what its code runs."""

import os
from pathlib import Path

import pytest

from hicache_kernels import build, compilers, probe


@pytest.mark.parametrize(
    ("built", "wanted", "runs"),
    [
        (["sm_90"], ["sm_90"], True),
        (["sm_80"], ["sm_86", "sm_89"], True),
        (["sm_86"], ["sm_80"], False),
        (["sm_80", "sm_90"], ["sm_120"], True),
        (["sm_80", "sm_90"], ["sm_75"], False),
        (["sm_90a"], ["sm_90"], False),
        (["sm_90a"], ["sm_100"], False),
        (["sm_80", "sm_100"], ["sm_90"], False),
        (["sm_100"], ["sm_103"], True),
    ],
)
def test_code_for_an_older_cuda_architecture_counts_where_it_runs(
    built: list[str], wanted: list[str], runs: bool
) -> None:
    assert build.covers("cuda", built, wanted) is runs


def test_rocm_code_runs_on_its_own_architecture_only() -> None:
    assert build.covers("rocm", ["gfx90a", "gfx942"], ["gfx942"])
    assert not build.covers("rocm", ["gfx90a"], ["gfx942"])


def test_architectures_come_from_the_environments_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "9.0a 8.0;8.0")
    assert build.target_archs("cuda") == ("sm_80", "sm_90a")
    monkeypatch.setenv("TVM_FFI_ROCM_ARCH_LIST", "gfx942,gfx90a")
    assert build.target_archs("rocm") == ("gfx90a", "gfx942")
    monkeypatch.setenv("TVM_FFI_CUDA_ARCH_LIST", "ninety")
    with pytest.raises(compilers.BuildError, match=r"TVM_FFI_CUDA_ARCH_LIST contains 'ninety'; it accepts .*'8.0 9.0'"):
        build.target_archs("cuda")


def test_driver_older_than_the_toolkit_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, name: str) -> None:
            self.name = name

        @staticmethod
        def cuDriverGetVersion(version: object) -> int:  # noqa: N802  the driver's own name
            version._obj.value = 12040  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(probe.ctypes, "CDLL", Driver)
    probe.check_driver(12, "nvcc")
    with pytest.raises(
        compilers.BuildError, match=r"^nvcc is of CUDA 13, which needs driver 580; the driver here supports CUDA 12\.4:"
    ):
        probe.check_driver(13, "nvcc")


def test_toolkit_called_by_a_wrapper_on_the_path_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "toolkit"
    (home / "bin").mkdir(parents=True)
    real, wrapper = home / "bin" / "nvcc", tmp_path / "nvcc"
    script = '#!/bin/sh\ncase $1 in --version) echo "tools, release {}.1";; *) echo "#$ TOP={}" >&2;; esac\n'
    real.write_text(script.format(12, home))
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    for path in (real, wrapper):
        path.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    memory = tmp_path / "memory"
    found = compilers.find_compiler("cuda", memory)
    assert (found.path, found.real_path, found.toolkit_major) == (str(wrapper), str(real), 12)
    monkeypatch.setattr(compilers, "run_compiler", None)
    assert compilers.find_compiler("cuda", memory) == found
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    real.write_text(script.format(113, home))
    assert compilers.find_compiler("cuda", memory).toolkit_major == 113


def test_home_variable_names_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert compilers.find_compiler_path("cuda") == str(nvcc)
