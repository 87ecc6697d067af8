"""NamespaceUsage: what the tree holds of one namespace, for its quota."""

from __future__ import annotations

from dataclasses import dataclass

from .policies import NO_QUOTA, Quota
from .queue import TierQueues


@dataclass(eq=False)
class NamespaceUsage:
    """Pages of one namespace, and its own eviction queues where it has a quota.

    Its nodes, its matches and its quota keep it alive; it goes with the last of them.
    """

    quota: Quota = NO_QUOTA
    queues: TierQueues | None = None
    device_pages: int = 0
    host_pages: int = 0


NO_USAGE = NamespaceUsage()
"""That of the root, which has no pages."""
