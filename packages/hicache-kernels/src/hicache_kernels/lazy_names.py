"""Imports the public names of a package when the first is used: a command line checks its arguments without torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def names_from(package: str, module: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package whose public names are those of one of its modules.

    Parameters
    ----------
    package
        ``__name__`` of the package.
    module
        Name of the module in it, which imports everything public and lists it in ``__all__``.
    """

    def find(name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        if find_spec(f"{package}.{name}") is not None:  # what imports a submodule asks for it here first
            return import_module(f"{package}.{name}")
        return getattr(import_module(f"{package}.{module}"), name)

    return find
