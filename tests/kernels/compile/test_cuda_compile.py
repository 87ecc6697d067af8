"""Both modules compile and link with nvcc for every supported architecture, each without the other's sources."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_kernels.build import read_record
from hicache_kernels.spec import TRANSFER_MODULES

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.mark.parametrize("name", TRANSFER_MODULES)
def test_module_alone_compiles_without_warnings_and_exports_what_the_cpu_build_does(
    name: str, compiled: Callable[..., Path], entry_points: Callable[[Path], set[str]]
) -> None:
    library = compiled(name, "cuda", ARCHS, ("-Werror=all-warnings",))
    record = read_record(library)
    assert record is not None
    assert record.archs == ARCHS
    assert record.toolkit_major is not None
    exported = entry_points(library)
    assert exported
    assert exported == entry_points(compiled(name, "cpu", flags=("-O0",)))
