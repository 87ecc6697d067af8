"""Requests: finds the cached prefix of a request, and inserts the pages that the engine has computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hicache_kernels.validation import whole

from ..hashing import Namespace
from .events import Change, Tier
from .evictor import Evictor
from .keys import KEY_BYTES, SequenceKeys, Tokens, join_keys
from .loads import Loads
from .node import NO_PAGES, Pages, TreeNode, unpack
from .pools import Pools
from .radix_tree import RadixTree
from .results import InsertResult, Match, Request


class Requests:
    """What a request finds in the tree, and adds to it."""

    def __init__(self, tree: RadixTree, pools: Pools, evictor: Evictor, loads: Loads) -> None:
        self._tree = tree
        self._pools = pools
        self._evictor = evictor
        self._loads = loads

    # Lookup

    def match(self, keys: Sequence[bytes] | SequenceKeys, namespace: Namespace | None, priority: int) -> Match:
        """Pin the longest restorable prefix; see :meth:`UnifiedRadixCache.match_prefix`."""
        tokens: Tokens | None = None
        if isinstance(keys, SequenceKeys):
            namespace = keys.namespace if namespace is None else namespace
            tokens = keys.tokens() if self._pools.events.listener is not None else None
            keys = keys.hashes
        blob = join_keys(keys)
        self._tree.order.tick += 1
        self._tree.expire()
        node, matched = self._tree.walk(self._tree.root, blob, 0)
        if self._tree.windows:
            node, matched = self._tree.last_restorable(node, matched)
        request = Request(blob, self._tree.usage(namespace), priority, tokens)
        match = self._tree.pin_match(request, node, matched)
        try:
            self._evictor.use(node, priority)
            self._tree.raise_pending()
        except BaseException:
            self._tree.unpin_match(match)
            raise
        return match

    def known_pages(self, keys: Sequence[bytes]) -> int:
        """Return how many pages the anchor has; see :meth:`UnifiedRadixCache.known_pages`."""
        return sum(same for _, same in self._tree.known(self._tree.root, join_keys(keys)))

    @staticmethod
    def device_pages(match: Match) -> Pages:
        """Return the device pages of a match; see :meth:`UnifiedRadixCache.device_page_numbers`."""
        parts = [unpack(node.device) for node in match.device_node.path() if node.device is not None]
        pages = np.concatenate(parts[::-1]) if parts else NO_PAGES
        if len(pages) != match.device_pages:
            raise ValueError(
                f"the match has {len(pages)} of its {match.device_pages} device pages, as a load of the others failed; "
                "settle must come first"
            )
        return pages

    def window_pages(self, match: Match, name: str) -> Pages:
        """Return the device pages of a window; see :meth:`UnifiedRadixCache.window_page_numbers`."""
        found = []
        for part, needed in self._tree.needed(match.node, name) or ():
            if part.device is None or part.on_device < needed:
                raise ValueError(f"the match has pages of {name} on the host; load_back must come first")
            found.append(unpack(part.device)[part.on_device - needed :])
        return np.concatenate(found[::-1]) if found else NO_PAGES

    # Insert

    def insert(
        self,
        match: Match,
        pages: Pages,
        count: int | None,
        windows: Mapping[str, Pages],
        computed_tokens: int | None,
    ) -> InsertResult:
        """Insert computed pages; see :meth:`UnifiedRadixCache.insert`."""
        self._tree.check_pinned(match)
        count = self._count_to_publish(match, pages, count, computed_tokens)
        for name, given in windows.items():
            if name not in self._tree.windows:
                raise ValueError(f"windows has {name!s}; the tree's components are {list(self._tree.windows)}")
            if len(given) > count:
                raise ValueError(f"windows has {len(given)} pages of {name!s} for {count} published pages")
        self._loads.settle_next(match, count)
        self._tree.order.tick += 1
        node, duplicates = self._publish(match, pages[:count])
        parts = [
            part for name, given in windows.items() for part in self._pools.adopt_window(node, name, given, device=True)
        ]
        result = self._tree.pin_match(match, node, match.pages + count)
        self._tree.order.offer_windows(parts)
        if duplicates:
            self._pools.calls.call(self._pools.free, np.concatenate(duplicates), device=True)
        with self._tree.handing_out(result):
            self._evictor.use_inserted(node, match.priority)
        return InsertResult(self._evictor.replace(match, result), sum(map(len, duplicates)))

    def _publish(self, match: Match, pages: Pages) -> tuple[TreeNode, list[Pages]]:
        """Give pages to the nodes that follow a match; returns the last node, and the pages that the tree had."""
        node, duplicates = match.node, []
        for node, own in self._tree.follow(match, len(pages)):
            if node.device is None:
                self._tree.set_part(node, pages[own], device=True)
                self._pools.events.node(Change.STORED, Tier.DEVICE, node)
            else:
                duplicates.append(pages[own])
        return node, duplicates

    def _count_to_publish(self, match: Match, pages: Pages, count: int | None, computed_tokens: int | None) -> int:
        if match.host_pages or match.host_pin.parts:
            raise ValueError(
                f"match has {match.host_pages} pages and {len(match.host_pin.parts)} windows on the host; load_back "
                "must come before insert"
            )
        if match.node.parent is not None and (match.node.device is None or match.node.load is not None):
            raise ValueError("a load of the match is in flight or has failed; settle must come before insert")
        if computed_tokens is not None:
            if count is not None:
                raise ValueError("count and computed_tokens are both given; accepted is one of them")
            computed_tokens = whole("computed_tokens", computed_tokens, least=0)
            count = min(max(computed_tokens // self._tree.page_size - match.pages, 0), len(pages))
        count = len(pages) if count is None else whole("count", count, least=0)
        request = len(match.keys) // KEY_BYTES
        if count > len(pages) or match.pages + count > request:
            raise ValueError(
                f"{count} pages to insert after {match.pages} matched ones; the request has {request} pages and "
                f"{len(pages)} were given"
            )
        return count


def checked_pages(pages: Pages, page_num: int) -> Pages:
    """Check page numbers that an engine gives, each of which must be one of ``page_num`` and given once."""
    checked = np.asarray(pages)
    if checked.ndim != 1 or (checked.size and not np.issubdtype(checked.dtype, np.integer)):
        raise ValueError(f"pages has shape {checked.shape} and type {checked.dtype}; accepted are integers [n]")
    if checked.size and not 0 <= int(checked.min()) <= int(checked.max()) < page_num:
        raise ValueError(f"pages runs from {checked.min()} to {checked.max()}; accepted is 0..{page_num - 1}")
    if len(np.unique(checked)) != checked.size:
        raise ValueError("pages names a page twice; every page is accepted once")
    return checked.astype(np.int64, copy=False)
