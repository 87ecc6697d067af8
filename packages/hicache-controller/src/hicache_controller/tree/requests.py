"""Requests: what they find in the tree, load to the device, and insert when the engine has computed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hicache_kernels.validation import whole

from ..hashing import Namespace
from .events import Change
from .evictor import Evictor
from .keys import KEY_BYTES, SequenceKeys, Tokens, join_keys
from .node import NO_PAGES, Pages, TreeNode, WindowPart, joined
from .policies import TreeSettings
from .pools import Pools
from .results import InsertResult, Match, Request
from .transfers import Transfers


class Requests:
    """From the match of a request to the insert of what it has computed; loads as far as there is room and use."""

    def __init__(self, pools: Pools, transfers: Transfers, evictor: Evictor, settings: TreeSettings) -> None:
        self._tree = pools.tree
        self._pools = pools
        self._transfers = transfers
        self._evictor = evictor
        self._settings = settings

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
        node = self._tree.walk(blob)
        if self._tree.windows:
            node = self._tree.last_restorable(node)
        match = self._tree.pin_match(Request(blob, self._tree.usage(namespace), priority, tokens), node)
        with self._tree.handing_out(match):
            self._evictor.use(node, priority)
        return match

    @staticmethod
    def device_pages(match: Match) -> Pages:
        """Return the device pages of a match; see :meth:`UnifiedRadixCache.device_page_numbers`."""
        pages = joined([*match.device_node.path()][::-1], device=True)
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
            if part.count(device=True) < needed:
                raise ValueError(f"the match has pages of {name} on the host; load_back must come first")
            found.append(joined([part], device=True)[part.count(device=True) - needed :])
        return np.concatenate(found[::-1]) if found else NO_PAGES

    # Loads

    def load_back(self, match: Match, *, wait: bool = True) -> Match:
        """Load a match; see :meth:`UnifiedRadixCache.load_back`."""
        return self._load(match, self._settings.load_back_pages, self._settings.load_quota_pages, wait=wait)

    def load_all(self, match: Match) -> Match:
        """Load all of a match or nothing, whatever the engine wants to be loaded at a time, and wait for it."""
        return self._load(match, max(1, match.host_pages), None, wait=True)

    def _load(self, match: Match, min_pages: int, max_pages: int | None, *, wait: bool) -> Match:
        self._tree.check_pinned(match)
        self._transfers.settle_writes(match.node)
        node = self._worth_loading(match, self._tree.last_restorable(match.node), min_pages, max_pages)
        loaded = self._start(match, node, min_pages, max_pages)
        if wait:
            with self._tree.handing_out(loaded):
                self._wait(loaded)
            arrived = self._arrived(loaded)
            if arrived is not loaded:
                self._tree.unpin_match(loaded)
                loaded = arrived
        return self._evictor.replace(match, loaded)

    def _worth_loading(self, match: Match, node: TreeNode, min_pages: int, max_pages: int | None) -> TreeNode:
        """Cut a prefix to its device part if loading the rest is not worthwhile, or to the quota."""
        to_load = node.depth - match.device_pages
        if 0 < to_load < min_pages:
            node = self._cut(node, match.device_pages, split=False)
        elif max_pages is not None and to_load > max_pages:
            node = self._cut(node, match.device_pages + max_pages)
        return self._tree.last_restorable(node)

    def _cut(self, node: TreeNode, limit: int, *, split: bool = True) -> TreeNode:
        """Shorten a prefix to ``limit`` pages, or without ``split`` to whole nodes."""
        while node.parent is not None and node.parent.depth >= limit:
            node = node.parent
        if node.parent is None or node.depth <= limit:
            return node
        return self._tree.split(node, limit - node.parent.depth) if split else node.parent

    def _start(self, match: Match, node: TreeNode, min_pages: int, max_pages: int | None) -> Match:
        """Start to load the longest prefix up to ``node`` that the device has room for, and pin it."""
        while True:
            pinned = self._tree.pin_match(match, node)
            if pinned.on_device:
                return pinned
            try:
                if self._try_load(pinned):
                    return self._tree.pin_match(match, node)
                whole = _is_whole(pinned)
            finally:
                self._tree.unpin_match(pinned)
            if not whole:  # there is less than it seemed, or more of it to load
                node = self._tree.last_restorable(node)
                continue
            if node.parent is None:
                return self._tree.pin_match(match, node)
            fitting = pinned.device_pages + self._pools.smallest(self._pools.device_allocator.available_pages)
            if self._tree.windows or fitting >= node.depth:
                node = self._tree.last_restorable(node.parent)
            else:
                node = self._cut(node, fitting, split=fitting - pinned.device_pages >= min_pages)
            node = self._worth_loading(pinned, node, min_pages, max_pages)

    def _try_load(self, match: Match) -> bool:
        parts: dict[str, list[WindowPart]] = {}
        for part in match.host_pin.parts:
            parts.setdefault(part.name, []).append(part)
        # Making room waits for other transfers, so what there is to load is known only when there is room for all.
        if not (self._evictor.make_device_room(match.host_pages) and self._make_room_for(parts) and _is_whole(match)):
            return False
        nodes = [node for node in match.node.path() if node.device is None]
        return self._transfers.move(nodes[::-1], parts, device=True)

    def _make_room_for(self, parts: dict[str, list[WindowPart]]) -> bool:
        """Make room on the device for window parts, by pool."""
        for name, mine in parts.items():
            for part in mine:
                # What the device has of it is too short, and comes again with the rest.
                if part.device is not None and part.pin_count(device=True):
                    return False
                self._pools.drop(part, device=True)
            if not self._evictor.make_window_room(name, sum(part.count(device=False) for part in mine)):
                return False
        return True

    # Waiting

    def _settle_next(self, match: Match, pages: int) -> None:
        """Wait for loads of what the tree has of the next ``pages`` pages after a match."""
        keys = match.keys[match.pages * KEY_BYTES : (match.pages + pages) * KEY_BYTES]
        while self._transfers.loads:
            known = (held for node, _ in self._tree.known(match.node, keys) for held in node.holders())
            if not any(held.load is not None for held in known):
                break
            self._transfers.poll(wait=True)

    def settle(self, match: Match) -> Match:
        """Wait for the loads that fill a match; see :meth:`UnifiedRadixCache.settle`."""
        self._wait(match)
        arrived = self._arrived(match)
        return match if arrived is match else self._evictor.replace(match, arrived)

    def _wait(self, match: Match) -> None:
        while any(held.load is not None for held in (*match.node.path(), *match.device_pin.parts)):
            self._transfers.poll(wait=True)

    def _arrived(self, match: Match) -> Match:
        """Return the match, or pin a shorter one if not all of it has arrived."""
        node = match.node
        while node.parent is not None and not self._tree.on_device(node):
            node = node.parent
        return match if node is match.node else self._tree.pin_match(match, node)

    # Insert

    def insert(
        self, match: Match, pages: Pages, count: int | None, windows: Mapping[str, Pages], computed_tokens: int | None
    ) -> InsertResult:
        """Insert computed pages; see :meth:`UnifiedRadixCache.insert`."""
        self._tree.check_pinned(match)
        count = self._count_to_publish(match, pages, count, computed_tokens)
        self._tree.check_windows(windows)
        for name, given in windows.items():
            if len(given) > count:
                raise ValueError(f"windows has {len(given)} pages of {name!s} for {count} published pages")
        self._settle_next(match, count)
        self._tree.order.tick += 1
        node, duplicates = self._publish(match, pages[:count])
        parts: list[WindowPart] = []
        for name, given in windows.items():
            parts += self._pools.adopt_window(node, name, given, device=True)
        result = self._tree.pin_match(match, node)
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
                self._pools.events.held(Change.STORED, node, device=True)
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
    if not (checked[1:] > checked[:-1]).all() and not np.diff(np.sort(checked)).all():
        raise ValueError("pages names a page twice; every page is accepted once")
    return checked.astype(np.int64, copy=False)


def _is_whole(match: Match) -> bool:
    """Return whether all that a match pins is there still; the load or the write of some may have failed meanwhile."""
    return (
        (match.device_node.device is not None or match.device_node.parent is None)
        and (match.node.host is not None or not match.host_pages)
        and all(part.device is not None for part in match.device_pin.parts)
        and all(part.host is not None for part in match.host_pin.parts)
    )
