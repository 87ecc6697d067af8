"""TreeStructure: the nodes, how they are cut and joined, what is locked, and what waits for eviction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch

from hicache_kernels.validation import whole
from hicache_pools import DevicePool, ExtentAllocator, PoolEntry

from ..controller import HiCacheController
from ..first_error import FirstError
from ..forks import refuse_in_forks
from ..hashing import Namespace
from ..hybrid import HybridCacheController
from .components import SlotPages, WindowComponent, WindowPool
from .events import CacheEvent, Change, Listener, Tier
from .keys import KEY_BYTES, common_pages, key_list, own_tokens
from .namespaces import NamespaceBooks
from .node import Needed, Operation, Pages, Pin, TreeNode, WindowPart, cut, pack, packed_count, unpack
from .policies import NO_NAMESPACE, NO_QUOTA, AnyStrategy, Quota, eviction_strategy, is_placed
from .queue import EvictionQueue

_QUEUES = 1 | 2 | 4 | 8 | 64 | 128
"""Bits of ``TreeNode.queued`` of the queues of both tiers and of what is not saved, and of a namespace's own."""


class PageAllocator(Protocol):
    """What the tree needs of the engine's device allocator; :class:`hicache_pools.ExtentAllocator` has it."""

    @property
    def page_num(self) -> int:
        """Pages in all."""

    @property
    def available_pages(self) -> int:
        """Free pages."""

    def alloc_pages(self, count: int, /) -> Pages | None:
        """``count`` owned page numbers, or None."""

    def free_pages(self, pages: Pages, /) -> int:
        """Give pages back."""


def _check_device_pages(anchor: PoolEntry, allocator: PageAllocator, page_size: int) -> None:
    """Check that every page an allocator can hand out is one of the anchor's device pool."""
    if isinstance(allocator, ExtentAllocator) and allocator.page_size != page_size:
        raise ValueError(f"device_allocator has pages of {allocator.page_size} slots; page_size is {page_size}")
    if isinstance(anchor.device_pool, DevicePool) and allocator.page_num * page_size > anchor.device_pool.index_size:
        raise ValueError(
            f"device_allocator has {allocator.page_num} pages of {page_size} slots; the device pool of the anchor has "
            f"{anchor.device_pool.index_size} slots"
        )


