"""The prefix tree under its short name; see :mod:`hicache_controller.tree`."""

from .tree import (
    KEY_BYTES,
    InsertResult,
    Match,
    PageAllocator,
    Pages,
    TreeNode,
    TreeStats,
    UnifiedRadixCache,
    WritePolicy,
)

__all__ = [
    "KEY_BYTES",
    "InsertResult",
    "Match",
    "PageAllocator",
    "Pages",
    "TreeNode",
    "TreeStats",
    "UnifiedRadixCache",
    "WritePolicy",
]
