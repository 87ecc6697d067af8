"""The README's snippets run as they stand, nothing in it breaks on an index page, and its names are the package's."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from hicache_kernels import HostLayout, TransferPolicy, jit_kernel
from hicache_kernels.bench.cases import quick_grid
from hicache_kernels.bench.report import run_benchmark
from hicache_kernels.build import CACHE_VARIABLE
from hicache_kernels.checks import CHECK_VARIABLE
from hicache_kernels.cli import app
from hicache_kernels.planner import STAGED_PREFERENCE
from hicache_kernels.probe import PREBUILT_VARIABLE
from hicache_kernels.staging import DEFAULT_BUDGET_BYTES

ROOT = Path(__file__).parents[2]
README = ROOT / "packages" / "hicache-kernels" / "README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = ROOT / "benchmarks" / "kernels_table.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_snippets_run_in_order(text: str) -> None:
    names: dict[str, object] = {"__name__": "readme"}
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), names)


def test_every_link_is_absolute(text: str) -> None:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", prose)
    assert all("".join(link).startswith("https://") for link in links), links


def test_it_names_variables_policies_layouts_calls_and_commands_as_they_are(text: str) -> None:
    calls = [name for name in vars(jit_kernel) if name.startswith("can_use_")]
    names = [CACHE_VARIABLE, PREBUILT_VARIABLE, CHECK_VARIABLE, "TVM_FFI_CUDA_ARCH_LIST", "TVM_FFI_ROCM_ARCH_LIST"]
    for name in [*names, *calls, *HostLayout, *TransferPolicy]:
        assert f"`{name}`" in text or f'"{name}"' in text, name
    for command in ("build", "info", "calibrate", "bench"):
        assert f"hicache-kernels {command}" in text
        assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0
    assert f"{DEFAULT_BUDGET_BYTES >> 20} MiB" in text
    assert f"at most {STAGED_PREFERENCE:.0%} slower" in text
    assert "compiled and checked, never yet executed" in text


def test_the_tables_are_written_between_their_comments(text: str, tables: ModuleType) -> None:
    cases = [case for case in quick_grid() if case.page_bytes <= 1 << 20][:6]
    report = run_benchmark(cases, device="cpu", size=1 << 20, repeats=1, interference=False)
    once = tables.filled(text, report)
    assert tables.filled(once, report) == once
    assert re.sub(r"^\|.*\n", "", once, flags=re.MULTILINE) == re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE)
    assert "| staged write-back, runs: bandwidth | at least 0.98 |" in once
    with pytest.raises(ValueError, match="0 places for the table 'quota'"):
        tables.fill("no comments here", "quota", "")
