"""Evictor: makes room in the tiers, and writes to the host what has to be there first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .backups import Backups
from .node import Held, Pages, Pin, TreeNode, WindowPart
from .policies import TreeSettings, WritePolicy
from .pools import Pools
from .queue import EvictionQueue, NamespaceUsage, TierQueues
from .results import Match
from .transfers import Transfers

logger = logging.getLogger(__name__)


class Evictor:
    """Evicts in the order of the strategy, and writes: each may need the other."""

    def __init__(self, pools: Pools, backups: Backups, transfers: Transfers, settings: TreeSettings) -> None:
        self._tree = pools.tree
        self._order = pools.tree.order
        self._pools = pools
        self._backups = backups
        self._transfers = transfers
        self._settings = settings
        serve, anchor, device = pools.reclaim.serve, pools.controller.host_group.anchor_entry, pools.device_allocator
        serve(anchor, self.evict_host, lambda count: self.evict_device(max(count - device.available_pages, 0)))
        for name, pool in pools.tree.windows.items():
            serve(pool.entry, partial(self.evict_window_host, name), partial(self.evict_window_device, name))

    # The device

    def evict_device(self, count: int) -> int:
        """Free device pages; see :meth:`UnifiedRadixCache.evict_device`."""
        return self._evict_device(self._order.queues.device, count)

    def evict_window_device(self, name: str, count: int) -> int:
        """Free device pages of a windowed pool; see :meth:`UnifiedRadixCache.evict_window_device`."""
        return self._evict_device(self._tree.windows[name].device_queue, count, windows=True)

    def _evict_device(self, queue: EvictionQueue[Any], count: int, *, windows: bool = False, waits: bool = True) -> int:
        """Let nodes or window parts leave the device; what is written to the host first leaves together.

        Where nothing else may leave, it waits for transfers in flight, if it ``waits``.
        """
        self._tree.expire()
        freed = 0
        saving: list[Held] = []
        try:
            while freed < count:
                missing = count - freed - sum(each.count(device=True) for each in saving)
                if missing > 0 and (held := queue.pop()) is not None:
                    try:
                        freed += self._evict(held, queue, saving)
                    except BaseException:
                        queue.offer(held)
                        raise
                elif saving:
                    freed += self._finish_saving(queue, saving)
                elif not waits or not self._transfers.free_device(windows=windows):
                    break
        finally:
            # Also if making room raised: nodes that are being saved are locked until then.
            freed += self._finish_saving(queue, saving)
        return freed

    def _evict(self, held: Held, queue: EvictionQueue[Any], saving: list[Held]) -> int:
        """Evict something from the device, or add it to ``saving``; returns how many pages are free now."""
        if isinstance(held, WindowPart):
            if not self.write_window(held):
                return self._pools.drop(held, device=True)
            saving.append(held)
            return 0
        self._order.evicted_value = held.value
        if held.host is not None or self._settings.write_policy is not WritePolicy.WRITE_BACK:
            self._save_windows(held)
            # Saving may have waited for a load above it that failed, and took the node off the device.
            return self._pools.drop(held, device=True)
        if self.write_node(held):
            # Its new host part must outlast the device part, or saving one node could undo another's.
            self._tree.lock(held, device=False)
            saving.append(held)
            self._save_windows(held)
            return 0
        if saving and (saved := self._finish_saving(queue, saving)):
            queue.offer(held)
            return saved
        return self._pools.drop(held, device=True)

    def _save_windows(self, node: TreeNode) -> None:
        """Under ``write_back``, write the windows of a node that leaves the device: it may leave for storage next."""
        if self._settings.write_policy is WritePolicy.WRITE_BACK:
            for part in node.windows:
                self.write_window(part)

    def _finish_saving(self, queue: EvictionQueue[Any], saving: list[Held]) -> int:
        """Start the writes of what is to leave the device, drop it from there, empty the list."""
        freed = 0
        try:
            if saving:
                self._transfers.release_device(windows=isinstance(saving[0], WindowPart))
            for held in saving:
                # One whose write has failed by now is dropped as it is, or it would be tried again without end.
                if queue.evictable(held):
                    freed += self._pools.drop(held, device=True)
        finally:
            for held in saving:
                queue.offer(held)
                if isinstance(held, TreeNode):
                    self._tree.unlock(held, device=False)
            saving.clear()
        return freed

    # The host

    def evict_host(self, count: int) -> int:
        """Free host pages; see :meth:`UnifiedRadixCache.evict_host`."""
        queues = self._order.queues
        return self._evict_host(queues.host, count, partial(self._give_up_first, queues))

    def evict_window_host(self, name: str, count: int) -> int:
        """Free host pages of a windowed pool; see :meth:`UnifiedRadixCache.evict_window_host`."""
        return self._evict_host(self._tree.windows[name].host_queue, count, partial(self._backups.give_up_window, name))

    def _evict_host(
        self, queue: EvictionQueue[Any], count: int, give_up: Callable[[], bool] | None = None, *, by_room: bool = True
    ) -> int:
        """Let nodes or window parts leave the host.

        Where nothing else may leave, it waits for transfers, and for storage. Once that had its time, ``give_up`` lets
        go of what one backup keeps, without another wait, and returns whether there was one. Without ``give_up``,
        nothing is waited for. With ``by_room``, what storage still reads does not count: it is not free yet.
        """
        self._tree.expire()
        freed, waits, gave_up = 0, give_up is not None, False
        while freed < count:
            held: Held | None = queue.pop()
            if held is None:
                waits = waits and self._transfers.wait()
                if not waits:
                    gave_up = give_up is not None and give_up()
                    if not gave_up:
                        break
                continue
            try:
                if isinstance(held, TreeNode):
                    if give_up is not None and self._waits_for_windows(held):
                        queue.offer(held)
                        continue
                    self._order.evicted_value = held.value
                pages = held.count(device=False)
                room = self._pools.drop(held, device=False)
            except BaseException:
                queue.offer(held)
                raise
            # Ranks' storages may still read different pages.
            freed += self._pools.smallest(room) if gave_up and by_room else pages
        return freed

    def _give_up_first(self, queues: TierQueues) -> bool:
        """Give up the backup that alone keeps the node that would leave the host first; False if there is none."""
        node: TreeNode | None = queues.unsaved.pop()
        if node is None or node.backup is None:
            return False
        try:
            self._backups.give_up(node.backup)
        finally:
            self._order.offer(node, device=False)
        return True

    def _waits_for_windows(self, node: TreeNode) -> bool:
        """Wait for windows of a node that leaves memory, for storage to keep; returns whether a transfer has ended."""
        written = any(part.write is not None for part in node.windows)
        to_store = written and node.device is None and self._pools.controller.has_storage
        return to_store and self._transfers.wait(backups=False)

    # Quotas

    def release(self, match: Match) -> None:
        """Unpin a match, and evict what its namespace then has above its quota."""
        self._tree.unpin_match(match)
        self.keep_quota(match.owner)

    def replace(self, match: Match, other: Match) -> Match:
        """Unpin a match in favour of another one of its request, which this returns; if it raises, the match stays."""
        with self._tree.handing_out(other):
            self.keep_quota(match.owner)
        self._tree.unpin_match(match)
        return other

    def keep_quota(self, usage: NamespaceUsage) -> None:
        """Evict leaves of a namespace that is above its quota, as far as they are unlocked and settled."""
        if usage.queues is None:
            return
        device, host = usage.quota.device_pages, usage.quota.host_pages
        if device is not None:
            self._evict_device(usage.queues.device, usage.device_pages - device, waits=False)
        if host is not None:
            self._evict_host(usage.queues.host, usage.host_pages - host)

    # Writes

    def use(self, node: TreeNode, priority: int) -> None:
        """Note that a request uses a prefix, and write to the host and to storage what should be there now."""
        write: TreeNode | None = None
        settings = self._settings
        selective = settings.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        for above in node.path():
            self._order.use(above, priority)
            if selective and write is None and above.hits >= settings.selective_hits and above.device is not None:
                write = above
        for part, _ in self._tree.all_needed(node):
            part.last_access = self._order.tick
        if write is not None:
            self._write_through(write)
        self._backups.store_again(node)

    def use_inserted(self, node: TreeNode, priority: int) -> None:
        """Note that a request has inserted a prefix; see :meth:`use`."""
        self.use(node, priority)
        if self._settings.write_policy is WritePolicy.WRITE_THROUGH:
            self._write_through(node)
            self._pools.controller.start_writing()

    def _write_through(self, node: TreeNode) -> None:
        """Write a prefix and its windows to the host; an error is logged, as the caller's own work is done by then."""
        try:
            if node.host is None:
                self.write_node(node)
            for part, _ in self._tree.all_needed(node):
                self.write_window(part)
        except Exception:
            logger.exception("a prefix of %d pages was not written to the host", node.depth)

    def write_node(self, node: TreeNode) -> bool:
        """Give the node and its ancestors host parts; False if the host has no room for one of them.

        The writes are queued; the next poll starts them, merged.
        """
        missing = [above for above in node.path() if above.host is None][::-1]
        for number, above in enumerate(missing):
            if not self._write(above):
                if self._pools.controller.has_storage:
                    self._pools.controller.storage.skipped(sum(each.pages for each in missing[number:]))
                return False
        return True

    def _write(self, node: TreeNode) -> bool:
        prefix = node.parent or self._tree.root
        if node.pages * self._tree.page_size > self._pools.controller.mem_pool_host.size:
            return False

        def queue() -> bool:
            # While room is made, a load of the node or of its prefix may fail, or a write of its prefix.
            on_host = prefix is self._tree.root or prefix.host is not None
            return on_host and self._transfers.move([node], {}, device=False)

        # Whatever the eviction below frees, it is neither this node nor its prefix.
        self._tree.lock(node, device=True)
        self._tree.lock(prefix, device=False)
        try:
            return self._quota_allows(node) and (queue() or (self.evict_host(node.pages) > 0 and queue()))
        finally:
            self._tree.unlock(prefix, device=False)
            self._tree.unlock(node, device=True)

    def _quota_allows(self, node: TreeNode) -> bool:
        """Return whether the namespace may have the node on the host too, after evicting its other leaves if needed."""
        usage = node.owner
        limit = usage.quota.host_pages
        if limit is None or usage.queues is None:
            return True
        missing = usage.host_pages + node.pages - limit
        if missing > 0 and node.pages <= limit:
            # A quota counts nodes, whether or not their pages are free yet.
            give_up = partial(self._give_up_first, usage.queues)
            self._evict_host(usage.queues.host, missing, give_up, by_room=False)
        return usage.host_pages + node.pages <= limit

    def write_window(self, part: WindowPart) -> bool:
        """Queue a part to be written to the host; False if that has it all, or has no room."""
        if part.device is None or part.count(device=False) >= part.count(device=True) or part.pin_count(device=False):
            return False
        self._pools.drop(part, device=False)
        pin = Pin(device=True)
        pin.hold(part)
        try:
            move = partial(self._transfers.move, (), {part.name: [part]}, device=False)
            return move() or (self.evict_window_host(part.name, part.count(device=True)) > 0 and move())
        finally:
            self._tree.unpin(pin)

    def settle_on_host(self, node: TreeNode) -> bool:
        """Wait until the node has a host part, writing it if needed; returns whether it has (the root needs none)."""
        if not self.write_node(node):
            return False
        while node.write is not None:
            self._transfers.poll(wait=True)
        return node.parent is None or node.host is not None

    # Room, on all ranks or on none: what one has no room for no other may use, or their trees would differ. What a
    # callback of the engine raises during an eviction is raised before anything is allocated.

    def _make_room(self, count: int, free: Callable[[], int], evict: Callable[[int], object]) -> int:
        """Evict until ``count`` pages are free, as far as possible; returns how many are."""
        room = self._pools.smallest(free())
        if room < count:
            evict(count - room)
            self._pools.calls.raise_first()
            room = self._pools.smallest(free())
        return room

    def make_device_room(self, count: int) -> bool:
        """Evict until ``count`` device pages are free; returns whether they are."""
        return self._make_room(count, lambda: self._pools.device_allocator.available_pages, self.evict_device) >= count

    def alloc_device(self, count: int) -> Pages | None:
        """Allocate device pages; None if there are too few."""
        pages = self._pools.device_allocator.alloc_pages(count) if self.make_device_room(count) else None
        return self._pools.on_all_ranks(pages, self._pools.device_allocator.free_pages)

    def alloc_window_device(self, name: str, count: int) -> Pages | None:
        """Allocate device pages of a windowed pool; None if there are too few."""
        alloc, give_back = self._tree.windows[name].alloc_device, partial(self._pools.free, device=True, pool=name)
        pages = self._pools.on_all_ranks(alloc(count), give_back)
        if pages is not None or not self.evict_window_device(name, count):
            return pages
        self._pools.calls.raise_first()
        return self._pools.on_all_ranks(alloc(count), give_back)

    def make_window_room(self, name: str, count: int) -> bool:
        """Return whether a windowed pool has room on the device, after evicting; a load that follows takes the same."""
        pages = self.alloc_window_device(name, count)
        if pages is not None:
            self._pools.free(pages, device=True, pool=name)
        return pages is not None

    def make_room(self, pool: str, count: int) -> bool:
        """Return whether the anchor or a windowed pool has room on the device, after evicting."""
        return self.make_window_room(pool, count) if pool in self._tree.windows else self.make_device_room(count)

    def make_host_room(self, pool: str, count: int) -> int:
        """Evict until a pool has ``count`` free host pages, as far as possible; returns how many it has."""
        evict = partial(self.evict_window_host, pool) if pool in self._tree.windows else self.evict_host
        return self._make_room(count, partial(self._pools.free_host_pages, pool), evict)

    def alloc_host(self, count: int) -> torch.Tensor | None:
        """Take host slots for ``count`` pages, or for as many as evicting makes room for; None if there are none."""
        count = min(count, self.make_host_room(self._pools.anchor, count))
        with self._pools.reclaim.held():
            return self._pools.controller.mem_pool_host.alloc(count * self._tree.page_size) if count else None

    def alloc_window_host(self, name: str, count: int) -> torch.Tensor | None:
        """Take host slots of a windowed pool; None if there are too few."""
        self.make_host_room(name, count)
        with self._pools.reclaim.held():
            slots = self._pools.controller.host_group.alloc(count * self._tree.windows[name].converter.page_size, name)
        return self._pools.on_all_ranks(slots, partial(self._pools.controller.evict_host, pool=name))
