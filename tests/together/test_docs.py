"""What the documents say is so: snippets run, commands exist, every metric and every log line is described."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer.main

import hicache_controller.tools.cli
import hicache_kernels.cli
import hicache_pools.cli
from hicache_controller.metrics import PREFIX
from hicache_controller.mooncake_module import SYSTEM_PACKAGES
from hicache_controller.storage import StorageStats, mooncake

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
PAGES = sorted(DOCS.glob("*.md"))
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
COMMANDS = {
    "hicache": hicache_controller.tools.cli.app,
    "hicache-kernels": hicache_kernels.cli.app,
    "hicache-pools": hicache_pools.cli.app,
}
ONCE = ("log_once", "warn_once", "_warn_once")
"""Functions that log a message the first time it comes; they are called with it as their one argument."""
LEVELS = {"info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR", "critical": "CRITICAL"}

POOLS = """
import torch
from hicache_controller import HiCacheController, HybridCacheController, Namespace, UnifiedRadixCache
from hicache_controller.storage import MemoryStorage
from hicache_controller.tree import *
from hicache_pools import *
page_size = 16
device_pool = MHATokenToKVPool(256, page_size, torch.float16, 2, 16, 2)
host_pool = MHATokenToKVPoolHost(device_pool, 2.0, 0)
"""
SETUPS = {
    "storage.md": POOLS,
    "tree.md": POOLS
    + """
