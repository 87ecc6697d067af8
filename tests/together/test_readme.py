"""What the README says runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("readme", ["README.md", "packages/hicache-controller/README.md"])
def test_example_of_an_engine_runs(readme: str) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, readme, "exec"), names)
    cache = names["cache"]
    cache.check_integrity()  # type: ignore[attr-defined]
    assert len([line for line in example.splitlines() if line and not line.startswith(("import", "from"))]) <= 23
