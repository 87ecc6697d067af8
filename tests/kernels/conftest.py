"""Fixtures of the kernels' tests: pools of random bytes, and the compiled CPU modules."""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.conftest import needs
from tests.kernels.workshop import SOURCE, WRAPPER, Workshop


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pools() -> ModuleType:
    """The module ``random_pools.py``: ``random_pool``, ``random_pages`` and the oracle."""
    return _load(Path(__file__).parent / "random_pools.py")


@pytest.fixture(scope="session")
def compiled() -> Callable[[str], Any]:
    """Loader of the compiled CPU modules; without a compiler a user's tests skip, CI's fail."""
    from hicache_kernels.probe import load_module, unavailable_reason
    from hicache_kernels.spec import MODULE_NAMES

    for name in MODULE_NAMES:
        reason = unavailable_reason(name, "cpu")
        if reason is not None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    return lambda name: load_module(name, "cpu")


@pytest.fixture(scope="session")
def cpu_compiler() -> Any:
    """The C++ compiler; without one a user's tests skip, CI's fail."""
    from hicache_kernels.compilers import BuildError, find_compiler

    try:
        return find_compiler("cpu")
    except BuildError as error:
        return needs(False, str(error))


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    compiler = shutil.which("g++")
    needs(compiler is not None, "no g++ on PATH")
    csrc = tmp_path / "csrc"
    (csrc / "main").mkdir(parents=True)
    (csrc / "include").mkdir()
    (csrc / "main" / "main.cc").write_text(SOURCE)
    (csrc / "include" / "shared.h").write_text("#define ADDED 1\n")
    shop = Workshop(
        csrc,
        tmp_path / "cache",
        *(tmp_path / name for name in ("compiler", "gate", "started", "release", "log")),
    )
    shop.compiler.write_text(
        WRAPPER.format(log=shop.log, gate=shop.gate, started=shop.started, release=shop.release, compiler=compiler)
    )
    shop.compiler.chmod(0o755)
    for variable in ("HICACHE_KERNELS_PREBUILT", "TVM_FFI_CUDA_ARCH_LIST", "TVM_FFI_ROCM_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("CXX", str(shop.compiler))
    return shop
