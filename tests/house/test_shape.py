"""Limits that keep the code easy to hold: lengths of files and functions, parameters, locks, inheritance."""

from __future__ import annotations

import pytest
from tests.house.measure import PACKAGES, functions, locks, modules

from hicache_controller import HiCacheController, HybridCacheController, UnifiedRadixCache

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_LOCKS = 500, 60, 8, 20
WIDE = {"HiCacheController.__init__", "MooncakeStorage.__init__", "UnifiedRadixCache.__init__"}
"""Constructors whose keywords are public, and stay."""
FILES = [(package, name) for package in PACKAGES for name in modules(package)]


@pytest.mark.parametrize("package", PACKAGES)
def test_files_are_short(package: str) -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules(package).items()}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short(package: str) -> None:
    every = [(name, each) for name, path in modules(package).items() for each in functions(path)]
    assert every
    assert [(name, each.name, each.lines) for name, each in every if each.lines > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_constructors_take_few_parameters(package: str) -> None:
    every = [(name, each) for name, path in modules(package).items() for each in functions(path)]
    wide = [each.name for _, each in every if each.name.endswith("__init__") and each.parameters > MAX_PARAMETERS]
    assert set(wide) <= WIDE


def test_locks_are_few_and_each_says_what_it_guards() -> None:
    found = [(modules(package)[name], line) for package, name in FILES for line in locks(modules(package)[name])]
    assert len(found) <= MAX_LOCKS
    for path, line in found:
        lines = path.read_text().splitlines()
        around = [lines[line - 2].strip(), lines[line - 1], lines[line].strip() if line < len(lines) else ""]
        said = around[0].startswith("#") or "#" in around[1] or around[2].startswith('"""')
        assert said, f"{path.name}:{line} has no line that says what it guards: {around[1].strip()}"


def test_the_tree_is_composed_and_there_is_one_controller() -> None:
    assert UnifiedRadixCache.__bases__ == (object,)
    assert HiCacheController.__bases__ == (object,)
    assert HybridCacheController is HiCacheController
