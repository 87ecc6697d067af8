"""The pools of tests/pools, on the GPU."""

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[2] / "pools" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("hicache_tests_pools", _PATH)
if _SPEC is None or _SPEC.loader is None:
    raise ImportError(f"{_PATH} cannot be loaded")
_pools = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = _pools
_SPEC.loader.exec_module(_pools)

bench = _pools.bench
pytest_generate_tests = _pools.pytest_generate_tests
