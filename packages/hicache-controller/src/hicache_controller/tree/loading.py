"""TreeLoads: brings what a match has, or storage has behind it, to the host and to the device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from hicache_pools.pool_transfer import PoolHitPolicy, PoolTransfer

from ..interrupts import interrupts_held_back
from ..wait_bound import WaitBound, checked_timeout
from .backups import further
from .bounded import bounded
from .events import Change, Tier
from .keys import KEY_BYTES, Tokens, common_pages, key_list, own_tokens
from .namespaces import NO_BOOKS, NamespaceBooks
from .node import NO_PAGES, Pages, TreeNode, WindowPart, unpack
from .results import Match, Prefetching
from .transfers import TreeTransfers


class TreeLoads(TreeTransfers):
    """Matches, and the ways they get longer or nearer to the device."""

    def __init__(self, *arguments: Any, load_back_pages: int, load_quota_pages: int | None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.load_back_pages = load_back_pages
        self.load_quota_pages = load_quota_pages
        self._prefetches: set[Prefetching] = set()

    # Matches

    @bounded
    def release(self, match: Match) -> None:
        """Unpin a match; once for each match handed out."""
        self._release_pins(match)
        if match.owner.device_queue is not None:
            self._keep_quota(match.owner)

    def _match_at(
        self,
        keys: bytes,
        node: TreeNode,
        pages: int,
        *,
        owner: NamespaceBooks = NO_BOOKS,
        priority: int = 0,
        tokens: Tokens | None = None,
    ) -> Match:
        """Pin the restorable prefix that ends with ``node``."""
        device_pages, above = pages, node
        while above.device is None and above.parent is not None:
            device_pages -= above.pages
            above = above.parent
        device_pin, host_pin = self._pins(node)
        above.device_lock += 1
        if device_pages < pages:
            node.host_lock += 1
        match = Match(
            keys, device_pages, pages - device_pages, above, node, device_pin, host_pin, owner, priority, tokens
        )
        self._pinned.add(match)
        return match

    def _like(self, match: Match, node: TreeNode, pages: int) -> Match:
        """Pin another prefix of the same request."""
        return self._match_at(match.keys, node, pages, owner=match.owner, priority=match.priority, tokens=match.tokens)

    # From storage to the host

    def prefetch(self, match: Match, *, timeout: float | None = None) -> Match:
        """Bring the pages behind the match from storage to the host, and wait for all of them.

        Parameters
        ----------
        match
            Replaced by the one that is returned.
        timeout
            Seconds to wait for storage, by default its ``timeout_seconds``; then what has come counts.
        """
        with self._waiting(timeout):
            return self._finish_prefetch(self.start_prefetch(match), wait=True)

    def _waiting(self, timeout: float | None) -> AbstractContextManager[WaitBound]:
        timeout, storage = checked_timeout(timeout), self.controller.storage
        return storage.one_call(storage.settings.timeout_seconds if timeout is None else timeout)

    @bounded
    def start_prefetch(self, match: Match) -> Prefetching:
        """Start to bring the pages behind the match from storage to the host; none where it does not answer in time.

        The match stays pinned, and the caller's to release unless it calls :meth:`finish_prefetch`, as it has to once
        for each start.
        """
        self._check_pinned(match)
        nothing = Prefetching(match, torch.empty(0, dtype=torch.int64), [], None)
        rest = match.rest()
        found = self._storage_exists(rest) if rest and self.controller.has_storage else 0
        if not found:
            return nothing
        # What comes needs a host part above it, which must stay until then.
        above = match.node
        above.host_lock += 1
        try:
            started = self._start_prefetch_below(match, rest[:found])
        except BaseException:
            self._unlock_host(above)
            raise
        if started is None:
            self._unlock_host(above)
            return nothing
        self._prefetches.add(started)
        return started

    def prefetch_ready(self, started: Prefetching) -> bool:
        """Tell whether, by the controller's prefetch policy, the request may go on."""
        return started.operation is None or self.controller.prefetch_ready(started.operation)

    def finish_prefetch(self, started: Prefetching, *, wait: bool = False, timeout: float | None = None) -> Match:
        """End a prefetch as the policy says, or with ``wait`` once everything has come.

        The match it returns has what came, and replaces the one it began with. Where waiting is interrupted, nothing
        comes, and that one stays the caller's.

        Parameters
        ----------
        started
            What :meth:`start_prefetch` returned.
        wait, timeout
            Whether to wait for all of it, and for how many seconds, by default the storage's ``timeout_seconds``.
            Otherwise the scheduler's bound holds.

        Raises
        ------
        ValueError
            Where it has ended before, by this or by ``reset``, or ``timeout`` is given without ``wait``. Nothing was
            changed.
        """
        if timeout is not None and not wait:
            raise ValueError(f"timeout is {timeout}, and wait is False; a timeout is accepted with wait=True")
        with self._waiting(timeout) if wait else self.controller.storage.one_call():
            return self._finish_prefetch(started, wait=wait)

    def _finish_prefetch(self, started: Prefetching, *, wait: bool) -> Match:
        match, operation = started.match, started.operation
        if operation is None:
            return match
        if started not in self._prefetches:
            raise ValueError("started has ended before, or the tree was reset; accepted is a prefetch that runs")
        try:
            if wait:
                with self.controller.storage.one_call() as bound:
                    operation.wait(bound.left())
            got, room = self.controller.finish_prefetch(operation), len(started.slots) // self.page_size
        except BaseException:
            operation.cancel()
            self._prefetches.discard(started)
            self._free_host(started.slots, started.transfers)
            self._unlock_host(match.node)
            raise
        # Nor is there a place for it where the write of what it follows has failed.
        if (started.transfers and got < room) or (match.node is not self.root and match.node.host is None):
            got = 0
        if got < room:
            self._free_host(started.slots[got * self.page_size :], started.transfers)
        longer = self._adopt_prefetched(started, got) if got else None
        self._prefetches.discard(started)
        self._unlock_host(match.node)
        if longer is None:
            return match
        self.release(match)
        return longer

    def _start_prefetch_below(self, match: Match, keys: list[bytes]) -> Prefetching | None:
        slots = self._alloc_host(len(keys)) if self._settled_on_host(match.node) else None
        if slots is None:
            slots = torch.empty(0, dtype=torch.int64)
        transfers: list[PoolTransfer] = []
        try:
            # Want of room on one rank is want of room on all, or some would wait for an answer that others never give.
            room = self._smallest(len(slots) // self.page_size)
            if 0 < room < len(keys) and self.windows:
                # A shorter prefix counts only where the windows of its own end are stored.
                room = self._storage_exists(keys[:room])
            slots, spare = slots[: room * self.page_size], slots[room * self.page_size :]
            self.controller.evict_host(spare)
            if room and self._alloc_windows_to_fetch(keys[:room], transfers):
                operation = self.controller.prefetch(
                    slots, keys[:room], request_id=str(self._new_id()), **further(transfers)
                )
                return Prefetching(match, slots, transfers, operation, self.controller.storage.changes)
        except BaseException:
            self._free_host(slots, transfers)
            raise
        self._free_host(slots, transfers)
        return None

    def _alloc_windows_to_fetch(self, keys: list[bytes], transfers: list[PoolTransfer]) -> bool:
        """Take host slots for the last pages of every windowed pool; False where one has no room."""
        for name, pool in self.windows.items():
            last = keys[max(0, len(keys) - pool.window_pages) :]
            indices = self._alloc_window_host(name, len(last))
            if indices is None:
                return False
            transfers.append(
                PoolTransfer(name, host_indices=indices, keys=last, hit_policy=PoolHitPolicy.TRAILING_PAGES)
            )
        return True

    def _adopt_prefetched(self, started: Prefetching, got: int) -> Match | None:
        match, end = started.match, started.match.pages + got
        # What came from a storage that has been changed since says nothing about the one there is now.
        stored = started.storage_changes == self.controller.storage.changes
        node = self._adopt_host(match, self._pages(started.slots[: got * self.page_size]), end, stored=stored)
        parts: list[WindowPart] = []
        for transfer in started.transfers:
            if transfer.host_indices is not None:
                name = str(transfer.name)
                pages = self.windows[name].converter.pages(transfer.host_indices)
                came = self._adopt_window(node, name, pages, device=False)
                if stored:
                    self._mark_stored(came, len(pages))
                parts += came
        longer = self._like(match, node, end) if self._restorable(node) else None
        self._offer_windows(parts)
        return longer

    def _keys_in_flight(self) -> set[bytes]:
        keys = super()._keys_in_flight()
        for started in self._prefetches:
            keys.update(started.match.rest()[: len(started.slots) // self.page_size])
        return keys

    def _storage_exists(self, keys: list[bytes]) -> int:
        windows = [
            PoolTransfer(name, keys=keys[: pool.window_pages], hit_policy=PoolHitPolicy.TRAILING_PAGES)
            for name, pool in self.windows.items()
        ]
        found = int(self.controller.storage_exists(keys, **further(windows)))
        self._presence.storing(self._anchor, keys[:found])
        for name, pool in self.windows.items():
            self._presence.storing(name, keys[max(0, found - pool.window_pages) : found])
        return found

    def _free_host(self, slots: torch.Tensor, transfers: list[PoolTransfer]) -> None:
        self.controller.evict_host(slots)
        self._free_window_slots(transfers)

    def _free_window_slots(self, transfers: list[PoolTransfer]) -> None:
        for transfer in transfers:
            if transfer.host_indices is not None:
                self.controller.evict_host(transfer.host_indices, pool=transfer.name)
        transfers.clear()

    def _mark_stored(self, parts: list[WindowPart], pages: int) -> None:
        """Note that the last ``pages`` pages of some parts, the last part first, came from storage."""
        for part in parts:
            came = min(pages, part.node.pages)
            pages -= came
            if part.host is not None and part.write is None and part.on_host <= came:
                part.stored = not self._storage_lacks_part(part)
            self._tell_stored(part.node, part.name, came)

    def _adopt_host(self, match: Match, pages: Pages, end: int, *, stored: bool) -> TreeNode:
        """Give host pages that came from storage to the nodes behind a match, new ones where there are none."""
        node, at, begin = match.node, match.pages, match.pages
        blob = match.keys[: end * KEY_BYTES]
        while at < end:
            child = node.child(blob[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if child is None:
                child = self._add_child(node, blob[at * KEY_BYTES :], match.owner)
                self._give_tokens(child, match, at)
            else:
                same = common_pages(child.keys, blob[at * KEY_BYTES :])
                if same < child.pages:
                    child = self._split(child, same)
            own = pages[at - begin : at - begin + child.pages]
            if child.host is None:
                child.stored = stored and not self._storage_lacks(self._anchor, key_list(child.keys))
                self._set_host(child, own)
                self._tell(Change.STORED, Tier.HOST, child)
                if stored:
                    self._tell_stored(child, self._anchor, child.pages)
            else:
                self.controller.evict_host(self._slots(own))
            # Eviction for the windows to come must not take what has just come.
            self._used(child, match.priority)
            node, at = child, at + child.pages
        return node

    def _give_tokens(self, node: TreeNode, match: Match, first_page: int) -> None:
        if match.tokens is not None and self.listener is not None:
            begin, end = first_page * self.page_size, (first_page + node.pages) * self.page_size
            node.tokens = own_tokens(match.tokens[begin:end])

    def _settled_on_host(self, node: TreeNode) -> bool:
        """Whether the node has a host part whose write is done (the root needs none), writing it if need be."""
        if not self._ensure_host(node):
            return False
        while node.write is not None:
            self.poll(wait=True)
        return node is self.root or node.host is not None

    # From the host to the device

    @bounded
    def load_back(self, match: Match, *, wait: bool = True) -> Match:
        """Load what the match has on the host to the device.

        Parameters
        ----------
        match
            Replaced by the one that is returned.
        wait
            False: the loads may still run. The engine then lets its layers wait for the match's ``consumers``, and
            calls :meth:`settle` before it inserts.

        Returns
        -------
        Match
            On the device. Shorter where the device has no room for all of it, a load failed, or ``load_back_pages``
            and ``load_quota_pages`` say so. What another request is loading already is not loaded again.

        Raises
        ------
        ValueError
            Where the match was released or replaced before.
        """
        self._check_pinned(match)
        self._settle_writes(match.node)
        node, pages = self._worth_loading(match, *self._still_there(match.node, match.pages))
        loaded = self._load_to(match, node, pages)
        self.release(match)
        return self.settle(loaded) if wait else loaded

    def _still_there(self, node: TreeNode, pages: int) -> tuple[TreeNode, int]:
        """Go up from a prefix of ``pages`` pages to what of it is in the tree still and can be restored."""
        while not self._is_alive(node):
            pages -= node.pages
            node = node.parent or self.root
        return self._last_restorable(node, pages)

    def _worth_loading(self, match: Match, node: TreeNode, pages: int) -> tuple[TreeNode, int]:
        """Cut a prefix where loading it is not worth its while, or above the quota."""
        to_load = pages - match.device_pages
        if 0 < to_load < self.load_back_pages:
            pages, node = self._go_up(node, pages, match.device_pages)
        elif self.load_quota_pages is not None and to_load > self.load_quota_pages:
            limit = match.device_pages + self.load_quota_pages
            # Stop at the node that spans the limit, and cut it there.
            while pages - node.pages >= limit and node.parent is not None:
                pages -= node.pages
                node = node.parent
            if pages > limit:
                node, pages = self._split(node, node.pages - (pages - limit)), limit
        return self._last_restorable(node, pages)

    @staticmethod
    def _go_up(node: TreeNode, pages: int, limit: int) -> tuple[int, TreeNode]:
        while pages > limit and node.parent is not None:
            pages -= node.pages
            node = node.parent
        return pages, node

    def _load_to(self, match: Match, node: TreeNode, pages: int) -> Match:
        """Start loading the longest prefix up to ``node`` that the device has room for, and pin it."""
        while True:
            pinned = self._like(match, node, pages)
            if pinned.on_device:
                return pinned
            try:
                if self._try_load(pinned):
                    return self._like(match, node, pages)
                whole = self._is_whole(pinned)
            finally:
                self._release_pins(pinned)
            if not whole:  # there is less than it seemed, or more of it to load
                node, pages = self._still_there(node, pages)
                continue
            if node.parent is None:
                return self._like(match, self.root, 0)
            fitting = pinned.device_pages + self._device_room()
            if self.windows or fitting >= pages:
                node, pages = self._last_restorable(node.parent, pages - node.pages)
            else:
                node, pages = self._cut(node, pages, fitting, pinned.device_pages)
            node, pages = self._worth_loading(pinned, node, pages)

    def _cut(self, node: TreeNode, pages: int, fitting: int, on_device: int) -> tuple[TreeNode, int]:
        """Shorten a prefix of ``pages`` pages to what fits, or to whole nodes where too little of the last would."""
        while node.parent is not None and pages - node.pages >= fitting:
            node, pages = node.parent, pages - node.pages
        above = pages - node.pages
        if node.parent is None or fitting >= pages:
            return node, pages
        if fitting - on_device < self.load_back_pages:
            return node.parent, above
        return self._split(node, fitting - above), fitting

    @staticmethod
    def _is_whole(match: Match) -> bool:
        """Whether all that a match pins is there still; the load or the write of some may have failed meanwhile."""
        return (
            (match.device_node.device is not None or match.device_node.parent is None)
            and (match.node.host is not None or not match.host_pages)
            and all(part.device is not None for part in match.device_pin.parts)
            and all(part.host is not None for part in match.host_pin.parts)
        )

    def _try_load(self, match: Match) -> bool:
        parts: dict[str, list[WindowPart]] = {}
        for part in match.host_pin.parts:
            parts.setdefault(part.name, []).append(part)
        # Making room waits for other transfers, so what there is to load is known only when there is room for all.
        if not (self._make_device_room(match.host_pages) and self._make_room_for(parts) and self._is_whole(match)):
            return False
        nodes = [node for node in self._path(match.node) if node.device is None][::-1]
        hosts = [unpack(node.host) for node in nodes if node.host is not None]
        slots = self._slots(np.concatenate(hosts) if hosts else NO_PAGES)
        transfers = [
            PoolTransfer(
                name,
                host_indices=self.windows[name].converter.slots(
                    np.concatenate([unpack(part.host) for part in mine if part.host is not None])
                ),
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )
            for name, mine in parts.items()
        ]
        operation = self._operation([])
        # Ctrl-C in between would leave a load that no node knows, or nodes that wait for none.
        with interrupts_held_back():
            target = self._queue_load(operation, slots, transfers)
            if target is None:
                return False
            self._start_load(operation, nodes, self._pages(target.cpu()), parts, transfers)
        return True

    def _make_room_for(self, parts: dict[str, list[WindowPart]]) -> bool:
        """Make room on the device for window parts, by pool."""
        for name, mine in parts.items():
            for part in mine:
                # What the device has of it is too short, and comes again with the rest.
                if part.device is not None and part.device_pins:
                    return False
                self._drop_window(part, device=True)
            if not self._make_window_room(name, sum(part.on_host for part in mine)):
                return False
        return True

    def _settle_behind(self, match: Match, pages: int) -> None:
        """Wait for loads of what the tree has of the next ``pages`` pages behind a match."""
        keys = match.keys[match.pages * KEY_BYTES : (match.pages + pages) * KEY_BYTES]
        while self._loads and any(
            node.load is not None or any(part.load is not None for part in node.windows)
            for node, _ in self._known(match.node, keys)
        ):
            self.poll(wait=True)

    @bounded
    def settle(self, match: Match) -> Match:
        """Wait for the loads that fill a match; the match it returns replaces it, shorter where one failed."""
        while True:
            waiting = any(node.load is not None for node in self._path(match.node)) or any(
                part.load is not None for part in match.device_pin.parts
            )
            if not waiting:
                break
            self.poll(wait=True)
        node, pages = match.node, match.pages
        while node.parent is not None and not (
            node.device is not None and self._is_alive(node) and self._windows_on_device(node)
        ):
            pages -= node.pages
            node = node.parent
        if node is match.node:
            return match
        shorter = self._like(match, node, pages)
        self.release(match)
        return shorter

    def _windows_on_device(self, node: TreeNode) -> bool:
        for name in self.windows:
            parts = self._window(node, name)
            if parts is None or any(part.on_device < needed for part, needed in parts):
                return False
        return True
