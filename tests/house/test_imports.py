"""Who may import whom: layers, the core, its tools and its integrations; read from the sources."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

import pytest
from tests.house.measure import PACKAGES, ROOT, cycle, import_graph, modules

DOCUMENTED = {
    name
    for page in (ROOT / "docs" / "api").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}
"""Modules and names that the reference describes: the public surface."""
SHARED = {"hicache_kernels.validation"}
"""Modules that our own packages share and that the reference leaves out."""
TOOLS, INTEGRATIONS = "hicache_controller.tools", "hicache_controller.integrations"


def dotted(package: str, name: str) -> str:
    """Return the dotted name of a package's file."""
    return ".".join([package, *name.removesuffix(".py").removesuffix("__init__").strip("/").split("/")]).rstrip(".")


def imported(package: str, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield what a file imports anywhere, in functions and for types too: a module, and a name in it."""
    here = [package, *name.split("/")[:-1]]
    for node in ast.walk(ast.parse(modules(package)[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def is_within(module: str, name: str | None, package: str) -> bool:
    """Return whether an import is of a package or of something in it."""
    return f"{module}.{name}.".startswith(f"{package}.") or f"{module}.".startswith(f"{package}.")


EVERY = [(package, name) for package in PACKAGES for name in modules(package)]
CORE = [each for each in EVERY if not dotted(*each).startswith((TOOLS, INTEGRATIONS))]
ADAPTERS = [each for each in EVERY if dotted(*each).startswith(INTEGRATIONS)]


def violations(files: list[tuple[str, str]], *forbidden: str) -> list[str]:
    """Return each import of a forbidden package in the files."""
    return [
        f"{dotted(*file)} imports {module}{f'.{name}' if name else ''}"
        for file in files
        for module, name in imported(*file)
        if any(is_within(module, name, package) for package in forbidden)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_an_import_cycle(package: str) -> None:
    assert cycle(import_graph(package)) == []


@pytest.mark.parametrize(("below", "above"), [(PACKAGES[0], PACKAGES[1:]), (PACKAGES[1], PACKAGES[2:])])
def test_a_package_imports_none_above_it(below: str, above: tuple[str, ...]) -> None:
    assert violations([each for each in EVERY if each[0] == below], *above) == []


def test_nothing_imports_the_tools() -> None:
    assert violations([each for each in EVERY if not dotted(*each).startswith(TOOLS)], TOOLS) == []


def test_the_core_imports_no_integration() -> None:
    assert len(CORE) > 100
    assert violations(CORE, INTEGRATIONS) == []


def test_only_the_contract_imports_pytest_and_nothing_imports_it() -> None:
    contract = "hicache_controller.storage.contract"
    assert violations([each for each in EVERY if not dotted(*each).startswith(contract)], "pytest") == []
    assert violations([each for each in EVERY if not dotted(*each).startswith(contract)], contract) == []


def is_public(module: str, name: str | None) -> bool:
    """Return whether the reference describes an imported name, or may: a name of a documented module."""
    if f"{module}.{name}" in DOCUMENTED:
        return True
    if name is None or name.startswith("_") or module not in DOCUMENTED | SHARED:
        return False
    declared = getattr(importlib.import_module(module), "__all__", None)
    return declared is None or name in declared


def test_integrations_import_public_names_alone() -> None:
    assert len(ADAPTERS) > 10
    assert [
        f"{dotted(*file)} imports {name} from {module}"
        for file in ADAPTERS
        for module, name in imported(*file)
        if module.split(".")[0] in PACKAGES and not is_within(module, name, INTEGRATIONS)
        if not is_public(module, name)
    ] == []


def private_names(files: list[tuple[str, str]]) -> set[str]:
    """Return the names of methods and attributes with one leading underscore that files define."""
    found = set()
    for package, name in files:
        for node in ast.walk(ast.parse(modules(package)[name].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.update(each.name for each in node.body if isinstance(each, ast.FunctionDef))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {each for each in found if each.startswith("_") and not each.startswith("__")}


def test_integrations_use_no_private_attribute_of_the_core() -> None:
    foreign = private_names(CORE) - private_names(ADAPTERS)
    assert "_closed" in private_names(ADAPTERS)
    assert [
        f"{dotted(package, name)}, line {node.lineno}: {ast.unparse(node)}"
        for package, name in ADAPTERS
        for node in ast.walk(ast.parse(modules(package)[name].read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in foreign
    ] == []
