"""Fixtures of the kernels' tests: pools of random bytes, and the compiled CPU modules."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


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
