"""Fixtures of the kernels' GPU tests: pools of random bytes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
    return _load(Path(__file__).parents[2] / "kernels" / "random_pools.py")
