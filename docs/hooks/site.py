"""MkDocs hook: pages and pictures that live elsewhere in the repository, and tables made from measured figures."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PACKAGES = ("hicache-kernels", "hicache-pools", "hicache-controller")
EXAMPLES = ROOT / "examples"
RESULTS = ROOT / "benchmarks" / "results"

logger = logging.getLogger("mkdocs.hooks.site")


def _tables() -> Any:
    path = Path(__file__).parent / "tables.py"
    spec = importlib.util.spec_from_file_location("hicache_docs_tables", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the packages' READMEs, the examples, and the pictures of the benchmarks."""
    for package in PACKAGES:
        readme = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
        files.append(File.generated(config, f"packages/{package}.md", content=readme))
    files.append(File.generated(config, "examples.md", content=examples()))
    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", content=picture.read_bytes()))
    return files


def examples() -> str:
    """Write a page with the source of every example, its docstring first."""
    parts = [
        "# Examples",
        "Under `examples/` in the repository: programs that run on a CPU in under a minute, and what they share.",
    ]
    for path in sorted(EXAMPLES.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        parts += [f"## {path.name}", ast.get_docstring(ast.parse(source)) or "", f"```python\n{source}```"]
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point pictures of the benchmarks at their copies, and fill in the tables of measured figures."""
    markdown = markdown.replace("../benchmarks/results/", "results/")
    if "<!-- table: " in markdown:
        tables = _tables()
        return str(tables.place_pictures(tables.fill_tables(markdown, RESULTS), RESULTS))
    return re.sub(r"<!-- (?:end of )?(?:quota|targets)\b[^>]*-->\n?", "", markdown)
