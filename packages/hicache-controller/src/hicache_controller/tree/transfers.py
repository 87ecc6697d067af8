"""TreeTransfers: writes nodes to the host, loads them, and takes in what is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hicache_pools.pool_transfer import PoolHitPolicy, PoolTransfer

from ..first_error import FirstError
from ..interrupts import interrupts_held_back
from ..operations import Ack
from ..wait_bound import checked_timeout
from .backups import TreeBackups, further
from .bounded import bounded
from .events import CacheEvent, Change, Tier
from .node import Operation, Pages, TreeNode, WindowPart, pack, unpack


class TreeTransfers(TreeBackups):
    """What moves between device and host."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loads: dict[int, Operation] = {}
        self._outcomes: dict[int, bool] = {}

    # Writes

    def _ensure_host(self, node: TreeNode) -> bool:
        """Give the node and its ancestors host parts; False if the host has no room for one of them.

        The writes are queued; the next :meth:`poll` starts them, merged.
        """
        missing = [above for above in self._path(node) if above.host is None][::-1]
        for number, above in enumerate(missing):
            if not self._write(above):
                if self.controller.has_storage:
                    self.controller.storage.skipped(sum(each.pages for each in missing[number:]))
                return False
        return True

    def _write(self, node: TreeNode) -> bool:
        if node.device is None or node.pages * self.page_size > self.controller.mem_pool_host.size:
            return False
        if not self._prefix_on_host(node):
            return False
        operation, parent = self._operation([node]), node.parent
        with interrupts_held_back():
            # Whatever the eviction below frees, it is neither this node nor its prefix.
            node.device_lock += 1
            if parent is not None:
                parent.host_lock += 1
            try:
                queued = self._host_quota(node) and self._queue_node(operation, node)
                if not queued and self._host_quota(node) and self.evict_host(node.pages):
                    queued = self._queue_node(operation, node)
                return queued
            finally:
                if parent is not None:
                    self._unlock_host(parent)
                if node.write is not operation:
                    self._unlock_device(node)

    def _queue_node(self, operation: Operation, node: TreeNode) -> bool:
        """Queue the write of a node; False where the host has no room, or lost its prefix, or the device lost it."""
        # While room was made, a load of the node or of its prefix may have failed, or a write of its prefix.
        if node.device is None or not self._prefix_on_host(node):
            return False
        host = self._queue_write(operation, self._slots(unpack(node.device)))
        if host is None:
            return False
        node.host_lock += 1
        node.write = self._writes[operation.id] = operation
        self._set_host(node, self._pages(host))
        return True

    @staticmethod
    def _prefix_on_host(node: TreeNode) -> bool:
        """Tell whether the host may have the node."""
        parent = node.parent
        return parent is None or parent.parent is None or parent.host is not None

    def _queue_write(
        self, operation: Operation, slots: torch.Tensor, transfers: Sequence[PoolTransfer] = ()
    ) -> torch.Tensor | None:
        """Take host slots and queue a write; None, with nothing evicted, where a rank has too few.

        Their trees are equal, but not what their storages still read of pages that have left.
        """
        with self._reclaim.held():
            host = self.controller.write(slots, node_id=operation.id, **further(transfers))
        if self._on_all_ranks(host is not None):
            return host
        if host is not None:
            self.controller.cancel_write(operation.id)
        return None

    def _host_quota(self, node: TreeNode) -> bool:
        """Whether the namespace may have the node on the host too, after evicting its other leaves if need be."""
        books = node.owner
        limit = books.quota.host_pages
        if limit is None or books.host_queue is None:
            return True
        missing = books.host_pages + node.pages - limit
        if missing > 0 and node.pages <= limit:
            self._evict_host(books.host_queue, books.unsaved_queue, missing)
        return books.host_pages + node.pages <= limit

    def _write_windows(self, node: TreeNode) -> None:
        """Write what the prefix that ends with ``node`` needs of windowed pools, where the host has room."""
        for name in self.windows:
            for part, _ in self._window(node, name) or ():
                self._write_window(part)

    def _write_window(self, part: WindowPart) -> bool:
        """Queue a part to be written to the host; False where that has it all, or has no room."""
        if part.device is None or part.on_host >= part.on_device or part.host_pins:
            return False
        self._drop_window(part, device=False)
        operation = self._operation([])
        with interrupts_held_back():
            operation.device_pin.hold(part, device=True)
            try:
                queued = self._queue_window(operation, part)
                if not queued and self.evict_window_host(part.name, part.on_device):
                    queued = self._queue_window(operation, part)
                return queued
            finally:
                if part.write is not operation:
                    self._unpin(operation.device_pin, device=True)

    def _queue_window(self, operation: Operation, part: WindowPart) -> bool:
        """Queue the write of a part; False where the host has no room, or the device has lost it."""
        if part.device is None:
            return False
        converter = self.windows[part.name].converter
        transfer = PoolTransfer(
            part.name, device_indices=converter.slots(unpack(part.device)), hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        done = self._queue_write(operation, torch.empty(0, dtype=torch.int64), [transfer])
        if done is None or transfer.host_indices is None:
            return False
        part.host = pack(converter.pages(transfer.host_indices))
        operation.host_pin.hold(part, device=False)
        part.write = self._writes[operation.id] = operation
        return True

    def _finish_write(self, operation: Operation, *, failed: bool) -> None:
        operation.done, operation.failed = True, failed
        parts = [part for part in operation.host_pin.parts if part.write is operation]
        self._unpin_both(operation.device_pin, operation.host_pin)
        with FirstError() as errors:
            for part in parts:
                part.write = None
                if part.host is None:
                    continue
                if failed:
                    part.host = None
                    self._forget_empty(part)
                else:
                    self._tell_window(Change.STORED, Tier.HOST, part, part.on_host)
                    with errors.kept():
                        self._store(part.node)
            if operation.nodes:
                self._finish_node_write(operation, errors, failed=failed)

    def _finish_node_write(self, operation: Operation, errors: FirstError, *, failed: bool) -> None:
        tail = operation.nodes[0]
        for node in operation.nodes:
            # One by one: forgetting a node drops what below it has no write of its own.
            node.write = None
            if failed:
                with errors.kept():
                    self._forget_host(node)
        if operation.holds_device:
            self._unlock_device(tail)
        self._unlock_host(tail)
        if failed:
            # A node that left the device on the strength of this write is nowhere now.
            self._remove_absent(operation.nodes, errors)
            return
        # All of them lie on the tail's path; heads go first.
        for node in [n for n in self._path(tail) if n in operation.nodes][::-1]:
            self._tell(Change.STORED, Tier.HOST, node)
            with errors.kept():
                self._store(node)

    def _remove_absent(self, nodes: Sequence[TreeNode], errors: FirstError) -> None:
        for node in nodes:
            if not node.present and node.parent is not None and node.parent.child(node.key(0)) is node:
                with errors.kept():
                    self._remove(node)

    def _forget_host(self, node: TreeNode) -> None:
        """Take back the host part of a failed write (the controller freed the slots), with what hangs on it."""
        try:
            self._drop_children(node, device=False)
        finally:
            self._clear_host(node)

    def _forget_device(self, node: TreeNode) -> None:
        """Take back the device part of a failed load (the controller freed the slots), with what hangs on it."""
        try:
            self._drop_children(node, device=True)
        finally:
            self._clear_device(node)

    def _abandon(self, operation: Operation, running: dict[int, Operation], *, device: bool) -> None:
        """Let a write or load that is under way, or whose ack is next, count as failed."""
        del running[operation.id]
        failed = self._outcomes.pop(operation.id, None)
        with FirstError() as errors:
            if failed is None:
                with errors.kept():
                    (self.controller.cancel_load if device else self.controller.cancel_write)(operation.id)
            elif not failed:
                # It is done, so its slots are the tree's to give back.
                for node in operation.nodes:
                    with errors.kept():
                        if device and node.device is not None:
                            self.controller.evict_device(self._slots(unpack(node.device)))
                        elif not device and node.host is not None:
                            self.controller.evict_host(self._slots(unpack(node.host)))
                for part in operation.device_pin.parts if device else operation.host_pin.parts:
                    pages = part.device if device else part.host
                    if pages is not None:
                        with errors.kept():
                            self._free_window_pages(part.name, unpack(pages), device=device)
            (self._finish_load if device else self._finish_write)(operation, failed=True)

    def _drop_children(self, node: TreeNode, *, device: bool) -> None:
        """Take everything below a node out of a tier.

        What is on its way there may well arrive, but without the node nobody could reach it.
        """
        running = self._loads if device else self._writes
        with FirstError() as errors:
            for child in [c for c in node.all_children() if (c.device if device else c.host) is not None]:
                operation = child.load if device else child.write
                with errors.kept():
                    if operation is None:
                        self._drop_child(child, device=device)
                    elif operation.id in running:
                        self._abandon(operation, running, device=device)

    def _drop_child(self, child: TreeNode, *, device: bool) -> None:
        try:
            self._drop_children(child, device=device)
        finally:
            (self._drop_device if device else self._drop_host)(child)

    # Loads

    def _queue_load(
        self, operation: Operation, slots: torch.Tensor, transfers: Sequence[PoolTransfer]
    ) -> torch.Tensor | None:
        """Take device slots and queue a load; None, with nothing evicted, where a rank has too few."""
        with self._reclaim.held():
            device = self.controller.load(slots, node_id=operation.id, **further(transfers))
        if self._on_all_ranks(device is not None):
            return device
        if device is not None:
            self.controller.cancel_load(operation.id)
        return None

    def _start_load(
        self,
        operation: Operation,
        nodes: list[TreeNode],
        pages: Pages,
        parts: dict[str, list[WindowPart]],
        transfers: list[PoolTransfer],
    ) -> None:
        """Take note of a load that the controller has queued, and start it."""
        operation.nodes = nodes[::-1]
        at = 0
        for node in nodes:
            node.load = operation
            self._set_device(node, pages[at : at + node.pages])
            at += node.pages
        if nodes:
            nodes[-1].device_lock += 1
            nodes[-1].host_lock += 1
        for transfer in transfers:
            if transfer.device_indices is None:
                continue
            got = self.windows[str(transfer.name)].converter.pages(transfer.device_indices.cpu())
            at = 0
            for part in parts[str(transfer.name)]:
                part.device, part.load = pack(got[at : at + part.on_host]), operation
                at += part.on_host
                operation.device_pin.hold(part, device=True)
                operation.host_pin.hold(part, device=False)
        self._loads[operation.id] = operation
        operation.consumer = self.controller.start_loading()

    def _finish_load(self, operation: Operation, *, failed: bool) -> None:
        operation.done, operation.failed = True, failed
        parts = [part for part in operation.device_pin.parts if part.load is operation]
        self._unpin_both(operation.device_pin, operation.host_pin)
        for part in parts:
            part.load = None
            if part.device is None:
                continue
            if failed:
                part.device = None
                self._forget_empty(part)
            else:
                self._tell_window(Change.STORED, Tier.DEVICE, part, part.on_device)
        if not operation.nodes:
            return
        tail = operation.nodes[0]
        with FirstError() as errors:
            for node in operation.nodes:
                node.load = None
                if failed:
                    with errors.kept():
                        self._forget_device(node)
                else:
                    self._tell(Change.STORED, Tier.DEVICE, node)
            self._unlock_device(tail)
            self._unlock_host(tail)
            # A node whose host part went meanwhile, with the failed write of one above it, is nowhere now.
            self._remove_absent(operation.nodes, errors)

    # Transfers in flight

    @bounded
    def poll(self, *, wait: bool = False) -> bool:
        """Take in finished transfers (with ``wait``, at least one where any is in flight); True if there were any.

        What a callback of the engine, or the listener, raises is raised once all are taken in; of several, the first.
        Storage is waited for within the scheduler's bound, so that False may come while backups run; see :meth:`drain`.
        """
        # Waits let interrupts in; elsewhere these would lose what the controller has told and no node knows yet.
        with interrupts_held_back(), FirstError() as errors, self._listener_kept(errors):
            self.controller.start_writing()
            wait_writes = wait and bool(self._writes)
            wait_loads = wait and bool(self._loads) and not wait_writes
            wait_backups = wait and bool(self._backups) and not wait_writes and not wait_loads
            seen = False
            # Also where none is known here: what was given up is let go by the controller's poll.
            with errors.kept():
                seen |= self._take_in(self.controller.poll_writes(wait=wait_writes), self._writes, self._finish_write)
            with errors.kept():
                seen |= self._take_in(self.controller.poll_loads(wait=wait_loads), self._loads, self._finish_load)
            if errors.error is not None:
                writes, loads = self.controller.kept_acks()
                with errors.kept():
                    self._take_in(writes, self._writes, self._finish_write)
                with errors.kept():
                    self._take_in(loads, self._loads, self._finish_load)
            if self._backups:
                with errors.kept():
                    seen |= self._take_in_backups(self.controller.poll_backups(wait=wait_backups))
            self._follow_storage()
        return seen

    @contextmanager
    def _listener_kept(self, errors: FirstError) -> Iterator[None]:
        """Keep what the listener raises from coming between two steps of the books."""
        listener = self.listener

        def tell(event: CacheEvent) -> None:
            with errors.kept():
                if listener is not None:
                    listener(event)

        self.listener = None if listener is None else tell
        try:
            yield
        finally:
            self.listener = listener

    def _take_in(self, acks: Sequence[Ack], running: dict[int, Operation], finish: Callable[..., None]) -> bool:
        """Finish the operations of some acks; True where there were any."""
        # One that fails may settle others of the same acks, so all outcomes are known before the first is taken in.
        self._outcomes = {number: ack.error is not None for ack in acks for number in ack.node_ids if number in running}
        with FirstError() as errors:
            # Windows come first: a node that is nowhere after its write takes its windows along, with what they have.
            for number in sorted(self._outcomes, key=lambda number: bool(running[number].nodes)):
                if number not in self._outcomes:
                    continue
                failed = self._outcomes.pop(number)
                with errors.kept():
                    finish(running.pop(number), failed=failed)
        return bool(acks)

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no transfer is in flight; tell whether that came.

        Parameters
        ----------
        timeout
            Seconds to wait for storage; with 0 this is a poll that tells. By default as long as it gets on: as another
            page is stored within its ``timeout_seconds``.
        """
        timeout = checked_timeout(timeout)
        with self.controller.storage.one_call(math.inf if timeout is None else timeout):
            self.poll()
            while self._wait():
                pass
        return not (self._writes or self._loads or self._backups)

    def _wait(self, *, backups: bool = True) -> bool:
        """Wait for one transfer, or with ``backups`` for one of these where no other is left; False if none came."""
        if not (self._writes or self._loads) and not (backups and self._backups):
            return False
        return self.poll(wait=True)

    def _settle_writes(self, node: TreeNode) -> None:
        """Wait for writes of parts that are on the host alone, up to the root: such a write may still fail."""
        for above in list(self._path(node)):
            while above.write is not None and above.device is None:
                self.poll(wait=True)

    def _is_alive(self, node: TreeNode) -> bool:
        """Whether a node is still in the tree."""
        parent = node.parent
        return parent is None or (parent.child(node.key(0)) is node and node.present)