allocator = ExtentAllocator(256 // page_size, page_size)
entry = PoolEntry(PoolName.KV, host_pool, device_pool, lambda layer: layer, True,
                  device_alloc_fn=allocator.alloc, device_free_fn=allocator.free)
controller = HybridCacheController(HostPoolGroup([entry]))
controller.attach_storage_backend(MemoryStorage())
tree = UnifiedRadixCache(controller, allocator, page_size=page_size)
tokens = torch.arange(100).numpy()
""",
}
"""What a page takes for granted."""
EXTRAS = {"operations.md": "prometheus_client", "transformers.md": "transformers"}
"""What a page needs beyond the three packages."""


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def words(page: Path) -> set[str]:
    """Everything in code spans."""
    return set(re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_snippets_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = EXTRAS.get(page.name)
    if extra is not None and not os.environ.get("HICACHE_DOCS"):  # the session of the documents has every extra
        pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mooncake, "MooncakeStorage", checked_call(mooncake.MooncakeStorage))
    names: dict[str, object] = {"__name__": page.stem}
    exec(SETUPS.get(page.name, ""), names)
    for number, block in enumerate(python_blocks(page), 1):
        exec(
            compile(block.replace("/var/cache/hicache", str(tmp_path / "cache")), f"{page.name}, {number}", "exec"),
            names,
        )


def checked_call(made: type) -> object:
    """Stand for a class that needs a service: takes what the class takes, does nothing."""

    def call(*arguments: object, **keywords: object) -> None:
        inspect.signature(made).bind(*arguments, **keywords)

    return call


# Commands


def shown_commands() -> Iterator[tuple[str, str]]:
    """Commands of ours in shell blocks and code spans, with the page they are on."""
    for page in [*PAGES, *READMES]:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        for line in [*lines, *(span for span in words(page) if " " in span)]:
            bare = re.sub(r"^\$ ", "", line.strip())
            bare = re.sub(r"^(?:[A-Z_]+=\S+ +)*(?:.*&& *)?(?:uv run +)?", "", bare)
            if bare.split(" ")[0] in COMMANDS:
                yield page.name, bare


@pytest.mark.parametrize(("page", "line"), sorted(set(shown_commands())))
def test_command_shown_exists_with_its_options(page: str, line: str) -> None:
    tokens = shlex.split(line, comments=True)
    command: Any = typer.main.get_command(COMMANDS[tokens[0]])
    # An option of the outer command comes before the name of the inner one.
    path = [tokens[0]]
    for token in tokens[1:]:
        if token.startswith("-"):
            name = token.split("=")[0]
            accepted = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            assert name in accepted | {"--help"}, f"{' '.join(path)} has no option {name}"
        elif hasattr(command, "commands"):
            assert token in command.commands, f"{' '.join(path)} has no command {token}"
            command = command.commands[token]
            path.append(token)


def test_some_commands_are_shown() -> None:
    shown = {line.split(" ")[0] + " " + line.split(" ")[1] for _, line in shown_commands() if " " in line}
    assert {"hicache replay", "hicache capacity", "hicache info", "hicache-kernels build"} <= shown


# Metrics


LABELS = {"direction", "operation", "path", "pool", "reason"}


def counted_names() -> set[str]:
    """Names that the sources count, observe or gauge."""
    names = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and is_metrics_call(node, "count", "observe", "gauge"):
                if isinstance(node.args[0], ast.Constant):
                    names.add(str(node.args[0].value))
            elif isinstance(node, ast.FunctionDef) and any(
                isinstance(each, ast.Call) and is_metrics_call(each, "add") for each in ast.walk(node)
            ):
                # Several at once, by name and labels.
                firsts = [each.elts[0] for each in ast.walk(node) if isinstance(each, ast.Tuple) and each.elts]
                names |= {str(each.value) for each in firsts if isinstance(each, ast.Constant)} - LABELS
    return names


def is_metrics_call(node: ast.Call, *methods: str) -> bool:
    return (
        isinstance(node.func, ast.Attribute)
        and node.func.attr in methods
        and "metrics" in ast.unparse(node.func.value)
        and bool(node.args)
    )


def test_operations_page_has_every_metric_and_no_other() -> None:
    described = {word for word in words(DOCS / "operations.md") if re.fullmatch(PREFIX + "[a-z_]+", word)}
    counted = {PREFIX + name for name in counted_names()}
    assert len(counted) > 20
    assert described - {PREFIX} == counted


def test_operations_page_has_every_counter_of_a_storage() -> None:
    assert set(StorageStats._fields) <= words(DOCS / "operations.md")


# Log lines


def logged() -> Iterator[tuple[str, str, str]]:
    """Module, level and message of each call of a logger at INFO or above; no message where it is made up."""
    for source in SOURCES:
        module = ".".join(source.relative_to(ROOT / "packages").parts[2:]).removesuffix(".py")
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            call = ast.unparse(node.func)
            if call.split(".")[-1] in ONCE:
                yield module, "WARNING", template(node.args[0])
            elif re.fullmatch(rf"_?log(?:ger|ging)?\.({'|'.join(LEVELS)})", call):
                level, message = LEVELS[call.split(".")[1]], template(node.args[0])
                if re.search("[a-z]{3}", re.sub("%[a-z]", "", message)):
                    yield module, level, message
                elif "message" not in {ast.unparse(argument) for argument in node.args}:
                    yield module, level, ""


def template(message: ast.expr) -> str:
    """Give the text of a message, with ``%s`` for what an f-string fills in; nothing for a variable."""
    if isinstance(message, ast.Constant):
        return str(message.value)
    if isinstance(message, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "%s" for part in message.values)
    return ""


def test_troubleshooting_page_has_every_log_line_and_no_other() -> None:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    calls = list(logged())
    assert len(calls) > 25
    for module, level, message in calls:
        if message:
            assert f"| {level} | `{message}` |" in text, f"{module} logs {message!r} at {level}"
        else:
            assert f"from `{module}`" in text, f"{module} logs messages that it makes up"
    known = {message for _, _, message in calls}
    for level, message in re.findall(r"^\| ([A-Z]+) \| `([^`]+)` \|(?! from `)", text, re.MULTILINE):
        assert message in known, f"nobody logs {message!r} at {level}"


# Names

FOREIGN = {"_total", "attack", "cudaMemcpyBatchAsync", "dd", "libibverbs1", "libnuma1", "librdmacm1"}
FOREIGN |= {"MC_MS_FILTERS", "MC_TRANSFER_TIMEOUT"}
"""Names in the documents that are not ours."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_code_spans_are_in_the_sources(page: Path) -> None:
    known = {word for source in SOURCES for word in re.findall(r"\w+", source.read_text(encoding="utf-8"))}
    known |= {"py", *(path.stem for path in ROOT.glob("examples/*.py"))}
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    if page.name == "migrating.md":  # the first column has the names of others
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    for span in re.findall(r"`([^`\n]+)`", text):
        name = re.fullmatch(r"([A-Za-z_][\w.]*)(?:\(.*\))?=?", span)
        if name is None or span.startswith(PREFIX) or re.search(r"\.(?:json|png)$|\.\.$", span) or span in FOREIGN:
            continue
        unknown = [part for part in name[1].split(".") if part not in known]
        assert not unknown, f"{span!r} on {page.name}"


# Migrating


def migrations() -> Iterator[tuple[str, str]]:
    """The middle cell of each row of the tables in migrating.md, which is ours, with the first."""
    for line in (DOCS / "migrating.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) == 5 and cells[1] != "before" and "hicache_" in cells[2]:
            yield cells[1], cells[2]


@pytest.mark.parametrize(("before", "here"), list(migrations()))
def test_row_of_the_migrating_tables_names_what_exists_with_that_signature(before: str, here: str) -> None:
    spans = re.findall(r"`([^`]+)`", here)
    assert spans, before
    for span in spans:
        found = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", span)
        assert found is not None, span
        package, *path = found[1].split(".")
        value: Any = importlib.import_module(package)
        for place, name in enumerate(path, 1):
            if not hasattr(value, name):
                importlib.import_module(".".join((package, *path[:place])))
            value = getattr(value, name)
        if found[2] is not None:
            check_parameters(span, value, [name.strip() for name in found[2].split(",") if name.strip()])


def check_parameters(span: str, value: Any, given: list[str]) -> None:
    parameters = [p for p in inspect.signature(value).parameters.values() if p.name != "self"]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    placed = [name for name in given if not name.endswith("=")]
    assert placed == by_place[: len(placed)], span
    accepted = {p.name for p in parameters}
    for parameter in parameters:
        if str(parameter.annotation).startswith("Unpack["):  # a type that lists the keywords
            (options,) = get_args(get_type_hints(value.__init__)[parameter.name])
            accepted |= options.__optional_keys__
    assert {name[:-1] for name in given if name.endswith("=")} <= accepted, span


def test_every_table_of_the_migrating_page_is_read() -> None:
    text = (DOCS / "migrating.md").read_text(encoding="utf-8").partition("## `can_use_jit`")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| before")]
    assert len(list(migrations())) == len(rows) > 40


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: page.parent.name + "-" + page.name)
def test_no_power_becomes_bold_type(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"\w\*\*\w", text) == []


# Packages


@pytest.mark.parametrize("package", sorted((ROOT / "packages").iterdir()), ids=lambda package: package.name)
def test_package_says_where_its_home_documents_changes_and_issues_are(package: Path) -> None:
    urls = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())
    changelog = re.fullmatch(r".*/blob/main/(.*)", urls["Changelog"])
    assert changelog is not None
    assert ROOT / changelog[1] == package / "CHANGELOG.md"


def test_readme_names_the_system_packages_that_mooncake_links_to() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = (block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "mooncake_master" in block)
    assert [name for name in SYSTEM_PACKAGES if name not in block] == []
