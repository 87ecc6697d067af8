"""Policies that a user chooses by name; without torch, as the command line lists them."""

from __future__ import annotations

from enum import StrEnum

EVICTION_STRATEGIES = ("lru", "lfu", "size_aware", "fifo", "filo", "mru", "slru")
"""Names of the strategies of :mod:`hicache_controller.tree.policies`."""


class WritePolicy(StrEnum):
    """When a node's pages are written from the device to the host (and from there to storage)."""

    WRITE_THROUGH = "write_through"
    """As soon as they are inserted."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Once a node was matched ``selective_hits`` times."""
    WRITE_BACK = "write_back"
    """When they are evicted from the device."""


class PrefetchPolicy(StrEnum):
    """How long a request waits for its pages to come from storage, before its scheduler lets it run."""

    BEST_EFFORT = "best_effort"
    """Not at all: what is there when the request is scheduled counts."""
    WAIT_COMPLETE = "wait_complete"
    """Until the prefetch is over, or no page has come within the storage timeout."""
    TIMEOUT = "timeout"
    """Until it is over or its time is, which grows with its pages."""
