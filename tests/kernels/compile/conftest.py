"""Fixtures of the compile tests: a module's sources without the other module's, and what a library exports."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import needs

from hicache_kernels.build import compile_module, target_archs
from hicache_kernels.compilers import BuildError, find_compiler
from hicache_kernels.spec import CSRC, ModuleSpec, module_specs


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], ModuleSpec]:
    """Spec of a module over a copy of the sources in which the other modules' directories are missing."""

    def spec(name: str, device_type: str) -> ModuleSpec:
        csrc = tmp_path_factory.mktemp(name) / "csrc"
        for part in (name, "include"):
            shutil.copytree(CSRC / part, csrc / part)
        return next(s for s in module_specs(csrc) if (s.name, s.device_type) == (name, device_type))

    return spec


@pytest.fixture(scope="session")
def compiled(alone: Callable[[str, str], ModuleSpec], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Library of a module compiled alone, each once a session."""
    done: dict[tuple[str, str], Path] = {}

    def library(name: str, device_type: str, archs: tuple[str, ...] | None = None, flags: tuple[str, ...] = ()) -> Path:
        key = (name, device_type)
        if key not in done:
            try:
                compiler = find_compiler(device_type)
            except BuildError as error:
                needs(False, str(error))
            spec = alone(name, device_type)
            spec = replace(spec, flags=(*spec.flags, *flags))
            directory = tmp_path_factory.mktemp(spec.key)
            done[key] = compile_module(spec, compiler, archs or target_archs(device_type), directory)
        return done[key]

    return library


@pytest.fixture(scope="session")
def entry_points() -> Callable[[Path], set[str]]:
    """Names of the entry points that a library exports."""
    nm = shutil.which("nm")
    needs(nm is not None, "no nm on PATH")

    def names(library: Path) -> set[str]:
        listing = subprocess.run([nm, "-D", "--defined-only", library], capture_output=True, text=True, check=True)
        symbols = [line.split()[-1] for line in listing.stdout.splitlines()]
        return {symbol for symbol in symbols if symbol.startswith("__tvm_ffi_")}

    return names
