"""Storage backends by name, by entry point, and by ``module:Class``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from ..storage_names import registered, storage_path, storage_paths
from .base import HiCacheStorage


class StorageBackendFactory:
    """Makes storage backends; their modules are imported when a backend is asked for.

    A backend is named ``file``, ``memory`` or ``mooncake``, by an entry point of the group ``hicache.storage`` that an
    installed package has, by :meth:`register`, or as ``module:Class``.
    """

    @classmethod
    def register(cls, name: str, path: str) -> None:
        """Give a backend a name in this process.

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
        taken = storage_paths().get(name, path)
        if taken != path:
            raise ValueError(f"name is {name!r}, which is {taken} already")
        registered[name] = path

    @classmethod
    def names(cls) -> list[str]:
        """Return the names that are known, those of entry points included."""
        return sorted(storage_paths())

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
        module_name, _, class_name = storage_path(backend).partition(":")
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise ImportError(
                f"storage backend is {backend!r}; module {module_name} cannot be imported: {error}"
            ) from error
        found = getattr(module, class_name, None)
        if found is None:
            raise ValueError(f"storage backend is {backend!r}; module {module_name} has no {class_name!r}")
        if not (isinstance(found, type) and issubclass(found, HiCacheStorage)):
            raise TypeError(f"storage backend is {backend!r}; {class_name} is not a subclass of HiCacheStorage")
        return found

    @classmethod
    def create(cls, backend: str, **options: Any) -> HiCacheStorage:
        """Make a backend.

        Parameters
        ----------
        backend
            A name or ``module:Class``, as for :meth:`load`.
        options
            Go to its constructor.

        Raises
        ------
        TypeError
            Where the constructor does not take these options, naming those that it does.
        ValueError, ImportError
            As :meth:`load`, and what the constructor raises.
        """
        kind = cls.load(backend)
        signature = inspect.signature(kind)
        try:
            signature.bind(**options)
        except TypeError as error:
            accepted = ", ".join(signature.parameters) or "none"
            raise TypeError(f"storage backend is {backend!r}: {error}; its options are {accepted}") from None
        return kind(**options)
