"""NamespaceBooks: what the tree holds of one namespace, for its quota."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .policies import NO_QUOTA, Quota
from .queue import EvictionQueue


@dataclass(eq=False)
class NamespaceBooks:
    """Pages of one namespace, and its own eviction queues where it has a quota.

    Its nodes and matches, and a quota, keep it; with the last of them it is gone.
    """

    quota: Quota = NO_QUOTA
    device_queue: EvictionQueue[Any] | None = None
    host_queue: EvictionQueue[Any] | None = None
    unsaved_queue: EvictionQueue[Any] | None = None
    device_pages: int = 0
    host_pages: int = 0


NO_BOOKS = NamespaceBooks()
"""Those of the root, which has no pages."""
