"""Checks that an engine is a version that is known, and has every hook that an integration uses."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class EngineSurface:
    """What an integration needs of its engine.

    Attributes
    ----------
    engine
        Its name.
    what
        What needs it, such as ``connector``.
    oldest, newest
        The first and the last version that were tried, in as many numbers as matter.
    logger
        Where an unknown version is a warning.
    """

    engine: str
    what: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    logger: logging.Logger

    def check_version(self, version: str) -> None:
        """Warn of a version that was not tried; ImportError where it is not one that has all hooks."""
        try:
            found = tuple(int(part) for part in version.split(".")[: len(self.oldest)])
        except ValueError:
            found = ()
        if found and found < self.oldest:
            raise ImportError(f"{self.engine} is {version}; the {self.what} needs {_text(self.oldest)} or newer")
        if not self.oldest <= found <= self.newest:
            logger = self.logger
            logger.warning(
                "%s is %s; this %s was tried with %s, and goes on as long as the hooks agree",
                self.engine,
                version,
                self.what,
                self._tried,
            )

    def check_hooks(self, version: str, used: Mapping[Any, tuple[str, ...]]) -> None:
        """Raise ImportError where a class lacks a method or field that is used.

        Parameters
        ----------
        version
            Of the engine.
        used
            Names by class.
        """
        missing = [
            f"{owner.__module__}.{owner.__qualname__}.{name}"
            for owner, names in used.items()
            for name in names
            if name not in _names(owner)
        ]
        if missing:
            raise ImportError(
                f"{self.engine} {version} lacks {', '.join(missing)}, which this {self.what} uses; versions that were "
                f"tried: {self._tried}"
            )

    @property
    def _tried(self) -> str:
        return " to ".join(dict.fromkeys((_text(self.oldest), _text(self.newest))))


def _names(owner: Any) -> set[str]:
    return set(_all_names(owner))


def _all_names(owner: Any) -> Iterator[str]:
    yield from dir(owner)
    if is_dataclass(owner):
        yield from (each.name for each in fields(owner))
    if inspect.isclass(owner):
        for each in owner.__mro__:
            yield from getattr(each, "__annotations__", {})


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
