"""The storage backend that docs/storage-backend.md shows passes the contract that the page shows."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "storage-backend.md"

shown: dict[str, Any] = {"__name__": __name__}
for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M), 1):
    exec(compile(block, f"{PAGE.name}, {number}", "exec"), shown)

TestSqliteStorage = shown["TestSqliteStorage"]
