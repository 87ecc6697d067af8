"""The snippets of the README run as they stand, one after the other, and nothing in it breaks on an index page."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "packages" / "hicache-pools" / "README.md"


@pytest.fixture(scope="module")
def text() -> str:
    return README.read_text(encoding="utf-8")


def test_the_snippets_run_in_order(text: str) -> None:
    names: dict[str, object] = {"__name__": "readme"}
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(snippets) >= 4
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), names)


def test_every_link_is_absolute(text: str) -> None:
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", prose)
    assert all("".join(link).startswith("https://") for link in links), links
