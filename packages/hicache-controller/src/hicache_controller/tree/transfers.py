"""Transfers: what moves between device and host, from the controller's queue to its outcome in the tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hicache_pools.pool_transfer import PoolTransfer

from ..operations import Ack
from .backups import Backups
from .components import trailing
from .events import Change, tier
from .node import NO_SLOTS, Operation, TreeNode, WindowPart, pack, packed_count, unpack
from .pools import Pools
from .radix_tree import RadixTree


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

    def __init__(self, tree: RadixTree, pools: Pools, backups: Backups) -> None:
        self._tree = tree
        self._pools = pools
        self._backups = backups
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

    def queue(
        self, operation: Operation, slots: torch.Tensor, transfers: Sequence[PoolTransfer] = (), *, device: bool
    ) -> torch.Tensor | None:
        """Take slots of the target and queue a load or a write; None, with nothing taken, if a rank has too few.

        Ranks have equal trees, but their storages may still read different pages that have left.
        """
        controller = self._pools.controller
        start, cancel = (
            (controller.load, controller.cancel_load) if device else (controller.write, controller.cancel_write)
        )
        with self._pools.reclaim.held():
            target = start(slots, node_id=operation.id, pool_transfers=transfers)
        if self._pools.on_all_ranks(target is not None):
            return target
        if target is not None:
            cancel(operation.id)
        return None

    def write_node(self, operation: Operation, node: TreeNode) -> bool:
        """Queue the write of a node; False if the host has no room or not its prefix, or the device has lost it."""
        if node.device is None or not has_prefix_on_host(node):
            return False
        host = self.queue(operation, self._pools.slots(unpack(node.device)), device=False)
        if host is None:
            return False
        operation.nodes.append(node)
        self._tree.lock(node, device=False)
        node.write = self.writes[operation.id] = operation
        self._tree.set_part(node, self._pools.pages(host), device=False)
        return True

    def write_window(self, operation: Operation, part: WindowPart) -> bool:
        """Queue the write of a part; False if the host has no room, or the device has lost it."""
        if part.device is None:
            return False
        transfer = trailing(part.name, device_indices=self._pools.slots(unpack(part.device), part.name))
        done = self.queue(operation, NO_SLOTS, [transfer], device=False)
        if done is None or transfer.host_indices is None:
            return False
        part.host = pack(self._pools.pages(transfer.host_indices, part.name))
        operation.host_pin.hold(part, device=False)
        part.write = self.writes[operation.id] = operation
        return True

    def start_writing(self) -> None:
        """Start what is queued, merged."""
        self._pools.controller.start_writing()

    def release_device(self, *, windows: bool) -> bool:
        """Unlock the device parts of writes of nodes, or of windows; returns whether any held one.

        The controller makes the next user of the slots wait until the write has read them.
        """
        if windows:
            held = [operation for operation in self.writes.values() if operation.device_pin.parts]
        else:
            held = [operation for operation in self.writes.values() if operation.nodes and operation.holds_device]
        if held:
            self.start_writing()
        for operation in held:
            if windows:
                self._tree.unpin(operation.device_pin)
            else:
                operation.holds_device = False
                self._tree.unlock(operation.nodes[0], device=True)
        return bool(held)

    # Loads

    def load(self, nodes: list[TreeNode], slots: torch.Tensor, windows: Sequence[LoadParts]) -> bool:
        """Load nodes, heads first, and window parts; False if a rank has no room."""
        operation = self.new()
        target = self.queue(operation, slots, [each.transfer for each in windows], device=True)
        if target is None:
            return False
        pages = self._pools.pages(target)
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
            pages = self._pools.pages(transfer.device_indices, str(transfer.name))
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
        return self._pools.controller.start_loading()

    # Ends

    def _end(self, operation: Operation, *, device: bool, failed: bool) -> None:
        """Note that a transfer has ended; the controller freed what a failed one was to fill."""
        operation.done, operation.failed = True, failed
        pin, to = operation.device_pin if device else operation.host_pin, tier(device=device)
        parts = [part for part in pin.parts if part.transfer(device=device) is operation]
        self._tree.unpin(operation.device_pin, operation.host_pin)
        for part in parts:
            part.end_transfer(device=device)
            pages = packed_count(part.part(device=device))
            if failed:
                self._tree.clear_window(part, device=device)
            elif pages:
                self._pools.events.window(Change.STORED, to, part, pages)
                if not device:
                    self._pools.calls.call(self._backups.store, part.node)
        if not operation.nodes:
            return
        tail = operation.nodes[0]
        for node in operation.nodes:
            # One by one: to clear a node drops what is below it and has no transfer of its own.
            node.end_transfer(device=device)
            if failed:
                self._drop_children(node, device=device)
                self._tree.clear_part(node, device=device)
        if operation.holds_device:
            self._tree.unlock(tail, device=True)
        self._tree.unlock(tail, device=False)
        # All of them are on the tail's path; heads go first.
        for node in [node for node in tail.path() if node in operation.nodes][::-1] if not failed else ():
            self._pools.events.node(Change.STORED, to, node)
            if not device:
                self._pools.calls.call(self._backups.store, node)
        for node in operation.nodes:
            # Its other part may have gone while the transfer was under way.
            if not node.present and node.parent is not None and node.parent.child(node.key(0)) is node:
                self._pools.remove(node)

    # Transfers that failed

    def _drop_children(self, node: TreeNode, *, device: bool) -> None:
        """Take everything below a node off a tier.

        What is on its way there may well arrive, but without the node no request could reach it.
        """
        for child in [child for child in node.all_children() if child.part(device=device) is not None]:
            operation = child.transfer(device=device)
            if operation is None:
                self._drop_children(child, device=device)
                self._pools.calls.call(self._pools.drop, child, device=device)
            elif operation.id in self.running(device=device):
                self.abandon(operation, device=device)

    def abandon(self, operation: Operation, *, device: bool) -> None:
        """Count a transfer that is under way, or whose outcome is about to be handled, as failed."""
        controller, call = self._pools.controller, self._pools.calls.call
        del self.running(device=device)[operation.id]
        failed = self._outcomes.pop(operation.id, None)
        if failed is None:
            call(controller.cancel_load if device else controller.cancel_write, operation.id)
        elif not failed:
            # It is done, so its slots are the tree's to give back.
            pin = operation.device_pin if device else operation.host_pin
            moved = [(None, node.part(device=device)) for node in operation.nodes]
            for pool, packed in moved + [(part.name, part.part(device=device)) for part in pin.parts]:
                if packed is not None:
                    call(self._pools.free, unpack(packed), device=device, pool=pool)
        self._end(operation, device=device, failed=True)

    # Outcomes

    def poll_if_busy(self, *, wait: bool) -> bool:
        """Poll in a public call of its own, but hold nothing where there is nothing to do."""
        controller, calls = self._pools.controller, self._pools.calls
        calls.check_thread()
        if controller.idle and not (self.writes or self.loads) and self._backups.idle:
            return False
        with calls:
            return self.poll(wait=wait)

    def poll(self, *, wait: bool = False) -> bool:
        """Handle what is done; see :meth:`UnifiedRadixCache.poll`."""
        controller, running = self._pools.controller, self._backups.running
        controller.start_writing()
        wait_writes = wait and bool(self.writes)
        wait_loads = wait and not wait_writes and bool(self.loads)
        wait_backups = wait and not wait_writes and not wait_loads
        # Also if none is known here: the controller's polls free the slots of what was given up.
        seen = self._finish(controller.poll_writes(wait=wait_writes), device=False)
        seen |= self._finish(controller.poll_loads(wait=wait_loads), device=True)
        if running:
            seen |= self._backups.finish(controller.poll_backups(wait=wait_backups))
        self._backups.follow_storage()
        self._pools.calls.raise_first()
        return seen

    def _finish(self, acks: Sequence[Ack], *, device: bool) -> bool:
        """Finish the operations of some acks; returns whether there were any."""
        if not acks:
            return False
        running = self.running(device=device)
        # One that fails may abandon others of the same acks, so all outcomes are known before the first is handled.
        self._outcomes = {number: ack.error is not None for ack in acks for number in ack.node_ids if number in running}
        # Windows come first: a node that is in no tier after its write takes its windows along, with what they have.
        for number in sorted(self._outcomes, key=lambda number: bool(running[number].nodes)):
            if number in self._outcomes:
                failed = self._outcomes.pop(number)
                self._end(running.pop(number), device=device, failed=failed)
        return True

    def wait(self, *, backups: bool = True) -> bool:
        """Wait for one transfer, or with ``backups`` for a backup if no other is left; returns whether one ended."""
        if not (self.writes or self.loads) and not (backups and self._backups.running):
            return False
        return self.poll(wait=True)

    def drain(self, timeout: float | None) -> bool:
        """Wait until nothing is in flight; see :meth:`UnifiedRadixCache.drain`."""
        with self._pools.controller.storage.one_call(math.inf if timeout is None else timeout):
            self.poll()
            while self.wait():
                pass
        return not (self.writes or self.loads or self._backups.running)

    def wait_for(self, operation: Operation, give_back: Callable[[], None], *, device: bool) -> bool:
        """Wait for an operation that moves no nodes; return whether it succeeded.

        An interrupted wait frees the slots taken for the operation; for a finished one, ``give_back`` does that.
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
