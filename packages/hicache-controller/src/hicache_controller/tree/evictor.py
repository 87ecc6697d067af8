"""Evictor: what leaves the tiers, after it was written to the host if it has to be."""

from __future__ import annotations

import logging

from ..controller import HiCacheController
from .backups import Backups
from .matches import Matches
from .namespaces import NamespaceUsage
from .node import TreeNode, WindowPart
from .policies import TreeSettings, WritePolicy
from .queue import EvictionQueue, TierQueues
from .radix_tree import RadixTree
from .ranks import Ranks
from .residency import Residency
from .results import Match
from .transfers import Transfers, has_prefix_on_host

logger = logging.getLogger(__name__)


class Evictor:
    """Evicts in the order of the strategy, and writes: each may need the other."""

    def __init__(
        self,
        tree: RadixTree,
        residency: Residency,
        matches: Matches,
        backups: Backups,
        transfers: Transfers,
        controller: HiCacheController,
        ranks: Ranks,
        settings: TreeSettings,
    ) -> None:
        self._tree = tree
        self._order = tree.order
        self._residency = residency
        self._matches = matches
        self._backups = backups
        self._transfers = transfers
        self._controller = controller
        self._ranks = ranks
        self._settings = settings

    @property
    def _writes_back(self) -> bool:
        """Whether what leaves the device is written to the host first."""
        return self._settings.write_policy is WritePolicy.WRITE_BACK

    # The device

    def evict_device(self, count: int) -> int:
        """Free device pages; see :meth:`UnifiedRadixCache.evict_device`."""
        self._matches.expire()
        queue, freed = self._order.queues.device, 0
        saving: list[TreeNode] = []
        try:
            while freed < count:
                node = queue.pop()
                if node is None:
                    if saving:
                        freed += self._finish_saving(saving)
                    elif not self._transfers.release_device() and not self._transfers.wait(backups=False):
                        break
                    continue
                self._order.evicted_value = node.value
                try:
                    freed += self._evict_node(node, saving, count - freed)
                except BaseException:
                    self._order.offer(node, device=True)
                    raise
        finally:
            # Also if making room raised: nodes that are being saved are locked until then.
            freed += self._finish_saving(saving)
        return freed

    def _evict_node(self, node: TreeNode, saving: list[TreeNode], missing: int) -> int:
        """Evict a node from the device, or add it to ``saving``; returns how many pages are free now."""
        if node.host is not None or not self._writes_back:
            self._save_windows(node)
            # Saving may have waited for a load above it that failed, and took the node off the device.
            return self._drop_device(node)
        if self.write_node(node):
            # Its new host part must outlast the device part, or saving one node could undo another's.
            self._tree.lock(node, device=False)
            saving.append(node)
            return self._finish_saving(saving) if sum(each.pages for each in saving) >= missing else 0
        if saving and (saved := self._finish_saving(saving)):
            self._order.offer(node, device=True)
            return saved
        return self._drop_device(node)

    def _drop_device(self, node: TreeNode) -> int:
        if node.device is None:
            return 0
        self._residency.drop(node, device=True)
        return node.pages

    def _save_windows(self, node: TreeNode) -> None:
        """Under ``write_back``, write the windows of a node that leaves the device: it may leave for storage next."""
        if self._writes_back:
            for part in node.windows:
                self.write_window(part)

    def _finish_saving(self, saving: list[TreeNode]) -> int:
        """Start the writes of nodes that are to leave the device, drop their device parts, empty the list."""
        freed = 0
        try:
            for node in saving:
                self._save_windows(node)
            if saving:
                self._transfers.release_device()
            for node in saving:
                if node.host is not None and not (node.device_children or node.device_lock):
                    freed += self._drop_device(node)
        finally:
            for node in saving:
                self._order.offer(node, device=True)
                self._tree.unlock(node, device=False)
            saving.clear()
        return freed

    # The host

    def evict_host(self, count: int) -> int:
        """Free host pages; see :meth:`UnifiedRadixCache.evict_host`."""
        self._matches.expire()
        return self._evict_host(self._order.queues, count)

    def _evict_host(self, queues: TierQueues, count: int) -> int:
        freed, waits = 0, True
        while freed < count:
            node: TreeNode | None = queues.host.pop()
            if node is None:
                if waits and self._transfers.wait():
                    continue
                # Storage had its time. What comes next is dropped by the strategy's order, without another wait.
                waits = False
                node = queues.unsaved.pop()
                if node is None:
                    break
            unsaved = node.backup is not None
            try:
                if node.backup is not None:
                    self._backups.give_up(node.backup)
                if self._has_windows_to_store(node) and self._transfers.wait(backups=False):
                    self._order.offer(node, device=False)
                    continue
                self._order.evicted_value = node.value
                freed_now = self._residency.drop(node, device=False)
            except BaseException:
                self._order.offer(node, device=False)
                raise
            # What storage still reads is not free yet, and ranks' storages read different pages. A quota counts nodes.
            counts_room = unsaved and queues is self._order.queues
            freed += self._ranks.smallest(freed_now) if counts_room else node.pages
        return freed

    def _has_windows_to_store(self, node: TreeNode) -> bool:
        """Return whether a node that leaves memory has windows that are still being written, for storage to keep."""
        return (
            node.device is None
            and self._controller.has_storage
            and any(part.write is not None for part in node.windows)
        )

    # Quotas

    def release(self, match: Match) -> None:
        """Unpin a match, and evict what its namespace then has above its quota."""
        self._matches.unpin(match)
        self.keep_quota(match.owner)

    def replace(self, match: Match, other: Match) -> Match:
        """Unpin a match in favour of another one of its request, which this returns; if it raises, the match stays."""
        with self._matches.handing_out(other):
            self.keep_quota(match.owner)
        self._matches.unpin(match)
        return other

    def keep_quota(self, usage: NamespaceUsage) -> None:
        """Evict leaves of a namespace that is above its quota, as far as they are unlocked and settled."""
        queues = usage.queues
        if queues is None:
            return
        limit = usage.quota.device_pages
        while limit is not None and usage.device_pages > limit:
            node = self._pop(queues.device)
            if node is None:
                break
            if node.host is None and self._writes_back and self.write_node(node):
                self._tree.lock(node, device=False)
                self._finish_saving([node])
            else:
                self._residency.drop(node, device=True)
        limit = usage.quota.host_pages
        while limit is not None and usage.host_pages > limit:
            node = self._pop(queues.host)
            if node is None:
                break
            self._residency.drop(node, device=False)

    def _pop(self, queue: EvictionQueue[TreeNode]) -> TreeNode | None:
        node = queue.pop()
        if node is not None:
            self._order.evicted_value = node.value
        return node

    # Windowed pools

    def evict_window_device(self, name: str, count: int) -> int:
        """Free device pages of a windowed pool; see :meth:`UnifiedRadixCache.evict_window_device`."""
        pool = self._tree.windows[name]
        self._matches.expire()
        freed = 0
        saving: list[WindowPart] = []
        try:
            while freed < count:
                part = pool.device_queue.pop()
                if part is None:
                    if saving:
                        freed += self._finish_saving_windows(saving)
                    elif not self._transfers.release_device_windows() and not self._transfers.wait(backups=False):
                        break
                    continue
                try:
                    if not self.write_window(part):
                        freed += self._residency.drop_window(part, device=True)
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

    def _finish_saving_windows(self, saving: list[WindowPart]) -> int:
        freed = 0
        try:
            if saving:
                self._transfers.release_device_windows()
            for part in saving:
                if part.device is not None and not part.device_pins:
                    freed += self._residency.drop_window(part, device=True)
        finally:
            self._order.offer_windows(saving)
            saving.clear()
        return freed

    def evict_window_host(self, name: str, count: int) -> int:
        """Free host pages of a windowed pool; see :meth:`UnifiedRadixCache.evict_window_host`."""
        pool = self._tree.windows[name]
        self._matches.expire()
        freed, waits = 0, True
        while freed < count:
            part = pool.host_queue.pop()
            if part is not None:
                freed += self._residency.drop_window(part, device=False)
                continue
            if waits and self._transfers.wait():
                continue
            waits = False
            backup = self._backups.first_holding(pool.name)
            if backup is None:
                break
            self._backups.give_up(backup)
        return freed

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
            self._transfers.start_writing()

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
                if self._controller.has_storage:
                    self._controller.storage.skipped(sum(each.pages for each in missing[number:]))
                return False
        return True

    def _write(self, node: TreeNode) -> bool:
        if node.device is None or node.pages * self._tree.page_size > self._controller.mem_pool_host.size:
            return False
        if not has_prefix_on_host(node):
            return False
        operation, parent = self._transfers.new(), node.parent
        # Whatever the eviction below frees, it is neither this node nor its prefix.
        self._tree.lock(node, device=True)
        if parent is not None:
            self._tree.lock(parent, device=False)
        try:
            queued = self._quota_allows(node) and self._transfers.write_node(operation, node)
            if not queued and self._quota_allows(node) and self.evict_host(node.pages):
                # While room was made, a load of the node or of its prefix may have failed, or a write of its prefix.
                queued = self._transfers.write_node(operation, node)
            return queued
        finally:
            if parent is not None:
                self._tree.unlock(parent, device=False)
            if node.write is not operation:
                self._tree.unlock(node, device=True)

    def _quota_allows(self, node: TreeNode) -> bool:
        """Return whether the namespace may have the node on the host too, after evicting its other leaves if needed."""
        usage = node.owner
        limit = usage.quota.host_pages
        if limit is None or usage.queues is None:
            return True
        missing = usage.host_pages + node.pages - limit
        if missing > 0 and node.pages <= limit:
            self._evict_host(usage.queues, missing)
        return usage.host_pages + node.pages <= limit

    def write_window(self, part: WindowPart) -> bool:
        """Queue a part to be written to the host; False if that has it all, or has no room."""
        if part.device is None or part.on_host >= part.on_device or part.host_pins:
            return False
        self._residency.drop_window(part, device=False)
        operation = self._transfers.new()
        operation.device_pin.hold(part, device=True)
        try:
            queued = self._transfers.write_window(operation, part)
            if not queued and self.evict_window_host(part.name, part.on_device):
                queued = self._transfers.write_window(operation, part)
            return queued
        finally:
            if part.write is not operation:
                self._tree.unpin(operation.device_pin)

    def settle_on_host(self, node: TreeNode) -> bool:
        """Wait until the node has a host part, writing it if needed; returns whether it has (the root needs none)."""
        if not self.write_node(node):
            return False
        while node.write is not None:
            self._transfers.poll(wait=True)
        return node.parent is None or node.host is not None
