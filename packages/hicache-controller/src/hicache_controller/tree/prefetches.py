"""Prefetches: brings the pages that follow a match from storage to the host."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hicache_pools.pool_transfer import PoolTransfer

from ..wait_bound import WaitBound
from .backups import Backups
from .components import trailing
from .events import Change
from .evictor import Evictor
from .node import NO_SLOTS, Pages, TreeNode, WindowPart
from .pools import Pools
from .results import Match, Prefetching


class Prefetches:
    """Starts prefetches, and gives what they bring to nodes."""

    def __init__(self, pools: Pools, backups: Backups, evictor: Evictor) -> None:
        self._tree = pools.tree
        self._pools = pools
        self._backups = backups
        self._evictor = evictor

    def waiting(self, timeout: float | None) -> AbstractContextManager[WaitBound]:
        """Bound the waits of the block by ``timeout``, or by the storage's."""
        storage = self._pools.controller.storage
        return storage.one_call(storage.settings.timeout_seconds if timeout is None else timeout)

    # Start

    def start(self, match: Match) -> Prefetching:
        """Start a prefetch; see :meth:`UnifiedRadixCache.start_prefetch`."""
        self._tree.check_pinned(match)
        nothing = Prefetching(match, NO_SLOTS, [], None)
        rest = match.rest()
        found = self._find(rest) if rest and self._pools.controller.has_storage else 0
        if not found:
            return nothing
        keys, slots, started = rest[:found], NO_SLOTS, None
        transfers: list[PoolTransfer] = []
        # What comes needs a host part above it, which must stay until then.
        self._tree.lock(match.node, device=False)
        try:
            if self._evictor.settle_on_host(match.node) and (taken := self._evictor.alloc_host(found)) is not None:
                slots = taken
            # If one rank has no room, all have none, or some would wait for an answer that others never give.
            room = self._pools.smallest(len(slots) // self._tree.page_size)
            if 0 < room < found and self._tree.windows:
                # A shorter prefix counts only if the windows of its own end are stored.
                room = self._find(keys[:room])
            keys, spare = keys[:room], slots[room * self._tree.page_size :]
            slots = slots[: room * self._tree.page_size]
            self._pools.controller.evict_host(spare)
            if room and self._alloc_windows(keys, transfers):
                operation = self._pools.controller.prefetch(
                    slots, keys, request_id=str(self._tree.new_id()), pool_transfers=transfers
                )
                started = Prefetching(match, slots, transfers, operation, self._pools.controller.storage.changes)
                self._backups.prefetches[started] = keys
        finally:
            if started is None:
                self._pools.free_host(slots, transfers)
                self._tree.unlock(match.node, device=False)
        return nothing if started is None else started

    def _alloc_windows(self, keys: list[bytes], transfers: list[PoolTransfer]) -> bool:
        """Take host slots for the last pages of every windowed pool; False if one has no room."""
        for name, pool in self._tree.windows.items():
            last = keys[-pool.window_pages :]
            slots = self._evictor.alloc_window_host(name, len(last))
            if slots is None:
                return False
            transfers.append(trailing(name, slots, keys=last))
        return True

    def _find(self, keys: list[bytes]) -> int:
        """Return how many leading pages storage has, and note that it has them."""
        windows = {name: pool.window_pages for name, pool in self._tree.windows.items()}
        transfers = [trailing(name, keys=keys[:pages]) for name, pages in windows.items()]
        found = int(self._pools.controller.storage_exists(keys, pool_transfers=transfers))
        self._backups.presence.storing(self._pools.anchor, keys[:found])
        for name, pages in windows.items():
            self._backups.presence.storing(name, keys[max(0, found - pages) : found])
        return found

    # End

    def finish(self, started: Prefetching, *, wait: bool) -> Match:
        """End a prefetch; see :meth:`UnifiedRadixCache.finish_prefetch`."""
        match, operation = started.match, started.operation
        if operation is None:
            return match
        if started not in self._backups.prefetches:
            raise ValueError("started has ended before, or the tree was reset; accepted is a prefetch that runs")
        try:
            if wait:
                with self._pools.controller.storage.one_call() as bound:
                    operation.wait(bound.left())
            got, room = self._pools.controller.finish_prefetch(operation), len(started.slots) // self._tree.page_size
        except BaseException:
            operation.cancel()
            self._end(started, 0)
            raise
        # If the write of what it follows has failed, no node can have it.
        if (started.transfers and got < room) or (match.node.parent is not None and match.node.host is None):
            got = 0
        longer = self._adopt(started, got) if got else None
        self._end(started, got)
        return match if longer is None else self._evictor.replace(match, longer)

    def _end(self, started: Prefetching, got: int) -> None:
        del self._backups.prefetches[started]
        if got < len(started.slots) // self._tree.page_size:
            self._pools.free_host(started.slots[got * self._tree.page_size :], started.transfers)
        self._tree.unlock(started.match.node, device=False)

    def _adopt(self, started: Prefetching, got: int) -> Match | None:
        match = started.match
        # What came from a storage that has been changed since says nothing about the one there is now.
        stored = started.storage_changes == self._pools.controller.storage.changes
        pages = self._pools.pages(started.slots[: got * self._tree.page_size])
        node = self._adopt_nodes(match, pages, stored=stored)
        parts: list[WindowPart] = []
        for transfer in started.transfers:
            pages = self._pools.pages_of(transfer, device=False)
            came = self._pools.adopt_window(node, str(transfer.name), pages, device=False)
            if stored:
                self._backups.mark_fetched(came, len(pages))
            parts += came
        longer = self._tree.pin_match(match, node) if self._tree.restorable(node) else None
        self._tree.order.offer_windows(parts)
        return longer

    def _adopt_nodes(self, match: Match, pages: Pages, *, stored: bool) -> TreeNode:
        """Give host pages that came from storage to the nodes that follow a match; returns the last one."""
        node = match.node
        for node, own in self._tree.follow(match, len(pages)):
            if node.host is None:
                self._tree.set_part(node, pages[own], device=False)
                node.stored = stored and not self._backups.lacks(node)
                self._pools.events.held(Change.STORED, node, device=False)
                if stored:
                    self._backups.report_stored(node, self._pools.anchor, node.pages)
            else:
                self._pools.free(pages[own], device=False)
            # Eviction for the windows to come must not take what has just come.
            self._tree.order.use(node, match.priority)
        return node
