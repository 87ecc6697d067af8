"""The CPU builds: warning-free, and each module without the others' sources."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hicache_kernels.build import compile_module, target_archs
from hicache_kernels.compilers import Compiler
from hicache_kernels.probe import open_library
from hicache_kernels.spec import CSRC, MODULE_NAMES, module_specs


@pytest.mark.parametrize("name", MODULE_NAMES)
def test_module_compiles_without_the_others_directory(name: str, tmp_path: Path, cpu_compiler: Compiler) -> None:
    for part in (name, "include"):
        shutil.copytree(CSRC / part, tmp_path / "csrc" / part)
    spec = next(s for s in module_specs(tmp_path / "csrc") if (s.name, s.device_type) == (name, "cpu"))
    strict = replace(spec, flags=(*spec.flags, "-O1", "-Wall", "-Wextra", "-Werror"))
    assert open_library(compile_module(strict, cpu_compiler, target_archs("cpu"), tmp_path)) is not None
