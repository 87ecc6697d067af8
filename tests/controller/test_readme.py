"""The README's snippet runs with this package alone, nothing in it breaks on an index page, and its names are there."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hicache_controller
from hicache_controller import metrics, storage
from hicache_controller.storage import mooncake
from hicache_controller.tools import cli

README = Path(__file__).parents[2] / "packages" / "hicache-controller" / "README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


def test_the_snippet_runs(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(snippet, str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == "0 pages cached, 32 to compute\n32 pages cached, 0 to compute\n"


def test_every_link_is_absolute(text: str) -> None:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", prose)
    assert all("".join(link).startswith("https://") for link in links), links


def test_the_names_in_its_table_are_there(text: str) -> None:
    homes = (hicache_controller, storage, metrics, mooncake)
    table = text.split("## What is in it")[1].split("##")[0]
    names = {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}
    assert len(names) > 10
    for name in names:
        if name.startswith("hicache_controller."):
            assert importlib.util.find_spec(name) is not None, name
        else:
            assert any(hasattr(home, name) for home in homes), name


def test_the_commands_it_shows_have_help(text: str) -> None:
    shown = {
        tuple(line.split()[:2])
        for line in re.findall(r"`?hicache ((?:replay|trace make|info|capacity)\b[^`\n]*)", text)
    }
    assert {words[0] for words in shown} == {"replay", "trace", "info", "capacity"}
    for command in (["replay"], ["trace", "make"], ["info"], ["capacity"]):
        assert CliRunner().invoke(cli.app, [*command, "--help"]).exit_code == 0
