"""Pools: the tree's pages in the pools of both tiers, and the controller that moves them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from hicache_pools.group import PoolEntry
from hicache_pools.pool_transfer import PoolTransfer

from ..controller import HiCacheController
from ..pool_transfers import SidecarPoolSpec
from .allocator import PageAllocator
from .components import SlotPages
from .events import Change, Events
from .node import NO_PAGES, Held, Pages, TreeNode, WindowPart, joined
from .radix_tree import RadixTree
from .reclaim import Reclaim

Taken = TypeVar("Taken")


class Pools:
    """What nodes and window parts have in the pools.

    A part whose pages the engine does not take back stays as it was, and the engine's error is raised.

    Attributes
    ----------
    tree
        The nodes.
    controller
        Moves the pages.
    device_allocator
        Hands out the anchor's device pages.
    events
        Where to report what changes.
    calls
        The seam to the engine.
    reclaim
        Held while the tree allocates.
    anchor
        Name of the anchor's pool.
    to_store
        Nodes on the host that wait to be stored again, in the order in which that was found.
    """

    def __init__(
        self, tree: RadixTree, controller: HiCacheController, device_allocator: PageAllocator, events: Events
    ) -> None:
        self.tree = tree
        self.device_allocator = device_allocator
        self.controller = controller
        self.events = events
        self.calls = tree.calls
        self.reclaim = Reclaim(controller)
        self.anchor = events.anchor
        self.to_store: OrderedDict[TreeNode, None] = OrderedDict()
        windows = {name: pool.converter for name, pool in tree.windows.items()}
        self._converters = {self.anchor: SlotPages(tree.page_size), **windows}

    def add_sidecar(self, spec: SidecarPoolSpec, entry: PoolEntry) -> None:
        """Add a pool that shares slots; see :meth:`UnifiedRadixCache.register_sidecar_pool`."""
        if self.tree.root.children is not None:
            raise ValueError(
                f"the tree holds pages, of which pool {entry.name!s} has nothing; register it before the first insert, "
                "or after reset"
            )
        if spec.pool_name != entry.name:
            raise ValueError(f"spec is for pool {spec.pool_name!s} and entry is {entry.name!s}; both must be the same")
        source = self.controller.host_group.get_pool(spec.indices_from_pool)
        for what in ("page_size", "size"):
            mine, theirs = int(getattr(entry.host_pool, what)), int(getattr(source, what))
            if mine != theirs if what == "page_size" else mine < theirs:
                raise ValueError(
                    f"pool {entry.name!s} has {what} {mine}; it shares the slots of {spec.indices_from_pool!s}, which "
                    f"has {theirs}, and needs {'the same' if what == 'page_size' else 'at least as many'}"
                )
        self.controller.add_entry(entry)
        self.controller.add_sidecar(spec)

    # Ranks

    def smallest(self, value: int) -> int:
        """Return the smallest value of all ranks; this one's if others are lost, as the engine here may go on."""
        agreement = self.controller.agreement
        return value if agreement.broken else agreement.smallest([value])[0]

    def on_all_ranks(self, taken: Taken | None, give_back: Callable[[Taken], object]) -> Taken | None:
        """Return what was taken here if every rank has taken its own; otherwise give it back."""
        if self.smallest(int(taken is not None)):
            return taken
        if taken is not None:
            give_back(taken)
        return None

    # Pages and slots

    def slots(self, pages: Pages, pool: str | None = None) -> torch.Tensor:
        """Return the slots of pages of the anchor, or of a windowed pool."""
        return self._converters[pool or self.anchor].slots(pages)

    def pages(self, slots: torch.Tensor, pool: str | None = None) -> Pages:
        """Return the pages of slots, which may be on the device."""
        return self._converters[pool or self.anchor].pages(slots.cpu())

    def pages_of(self, transfer: PoolTransfer, *, device: bool) -> Pages:
        """Return the pages that a transfer of a windowed pool has on the device, or on the host."""
        slots = transfer.device_indices if device else transfer.host_indices
        return NO_PAGES if slots is None else self.pages(slots, str(transfer.name))

    def free(self, pages: Pages, *, device: bool, pool: str | None = None) -> int:
        """Give pages back; returns how many are free now. Those in flight are freed when their transfers are done."""
        converter, controller = self._converters[pool or self.anchor], self.controller
        slots = converter.slots(pages)
        freed = (controller.evict_device if device else controller.evict_host)(slots, pool=pool)
        return freed // converter.page_size

    def free_host(self, slots: torch.Tensor, transfers: Sequence[PoolTransfer] = ()) -> None:
        """Give back host slots of the anchor and of windowed pools."""
        self.controller.evict_host(slots)
        for transfer in transfers:
            if transfer.host_indices is not None:
                self.controller.evict_host(transfer.host_indices, pool=transfer.name)

    def free_host_pages(self, pool: str) -> int:
        """Return how many host pages of a pool are free."""
        return self.controller.host_group.available_size(pool) // self._converters[pool].page_size

    # Nodes

    def drop(self, held: Held, *, device: bool) -> int:
        """Take a node, or its part in a windowed pool, off a tier; returns the pages that are free now.

        A node that is in no other tier leaves the tree.
        """
        if held.part(device=device) is None:
            return 0
        if isinstance(held, TreeNode) and not device and held in self.to_store:
            del self.to_store[held]
            if not held.stored and self.controller.has_storage:
                self.controller.storage.skipped(held.pages)
        pool = self.events.place(held)[1]
        freed = self.free(joined([held], device=device), device=device, pool=pool)
        self._report_removed(held, device=device)
        self.tree.clear_part(held, device=device)
        if isinstance(held, TreeNode) and not held.present:
            self.remove(held)
        return freed

    def remove(self, node: TreeNode) -> None:
        """Take a node out of the tree, with its windows."""
        for part in node.windows:
            for device in (True, False):
                self.calls.call(self.drop, part, device=device)
                if part.part(device=device) is not None:  # the engine did not take its pages back
                    self._report_removed(part, device=device)
                    self.tree.clear_part(part, device=device)
        if node.parent is not None:
            node.parent.remove_child(node)

    def free_all(self) -> None:
        """Report that every node leaves, and free its device pages; the controller's reset frees host pages."""
        for node in reversed(list(self.tree.nodes())):
            for held in node.holders():
                for device in (True, False):
                    self._report_removed(held, device=device)
                # What a load is still to fill is freed by the controller.
                if held.device is not None and held.load is None:
                    pages, (_, pool) = joined([held], device=True), self.events.place(held)
                    self.calls.call(self.free, pages, device=True, pool=pool)
                # Queues and old matches may still hold it; it has nothing any more.
                held.device = held.host = None

    def _report_removed(self, held: Held, *, device: bool) -> None:
        if held.part(device=device) is not None and held.transfer(device=device) is None:
            self.events.held(Change.REMOVED, held, device=device)

    # Windows

    def adopt_window(self, node: TreeNode, name: str, pages: Pages, *, device: bool) -> list[WindowPart]:
        """Give the last pages of the prefix that ends with ``node`` their pages of a windowed pool.

        Pages that the tree has already are kept, and the given ones freed. Returns the parts; the caller queues them
        for eviction once it has pinned what it needs, so that both queues of most parts share one entry.
        """
        parts: list[WindowPart] = []
        left = len(pages)
        for above in node.path():
            if not left:
                break
            take = min(left, above.pages)
            mine = pages[left - take : left]
            left -= take
            part = above.window(name)
            if part is None:
                part = WindowPart(above, name)
                above.windows = (*above.windows, part)
            part.last_access = self.tree.order.tick
            kept = before = part.count(device=device)
            if part.load is not None or (part.write is not None and not device):
                # What moves now counts when it has arrived, so none of the given pages are needed.
                kept = take
            fresh = max(0, take - kept)
            if fresh < take:
                self.calls.call(self.free, mine[fresh:], device=device, pool=name)
            if fresh:
                # Those that it has keep their places and their pins.
                self.tree.set_part(part, np.concatenate((mine[:fresh], joined([part], device=device))), device=device)
                self.events.held(Change.STORED, part, device=device, skip=before)
            self.tree.remove_empty(part)
            parts.append(part)
        return parts
