"""Retraction: requests that a scheduler takes off the device and brings back later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from .evictor import Evictor
from .node import NO_PAGES, Operation, Pages, PagesByPool, Pin, TreeNode
from .pools import Pools
from .requests import Requests
from .results import Match, Restored
from .transfers import Transfers


@dataclass(frozen=True, eq=False)
class _Retracted:
    """A request on the host: its match, its prefix's windows there, pinned, and its own pages there."""

    match: Match
    pin: Pin
    pages: PagesByPool


class Retraction:
    """Requests on the host.

    Each has a prefix in the tree, pinned on the host, and private pages that the tree does not know: what was computed
    and not published, an unfinished last page, a running state. These move as one operation of the controller, so that
    the group takes the slots of all pools or none.
    """

    def __init__(self, pools: Pools, transfers: Transfers, evictor: Evictor, requests: Requests) -> None:
        self._tree = pools.tree
        self._pools = pools
        self._transfers = transfers
        self._evictor = evictor
        self._requests = requests
        self.requests: dict[str, _Retracted] = {}

    def backup(self, request_id: str, match: Match, pages: Pages, windows: Mapping[str, Pages]) -> bool:
        """Take a request off the device; see :meth:`UnifiedRadixCache.retraction_backup`.

        Its prefix is pinned on the host before anything moves, and only what has arrived leaves the device; so a False
        leaves the request as it was, and so does an interrupt, which comes while this waits.
        """
        if request_id in self.requests:
            raise ValueError(f"request {request_id} is retracted already; restore or discard must come first")
        if not match.on_device:
            raise ValueError(f"match has {match.host_pages} pages on the host; load_back must come before retraction")
        self._tree.check_windows(windows)
        if not self._evictor.settle_on_host(match.node):
            return False
        own = {self._pools.anchor: pages, **windows}
        node, pin, moved = match.node, Pin(device=False), None
        self._tree.lock(node, device=False)
        try:
            if self._pin_windows(node, pin):
                moved = self._move(own, device=False)
        finally:
            if moved is None:
                self._unpin(node, pin)
        if moved is None:
            return False
        self.requests[request_id] = _Retracted(match, pin, moved)
        self._free(own, device=True)
        self._evictor.release(match)
        return True

    def restore(self, request_id: str) -> Restored | None:
        """Bring a request back to the device, all of it or nothing; see :meth:`UnifiedRadixCache.retraction_restore`.

        An interrupt comes while this waits, and leaves the request as it was.
        """
        kept = self.requests[request_id]
        found = None
        match = self._tree.pin_match(kept.match, kept.match.node)
        try:
            match = self._requests.load_all(match)
            found = self._move(kept.pages, device=True) if match.pages == kept.match.pages else None
            self._tree.raise_pending()
        except BaseException:
            if found is not None:
                self._free(found, device=True)
            self._evictor.release(match)
            raise
        if found is None:
            self._evictor.release(match)
            return None
        self.discard(request_id)
        return Restored(match, found.pop(self._pools.anchor), found)

    def discard(self, request_id: str) -> None:
        """Forget a retracted request; KeyError if there is none of that id."""
        kept = self.requests.pop(request_id)
        self._free(kept.pages, device=False)
        self._unpin(kept.match.node, kept.pin)

    def clear(self) -> None:
        """Drop every request, as the pools are about to be cleared."""
        self.requests.clear()

    def _free(self, pages: PagesByPool, *, device: bool) -> None:
        for pool, mine in pages.items():
            if len(mine):
                self._pools.calls.call(self._pools.free, mine, device=device, pool=pool)

    def _unpin(self, node: TreeNode, pin: Pin) -> None:
        self._tree.unpin(pin)
        self._tree.unlock(node, device=False)

    def _pin_windows(self, node: TreeNode, pin: Pin) -> bool:
        """Pin on the host what the prefix needs of windowed pools, after writing it if needed."""
        for part, needed in self._tree.all_needed(node):
            if part.count(device=False) < needed and not self._evictor.write_window(part):
                return False
            pin.hold(part)
        while any(part.write is not None for part in pin.parts):
            self._transfers.poll(wait=True)
        return all(part.host is not None for part in pin.parts)

    def _move(self, pages: PagesByPool, *, device: bool) -> PagesByPool | None:
        """Move private pages to the device or the host; None, with nothing taken, without room or if that failed."""
        if not any(len(mine) for mine in pages.values()):
            return {self._pools.anchor: NO_PAGES}
        for pool, mine in pages.items():
            if not device:
                self._evictor.make_host_room(pool, len(mine))
            elif not self._evictor.make_room(pool, len(mine)):
                return None
        operation = Operation(self._tree.new_id(), device)
        target = self._transfers.queue(operation, pages)
        if target is None:
            return None
        arrived = self._transfers.wait_for(operation, partial(self._free, target, device=device))
        return target if arrived else None
