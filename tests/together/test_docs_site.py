"""The documents as a site: it builds without a warning, fetches nothing, and describes every public name."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = (
    "hicache_kernels",
    "hicache_pools",
    "hicache_controller",
    "hicache_controller.tree",
    "hicache_controller.storage",
    "hicache_controller.storage.contract",
)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the session of the documents has what that needs."""
    if not os.environ.get("HICACHE_DOCS"):
        pytest.importorskip("mkdocs", reason="mkdocs is not installed; nox -s docs builds the site")
        pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed; nox -s docs builds the site")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


def described_names(site: Path) -> set[str]:
    """Names in the inventory of the reference."""
    lines = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(lines).decode().splitlines()}


def test_reference_describes_every_public_name(site: Path) -> None:
    described = described_names(site)
    for name in MODULES:
        module = importlib.import_module(name)
        assert module.__all__
        # What has a second name is described under its own.
        own = {each: getattr(getattr(module, each), "__name__", each) for each in module.__all__}
        missing = [each for each in own if not {f"{name}.{each}", f"{name}.{own[each]}"} & described]
        assert missing == [], name


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(
            r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=\"((?:https?:)?//[^\"]*)\"", text
        )
        assert fetched == [], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), style.name


def test_docstrings_leave_no_markup_of_another_language(site: Path) -> None:
    for page in (site / "api").glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r":(?:attr|class|data|func|meth|mod):", text), page.name
        assert "====" not in text, page.name


def test_readmes_are_pages(site: Path) -> None:
    for package in ("hicache-kernels", "hicache-pools", "hicache-controller"):
        readme = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
        heading = re.findall(r"^## (.*)$", readme, re.MULTILINE)[0]
        assert heading in (site / "packages" / f"{package}.html").read_text(encoding="utf-8")


def test_examples_are_a_page(site: Path) -> None:
    page = (site / "examples.html").read_text(encoding="utf-8")
    for example in (ROOT / "examples").glob("*.py"):
        assert f">{example.name}<" in page


# The hooks


def test_table_of_missing_figures_says_so(tmp_path: Path) -> None:
    tables = load(DOCS / "hooks" / "tables.py")
    filled = tables.fill_tables("before\n\n<!-- table: pinning none.json -->\n\nafter", tmp_path)
    assert filled == "before\n\n*Not measured yet: `benchmarks/results/none.json` is not there.*\n\nafter"
    with pytest.raises(KeyError, match="nothing"):
        tables.fill_tables("<!-- table: nothing none.json -->", tmp_path)


def test_tables_show_the_figures_of_their_files(tmp_path: Path) -> None:
    tables = load(DOCS / "hooks" / "tables.py")
    shown = [(name, file) for name, file in tables.PLACE.findall((DOCS / "performance.md").read_text(encoding="utf-8"))]
    assert {name for name, _ in shown} == set(tables.TABLES)
    results = ROOT / "benchmarks" / "results"
    there = [(name, file) for name, file in shown if (results / file).exists()]
    assert len(there) >= 5
    for name, file in there:
        made = tables.fill_tables(f"<!-- table: {name} {file} -->", results)
        assert made.count("\n| ") >= 2, name
    figures = json.loads((results / "tree.json").read_text(encoding="utf-8"))
    figures["against_size"] = [{"tokens": 1234567, "nodes": 7, "match_ms": 0.125, "insert_ms": 0.5}]
    (tmp_path / "tree.json").write_text(json.dumps(figures))
    assert "| 1,234,567 | 7 | 0.125 | 0.500 |" in tables.fill_tables("<!-- table: tree tree.json -->", tmp_path)


def test_kernel_tables_come_from_a_report_of_the_benchmark(tmp_path: Path) -> None:
    bench = importlib.import_module("hicache_kernels.bench.report")
    cases = list(importlib.import_module("hicache_kernels.bench.cases").quick_grid())[:4]
    report = bench.run_benchmark(cases, device="cpu", size=1 << 20, repeats=1, interference=False)
    (tmp_path / "h200.json").write_text(report.to_json())
    tables = load(DOCS / "hooks" / "tables.py")
    made = tables.fill_tables(
        "".join(f"<!-- table: kernels_{name} h200.json -->\n" for name in ("targets", "quota", "losses")), tmp_path
    )
    assert "staged write-back, runs: bandwidth" in made
    assert "| transfer | D2H | H2D |" in made
    assert "| pool | transfer | alone |" in made
    assert "Not measured yet" not in made


def test_pictures_that_are_not_there_leave_no_trace(tmp_path: Path) -> None:
    tables = load(DOCS / "hooks" / "tables.py")
    (tmp_path / "one.png").touch()
    text = "<!-- picture: one.png What it shows --><!-- picture: two.png Nothing -->"
    assert tables.place_pictures(text, tmp_path) == "![What it shows](results/one.png)"


def test_engine_table_comes_from_a_report_of_its_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    bench = importlib.import_module("hicache_controller.tools.bench.report")
    engine = importlib.import_module("hicache_controller.tools.bench.engine")
    times = engine.PromptTimes(
        4096, 64, 1.25, 0.05, l2=0.0625, load_bytes=1 << 20, load_seconds=0.03, load_path="staged", copy=0.025
    )
    options = {"parameters": 1_500_000_000, "dtype": "bfloat16", "token_bytes": 65536, "page_size": 64}
    report = bench.EngineReport({"device": "a GPU"}, options, (times,))
    (tmp_path / "bench_engine.json").write_text(json.dumps(report.as_json()))
    made = load(DOCS / "hooks" / "tables.py").fill_tables("<!-- table: engine bench_engine.json -->", tmp_path)
    assert "| 4,096 | staged | 1250.00 |  |  | 62.50 | 50.00 | 30.00 | 25.00 | 20.00 | 1.25 |  |" in made
    assert "1.50 billion parameters in bfloat16" in made


def test_markup_of_docstrings_becomes_markdown() -> None:
    pytest.importorskip("griffe")
    convert = load(DOCS / "hooks" / "docstrings.py").markdown
    assert convert("See :class:`a.B`, :meth:`~c.d` and ``e``.") == "See `a.B`, `c.d` and ``e``."
    table = "Head.\n\n====  =====\nx     one\nyy    two words\n====  =====\n\nTail."
    assert convert(table) == "Head.\n\n\n|  |  |\n| --- | --- |\n| x | one |\n| yy | two words |\n\n\nTail."
    headed = "======  =====\nmodule  holds\n======  =====\na       one\n======  ====="
    assert convert(headed) == "\n| module | holds |\n| --- | --- |\n| a | one |\n"


@pytest.mark.parametrize("picture", sorted(DOCS.glob("*.svg")), ids=lambda picture: picture.name)
def test_pictures_are_readable_on_dark_and_light_pages(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    first = next(child for child in root if child.tag.endswith("rect"))
    width, height = root.attrib["viewBox"].split()[2:]
    assert (first.attrib["width"], first.attrib["height"]) == (width, height), "a background of its own"
    assert first.attrib["fill"] == "#ffffff"
    for element in root.iter():
        assert not any(name.endswith("href") for name in element.attrib), "fetches something"
