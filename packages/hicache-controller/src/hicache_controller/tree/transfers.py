"""Transfers: what moves between device and host, from the controller's queue to its outcome in the tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hicache_pools.pool_transfer import PoolTransfer

from ..controller import HiCacheController
from ..engine_calls import EngineCalls
from ..operations import Ack
from .backups import Backups
from .components import trailing
from .events import Change, Events, Tier
from .node import Operation, TreeNode, WindowPart, pack, unpack
from .radix_tree import RadixTree
from .ranks import Ranks
from .reclaim import Reclaim
from .residency import Residency


class LoadParts(NamedTuple):
    """Window parts that a load brings from one pool, and their transfer."""

    parts: list[WindowPart]
    transfer: PoolTransfer


class Transfers:
    """Writes and loads in flight; makes no room for them.

    Attributes
    ----------
    writes, loads
        Under way, by id.
    """

    def __init__(
        self,
        tree: RadixTree,
        residency: Residency,
        backups: Backups,
        controller: HiCacheController,
        events: Events,
        reclaim: Reclaim,
        ranks: Ranks,
        calls: EngineCalls,
    ) -> None:
        self._tree = tree
        self._residency = residency
        self._backups = backups
        self._controller = controller
        self._events = events
        self._reclaim = reclaim
        self._ranks = ranks
        self._calls = calls
        self.writes: dict[int, Operation] = {}
        self.loads: dict[int, Operation] = {}
        self._outcomes: dict[int, bool] = {}

    def new(self) -> Operation:
        """Return an operation that moves nothing yet."""
        return Operation(self._tree.new_id(), [])

    def running(self, *, device: bool) -> dict[int, Operation]:
        """Return the operations whose target is the device, or the host."""
        return self.loads if device else self.writes

    # Writes

    def queue_write(
        self, operation: Operation, slots: torch.Tensor, transfers: Sequence[PoolTransfer] = ()
    ) -> torch.Tensor | None:
        """Take host slots and queue a write; None, with nothing taken, if a rank has too few.

        Ranks have equal trees, but their storages may still read different pages that have left.
        """
        with self._reclaim.held():
            host = self._controller.write(slots, node_id=operation.id, pool_transfers=transfers)
        if self._ranks.all(host is not None):
            return host
        if host is not None:
            self._controller.cancel_write(operation.id)
        return None

    def write_node(self, operation: Operation, node: TreeNode) -> bool:
        """Queue the write of a node; False if the host has no room or not its prefix, or the device has lost it."""
        if node.device is None or not has_prefix_on_host(node):
            return False
        host = self.queue_write(operation, self._residency.slots(unpack(node.device)))
        if host is None:
            return False
        operation.nodes.append(node)
        self._tree.lock(node, device=False)
        node.write = self.writes[operation.id] = operation
        self._tree.set_part(node, self._residency.pages(host), device=False)
        return True

    def write_window(self, operation: Operation, part: WindowPart) -> bool:
        """Queue the write of a part; False if the host has no room, or the device has lost it."""
        if part.device is None:
            return False
        transfer = trailing(part.name, device_indices=self._residency.slots(unpack(part.device), part.name))
        done = self.queue_write(operation, torch.empty(0, dtype=torch.int64), [transfer])
        if done is None or transfer.host_indices is None:
            return False
        part.host = pack(self._residency.pages(transfer.host_indices, part.name))
        operation.host_pin.hold(part, device=False)
        part.write = self.writes[operation.id] = operation
        return True

    def start_writing(self) -> None:
        """Start what is queued, merged."""
        self._controller.start_writing()

    def release_device(self) -> bool:
        """Let writes go on without their device parts; returns whether any held one.

        The controller makes the next user of the slots wait until the write has read them.
        """
        held = [operation for operation in self.writes.values() if operation.nodes and operation.holds_device]
        if held:
            self.start_writing()
        for operation in held:
            operation.holds_device = False
            self._tree.unlock(operation.nodes[0], device=True)
        return bool(held)

    def release_device_windows(self) -> bool:
        """Let writes of windows go on without their device parts; returns whether any held one."""
        held = [operation for operation in self.writes.values() if operation.device_pin.parts]
        if held:
            self.start_writing()
        for operation in held:
            self._tree.unpin(operation.device_pin)
        return bool(held)

    def _finish_write(self, operation: Operation, *, failed: bool) -> None:
        operation.done, operation.failed = True, failed
        parts = [part for part in operation.host_pin.parts if part.write is operation]
        self._tree.unpin(operation.device_pin, operation.host_pin)
        for part in parts:
            part.write = None
            if part.host is None:
                continue
            if failed:
                part.host = None
                self._tree.remove_empty(part)
            else:
                self._events.window(Change.STORED, Tier.HOST, part, part.on_host)
                self._calls.call(self._backups.store, part.node)
        if not operation.nodes:
            return
        tail = operation.nodes[0]
        for node in operation.nodes:
            # One by one: to clear a node drops what is below it and has no write of its own.
            node.write = None
            if failed:
                self._clear_failed(node, device=False)
        if operation.holds_device:
            self._tree.unlock(tail, device=True)
        self._tree.unlock(tail, device=False)
        if failed:
            self._remove_absent(operation.nodes)
            return
        # All of them are on the tail's path; heads go first.
        for node in [node for node in tail.path() if node in operation.nodes][::-1]:
            self._events.node(Change.STORED, Tier.HOST, node)
            self._calls.call(self._backups.store, node)

    # Loads

    def queue_load(
        self, operation: Operation, slots: torch.Tensor, transfers: Sequence[PoolTransfer]
    ) -> torch.Tensor | None:
        """Take device slots and queue a load; None, with nothing taken, if a rank has too few."""
        with self._reclaim.held():
            device = self._controller.load(slots, node_id=operation.id, pool_transfers=transfers)
        if self._ranks.all(device is not None):
            return device
        if device is not None:
            self._controller.cancel_load(operation.id)
        return None

    def load(self, nodes: list[TreeNode], slots: torch.Tensor, windows: Sequence[LoadParts]) -> bool:
        """Load nodes, heads first, and window parts; False if a rank has no room."""
        operation = self.new()
        target = self.queue_load(operation, slots, [each.transfer for each in windows])
        if target is None:
            return False
        pages = self._residency.pages(target)
        operation.nodes = nodes[::-1]
        at = 0
        for node in nodes:
            node.load = operation
            self._tree.set_part(node, pages[at : at + node.pages], device=True)
            at += node.pages
        if nodes:
            self._tree.lock(nodes[-1], device=True)
            self._tree.lock(nodes[-1], device=False)
        for parts, transfer in windows:
            if transfer.device_indices is None:
                continue
            pages = self._residency.pages(transfer.device_indices, str(transfer.name))
            at = 0
            for part in parts:
                part.device, part.load = pack(pages[at : at + part.on_host]), operation
                at += part.on_host
                operation.device_pin.hold(part, device=True)
                operation.host_pin.hold(part, device=False)
        self.loads[operation.id] = operation
        operation.consumer = self.start_loading()
        return True

    def start_loading(self) -> int:
        """Start the loads that are queued; returns their consumer id."""
        return self._controller.start_loading()

    def _finish_load(self, operation: Operation, *, failed: bool) -> None:
        operation.done, operation.failed = True, failed
        parts = [part for part in operation.device_pin.parts if part.load is operation]
        self._tree.unpin(operation.device_pin, operation.host_pin)
        for part in parts:
            part.load = None
            if part.device is None:
                continue
            if failed:
                part.device = None
                self._tree.remove_empty(part)
            else:
                self._events.window(Change.STORED, Tier.DEVICE, part, part.on_device)
        if not operation.nodes:
            return
        for node in operation.nodes:
            node.load = None
            if failed:
                self._clear_failed(node, device=True)
            else:
                self._events.node(Change.STORED, Tier.DEVICE, node)
        self._tree.unlock(operation.nodes[0], device=True)
        self._tree.unlock(operation.nodes[0], device=False)
        self._remove_absent(operation.nodes)

    # Transfers that failed

    def _clear_failed(self, node: TreeNode, *, device: bool) -> None:
        """Clear the part that a failed transfer was to fill (the controller freed it), and what depends on it."""
        self._drop_children(node, device=device)
        self._tree.clear_part(node, device=device)

    def _drop_children(self, node: TreeNode, *, device: bool) -> None:
        """Take everything below a node off a tier.

        What is on its way there may well arrive, but without the node no request could reach it.
        """
        for child in [c for c in node.all_children() if (c.device if device else c.host) is not None]:
            operation = child.load if device else child.write
            if operation is None:
                self._drop_children(child, device=device)
                self._calls.call(self._residency.drop, child, device=device)
            elif operation.id in self.running(device=device):
                self.abandon(operation, device=device)

    def _remove_absent(self, nodes: Sequence[TreeNode]) -> None:
        """Remove nodes that are in no tier any more: their other part went while the transfer was under way."""
        for node in nodes:
            if not node.present and node.parent is not None and node.parent.child(node.key(0)) is node:
                self._residency.remove(node)

    def abandon(self, operation: Operation, *, device: bool) -> None:
        """Count a transfer that is under way, or whose outcome is about to be handled, as failed."""
        del self.running(device=device)[operation.id]
        failed = self._outcomes.pop(operation.id, None)
        if failed is None:
            self._calls.call(self._controller.cancel_load if device else self._controller.cancel_write, operation.id)
        elif not failed:
            # It is done, so its slots are the tree's to give back.
            pin = operation.device_pin if device else operation.host_pin
            moved = [(None, node.device if device else node.host) for node in operation.nodes]
            for pool, packed in moved + [(part.name, part.device if device else part.host) for part in pin.parts]:
                if packed is not None:
                    self._calls.call(self._residency.free, unpack(packed), device=device, pool=pool)
        (self._finish_load if device else self._finish_write)(operation, failed=True)

    # Outcomes

    def poll(self, *, wait: bool = False) -> bool:
        """Handle what is done; see :meth:`UnifiedRadixCache.poll`."""
        controller, running = self._controller, self._backups.running
        controller.start_writing()
        wait_writes = wait and bool(self.writes)
        wait_loads = wait and not wait_writes and bool(self.loads)
        wait_backups = wait and not wait_writes and not wait_loads
        # Also if none is known here: the controller's polls free the slots of what was given up.
        seen = self._finish(controller.poll_writes(wait=wait_writes), self.writes, self._finish_write)
        seen |= self._finish(controller.poll_loads(wait=wait_loads), self.loads, self._finish_load)
        if running:
            seen |= self._backups.finish(controller.poll_backups(wait=wait_backups))
        self._backups.follow_storage()
        self._calls.raise_first()
        return seen

    def _finish(self, acks: Sequence[Ack], running: dict[int, Operation], finish: Callable[..., None]) -> bool:
        """Finish the operations of some acks; returns whether there were any."""
        if not acks:
            return False
        # One that fails may abandon others of the same acks, so all outcomes are known before the first is handled.
        self._outcomes = {number: ack.error is not None for ack in acks for number in ack.node_ids if number in running}
        # Windows come first: a node that is in no tier after its write takes its windows along, with what they have.
        for number in sorted(self._outcomes, key=lambda number: bool(running[number].nodes)):
            if number in self._outcomes:
                failed = self._outcomes.pop(number)
                finish(running.pop(number), failed=failed)
        return True

    def wait(self, *, backups: bool = True) -> bool:
        """Wait for one transfer, or with ``backups`` for a backup if no other is left; returns whether one ended."""
        if not (self.writes or self.loads) and not (backups and self._backups.running):
            return False
        return self.poll(wait=True)

    def drain(self, timeout: float | None) -> bool:
        """Wait until nothing is in flight; see :meth:`UnifiedRadixCache.drain`."""
        with self._controller.storage.one_call(math.inf if timeout is None else timeout):
            self.poll()
            while self.wait():
                pass
        return not (self.writes or self.loads or self._backups.running)

    def wait_for(self, operation: Operation, give_back: Callable[[], None], *, device: bool) -> bool:
        """Wait for an operation that moves no nodes; returns whether it succeeded.

        If the wait is interrupted, what was taken for the operation goes back, by ``give_back`` if it has succeeded.
        """
        self.running(device=device)[operation.id] = operation
        try:
            while not operation.done:
                self.poll(wait=True)
        except BaseException:
            if not operation.done:
                self.abandon(operation, device=device)
            elif not operation.failed:
                give_back()
            raise
        return not operation.failed

    def settle_writes(self, node: TreeNode) -> None:
        """Wait for writes of parts that are on the host alone, up to the root: such a write may still fail."""
        for above in list(node.path()):
            while above.write is not None and above.device is None:
                self.poll(wait=True)

    def clear(self) -> None:
        """Forget every transfer."""
        self.writes.clear()
        self.loads.clear()


def has_prefix_on_host(node: TreeNode) -> bool:
    """Return whether the host may have the node."""
    parent = node.parent
    return parent is None or parent.parent is None or parent.host is not None
