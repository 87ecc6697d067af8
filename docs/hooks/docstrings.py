"""Griffe extension: turns what numpy docstrings borrow from reStructuredText into Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
_RULE = re.compile(r"^=+(?: +=+)+$")


def markdown(text: str) -> str:
    """Roles become code, and simple tables become tables of Markdown."""
    return _tables(_ROLE.sub(r"`\1`", text))


def _tables(text: str) -> str:
    out: list[str] = []
    begin: int | None = None
    rows: list[list[str]] = []
    rules = 0
    for line in text.splitlines():
        rule = _RULE.match(line.strip())
        if rule:
            starts = [found.start() for found in re.finditer(r"=+", line)]
            rules += 1
            if rules == 1:
                begin, rows = len(out), []
            # A table without a head has two rules, one with a head three; what follows decides.
            elif rules == 2 and len(rows) == 1:
                continue
            else:
                _close(out, rows)
                begin, rules = None, 0
        elif begin is not None:
            cells = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
            rows.append(cells)
        else:
            out.append(line)
    if rules == 2:
        _close(out, rows)
    return "\n".join(out)


def _close(out: list[str], rows: list[list[str]]) -> None:
    head, body = (rows[0], rows[1:]) if len(rows) > 1 and rows[0][0] == "module" else ([""] * len(rows[0]), rows)
    lines = [head, ["---"] * len(head), *body]
    out += ["", *(f"| {' | '.join(cells)} |" for cells in lines), ""]


class MarkdownDocstrings(griffe.Extension):
    """Rewrites each docstring as it is collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
