"""Loads: brings what a match has on the host to the device."""

from __future__ import annotations

import numpy as np

from .components import trailing
from .evictor import Evictor
from .keys import KEY_BYTES
from .node import NO_PAGES, Pages, TreeNode, WindowPart, unpack
from .policies import TreeSettings
from .pools import Pools
from .radix_tree import RadixTree
from .results import Match
from .transfers import LoadParts, Transfers


class Loads:
    """Loads matches, as far as the device has room and a load is worthwhile."""

    def __init__(
        self,
        tree: RadixTree,
        pools: Pools,
        transfers: Transfers,
        evictor: Evictor,
        settings: TreeSettings,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._transfers = transfers
        self._evictor = evictor
        self._settings = settings

    def load_back(self, match: Match, *, wait: bool = True) -> Match:
        """Load a match; see :meth:`UnifiedRadixCache.load_back`."""
        return self._load(match, self._settings.load_back_pages, self._settings.load_quota_pages, wait=wait)

    def load_all(self, match: Match) -> Match:
        """Load all of a match or nothing, whatever the engine wants to be loaded at a time, and wait for it."""
        return self._load(match, max(1, match.host_pages), None, wait=True)

    def _load(self, match: Match, min_pages: int, max_pages: int | None, *, wait: bool) -> Match:
        self._tree.check_pinned(match)
        self._transfers.settle_writes(match.node)
        start = self._worth_loading(match, *self._still_there(match.node, match.pages), min_pages, max_pages)
        loaded = self._start(match, *start, min_pages, max_pages)
        if wait:
            with self._tree.handing_out(loaded):
                self._wait(loaded)
            arrived = self._arrived(loaded)
            if arrived is not loaded:
                self._tree.unpin_match(loaded)
                loaded = arrived
        return self._evictor.replace(match, loaded)

    def _still_there(self, node: TreeNode, pages: int) -> tuple[TreeNode, int]:
        """Go up from a prefix of ``pages`` pages to what of it is in the tree still and can be restored."""
        while not node.in_tree:
            pages -= node.pages
            node = node.parent or self._tree.root
        return self._tree.last_restorable(node, pages)

    def _worth_loading(
        self, match: Match, node: TreeNode, pages: int, min_pages: int, max_pages: int | None
    ) -> tuple[TreeNode, int]:
        """Cut a prefix to its device part if loading the rest is not worthwhile, or to the quota."""
        to_load = pages - match.device_pages
        if 0 < to_load < min_pages:
            node, pages = _go_up(node, pages, match.device_pages)
        elif max_pages is not None and to_load > max_pages:
            node, pages = self._cut(node, pages, match.device_pages + max_pages)
        return self._tree.last_restorable(node, pages)

    def _cut(self, node: TreeNode, pages: int, limit: int, *, split: bool = True) -> tuple[TreeNode, int]:
        """Shorten a prefix to ``limit`` pages, or without ``split`` to whole nodes."""
        while node.parent is not None and pages - node.pages >= limit:
            node, pages = node.parent, pages - node.pages
        if node.parent is None or pages <= limit:
            return node, pages
        if not split:
            return node.parent, pages - node.pages
        return self._tree.split(node, node.pages - (pages - limit)), limit

    def _start(self, match: Match, node: TreeNode, pages: int, min_pages: int, max_pages: int | None) -> Match:
        """Start to load the longest prefix up to ``node`` that the device has room for, and pin it."""
        while True:
            pinned = self._tree.pin_other(match, node, pages)
            if pinned.on_device:
                return pinned
            try:
                if self._try_load(pinned):
                    return self._tree.pin_other(match, node, pages)
                whole = _is_whole(pinned)
            finally:
                self._tree.unpin_match(pinned)
            if not whole:  # there is less than it seemed, or more of it to load
                node, pages = self._still_there(node, pages)
                continue
            if node.parent is None:
                return self._tree.pin_other(match, self._tree.root, 0)
            fitting = pinned.device_pages + self._evictor.device_room()
            if self._tree.windows or fitting >= pages:
                node, pages = self._tree.last_restorable(node.parent, pages - node.pages)
            else:
                node, pages = self._cut(node, pages, fitting, split=fitting - pinned.device_pages >= min_pages)
            node, pages = self._worth_loading(pinned, node, pages, min_pages, max_pages)

    def _try_load(self, match: Match) -> bool:
        parts: dict[str, list[WindowPart]] = {}
        for part in match.host_pin.parts:
            parts.setdefault(part.name, []).append(part)
        # Making room waits for other transfers, so what there is to load is known only when there is room for all.
        if not (self._evictor.make_device_room(match.host_pages) and self._make_room_for(parts) and _is_whole(match)):
            return False
        nodes = [node for node in match.node.path() if node.device is None][::-1]
        hosts = [unpack(node.host) for node in nodes if node.host is not None]
        windows = [
            LoadParts(mine, trailing(name, host_indices=self._pools.slots(_host_pages(mine), name)))
            for name, mine in parts.items()
        ]
        return self._transfers.load(nodes, self._pools.slots(np.concatenate([NO_PAGES, *hosts])), windows)

    def _make_room_for(self, parts: dict[str, list[WindowPart]]) -> bool:
        """Make room on the device for window parts, by pool."""
        for name, mine in parts.items():
            for part in mine:
                # What the device has of it is too short, and comes again with the rest.
                if part.device is not None and part.device_pins:
                    return False
                self._pools.drop_window(part, device=True)
            if not self._evictor.make_window_room(name, sum(part.on_host for part in mine)):
                return False
        return True

    # Waiting

    def settle_next(self, match: Match, pages: int) -> None:
        """Wait for loads of what the tree has of the next ``pages`` pages after a match."""
        keys = match.keys[match.pages * KEY_BYTES : (match.pages + pages) * KEY_BYTES]
        while self._transfers.loads and any(
            node.load is not None or any(part.load is not None for part in node.windows)
            for node, _ in self._tree.known(match.node, keys)
        ):
            self._transfers.poll(wait=True)

    def settle(self, match: Match) -> Match:
        """Wait for the loads that fill a match; see :meth:`UnifiedRadixCache.settle`."""
        self._wait(match)
        arrived = self._arrived(match)
        return match if arrived is match else self._evictor.replace(match, arrived)

    def _wait(self, match: Match) -> None:
        while any(node.load is not None for node in match.node.path()) or any(
            part.load is not None for part in match.device_pin.parts
        ):
            self._transfers.poll(wait=True)

    def _arrived(self, match: Match) -> Match:
        """Return the match, or pin a shorter one if not all of it has arrived."""
        node, pages = match.node, match.pages
        while node.parent is not None and not (
            node.device is not None and node.in_tree and self._windows_on_device(node)
        ):
            pages -= node.pages
            node = node.parent
        if node is match.node:
            return match
        return self._tree.pin_other(match, node, pages)

    def _windows_on_device(self, node: TreeNode) -> bool:
        for name in self._tree.windows:
            parts = self._tree.needed(node, name)
            if parts is None or any(part.on_device < needed for part, needed in parts):
                return False
        return True


def _go_up(node: TreeNode, pages: int, limit: int) -> tuple[TreeNode, int]:
    while pages > limit and node.parent is not None:
        pages -= node.pages
        node = node.parent
    return node, pages


def _host_pages(parts: list[WindowPart]) -> Pages:
    return np.concatenate([unpack(part.host) for part in parts if part.host is not None])


def _is_whole(match: Match) -> bool:
    """Return whether all that a match pins is there still; the load or the write of some may have failed meanwhile."""
    return (
        (match.device_node.device is not None or match.device_node.parent is None)
        and (match.node.host is not None or not match.host_pages)
        and all(part.device is not None for part in match.device_pin.parts)
        and all(part.host is not None for part in match.host_pin.parts)
    )
