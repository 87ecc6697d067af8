"""Checks that transformers is there and new enough, before anything else of it is imported."""

from __future__ import annotations

OLDEST_TRANSFORMERS = (5, 14)
"""The first version whose cache layers have all that is restored here."""

try:
    import transformers
except ImportError as error:
    raise ImportError("transformers is not installed; pip install 'hicache-controller[transformers]'") from error


def check_version(version: str) -> None:
    """Raise ImportError for a version of transformers that is too old."""
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ImportError(f"transformers is {version}; the prefix cache needs {oldest} or newer")


check_version(transformers.__version__)
