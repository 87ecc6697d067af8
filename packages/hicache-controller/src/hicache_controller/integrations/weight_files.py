"""The files of a local model: which weights it has."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", "config.json")


def directory_hash(path: str) -> str | None:
    """Hash the texts of a local model's configuration, and names, sizes and times of its weights; or None."""
    if not os.path.isdir(path):
        return None
    digest = hashlib.sha256()
    for entry in _files(path):
        if entry.name.endswith(".json"):
            with open(entry.path, "rb") as file:
                digest.update(entry.name.encode() + file.read())
            continue
        stat = entry.stat()
        digest.update(f"{entry.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _files(path: str) -> Iterable[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return sorted((each for each in entries if each.name.endswith(_WEIGHT_FILES)), key=lambda each: each.name)
