"""Where the classes of storage backends are, by name; without torch, so that a wrong name is an error at once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

ENTRY_POINT_GROUP = "hicache.storage"
"""Group of the entry points by which installed packages offer backends."""

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "file": "hicache_controller.storage.file:FileStorage",
        "memory": "hicache_controller.storage.memory:MemoryStorage",
        "mooncake": "hicache_controller.storage.mooncake:MooncakeStorage",
    }
)
"""Backends of this package, as ``module:Class``."""


registered: dict[str, str] = {}
"""Backends that were given a name in this process."""


def storage_paths() -> dict[str, str]:
    """Return ``module:Class`` by name: entry points of installed packages, registered ones, and those of this package.

    A name of this package cannot be taken by another; of two packages that offer one name, the first that is found on
    the import path counts.
    """
    found: dict[str, str] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(entry.name, f"{entry.module}:{entry.attr}")
    return {**registered, **found, **BUILT_IN}


def storage_path(backend: str) -> str:
    """Return the ``module:Class`` of a name, or of a backend that is given as one.

    Raises
    ------
    ValueError
        For a name that is unknown, listing what is accepted.
    """
    known = storage_paths()
    path = backend if ":" in backend else known.get(backend, "")
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(
            f"storage backend is {backend!r}; accepted are {', '.join(sorted(known))}, a name of an entry point in the "
            f"group {ENTRY_POINT_GROUP}, and 'module:Class'"
        )
    return path
