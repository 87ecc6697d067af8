"""TreeBackups: stores what is settled on the host, again where that failed or storage lost it, and follows storage."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from hicache_pools.pool_transfer import PoolHitPolicy, PoolTransfer

from ..hybrid import HybridCacheController
from ..interrupts import interrupts_held_back
from ..operations import StorageAck
from ..storage.backoff import Backoff
from ..storage.base import ANCHOR
from .components import window_rank
from .events import CacheEvent, Change, Tier
from .eviction import TreeEviction
from .keys import KEY_BYTES, key_list
from .node import NO_PAGES, Operation, TreeNode, WindowPart, unpack
from .presence import Run, StoragePresence

_TO_STORE = 16
"""Bit of ``TreeNode.queued``: it waits to be stored again."""

_FEW = 4096
"""Removed keys, or nodes to store again, that are not worth looking through."""


def further(transfers: Sequence[PoolTransfer]) -> dict[str, Any]:
    """Keywords that hand further pools' parts to a controller; none where there are none, as a plain one takes none."""
    return {"pool_transfers": list(transfers)} if transfers else {}


class TreeBackups(TreeEviction):
    """What goes to storage, and what is known to be there.

    A node is stored as soon as its bytes are settled on the host. One that storage did not take, or has removed since,
    or that was there before the storage was attached, waits in ``_to_store`` from when it is next used (all of them,
    when a storage is attached); :meth:`_store_waiting` stores these again a few at a time, and pauses while storage
    fails. Ranks that agree with each other have the same nodes there, in one order.

    A backup locks its node on the host until it is done, or given up for want of host pages.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._backups: dict[int, Operation] = {}
        self._backed_up_pages = 0
        self._presence = StoragePresence(remember=self.listener is not None)
        self._storage_changes = self.controller.storage.changes
        self._pause = Backoff(self.clock)
        self._to_store: deque[TreeNode] = deque()
        self._look_through_at = _FEW
        self.controller.storage.follow_removals(self._presence.note_removed)
        self._serve_pools()

    # One node

    def _store(self, node: TreeNode) -> None:
        """Store what of a node and its prefix is settled on the host and not in storage, heads first."""
        if not self.controller.has_storage:
            return
        if not self._storage_answers():
            self._store_later(node)
            return
        for above in reversed(list(self._path(node))):
            self._take_in_removed()
            if self._is_to_store(above):
                self._start_backup(above)

    def _is_to_store(self, node: TreeNode) -> bool:
        """Whether something of the node is settled on the host, not in storage, and not on its way there."""
        if node.host is None or node.write is not None or node.backup is not None:
            return False
        self._unmark_removed(node)
        return not node.stored or any(_is_part_to_store(part) for part in node.windows)

    def _start_backup(self, node: TreeNode) -> None:
        if node.host is None:
            return
        parts = [part for part in node.windows if _is_part_to_store(part)]
        operation = self._operation([node], whole=not node.stored)
        keys = key_list(node.keys)
        transfers = []
        for part in parts:
            pages = NO_PAGES if part.host is None else unpack(part.host)
            operation.host_pin.hold(part, device=False)
            transfers.append(
                PoolTransfer(
                    part.name,
                    host_indices=self.windows[part.name].converter.slots(pages),
                    keys=keys[len(keys) - len(pages) :],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            )
        above = None if node.parent is None else node.parent.last_key()
        parents: list[bytes | None] = [above, *keys[:-1]]
        # What is stored already is named again, the last page alone: windows travel beside pages of the anchor.
        first = len(keys) - 1 if node.stored else 0
        operation.pages = len(keys) - first
        node.host_lock += 1
        node.backup = self._backups[operation.id] = operation
        self._offer(node, device=False)
        self._backed_up_pages += operation.pages
        self._presence.storing(self._anchor, keys[first:])
        for part in parts:
            self._presence.storing(part.name, keys[len(keys) - part.on_host :])
        try:
            self.controller.backup(
                self._slots(unpack(node.host)[first:]),
                keys[first:],
                parents=parents[first:],
                node_id=operation.id,
                **further(transfers),
            )
        except BaseException:
            del self._backups[operation.id]
            self._backed_up_pages -= operation.pages
            self._finish_backup(operation, 0, Counter())
            raise

    def _give_up_backup(self, operation: Operation) -> None:
        # Ctrl-C in between would leave a lock of a backup that no ack names.
        with interrupts_held_back():
            del self._backups[operation.id]
            self._backed_up_pages -= operation.pages
            self.controller.cancel_backup(operation.id)
            self._finish_backup(operation, 0, Counter(), refused=False)

    def _backup_of_window(self, name: str) -> Operation | None:
        kept = (
            (*window_rank(part), operation.id)
            for operation in self._backups.values()
            for part in operation.host_pin.parts
            if part.name == name and len(part.host_pins) == 1
        )
        first = min(kept, default=None)
        return None if first is None else self._backups[int(first[-1])]

    def _drop_host(self, node: TreeNode) -> int:
        if node.queued & _TO_STORE and not node.stored and self.controller.has_storage:
            self.controller.storage.skipped(node.pages)
        return super()._drop_host(node)

    def _take_in_backups(self, acks: Sequence[StorageAck]) -> bool:
        """Finish the backups of some acks; True where there were any."""
        whole = [ack.error is None for ack in acks]
        if acks and self.controller.agreement.needed:
            # What is stored again has to be the same on all ranks.
            whole = [bool(each) for each in self.controller.agreement.smallest([int(each) for each in whole])]
        for ack, good in zip(acks, whole, strict=True):
            operation = self._backups.pop(ack.node_id, None)
            if operation is None:  # it was interrupted, or the tree was emptied meanwhile
                continue
            self._backed_up_pages -= operation.pages
            if operation.failed:  # it went to a storage that is gone
                self._finish_backup(operation, 0, Counter())
                self._store_later(operation.nodes[0])
                continue
            if good and ack.stored_pages == operation.pages:
                self._pause.succeeded()
            else:
                self._pause.failed()
            self._finish_backup(operation, ack.stored_pages, None if good else self._taken_windows(ack))
        return bool(acks)

    def _taken_windows(self, ack: StorageAck) -> Counter[str]:
        """Leading pages of its part in each windowed pool that a backup that failed has stored, as all ranks know."""
        taken: dict[str, int] = {}
        if not self.controller.agreement.needed:
            for name, pages in ack.pool_pages.items():
                pool = self._component_of(name)
                if pool is not None:
                    taken[pool] = min(pages, taken.get(pool, pages))
        return Counter(taken)

    def _finish_backup(
        self, operation: Operation, stored_pages: int, taken: Counter[str] | None, *, refused: bool = True
    ) -> None:
        """Mark and tell what storage has; of windows all, or what was ``taken`` by a backup that failed.

        What storage has not taken, it has ``refused``, unless the backup was given up.
        """
        tail = operation.nodes[0]
        complete = stored_pages == operation.pages
        parts = list(operation.host_pin.parts)
        self._unpin(operation.host_pin, device=False)
        nodes = [node for node in self._path(tail) if node in operation.nodes][::-1]
        if complete:
            for part in sorted(parts, key=lambda part: nodes.index(part.node)):
                pages = part.on_host if taken is None else min(part.on_host, taken[part.name])
                if taken is not None:
                    taken[part.name] -= pages
                if part.host is not None:
                    part.stored = pages == part.on_host and not self._storage_lacks_part(part)
                    self._tell_stored(part.node, part.name, part.on_host, pages)
        for node in nodes:
            node.backup = None
        if operation.whole:
            left = stored_pages
            for node in nodes:
                there = min(left, node.pages)
                left -= there
                node.stored = there == node.pages and not self._storage_lacks(self._anchor, key_list(node.keys))
                if there:
                    self._tell_stored(node, self._anchor, node.pages, there)
        elif complete:
            self._tell_stored(tail, self._anchor, 1)
        else:
            tail.stored = False
        head = nodes[0].parent
        if refused and not stored_pages and head is not None:
            # It may be the page before that storage lacks; naming that again costs little.
            head.stored = False
        self._unlock_host(tail)
        came = [part for node in nodes for part in node.windows if part not in parts and _is_part_to_store(part)]
        if complete and taken is None and came:
            self._store(tail)

    # Again

    def _store_again(self, node: TreeNode) -> None:
        """Let a prefix that is being used be stored again, where storage does not have all of it."""
        if not self.controller.has_storage:
            return
        for above in self._path(node):
            if self._is_to_store(above):
                self._store_later(above)
                return

    def _store_later(self, node: TreeNode) -> None:
        if node.queued & _TO_STORE:
            return
        if len(self._to_store) >= self._look_through_at:
            for each in self._to_store:
                if each.host is None:
                    each.queued &= ~_TO_STORE
            self._to_store = deque(each for each in self._to_store if each.queued & _TO_STORE)
            self._look_through_at = max(_FEW, 2 * len(self._to_store))
        node.queued |= _TO_STORE
        self._to_store.append(node)

    def _store_waiting(self) -> None:
        """Store again what waits for it, as long as the storage answers and its queue is short."""
        most = self.controller.storage.settings.backup_queue_pages // 4
        while self._to_store and self.controller.has_storage:
            node = self._to_store[0]
            busy = bool(self._backups) and (self._pause.failing or self._backed_up_pages + node.pages > most)
            if node.host is not None and (busy or not self._storage_answers()):
                return
            self._to_store.popleft()
            node.queued &= ~_TO_STORE
            if node.host is not None:
                self._store(node)

    def _storage_answers(self) -> bool:
        """Whether no rank is in the pause behind a failure."""
        if not self._pause.failing:
            return True
        return bool(self.controller.agreement.smallest([int(not self._pause.active)])[0])

    # What storage does by itself

    def _follow_storage(self) -> None:
        """Notice another storage and what the one there is has removed; store what waits for it."""
        if self.controller.storage.changes != self._storage_changes:
            self._change_storage()
        self._take_in_removed()
        if len(self._presence) > _FEW:
            self._compare_with_removed()
        if self._to_store:
            self._store_waiting()

    def _take_in_removed(self) -> None:
        for name, keys in self._presence.take_noted().items():
            pool = self._component_of(name)
            if pool is not None:
                self._tell_removed(pool, self._presence.removed(pool, keys))

    def _component_of(self, name: str) -> str | None:
        """Pool whose pages count as removed with those of a pool of the storage: a sidecar is nothing by itself."""
        controller, anchor = self.controller, self._anchor
        sidecars = controller.sidecars if isinstance(controller, HybridCacheController) else ()
        sources = {str(spec.pool_name): str(spec.indices_from_pool) for spec in sidecars}
        pool = sources.get(name, anchor if name == ANCHOR else name)
        return pool if pool == anchor or pool in self.windows else None

    def _change_storage(self) -> None:
        self._storage_changes = self.controller.storage.changes
        for pool, run in self._presence.forget_all():
            self._tell_removed(pool, [run])
        self._pause.succeeded()
        for operation in self._backups.values():
            operation.failed = True
        for node in self._all_nodes():
            node.stored = False
            for part in node.windows:
                part.stored = False
            if self.controller.has_storage and self._is_to_store(node):
                self._store_later(node)

    def _storage_lacks(self, pool: str, keys: Sequence[bytes]) -> bool:
        """Whether storage removed any of some pages; unknown among ranks, each of which has removals of its own."""
        return not self.controller.agreement.needed and self._presence.lacks_any(pool, keys)

    def _storage_lacks_part(self, part: WindowPart) -> bool:
        return self._storage_lacks(part.name, key_list(part.node.keys[-part.on_host * KEY_BYTES :]))

    def _unmark_removed(self, node: TreeNode) -> None:
        """Take the marks off what storage removed.

        Room is made there from the tail of a prefix on, but a damaged page leaves from anywhere in it.
        """
        if not len(self._presence):
            return
        node.stored = node.stored and not self._storage_lacks(self._anchor, key_list(node.keys))
        for part in node.windows:
            part.stored = part.stored and not self._storage_lacks_part(part)

    def _compare_with_removed(self) -> None:
        """Unmark all that was removed, once that is much, so that it costs a few steps a key."""
        if len(self._presence) <= sum(books.host_pages for books in self._books.values()) // 8:
            return
        for node in self._all_nodes():
            if node.host is not None:
                self._unmark_removed(node)
        self._presence.forget_removed(self._keys_in_flight())

    def _keys_in_flight(self) -> set[bytes]:
        """Keys of what moves, and is marked when it has arrived."""
        return {key for operation in self._backups.values() for node in operation.nodes for key in key_list(node.keys)}

    # Events

    def _tell_stored(self, node: TreeNode, pool: str, pages: int, count: int | None = None) -> None:
        """Tell that storage has the first ``count`` (default: all) of the last ``pages`` pages of a node."""
        if self.listener is None:
            return
        first = node.pages - pages
        keys = key_list(node.keys)[first : None if count is None else first + count]
        above = None if node.parent is None else node.parent.last_key()
        for run in self._presence.stored(pool, keys, node.key(first - 1) if first else above):
            begin = first + run.first
            end = begin + len(run.keys)
            tokens = None if node.tokens is None else node.tokens[begin * self.page_size : end * self.page_size]
            self.listener(CacheEvent(Change.STORED, Tier.STORAGE, pool, run.keys, run.parent, tokens))

    def _tell_removed(self, pool: str, runs: Sequence[Run]) -> None:
        if self.listener is not None:
            for run in runs:
                self.listener(CacheEvent(Change.REMOVED, Tier.STORAGE, pool, run.keys, run.parent, None))


def _is_part_to_store(part: WindowPart) -> bool:
    return part.host is not None and part.write is None and not part.stored
