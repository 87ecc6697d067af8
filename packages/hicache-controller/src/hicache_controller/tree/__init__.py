"""The prefix tree: what is cached in which tier, over all pools of a model.

An object gets the objects it uses when it is made; each row below uses only rows above it.

=========================== ===========================================================================
module                      holds
=========================== ===========================================================================
``keys``                    page keys of a growing token sequence
``policies``                when to write to the host, what to evict first, quotas
``queue``                   what may leave a tier, and what a namespace has
``node``                    a run of pages and what each tier has of it; transfers of nodes; pins
``components``              windowed pools: sliding windows and recurrent states
``order``                   the value of a node, and the queues of all tiers and pools
``presence``, ``events``    what is known to be in storage; what routers are sent about changes
``results``                 what the calls return
``radix_tree``              the nodes: walking, splitting, locking; pins of requests and with a time to live
``pools``                   what nodes have in pools, and giving it back; the engine's allocator
``backups``                 what storage has, and bringing it there
``transfers``               writes and loads in flight, and what becomes of them
``evictor``                 evictions, the writes they need, and allocations after them
``prefetches``              from storage to the host
``requests``                matching, loading from the host, inserting
``retraction``              requests taken off the device
``cache``                   what an engine calls; makes all of the above
=========================== ===========================================================================

Apart from these: ``allocator`` (the engine's), ``reclaim`` (allocations of the engine that make the tree evict),
``calls`` (what public calls have in common), ``drafts`` (pools that come later), ``integrity`` (checks, sizes,
drawing).
"""

from .allocator import PageAllocator
from .cache import UnifiedRadixCache
from .components import WindowComponent
from .drafts import maybe_register_hicache_draft, register_hicache_draft_pools
from .events import CacheEvent, Change, Tier
from .keys import KEY_BYTES, SequenceKeys
from .node import Pages, TreeNode
from .policies import (
    EvictionStrategy,
    FirstInFirstOut,
    FirstInLastOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    MostRecentlyUsed,
    PlacedEvictionStrategy,
    Quota,
    SegmentedLeastRecentlyUsed,
    SizeAware,
    WritePolicy,
)
from .results import InsertResult, Match, Prefetching, Restored, TreeStats, WindowStats

__all__ = [
    "KEY_BYTES",
    "CacheEvent",
    "Change",
    "EvictionStrategy",
    "FirstInFirstOut",
    "FirstInLastOut",
    "InsertResult",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "Match",
    "MostRecentlyUsed",
    "PageAllocator",
    "Pages",
    "PlacedEvictionStrategy",
    "Prefetching",
    "Quota",
    "Restored",
    "SegmentedLeastRecentlyUsed",
    "SequenceKeys",
    "SizeAware",
    "Tier",
    "TreeNode",
    "TreeStats",
    "UnifiedRadixCache",
    "WindowComponent",
    "WindowStats",
    "WritePolicy",
    "maybe_register_hicache_draft",
    "register_hicache_draft_pools",
]