class TreeStructure:
    """Nodes and books; moves no bytes.

    Invariants (``check_integrity`` of the tree checks them):

    - every node but the root has a device part, a host part, or both, of as many pages as it has keys;
    - a node with a device part has a parent with one, and the same for host parts: each tier holds whole prefixes, so
      only leaves of a tier are evicted from it and pinning a node pins its prefix;
    - a locked part is never evicted; a part with a transfer in flight is locked;
    - a window part covers the last pages of its node, at most all of them, and belongs to a node in the tree.
    """

    def __init__(
        self,
        controller: HiCacheController,
        device_allocator: PageAllocator,
        *,
        page_size: int,
        eviction: AnyStrategy | str,
        components: Sequence[WindowComponent],
        quotas: Mapping[Namespace, Quota],
        listener: Listener | None,
        clock: Callable[[], float] | None,
    ) -> None:
        page_size = whole("page_size", page_size)
        if page_size != controller.page_size:
            raise ValueError(f"page_size is {page_size}; the controller's pools have pages of {controller.page_size}")
        _check_device_pages(controller.host_group.anchor_entry, device_allocator, page_size)
        if components and not isinstance(controller, HybridCacheController):
            names = [str(component.name) for component in components]
            raise TypeError(
                f"controller is a {type(controller).__name__}; a tree with components {names} needs a "
                "HybridCacheController"
            )
        refuse_in_forks(self)
        self.controller = controller
        self.device_allocator = device_allocator
        self.page_size = page_size
        self.strategy = eviction_strategy(eviction)
        self._value: Callable[..., float] = self.strategy.value
        self._placed = is_placed(self.strategy)
        self.listener = listener
        self.clock = time.monotonic if clock is None else clock
        self.windows = {str(c.name): WindowPool(c, controller.host_group.get_entry(c.name)) for c in components}
        self.root = TreeNode(0, None, b"")
        self._anchor = str(controller.host_group.anchor_entry.name)
        self._converter = SlotPages(page_size)
        self._next_id = 1
        self._tick = 0
        self._evicted_value: float = 0
        self._device_queue = self._queue(1, device=True)
        self._host_queue = self._queue(2, device=False)
        self._unsaved_queue = self._queue(64, device=False, backups=1)
        self._books: WeakValueDictionary[Namespace, NamespaceBooks] = WeakValueDictionary()
        self._limited: dict[Namespace, NamespaceBooks] = {}
        for namespace, quota in quotas.items():
            self.set_quota(namespace, quota)

    def set_quota(self, namespace: Namespace | None, quota: Quota) -> None:
        """Limit the pages a namespace keeps; counts from its next insert or release on."""
        key = NO_NAMESPACE if namespace is None else namespace
        books = self._owner(key)
        books.quota = quota
        if quota == NO_QUOTA:
            self._limited.pop(key, None)
            return
        self._limited[key] = books
        if books.device_queue is None and books.host_queue is None:
            books.device_queue, books.host_queue = self._queue(4, device=True), self._queue(8, device=False)
            books.unsaved_queue = self._queue(128, device=False, backups=1)
            for node in self._all_nodes():
                self._offer(node, device=True)
                self._offer(node, device=False)

    def _owner(self, namespace: Namespace | None) -> NamespaceBooks:
        key = NO_NAMESPACE if namespace is None else namespace
        books = self._books.get(key)
        if books is None:
            books = self._books[key] = NamespaceBooks()
        return books

    # Walking

    def _walk(self, node: TreeNode, blob: bytes, at: int) -> tuple[TreeNode, int]:
        """Follow the keys as far as there are nodes, cutting the last one where the keys end or differ."""
        end = len(blob) // KEY_BYTES
        while at < end:
            child = node.child(blob[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if child is None:
                break
            tail = blob[at * KEY_BYTES : at * KEY_BYTES + len(child.keys)]
            same = child.pages if tail == child.keys else common_pages(child.keys, tail)
            if same < child.pages:
                child = self._split(child, same)
            node, at = child, at + same
        return node, at

    def _known(self, node: TreeNode, blob: bytes) -> Iterator[tuple[TreeNode, int]]:
        """Follow the keys from a node, cutting nothing; yields each node and how many of its pages they share."""
        while blob:
            child = node.child(blob[:KEY_BYTES])
            if child is None:
                return
            same = common_pages(child.keys, blob[: len(child.keys)])
            yield child, same
            if same < child.pages:
                return
            node, blob = child, blob[same * KEY_BYTES :]

    def _path(self, node: TreeNode) -> Iterator[TreeNode]:
        """Yield the node and its ancestors, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _all_nodes(self) -> Iterator[TreeNode]:
        stack = self.root.all_children()
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.all_children())

    def _used(self, node: TreeNode, priority: int) -> None:
        """Note that a request uses a node."""
        tick = node.last_access = self._tick
        hits = node.hits = node.hits + 1
        if priority > node.priority:
            node.priority = priority
        pages, clock = len(node.keys) // KEY_BYTES, self._evicted_value
        if self._placed:
            value = self._value(hits=hits, pages=pages, tick=tick, clock=clock, created=node.created, depth=node.depth)
        else:
            value = self._value(hits=hits, pages=pages, tick=tick, clock=clock)
        if value >= node.value:
            node.value = value
        else:
            self._sink(node, value)

    def _sink(self, node: TreeNode, value: float) -> None:
        """Give a node a lower value, with which it has to be offered anew."""
        if value != value:
            raise ValueError(f"eviction {self.strategy!r} gave a node the value {value}; accepted are numbers")
        node.value = value
        node.queued &= ~_QUEUES
        self._offer(node, device=True)
        self._offer(node, device=False)

    # Windows of a prefix

    def _window(self, node: TreeNode, name: str) -> list[Needed] | None:
        """Return what a prefix ending with ``node`` needs in a windowed pool, last first; None where it lacks some."""
        left = self.windows[name].window_pages
        parts: list[Needed] = []
        for above in self._path(node):
            part, needed = above.window(name), min(left, above.pages)
            if part is None or part.covered < needed:
                return None
            parts.append(Needed(part, needed))
            left -= needed
            if not left:
                break
        return parts

    def _restorable(self, node: TreeNode) -> bool:
        """Whether every windowed pool has what a prefix ending with ``node`` needs, on some side."""
        return all(self._window(node, name) is not None for name in self.windows)

    def _last_restorable(self, node: TreeNode, pages: int) -> tuple[TreeNode, int]:
        """Go up from a prefix of ``pages`` pages to the longest that can be restored.

        Only ends of nodes come into question: parts cover the last pages of their nodes, so if a prefix can be cut
        inside a node, it can be extended to that node's end.
        """
        while node.parent is not None and not self._restorable(node):
            pages -= node.pages
            node = node.parent
        return node, pages

    def _pins(self, node: TreeNode) -> tuple[Pin, Pin]:
        """Pin what a restorable prefix needs of windowed pools, each part on the device if it is there."""
        device, host = Pin(), Pin()
        for name in self.windows:
            for part, needed in self._window(node, name) or ():
                if part.on_device >= needed:
                    device.hold(part, device=True)
                else:
                    host.hold(part, device=False)
        return device, host

    def _unpin(self, pin: Pin, *, device: bool) -> None:
        self._offer_windows(pin.let_go(device=device))

    def _unpin_both(self, device_pin: Pin, host_pin: Pin) -> None:
        """Let go of a pin on either side; both sides of a part may then wait with one entry."""
        self._offer_windows(device_pin.let_go(device=True) + host_pin.let_go(device=False))

    # Shape of the tree

    def _add_child(self, parent: TreeNode, keys: bytes, owner: NamespaceBooks) -> TreeNode:
        depth = parent.depth + len(keys) // KEY_BYTES
        node = TreeNode(self._new_id(), parent, keys, owner, depth, created=self._tick, last_access=self._tick)
        # It waits for eviction before the use that brought it is counted, and has the value of that use from the start.
        self._used(node, 0)
        node.hits = 0
        parent.add_child(node)
        return node

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """Cut a node in two and return the new head; the node itself stays the tail, with its locks and its id."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root cannot be split")
        head = TreeNode(
            self._new_id(),
            parent,
            node.keys[: at * KEY_BYTES],
            node.owner,
            node.depth - node.pages + at,
            node.created,
            hits=node.hits,
            value=node.value,
            priority=node.priority,
            last_access=node.last_access,
        )
        head.stored = node.stored
        node.keys = node.keys[at * KEY_BYTES :]
        if node.device is not None:
            head.device, node.device = cut(node.device, at)
            head.device_children = 1
        if node.host is not None:
            head.host, node.host = cut(node.host, at)
            head.host_children = 1
        if node.tokens is not None:
            first = at * self.page_size
            head.tokens, node.tokens = own_tokens(node.tokens[:first]), own_tokens(node.tokens[first:])
        for operation in (node.write, node.load, node.backup):
            if operation is not None:
                operation.nodes.append(head)
        # The head needs no locks of its own: its tail is locked, so it is no leaf.
        head.write, head.load, head.backup = node.write, node.load, node.backup
        parent.replace_child(node, head)
        head.children = node
        node.parent = head
        for part in node.windows:
            self._split_window(part, head, node.pages)
        return head

    def _split_window(self, part: WindowPart, head: TreeNode, tail_pages: int) -> None:
        """Give the head what a part covers of it. The tail keeps the rest, and the pins hold both."""
        if part.covered <= tail_pages:
            return
        upper = WindowPart(
            head,
            part.name,
            write=part.write,
            load=part.load,
            last_access=part.last_access,
        )
        upper.stored = part.stored
        if part.device is not None and part.on_device > tail_pages:
            upper.device, part.device = cut(part.device, part.on_device - tail_pages)
            for pin in part.device_pins:
                pin.hold(upper, device=True)
        if part.host is not None and part.on_host > tail_pages:
            upper.host, part.host = cut(part.host, part.on_host - tail_pages)
            for pin in part.host_pins:
                pin.hold(upper, device=False)
        head.windows = (*head.windows, upper)
        self.windows[part.name].offer(upper)

    def _remove(self, node: TreeNode) -> None:
        with FirstError() as errors:
            for part in node.windows:
                for device in (True, False):
                    with errors.kept():
                        self._drop_window(part, device=device)
            if node.parent is not None:
                node.parent.remove_child(node)

    # Parts of nodes

    def _set_device(self, node: TreeNode, pages: Pages) -> None:
        node.device = pack(pages)
        node.owner.device_pages += len(pages)
        if node.parent is not None:
            node.parent.device_children += 1
        self._offer(node, device=True)

    def _set_host(self, node: TreeNode, pages: Pages) -> None:
        node.host = pack(pages)
        node.owner.host_pages += len(pages)
        if node.parent is not None:
            node.parent.host_children += 1
        self._offer(node, device=False)

    def _clear_device(self, node: TreeNode) -> None:
        node.owner.device_pages -= node.pages
        node.device = None
        if node.parent is not None:
            node.parent.device_children -= 1
            self._offer(node.parent, device=True)

    def _clear_host(self, node: TreeNode) -> None:
        node.owner.host_pages -= node.pages
        node.host = None
        node.stored = False
        if node.parent is not None:
            node.parent.host_children -= 1
            self._offer(node.parent, device=False)

    def _drop_device(self, node: TreeNode) -> None:
        """Take a node off the device, and out of the tree where it is in no tier then."""
        try:
            if node.device is not None:
                self.controller.evict_device(self._slots(unpack(node.device)))
                self._clear_device(node)
                if node.load is None:
                    self._tell(Change.REMOVED, Tier.DEVICE, node)
        finally:  # also where a listener raises
            if node.device is None and node.host is None:
                self._remove(node)

    def _drop_host(self, node: TreeNode) -> int:
        """Take a node off the host, and out of the tree where it is in no tier then; returns the pages that are free.

        Others are so once what is in flight is done with them.
        """
        freed = 0
        try:
            if node.host is not None:
                freed = self.controller.evict_host(self._slots(unpack(node.host))) // self.page_size
                self._clear_host(node)
                if node.write is None:
                    self._tell(Change.REMOVED, Tier.HOST, node)
        finally:  # also where a listener raises
            if node.device is None and node.host is None:
                self._remove(node)
        return freed

    def _drop_window(self, part: WindowPart, *, device: bool) -> int:
        """Give back one side of a window part; returns its pages."""
        packed = part.device if device else part.host
        if packed is None:
            return 0
        pages = unpack(packed)
        slots = self.windows[part.name].converter.slots(pages)
        if device:
            self.controller.evict_device(slots, pool=part.name)
            part.device, moving = None, part.load is not None
        else:
            self.controller.evict_host(slots, pool=part.name)
            part.host, part.stored, moving = None, False, part.write is not None
        try:
            if not moving:
                self._tell_window(Change.REMOVED, Tier.DEVICE if device else Tier.HOST, part, len(pages))
        finally:  # also where a listener raises
            self._forget_empty(part)
        return len(pages)

    @staticmethod
    def _forget_empty(part: WindowPart) -> None:
        if part.device is None and part.host is None:
            part.node.windows = tuple(other for other in part.node.windows if other is not part)

    def _adopt_window(self, node: TreeNode, name: str, pages: Pages, *, device: bool) -> list[WindowPart]:
        """Give the last pages of the prefix that ends with ``node`` their pages of a windowed pool.

        Where the tree has some already, its own stand and the others are freed. Returns the parts, which the caller
        offers once what is to be pinned of them is: then both sides of most will wait with one entry.
        """
        parts: list[WindowPart] = []
        left = len(pages)
        for above in self._path(node):
            if not left:
                break
            take = min(left, above.pages)
            mine = pages[left - take : left]
            left -= take
            part = above.window(name)
            if part is None:
                part = WindowPart(above, name)
                above.windows = (*above.windows, part)
            part.last_access = self._tick
            kept = part.on_device if device else part.on_host
            if part.load is not None or (part.write is not None and not device):
                # What moves now is taken note of when it has arrived; the pages given come too early or too late.
                kept = take
            fresh = max(0, take - kept)
            if fresh < take:
                self._free_window_pages(name, mine[fresh:], device=device)
            if fresh:
                self._extend_window(part, mine[:fresh], device=device)
            self._forget_empty(part)
            parts.append(part)
        return parts

    def _offer_windows(self, parts: Sequence[WindowPart]) -> None:
        for part in parts:
            self.windows[part.name].offer(part)

    def _extend_window(self, part: WindowPart, pages: Pages, *, device: bool) -> None:
        """Put pages in front of those that one side of a part has; these keep their places and their pins."""
        packed = part.device if device else part.host
        kept = 0 if packed is None else packed_count(packed)
        joined = pack(pages if packed is None else np.concatenate((pages, unpack(packed))))
        if device:
            part.device = joined
        else:
            part.host = joined
        self._tell_window(Change.STORED, Tier.DEVICE if device else Tier.HOST, part, kept + len(pages), kept)

    def _free_window_pages(self, name: str, pages: Pages, *, device: bool) -> None:
        slots = self.windows[name].converter.slots(pages)
        (self.controller.evict_device if device else self.controller.evict_host)(slots, pool=name)

    # Locks and queues

    def _queue(self, bit: int, *, device: bool, backups: int = 0) -> EvictionQueue[TreeNode]:
        """Make a queue of the leaves of a tier that nothing locks, or that so many backups alone lock."""

        def rank(node: TreeNode) -> tuple[float, float, int]:
            return node.priority, node.value, node.last_access

        if device:
            return EvictionQueue(
                bit, rank, lambda node: node.device is not None and not (node.device_children or node.device_lock)
            )
        return EvictionQueue(
            bit,
            rank,
            lambda node: (
                node.host is not None
                and not node.host_children
                and node.host_lock == backups
                and (not backups or node.backup is not None)
            ),
        )

    def _queues(self) -> Iterator[EvictionQueue[Any]]:
        """Yield every eviction queue."""
        yield from (self._device_queue, self._host_queue, self._unsaved_queue)
        for pool in self.windows.values():
            yield from (pool.device_queue, pool.host_queue)
        for books in self._books.values():
            own = (books.device_queue, books.host_queue, books.unsaved_queue)
            yield from (queue for queue in own if queue is not None)

    def _offer(self, node: TreeNode, *, device: bool) -> None:
        """Let an unlocked leaf of a tier wait for its eviction."""
        if node.parent is None:
            return
        books = node.owner
        queues = [(self._device_queue, books.device_queue) if device else (self._host_queue, books.host_queue)]
        if node.backup is not None and not device:
            queues.append((self._unsaved_queue, books.unsaved_queue))
        for common, own in queues:
            common.offer(node)
            if own is not None:
                own.offer(node)

    def _unlock_device(self, node: TreeNode) -> None:
        node.device_lock -= 1
        self._offer(node, device=True)

    def _unlock_host(self, node: TreeNode) -> None:
        node.host_lock -= 1
        self._offer(node, device=False)

    # Slots, events

    def _slots(self, pages: Pages) -> torch.Tensor:
        return self._converter.slots(pages)

    def _pages(self, slots: torch.Tensor) -> Pages:
        return self._converter.pages(slots)

    def _operation(self, nodes: list[TreeNode], **more: Any) -> Operation:
        return Operation(self._new_id(), nodes, **more)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _tell(self, change: Change, tier: Tier, node: TreeNode) -> None:
        if self.listener is None:
            return
        parent = None if node.parent is None else node.parent.last_key()
        self.listener(CacheEvent(change, tier, self._anchor, tuple(key_list(node.keys)), parent, node.tokens))

    def _tell_gone(self, node: TreeNode) -> None:
        """Tell that a node and its windows leave the tiers that they were told to be in."""
        for part in node.windows:
            if part.on_device and part.load is None:
                self._tell_window(Change.REMOVED, Tier.DEVICE, part, part.on_device)
            if part.on_host and part.write is None:
                self._tell_window(Change.REMOVED, Tier.HOST, part, part.on_host)
        if node.device is not None and node.load is None:
            self._tell(Change.REMOVED, Tier.DEVICE, node)
        if node.host is not None and node.write is None:
            self._tell(Change.REMOVED, Tier.HOST, node)

    def _tell_window(self, change: Change, tier: Tier, part: WindowPart, pages: int, but: int = 0) -> None:
        """Tell of the last ``pages`` pages of a part's node, but not of the very last ``but``."""
        if self.listener is None:
            return
        node, first, end = part.node, part.node.pages - pages, part.node.pages - but
        parent = None if node.parent is None else node.parent.last_key()
        tokens = None if node.tokens is None else node.tokens[first * self.page_size : end * self.page_size]
        keys = tuple(key_list(node.keys[first * KEY_BYTES : end * KEY_BYTES]))
        self.listener(CacheEvent(change, tier, part.name, keys, node.key(first - 1) if first else parent, tokens))
