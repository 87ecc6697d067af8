"""Measure the shape of the code: lines of code, long files and functions, wide constructors, locks, import cycles.

A line of code is a physical line with a token on it that is neither a comment nor part of a docstring.
Run as a program it prints the figures of the three packages. The core of a package is what is neither a tool, nor an
integration, nor the storage contract, which is a test suite. That of hicache-controller had 9,210 lines before it
became one controller and a composed tree, and 8,108 after it (the contract, once among the tests, has another 456).
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("hicache_kernels", "hicache_pools", "hicache_controller")
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def source_of(package: str) -> Path:
    """Return the folder of a package's modules."""
    return ROOT / "packages" / package.replace("_", "-") / "src" / package


def modules(package: str) -> dict[str, Path]:
    """Return the files of a package by their path within it, such as ``tree/cache.py``."""
    source = source_of(package)
    return {str(path.relative_to(source)): path for path in sorted(source.rglob("*.py"))}


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


@dataclass(frozen=True)
class Function:
    """A function: where it is, its lines of code, and what it takes besides ``self``."""

    name: str
    lines: int
    parameters: int


def functions(path: Path) -> Iterator[Function]:
    """Yield every function and method of a file."""
    text = path.read_text()
    code = code_lines(text)

    def visit(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _FUNCTIONS):
                own = code & set(range(child.lineno, (child.end_lineno or child.lineno) + 1))
                taken = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
                names = [each.arg for each in taken if each.arg not in ("self", "cls")]
                yield Function(f"{prefix}{child.name}", len(own), len(names))
                yield from visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{prefix}{child.name}.")
            else:
                yield from visit(child, prefix)

    yield from visit(ast.parse(text), "")


def locks(path: Path) -> list[int]:
    """Return the line numbers at which a file makes a lock or a condition."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LOCKS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("threading", "multiprocessing")
    ]


def imports(package: str, name: str) -> set[str]:
    """Return the dotted modules that a module imports when it is loaded; not what a function or a type checker does."""
    path = modules(package)[name]
    parts = [package, *Path(name).with_suffix("").parts]
    here = parts[:-1]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = here[: len(here) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                found.add(module)
                found.update(f"{module}.{alias.name}" for alias in child.names)
            elif not isinstance(child, _FUNCTIONS) and not _for_types_alone(child):
                visit(child)

    visit(ast.parse(path.read_text()))
    return found


def _for_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def import_graph(package: str) -> dict[str, set[str]]:
    """Return which modules of a package each of its modules imports when it is loaded."""
    dotted = {}
    for name in modules(package):
        parts = Path(name).with_suffix("").parts
        dotted[name] = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
    known = set(dotted.values())
    graph: dict[str, set[str]] = {}
    for name, module in dotted.items():
        wanted = imports(package, name)
        # ``from .a import b`` names module ``a.b`` or something within ``a``; only then is ``a`` itself needed.
        submodules = {each for each in wanted if each in known}
        graph[module] = {
            each
            for each in submodules
            if each != module and not (_is_package(package, each) and _only_submodules(wanted, each, known))
        }
    return graph


def _is_package(package: str, module: str) -> bool:
    relative = module.split(".")[1:]
    return (source_of(package).joinpath(*relative) / "__init__.py").exists()


def _only_submodules(wanted: set[str], package: str, known: set[str]) -> bool:
    members = {each for each in wanted if each.startswith(package + ".") and each.count(".") == package.count(".") + 1}
    return bool(members) and members <= known


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one import cycle, or an empty list."""
    done: set[str] = set()
    for start in graph:
        trail: list[str] = []

        def search(module: str, trail: list[str] = trail) -> list[str]:
            if module in trail:
                return [*trail[trail.index(module) :], module]
            if module in done:
                return []
            trail.append(module)
            for other in sorted(graph[module]):
                found = search(other)
                if found:
                    return found
            trail.pop()
            done.add(module)
            return []

        found = search(start)
        if found:
            return found
    return []


def main() -> None:
    """Print the figures."""
    tools = ("replay", "bench", "tools", "cli.py", "capacity", "report.py", "trace.py")
    without = (*tools, "integrations", "storage/contract", "storage/faults.py")  # the last as it was called before
    for package in PACKAGES:
        files = modules(package)
        total = {name: len(code_lines(path.read_text())) for name, path in files.items()}
        core = sum(lines for name, lines in total.items() if not name.startswith(without))
        every = [(f"{name}:{each.name}", each) for name, path in files.items() for each in functions(path)]
        print(f"{package}: {sum(total.values())} lines of code in {len(files)} files; core {core}")
        print("  files over 500 lines:", [n for n, p in files.items() if len(p.read_text().splitlines()) > 500])
        print("  functions over 60 lines of code:", [(n, f.lines) for n, f in every if f.lines > 60])
        wide = [(n, f.parameters) for n, f in every if f.name.endswith("__init__") and f.parameters > 8]
        print("  constructors over 8 parameters:", wide)
        print("  locks:", {n: found for n, p in files.items() if (found := locks(p))})
        print("  import cycle:", cycle(import_graph(package)) or "none")


if __name__ == "__main__":
    sys.exit(main())
