"""Retraction: requests that a scheduler takes off the device and brings back later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .components import trailing
from .evictor import Evictor
from .node import NO_PAGES, NO_SLOTS, Pages, Pin, TreeNode
from .pools import Pools
from .radix_tree import RadixTree
from .requests import Requests
from .results import Match, Restored
from .transfers import Transfers


@dataclass(frozen=True, eq=False)
class _Retracted:
    """A request on the host: its prefix, pinned there, and its own slots by pool (the anchor's first)."""

    match: Match
    node: TreeNode
    pin: Pin
    anchor: torch.Tensor
    windows: dict[str, torch.Tensor]


class Retraction:
    """Requests on the host.

    Each has a prefix in the tree, pinned on the host, and private pages that the tree does not know: what was computed
    and not published, an unfinished last page, a running state. These move as one operation of the controller, so that
    the group takes the slots of all pools or none.
    """

    def __init__(
        self, tree: RadixTree, pools: Pools, transfers: Transfers, evictor: Evictor, requests: Requests
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._transfers = transfers
        self._evictor = evictor
        self._requests = requests
        self._retracted: dict[str, _Retracted] = {}

    @property
    def requests(self) -> tuple[str, ...]:
        """Their ids."""
        return tuple(self._retracted)

    def backup(
        self, request_id: str, match: Match, pages: Pages, *, windows: Mapping[str, Pages] | None = None
    ) -> bool:
        """Take a request off the device; see :meth:`UnifiedRadixCache.retraction_backup`.

        Its prefix is pinned on the host before anything moves, and only what has arrived leaves the device; so a False
        leaves the request as it was, and so does an interrupt, which comes while this waits.
        """
        if request_id in self._retracted:
            raise ValueError(f"request {request_id} is retracted already; restore or discard must come first")
        if not match.on_device:
            raise ValueError(f"match has {match.host_pages} pages on the host; load_back must come before retraction")
        if not self._evictor.settle_on_host(match.node):
            return False
        node, pin, moved = match.node, Pin(device=False), None
        self._tree.lock(node, device=False)
        try:
            if self._pin_windows(node, pin):
                moved = self._write(pages, windows or {})
        finally:
            if moved is None:
                self._unpin(node, pin)
        if moved is None:
            return False
        self._retracted[request_id] = _Retracted(match, node, pin, *moved)
        self._free_device(pages, windows or {})
        self._evictor.release(match)
        return True

    def restore(self, request_id: str) -> Restored | None:
        """Bring a request back to the device, all of it or nothing; see :meth:`UnifiedRadixCache.retraction_restore`.

        An interrupt comes while this waits, and leaves the request as it was.
        """
        kept = self._retracted[request_id]
        found = None
        match = self._tree.pin_match(kept.match, kept.node)
        try:
            match = self._requests.load_all(match)
            found = self._load(kept) if match.pages == kept.match.pages else None
            self._tree.raise_pending()
        except BaseException:
            if found is not None:
                self._free_device(*found)
            self._evictor.release(match)
            raise
        if found is None:
            self._evictor.release(match)
            return None
        self.discard(request_id)
        return Restored(match, *found)

    def discard(self, request_id: str) -> None:
        """Forget a retracted request; KeyError if there is none of that id."""
        kept = self._retracted.pop(request_id)
        self._free_host(kept.anchor, kept.windows)
        self._unpin(kept.node, kept.pin)

    def clear(self) -> None:
        """Drop every request, as the pools are about to be cleared."""
        self._retracted.clear()

    def _free_host(self, anchor: torch.Tensor, windows: Mapping[str, torch.Tensor]) -> None:
        self._pools.free_host(anchor, [trailing(name, slots) for name, slots in windows.items()])

    def _free_device(self, pages: Pages, windows: Mapping[str, Pages]) -> None:
        for pool, mine in ((None, pages), *windows.items()):
            if len(mine):
                self._pools.calls.call(self._pools.free, mine, device=True, pool=pool)

    def _unpin(self, node: TreeNode, pin: Pin) -> None:
        self._tree.unpin(pin)
        self._tree.unlock(node, device=False)

    def _pin_windows(self, node: TreeNode, pin: Pin) -> bool:
        """Pin on the host what the prefix needs of windowed pools, after writing it if needed."""
        for part, needed in self._tree.all_needed(node):
            if part.on_host < needed and not self._evictor.write_window(part):
                return False
            pin.hold(part)
        while any(part.write is not None for part in pin.parts):
            self._transfers.poll(wait=True)
        return all(part.host is not None for part in pin.parts)

    def _write(self, pages: Pages, windows: Mapping[str, Pages]) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """Move private pages to the host; None, with nothing taken, if there is no room or the write failed."""
        given = {name: mine for name, mine in windows.items() if len(mine)}
        if not len(pages) and not given:
            return NO_SLOTS, {}
        operation, slots = self._transfers.new(device=False), self._pools.slots(pages)
        transfers = [trailing(name, self._pools.slots(mine, name), on_device=True) for name, mine in given.items()]
        for name, mine in given.items():
            self._evictor.make_window_host_room(name, len(mine))
        host = self._transfers.queue(operation, slots, transfers)
        if host is None and self._evictor.evict_host(len(pages)):
            host = self._transfers.queue(operation, slots, transfers)
        if host is None:
            return None
        taken = host, {str(each.name): each.host_indices for each in transfers if each.host_indices is not None}
        arrived = self._transfers.wait_for(operation, lambda: self._free_host(*taken))
        return taken if arrived else None

    def _load(self, kept: _Retracted) -> tuple[Pages, dict[str, Pages]] | None:
        """Move private pages to the device; None, with nothing taken, if there is no room or the load failed."""
        if not kept.anchor.numel() and not kept.windows:
            return NO_PAGES, {}
        if not self._evictor.make_device_room(kept.anchor.numel() // self._tree.page_size):
            return None
        for name, slots in kept.windows.items():
            if not self._evictor.make_window_room(name, len(self._pools.pages(slots, name))):
                return None
        transfers = [trailing(name, slots) for name, slots in kept.windows.items()]
        operation = self._transfers.new(device=True)
        device = self._transfers.queue(operation, kept.anchor, transfers)
        if device is None:
            return None
        windows = {str(each.name): self._pools.pages_of(each, device=True) for each in transfers}
        taken = self._pools.pages(device), windows
        arrived = self._transfers.wait_for(operation, lambda: self._free_device(*taken))
        return taken if arrived else None
