"""TreeEviction: what leaves the tiers, after it was saved where it has to be, and the room that makes."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from typing import Any

import torch

from hicache_kernels.validation import whole

from .bounded import bounded
from .namespaces import NamespaceBooks
from .node import Operation, Pages, TreeNode, WindowPart
from .policies import WritePolicy
from .queue import EvictionQueue
from .reclaim import Reclaim
from .results import Match
from .structure import TreeStructure

_order = itertools.count()


class TreeEviction(TreeStructure, ABC):
    """Evicts; what has to be written first, its heir writes."""

    def __init__(self, *arguments: Any, write_policy: WritePolicy, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.write_policy = write_policy
        self._writes: dict[int, Operation] = {}
        self._timed: list[tuple[float, int, Match]] = []
        self._pinned: set[Match] = set()
        self._reclaim = Reclaim(alone=not self.controller.agreement.needed)

    def _serve_pools(self) -> None:
        """Let the pools evict through this tree, from the end of its making on."""
        self._reclaim.serve(
            self.controller.host_group.anchor_entry,
            evict_host=lambda count: self.evict_host(count),
            evict_device=lambda count: self.evict_device(max(count - self.device_allocator.available_pages, 0)),
        )
        for name, pool in self.windows.items():
            self._reclaim.serve(
                pool.entry,
                evict_host=lambda count, name=name: self.evict_window_host(name, count),  # type: ignore[misc]
                evict_device=lambda count, name=name: self.evict_window_device(name, count),  # type: ignore[misc]
            )

    @abstractmethod
    def _ensure_host(self, node: TreeNode) -> bool:
        """Give the node and its ancestors host parts; False if the host has no room for one of them."""

    @abstractmethod
    def _write_window(self, part: WindowPart) -> bool:
        """Queue a part to be written to the host; False where that has it all, or has no room."""

    @abstractmethod
    def _wait(self, *, backups: bool = True) -> bool:
        """Wait for one transfer, or with ``backups`` for one of these where no other is left; False if none came."""

    @abstractmethod
    def _give_up_backup(self, operation: Operation) -> None:
        """End a backup that is under way; what of it storage has not taken is counted as skipped."""

    @abstractmethod
    def _backup_of_window(self, name: str) -> Operation | None:
        """Return what keeps the part of a windowed pool on the host that leaves first of those that backups keep."""

    # Eviction of full attention

    @bounded
    def evict_device(self, count: int) -> int:
        """Free at least ``count`` device pages if the unlocked leaves allow; returns how many were freed.

        Under ``write_back`` the pages that leave are written to the host first. They are free once they have been read:
        on a GPU the current stream is made to wait for that, and nothing waits for the bytes to arrive on the host.
        """
        count = whole("count", count, least=0)
        self.expire()
        return self._evict_device(self._device_queue, count)

    @bounded
    def evict_host(self, count: int) -> int:
        """Free at least ``count`` host pages if the unlocked leaves allow; returns how many were freed.

        Host copies of pages that are on the device as well may go like all others. What storage is to take first is
        waited for within the scheduler's bound; then its backup is given up. Pages that a call to storage still reads
        are not free before it ends.
        """
        count = whole("count", count, least=0)
        self.expire()
        return self._evict_host(self._host_queue, self._unsaved_queue, count)

    def _evict_device(self, queue: EvictionQueue[TreeNode], count: int) -> int:
        freed = 0
        saving: list[TreeNode] = []
        try:
            while freed < count:
                node = queue.pop()
                if node is None:
                    if saving:
                        freed += self._finish_saving(saving)
                    elif not self._let_device_go() and not self._wait(backups=False):
                        break
                    continue
                self._evicted_value = node.value
                try:
                    freed += self._evict_node(node, saving, count - freed)
                except BaseException:
                    self._offer(node, device=True)
                    raise
        finally:
            # Also where making room raised: those that are saved are locked until then.
            freed += self._finish_saving(saving)
        return freed

    def _evict_node(self, node: TreeNode, saving: list[TreeNode], missing: int) -> int:
        """Evict a node from the device, or note it in ``saving``; returns how many pages are free now."""
        if node.host is not None or self.write_policy is not WritePolicy.WRITE_BACK:
            self._save_windows(node)
            # Saving may have waited for a load above it that failed, and took the node off the device.
            return self._drop_if_there(node)
        if self._ensure_host(node):
            # Its new host part must outlast the device part, or saving one node could undo another's.
            node.host_lock += 1
            saving.append(node)
            return self._finish_saving(saving) if sum(n.pages for n in saving) >= missing else 0
        if saving and (saved := self._finish_saving(saving)):
            self._offer(node, device=True)
            return saved
        return self._drop_if_there(node)

    def _drop_if_there(self, node: TreeNode) -> int:
        if node.device is None:
            return 0
        self._drop_device(node)
        return node.pages

    def _save_windows(self, node: TreeNode) -> None:
        """Under ``write_back``, write the windows of a node that leaves the device: it may leave for storage next."""
        if self.write_policy is WritePolicy.WRITE_BACK:
            for part in node.windows:
                self._write_window(part)

    def _let_device_go(self) -> bool:
        """Let writes under way go on without their device parts; True where there were any that held one.

        Whoever reuses the slots is made to wait for the write to have read them, by the controller.
        """
        held = [operation for operation in self._writes.values() if operation.nodes and operation.holds_device]
        if held:
            self.controller.start_writing()
        for operation in held:
            operation.holds_device = False
            self._unlock_device(operation.nodes[0])
        return bool(held)

    def _finish_saving(self, saving: list[TreeNode]) -> int:
        """Start the writes of nodes that are to leave the device, drop their device parts, empty the list."""
        freed = 0
        try:
            for node in saving:
                self._save_windows(node)
            if saving:
                self._let_device_go()
            for node in saving:
                if node.host is not None and not (node.device_children or node.device_lock):
                    freed += self._drop_if_there(node)
        finally:
            for node in saving:
                self._offer(node, device=True)
                self._unlock_host(node)
            saving.clear()
        return freed

    def _evict_host(self, queue: EvictionQueue[TreeNode], unsaved: EvictionQueue[TreeNode] | None, count: int) -> int:
        freed, waits = 0, True
        while freed < count:
            node = queue.pop()
            if node is None:
                if waits and self._wait():
                    continue
                # Storage had its time. What comes next is dropped by the strategy's order, with no further wait.
                waits = False
                node = None if unsaved is None else unsaved.pop()
                if node is None:
                    break
            unsaved_node = node.backup is not None
            try:
                if node.backup is not None:
                    self._give_up_backup(node.backup)
                if self._windows_on_their_way(node) and self._wait(backups=False):
                    self._offer(node, device=False)
                    continue
                self._evicted_value = node.value
                freed_now = self._drop_host(node)
            except BaseException:
                self._offer(node, device=False)
                raise
            # What storage still reads is not free yet, and ranks' storages read different pages. A quota counts nodes.
            counts_room = unsaved_node and queue is self._host_queue
            freed += self._smallest(freed_now) if counts_room else node.pages
        return freed

    def _windows_on_their_way(self, node: TreeNode) -> bool:
        """Tell whether a node about to leave memory has windows that are still being written, for storage to keep."""
        return (
            node.device is None and self.controller.has_storage and any(part.write is not None for part in node.windows)
        )

    def _keep_quota(self, books: NamespaceBooks) -> None:
        """Evict leaves of a namespace that is above its quota, as far as they are unlocked and settled."""
        if books.device_queue is None or books.host_queue is None:
            return
        limit = books.quota.device_pages
        while limit is not None and books.device_pages > limit:
            node = books.device_queue.pop()
            if node is None:
                break
            self._evicted_value = node.value
            if node.host is None and self.write_policy is WritePolicy.WRITE_BACK and self._ensure_host(node):
                node.host_lock += 1
                self._finish_saving([node])
            else:
                self._drop_device(node)
        limit = books.quota.host_pages
        while limit is not None and books.host_pages > limit:
            node = books.host_queue.pop()
            if node is None:
                break
            self._evicted_value = node.value
            self._drop_host(node)

    # Eviction of windowed pools

    @bounded
    def evict_window_device(self, name: str, count: int) -> int:
        """Free device pages of a windowed pool, of prefixes not used for longest; each is saved on the host first."""
        pool = self.windows[str(name)]
        count = whole("count", count, least=0)
        self.expire()
        freed = 0
        saving: list[WindowPart] = []
        try:
            while freed < count:
                part = pool.device_queue.pop()
                if part is None:
                    if saving:
                        freed += self._finish_saving_windows(saving)
                    elif not self._let_windows_go() and not self._wait(backups=False):
                        break
                    continue
                try:
                    if not self._write_window(part):
                        freed += self._drop_window(part, device=True)
                        continue
                except BaseException:
                    pool.offer(part)
                    raise
                saving.append(part)
                if freed + sum(each.on_device for each in saving) >= count:
                    freed += self._finish_saving_windows(saving)
        finally:
            freed += self._finish_saving_windows(saving)
        return freed

    def _let_windows_go(self) -> bool:
        """Let writes of windows under way go on without their device parts; True where any held one."""
        held = [operation for operation in self._writes.values() if operation.device_pin.parts]
        if held:
            self.controller.start_writing()
        for operation in held:
            self._unpin(operation.device_pin, device=True)
        return bool(held)

    def _finish_saving_windows(self, saving: list[WindowPart]) -> int:
        freed = 0
        try:
            if saving:
                self._let_windows_go()
            for part in saving:
                if part.device is not None and not part.device_pins:
                    freed += self._drop_window(part, device=True)
        finally:
            for part in saving:
                self.windows[part.name].offer(part)
            saving.clear()
        return freed

    @bounded
    def evict_window_host(self, name: str, count: int) -> int:
        """Free host pages of a windowed pool, of prefixes not used for longest; see :meth:`evict_host`."""
        pool = self.windows[str(name)]
        count = whole("count", count, least=0)
        self.expire()
        freed, waits = 0, True
        while freed < count:
            part = pool.host_queue.pop()
            if part is None:
                if waits and self._wait():
                    continue
                waits = False
                backup = self._backup_of_window(pool.name)
                if backup is None:
                    break
                self._give_up_backup(backup)
                continue
            freed += self._drop_window(part, device=False)
        return freed

    # Pins with a time to live

    def expire(self) -> int:
        """Let pins go whose time is over; returns how many."""
        gone = 0
        while self._timed and self._timed[0][0] <= self.clock():
            self._release_pins(heapq.heappop(self._timed)[2])
            gone += 1
        return gone

    def _keep_until(self, deadline: float, match: Match) -> None:
        heapq.heappush(self._timed, (deadline, next(_order), match))

    def _check_pinned(self, match: Match) -> None:
        if match not in self._pinned:
            raise ValueError("match was released, or another one replaced it; accepted is one that is pinned")

    def _release_pins(self, match: Match) -> None:
        self._check_pinned(match)
        self._pinned.remove(match)
        self._unlock_device(match.device_node)
        if match.host_pages:
            self._unlock_host(match.node)
        self._unpin_both(match.device_pin, match.host_pin)

    # Ranks

    def _smallest(self, value: int) -> int:
        """Smallest value of all ranks; this one's where others are lost, as the engine here may go on."""
        agreement = self.controller.agreement
        return value if agreement.broken else agreement.smallest([value])[0]

    def _on_all_ranks(self, here: bool) -> bool:
        return bool(self._smallest(int(here)))

    # Room, on all ranks or none: what one lacks, none uses, or their trees would differ

    def _device_room(self) -> int:
        return self._smallest(self.device_allocator.available_pages)

    def _make_device_room(self, count: int) -> bool:
        room = self._device_room()
        if room < count:
            self.evict_device(count - room)
            room = self._device_room()
        return room >= count

    def _alloc_device(self, count: int) -> Pages | None:
        pages = self.device_allocator.alloc_pages(count) if self._make_device_room(count) else None
        if self._on_all_ranks(pages is not None):
            return pages
        if pages is not None:
            self.device_allocator.free_pages(pages)
        return None

    def _alloc_window_device(self, name: str, count: int) -> Pages | None:
        pages = self._take_window_device(name, count)
        if pages is None and self.evict_window_device(name, count):
            pages = self._take_window_device(name, count)
        return pages

    def _take_window_device(self, name: str, count: int) -> Pages | None:
        pages = self.windows[name].alloc_device(count)
        if self._on_all_ranks(pages is not None):
            return pages
        if pages is not None:
            self._free_window_pages(name, pages, device=True)
        return None

    def _make_window_room(self, name: str, count: int) -> bool:
        """Tell whether a windowed pool had room on the device; a load that follows takes the same."""
        pages = self._alloc_window_device(name, count)
        if pages is None:
            return False
        self._free_window_pages(name, pages, device=True)
        return True

    def _alloc_host(self, count: int) -> torch.Tensor | None:
        """Take host slots for ``count`` pages, or for as many as evicting makes room for; None where there is none."""
        pool = self.controller.mem_pool_host
        room = self._smallest(pool.available_size() // self.page_size)
        if room < count:
            self.evict_host(count - room)
            count = min(count, self._smallest(pool.available_size() // self.page_size))
        with self._reclaim.held():
            return pool.alloc(count * self.page_size) if count else None

    def _alloc_window_host(self, name: str, count: int) -> torch.Tensor | None:
        pool = self.windows[name]
        room = self._smallest(pool.free_host_pages())
        if room < count:
            self.evict_window_host(name, count - room)
        with self._reclaim.held():
            slots = self.controller.host_group.alloc(count * pool.converter.page_size, name)
        if self._on_all_ranks(slots is not None):
            return slots
        if slots is not None:
            self.controller.evict_host(slots, pool=name)
        return None
