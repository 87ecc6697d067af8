"""Storage backends by name, and by ``module:Class`` for engines that bring their own."""

from __future__ import annotations

import importlib
from typing import Any

from .base import HiCacheStorage


class StorageBackendFactory:
    """Makes storage backends; a registry of names, each with where its class is, imported when it is asked for."""

    _paths: dict[str, str] = {
        "file": "hicache_controller.storage.file:FileStorage",
        "mooncake": "hicache_controller.storage.mooncake:MooncakeStorage",
        "memory": "hicache_controller.storage.memory:MemoryStorage",
    }

    @classmethod
    def register(cls, name: str, path: str) -> None:
        """Give a backend a name.

        Parameters
        ----------
        name
            New; it has no colon.
        path
            ``module:Class``, a subclass of :class:`HiCacheStorage`.

        Raises
        ------
        ValueError
            Where the name is taken by another class or has a colon, or the path has none.
        """
        if ":" in name or not name:
            raise ValueError(f"name is {name!r}; accepted is a name without a colon")
        if ":" not in path:
            raise ValueError(f"path is {path!r}; accepted is 'module:Class'")
        if cls._paths.get(name, path) != path:
            raise ValueError(f"name is {name!r}, which is {cls._paths[name]} already")
        cls._paths[name] = path

    @classmethod
    def names(cls) -> list[str]:
        """Return the registered names."""
        return sorted(cls._paths)

    @classmethod
    def load(cls, backend: str) -> type[HiCacheStorage]:
        """Return the class of a name or of ``module:Class``.

        Raises
        ------
        ValueError
            Where the name is unknown, or the module has no such class.
        TypeError
            Where it is not a subclass of :class:`HiCacheStorage`.
        ImportError
            Where the module cannot be imported.
        """
        path = backend if ":" in backend else cls._paths.get(backend)
        if path is None:
            raise ValueError(f"backend is {backend!r}; accepted are {', '.join(cls.names())} and 'module:Class'")
        module_name, _, class_name = path.partition(":")
        found = vars(importlib.import_module(module_name)).get(class_name)
        if found is None:
            raise ValueError(f"backend is {backend!r}; module {module_name} has no {class_name!r}")
        if not (isinstance(found, type) and issubclass(found, HiCacheStorage)):
            raise TypeError(f"backend is {backend!r}; {class_name} is not a subclass of HiCacheStorage")
        return found

    @classmethod
    def create(cls, backend: str, **options: Any) -> HiCacheStorage:
        """Make a backend from a name or ``module:Class``; ``options`` go to its constructor."""
        return cls.load(backend)(**options)
