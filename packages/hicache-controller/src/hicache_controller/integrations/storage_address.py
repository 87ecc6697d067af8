"""The address of a storage, as the configurations of engines give it."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit


class StorageAddress(NamedTuple):
    """A storage backend's name, and the options that an address gives it."""

    backend: str
    options: dict[str, Any]


def storage_address(storage: str) -> StorageAddress:
    """Return backend and options of ``file:///directory``, ``mooncake://host:port`` or a backend's name.

    Raises
    ------
    ValueError
        Where the address lacks a part, or has one that is not known.
    """
    if "://" not in storage:
        return StorageAddress(storage, {})
    parts = urlsplit(storage)
    accepted = "accepted are file:///directory, mooncake://host:port and the name of a storage backend"
    if parts.query or parts.fragment:
        raise ValueError(f"storage is {storage!r}; options are given in storage_options, not in the address")
    if parts.scheme == "file" and not parts.netloc and len(parts.path) > 1:
        return StorageAddress("file", {"directory": parts.path})
    if parts.scheme == "mooncake" and parts.netloc and parts.path in ("", "/"):
        return StorageAddress("mooncake", {"master": parts.netloc})
    raise ValueError(f"storage is {storage!r}; {accepted}")
