"""Transfers: what moves between device and host, from the controller's queue to its outcome in the tree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ..operations import Ack
from .backups import Backups
from .components import trailing
from .events import Change
from .node import Held, Operation, PagesByPool, TreeNode, WindowPart, joined
from .pools import Pools


class Transfers:
    """Writes and loads in flight; makes no room for them.

    Attributes
    ----------
    writes, loads
        Under way, by id.
    """

    def __init__(self, pools: Pools, backups: Backups) -> None:
        self._tree = pools.tree
        self._pools = pools
        self._backups = backups
        self.writes: dict[int, Operation] = {}
        self.loads: dict[int, Operation] = {}
        self._outcomes: dict[int, bool] = {}

    def _running(self, *, device: bool) -> dict[int, Operation]:
        return self.loads if device else self.writes

    # Starts

    def queue(self, operation: Operation, pages: PagesByPool) -> PagesByPool | None:
        """Take pages of the target for those given, and queue the transfer; None, with nothing taken, if too few.

        That may be on another rank: ranks have equal trees, but their storages may still read different pages that have
        left.
        """
        device, controller = operation.device, self._pools.controller
        start = controller.load if device else controller.write
        slots = {pool: self._pools.slots(mine, pool) for pool, mine in pages.items()}
        anchor = slots.pop(self._pools.anchor)
        transfers = [trailing(pool, mine, on_device=not device) for pool, mine in slots.items() if len(mine)]
        with self._pools.reclaim.held():
            target = start(anchor, node_id=operation.id, pool_transfers=transfers)
        target = self._pools.on_all_ranks(target, lambda _: self._cancel(operation))
        if target is None:
            return None
        windows = {str(each.name): self._pools.pages_of(each, device=device) for each in transfers}
        return {self._pools.anchor: self._pools.pages(target), **windows}

    def _cancel(self, operation: Operation) -> None:
        controller = self._pools.controller
        (controller.cancel_load if operation.device else controller.cancel_write)(operation.id)

    def move(self, nodes: Sequence[TreeNode], windows: Mapping[str, Sequence[WindowPart]], *, device: bool) -> bool:
        """Load or write nodes, heads first, and window parts by pool; False if a rank has no room, or some have gone.

        A load is started at once; the next poll starts what is to be written, merged.
        """
        moved: dict[str, Sequence[Held]] = {self._pools.anchor: nodes, **windows}
        if any(each.part(device=not device) is None for held in moved.values() for each in held):
            return False
        operation = Operation(self._tree.new_id(), device)
        target = self.queue(operation, {pool: joined(held, device=not device) for pool, held in moved.items()})
        if target is None:
            return False
        self._running(device=device)[operation.id] = operation
        operation.nodes = [*reversed(nodes)]
        if nodes:
            self._tree.lock(nodes[-1], device=True)
            self._tree.lock(nodes[-1], device=False)
        for pool, held in moved.items():
            first = 0
            for each in held:
                end = first + each.count(device=not device)
                each.set_transfer(operation, device=device)
                self._tree.set_part(each, target[pool][first:end], device=device)
                if isinstance(each, WindowPart):
                    operation.device_pin.hold(each)
                    operation.host_pin.hold(each)
                first = end
        if device:
            operation.consumer = self._pools.controller.start_loading()
        return True

    def release_device(self, *, windows: bool) -> bool:
        """Unlock the device parts of writes of nodes, or of windows; returns whether any held one.

        The controller makes the next user of the slots wait until the write has read them.
        """
        held = [each for each in self.writes.values() if each.holds_device and bool(each.nodes) is not windows]
        if held:
            self._pools.controller.start_writing()
        for operation in held:
            operation.holds_device = False
            self._tree.unpin(operation.device_pin)
            if operation.nodes:
                self._tree.unlock(operation.nodes[0], device=True)
        return bool(held)

    def free_device(self, *, windows: bool) -> bool:
        """Unlock device parts as :meth:`release_device`, or wait for one transfer; False if there is nothing to do."""
        return self.release_device(windows=windows) or self.wait(backups=False)

    # Ends

    def _end(self, operation: Operation, *, failed: bool) -> None:
        """Note that a transfer has ended; the controller freed what a failed one was to fill."""
        device = operation.device
        operation.failed = failed
        parts = [part for part in operation.target_pin.parts if part.transfer(device=device) is operation]
        self._tree.unpin(operation.device_pin, operation.host_pin)
        for part in parts:
            part.set_transfer(None, device=device)
            if failed:
                self._tree.clear_part(part, device=device)
            elif part.count(device=device):
                self._arrived(part, part.node, device=device)
        if not operation.nodes:
            return
        tail = operation.nodes[0]
        for node in operation.nodes:
            # One by one: to clear a node drops what is below it and has no transfer of its own.
            node.set_transfer(None, device=device)
            if failed:
                self._drop_children(node, device=device)
                self._tree.clear_part(node, device=device)
        if operation.holds_device:
            self._tree.unlock(tail, device=True)
        self._tree.unlock(tail, device=False)
        for node in operation.heads_first() if not failed else ():
            self._arrived(node, node, device=device)
        for node in operation.nodes:
            # Its other part may have gone while the transfer was under way.
            if not node.present and node.parent is not None and node.parent.child(node.key(0)) is node:
                self._pools.remove(node)

    def _arrived(self, held: Held, node: TreeNode, *, device: bool) -> None:
        self._pools.events.held(Change.STORED, held, device=device)
        if not device:
            self._pools.calls.call(self._backups.store, node)

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
            elif operation.id in self._running(device=device):
                self.abandon(operation)

    def abandon(self, operation: Operation) -> None:
        """Count a transfer that is under way, or whose outcome is about to be handled, as failed."""
        device, call = operation.device, self._pools.calls.call
        del self._running(device=device)[operation.id]
        failed = self._outcomes.pop(operation.id, None)
        if failed is None:
            call(self._cancel, operation)
        elif not failed:
            # It is done, so its slots are the tree's to give back.
            moved: list[Held] = [*operation.nodes, *operation.target_pin.parts]
            for held in moved:
                _, pool = self._pools.events.place(held)
                if held.part(device=device) is not None:
                    call(self._pools.free, joined([held], device=device), device=device, pool=pool)
        self._end(operation, failed=True)

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
        running = self._running(device=device)
        # One that fails may abandon others of the same acks, so all outcomes are known before the first is handled.
        self._outcomes = {number: ack.error is not None for ack in acks for number in ack.node_ids if number in running}
        # Windows come first: a node that is in no tier after its write takes its windows along, with what they have.
        for number in sorted(self._outcomes, key=lambda number: bool(running[number].nodes)):
            if number in self._outcomes:
                self._end(running.pop(number), failed=self._outcomes.pop(number))
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

    def wait_for(self, operation: Operation, give_back: Callable[[], None]) -> bool:
        """Start an operation that moves no nodes, and wait for it; return whether it succeeded.

        An interrupted wait frees the slots taken for the operation; for a finished one, ``give_back`` does that.
        """
        running = self._running(device=operation.device)
        running[operation.id] = operation
        try:
            self._pools.controller.start_loading()
            while operation.id in running:
                self.poll(wait=True)
        except BaseException:
            if operation.id in running:
                self.abandon(operation)
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
