"""The prefix tree: what is cached in which tier, over all pools of a model.

========================  ==============================================================================
module                    holds
========================  ==============================================================================
``keys``                  page keys of a growing token sequence
``node``                  a run of pages and what each tier has of it
``components``            windowed pools: sliding windows and recurrent states
``policies``              when to write to the host, what to evict first, quotas
``queue``                 what waits for eviction
``structure``             the tree itself: cutting, joining, locking
``eviction``              what leaves a tier, and the room that makes
``reclaim``               allocations of the engine that make the tree evict
``backups``               what is stored, once and again
``bounded``               how long a call may wait for storage
``presence``              what is known to be in storage
``transfers``             writes and loads
``loading``               prefetch and load-back
``references``            locks and cuts of single nodes
``cache``                 what an engine calls
``retraction``            requests taken off the device
``drafts``                registering a draft model's pools
``events``                what routers are told
``integrity``             checks and drawing
========================  ==============================================================================
"""

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
from .structure import PageAllocator

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
