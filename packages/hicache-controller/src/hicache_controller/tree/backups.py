"""Backups: stores what is settled on the host, again if that failed or storage lost it, and follows storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

from ..operations import StorageAck
from ..storage.backoff import Backoff
from ..storage.base import ANCHOR
from .components import trailing, window_rank
from .events import Change, Tier
from .keys import KEY_BYTES, key_list
from .node import Held, Operation, TreeNode, WindowPart, joined
from .pools import Pools
from .presence import Run, StoragePresence
from .results import Prefetching

_MIN_CLEANUP = 4096
"""Removed keys below which they are not cleaned up."""


class Backups:
    """What goes to storage, and what is known to be there.

    A node is stored as soon as its bytes are settled on the host. One that storage did not take, or has removed since,
    or that was there before the storage was attached, is queued when it is next used (all of them, when a storage is
    attached); :meth:`follow_storage` stores these again a few at a time, and pauses while storage fails. Ranks that
    agree with each other have the same nodes in their queues, in one order.

    A backup locks its node on the host until it is done, or given up to make room there.

    Attributes
    ----------
    running
        Backups under way, by id.
    prefetches
        Prefetches under way, with the keys they bring.
    presence
        What storage has.
    """

    def __init__(self, pools: Pools, clock: Callable[[], float]) -> None:
        self._tree = pools.tree
        self._pools = pools
        self._anchor = pools.anchor
        self.running: dict[int, Operation] = {}
        self.prefetches: dict[Prefetching, list[bytes]] = {}
        self.presence = StoragePresence(remember=pools.events.listener is not None)
        self._running_pages = 0
        self._storage_changes = pools.controller.storage.changes
        self._pause = Backoff(clock)
        self._to_store = pools.to_store
        pools.controller.storage.follow_removals(self.presence.note_removed)

    # One node

    def store(self, node: TreeNode) -> None:
        """Store what of a node and its prefix is settled on the host and not in storage, heads first."""
        if not self._pools.controller.has_storage:
            return
        if not self._storage_answers():
            self._to_store.setdefault(node)
            return
        # What is above one that storage has or is being given was stored before; what of that has failed is stored
        # again when it is used.
        nodes = [node]
        for above in islice(node.path(), 1, None):
            if above.stored or above.backup is not None:
                break
            nodes.append(above)
        for above in reversed(nodes):
            self._note_removed()
            if self._is_to_store(above):
                self._start(above)

    def _is_to_store(self, node: TreeNode) -> bool:
        """Return whether something of the node is settled on the host, not in storage, and not on its way there."""
        if node.host is None or node.write is not None or node.backup is not None:
            return False
        self._unmark_removed(node)
        return any(_is_unstored(held) for held in node.holders())

    def _start(self, node: TreeNode) -> None:
        operation = Operation(self._tree.new_id(), nodes=[node], whole=not node.stored)
        keys = key_list(node.keys)
        transfers = []
        for part in node.windows:
            if _is_unstored(part):
                operation.host_pin.hold(part)
                slots, last = (
                    self._pools.slots(joined([part], device=False), part.name),
                    keys[-part.count(device=False) :],
                )
                transfers.append(trailing(part.name, slots, keys=last))
                self.presence.storing(part.name, last)
        parents: list[bytes | None] = [node.key_before(0), *keys[:-1]]
        # Of a node that is stored the last page is named again: windows are stored only along with pages of the anchor.
        first = len(keys) - 1 if node.stored else 0
        operation.pages = len(keys) - first
        self._tree.lock(node, device=False)
        node.backup = self.running[operation.id] = operation
        self._tree.order.offer(node, device=False)
        self._running_pages += operation.pages
        self.presence.storing(self._anchor, keys[first:])
        try:
            self._pools.controller.backup(
                self._pools.slots(joined([node], device=False)[first:]),
                keys[first:],
                parents=parents[first:],
                node_id=operation.id,
                pool_transfers=transfers,
            )
        except BaseException:
            self._finish(operation, 0, Counter())
            raise

    def give_up(self, operation: Operation) -> None:
        """End a backup that is under way; what of it storage has not taken counts as skipped."""
        self._pools.controller.cancel_backup(operation.id)
        self._finish(operation, 0, Counter(), refused=False)

    def give_up_window(self, pool: str) -> bool:
        """Give up the backup that alone keeps the part of a windowed pool that would leave the host first.

        Returns whether there is one.
        """
        held = (
            (*window_rank(part), operation.id)
            for operation in self.running.values()
            for part in operation.host_pin.parts
            if part.name == pool and part.pin_count(device=False) == 1
        )
        first = min(held, default=None)
        if first is not None:
            self.give_up(self.running[int(first[-1])])
        return first is not None

    def finish(self, acks: Sequence[StorageAck]) -> bool:
        """Finish the backups of some acks; returns whether there were any."""
        if not acks:
            return False
        # What is stored again has to be the same on all ranks.
        succeeded = self._pools.controller.agreement.smallest([int(ack.error is None) for ack in acks])
        for ack, good in zip(acks, succeeded, strict=True):
            operation = self.running.get(ack.node_id)
            if operation is None:  # it was interrupted, or the tree was emptied meanwhile
                continue
            if operation.failed:  # it went to a storage that is gone
                self._finish(operation, 0, Counter())
                self._to_store.setdefault(operation.nodes[0])
                continue
            if good and ack.stored_pages == operation.pages:
                self._pause.succeeded()
            else:
                self._pause.failed()
            self._finish(operation, ack.stored_pages, None if good else self._stored_windows(ack))
        return True

    def _stored_windows(self, ack: StorageAck) -> Counter[str]:
        """Return how many leading pages of each windowed pool a failed backup has stored, as far as all ranks know."""
        stored: dict[str, int] = {}
        if not self._pools.controller.agreement.needed:
            for name, pages in ack.pool_pages.items():
                pool = self._component_of(name)
                if pool is not None:
                    stored[pool] = min(pages, stored.get(pool, pages))
        return Counter(stored)

    def _finish(self, operation: Operation, pages: int, windows: Counter[str] | None, *, refused: bool = True) -> None:
        """Mark and report what storage has: ``pages``, and of windows all, or ``windows`` of a backup that failed.

        Storage has ``refused`` what it did not store, unless the backup was given up.
        """
        del self.running[operation.id]
        self._running_pages -= operation.pages
        nodes, tail = operation.heads_first(), operation.nodes[0]
        parts = sorted(operation.host_pin.parts, key=lambda part: nodes.index(part.node))
        complete = pages == operation.pages
        self._tree.unpin(operation.host_pin)
        for node in nodes:
            node.backup = None
        if complete:
            self._mark(parts, windows)
        if operation.whole:
            self._mark(nodes, Counter({self._anchor: pages}))
        elif complete:
            self.report_stored(tail, self._anchor, 1)
        else:
            tail.stored = False
        head = nodes[0].parent
        if refused and not pages and head is not None:
            # Storage may lack the page before these; to name it again costs little.
            head.stored = False
        self._tree.unlock(tail, device=False)
        came = [part for node in nodes for part in node.windows if part not in parts and _is_unstored(part)]
        if complete and windows is None and came:
            self.store(tail)

    def _mark(self, holders: Sequence[Held], stored: Counter[str] | None) -> None:
        """Mark and report what storage has of nodes or window parts, heads first: all, or so many pages by pool."""
        for held in holders:
            node, pool = self._pools.events.place(held)
            pages = node.pages if held is node else held.count(device=False)
            there = pages if stored is None else min(pages, stored[pool])
            if stored is not None:
                stored[pool] -= there
            held.stored = held.host is not None and there == pages and not self.lacks(held)
            self.report_stored(node, pool, pages, there)

    # Again

    def store_again(self, node: TreeNode) -> None:
        """Queue a prefix that is being used, if storage does not have all of it."""
        if not self._pools.controller.has_storage:
            return
        for above in node.path():
            if self._is_to_store(above):
                self._to_store.setdefault(above)
                return

    def _store_waiting(self) -> None:
        """Store the queued nodes, as long as the storage answers and its own queue is short."""
        limit = self._pools.controller.storage.settings.backup_queue_pages // 4
        while self._to_store and self._pools.controller.has_storage:
            node = next(iter(self._to_store))
            busy = bool(self.running) and (self._pause.failing or self._running_pages + node.pages > limit)
            if busy or not self._storage_answers():
                return
            del self._to_store[node]
            self.store(node)

    def _storage_answers(self) -> bool:
        """Return whether no rank is in the pause after a failure."""
        if not self._pause.failing:
            return True
        return bool(self._pools.controller.agreement.smallest([int(not self._pause.active)])[0])

    # What storage does by itself

    @property
    def idle(self) -> bool:
        """Whether no backup runs or waits, and storage has changed nothing."""
        known = self._pools.controller.storage.changes == self._storage_changes and not self.presence.news
        return known and not (self.running or self._to_store or len(self.presence) > _MIN_CLEANUP)

    def follow_storage(self) -> None:
        """Notice a change of storage and what it has removed; store what is queued."""
        if self._pools.controller.storage.changes != self._storage_changes:
            self._change_storage()
        self._note_removed()
        if len(self.presence) > _MIN_CLEANUP:
            self._unmark_all_removed()
        if self._to_store:
            self._store_waiting()

    def _note_removed(self) -> None:
        for name, keys in self.presence.take_noted().items():
            pool = self._component_of(name)
            if pool is not None:
                self._report_removed(pool, self.presence.removed(pool, keys))

    def _component_of(self, name: str) -> str | None:
        """Return the pool whose pages count as removed with those of a pool of the storage; sidecars have none."""
        owners = {str(spec.pool_name): str(spec.indices_from_pool) for spec in self._pools.controller.sidecars}
        pool = owners.get(name, self._anchor if name == ANCHOR else name)
        return pool if pool == self._anchor or pool in self._tree.windows else None

    def _change_storage(self) -> None:
        self._storage_changes = self._pools.controller.storage.changes
        for pool, run in self.presence.forget_all():
            self._report_removed(pool, [run])
        self._pause.succeeded()
        for operation in self.running.values():
            operation.failed = True
        for node in self._tree.nodes():
            for held in node.holders():
                held.stored = False
            if self._pools.controller.has_storage and self._is_to_store(node):
                self._to_store.setdefault(node)

    def lacks(self, held: Held) -> bool:
        """Return whether storage is known to have removed any of what a node or a window part has on the host.

        Ranks have removals of their own, so that nothing is known among several.
        """
        if self._pools.controller.agreement.needed:
            return False
        node, pool = self._pools.events.place(held)
        return self.presence.lacks_any(pool, key_list(node.keys[-held.count(device=False) * KEY_BYTES :]))

    def _unmark_removed(self, node: TreeNode) -> None:
        """Mark what storage has removed as not stored.

        Storage makes room from the tail of a prefix on, but may remove a damaged page anywhere in it.
        """
        for held in node.holders() if len(self.presence) else ():
            held.stored = held.stored and not self.lacks(held)

    def _unmark_all_removed(self) -> None:
        """Mark all that was removed as not stored, once that is much, so that it costs a few steps a key."""
        if len(self.presence) <= self._tree.host_pages // 8:
            return
        for node in self._tree.nodes():
            if node.host is not None:
                self._unmark_removed(node)
        # What moves is marked when it has arrived.
        keys = {key for running in self.running.values() for node in running.nodes for key in key_list(node.keys)}
        self.presence.forget_removed(keys.union(*self.prefetches.values()))

    # What came from storage

    def mark_fetched(self, parts: list[WindowPart], pages: int) -> None:
        """Note that the last ``pages`` pages of some parts, the last part first, came from storage."""
        for part in parts:
            came = min(pages, part.node.pages)
            pages -= came
            if part.host is not None and part.write is None and part.count(device=False) <= came:
                part.stored = not self.lacks(part)
            self.report_stored(part.node, part.name, came)

    # End

    def clear(self) -> None:
        """Forget every backup and prefetch."""
        self.running.clear()
        self.prefetches.clear()
        self._running_pages = 0
        self._to_store.clear()

    # Events

    def report_stored(self, node: TreeNode, pool: str, pages: int, count: int | None = None) -> None:
        """Report that storage has the first ``count`` (default: all) of the last ``pages`` pages of a node."""
        if self._pools.events.listener is None or count == 0:
            return
        first = node.pages - pages
        keys = key_list(node.keys)[first : None if count is None else first + count]
        for run in self.presence.stored(pool, keys, node.key_before(first)):
            at = first + keys.index(run.keys[0])
            self._pools.events.run(Change.STORED, Tier.STORAGE, pool, run, node, at)

    def _report_removed(self, pool: str, runs: Sequence[Run]) -> None:
        for run in runs:
            self._pools.events.run(Change.REMOVED, Tier.STORAGE, pool, run)


def _is_unstored(held: Held) -> bool:
    """Return whether something is settled on the host and not in storage."""
    return held.host is not None and held.write is None and not held.stored
