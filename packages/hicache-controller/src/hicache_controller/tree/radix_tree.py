"""RadixTree: nodes, what each tier has of them, and the locks and matches that keep it there."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from ..engine_calls import EngineCalls
from ..hashing import Namespace
from ..interrupts import interruptibly
from .keys import KEY_BYTES, common_pages, own_tokens
from .node import Held, Needed, Pages, Pin, TreeNode, WindowPart, cut, pack
from .order import EvictionOrder, tier_queues
from .policies import NO_NAMESPACE, NO_QUOTA, Quota
from .queue import NamespaceUsage
from .results import Match, Request


class RadixTree:
    """Nodes and their parts; allocates, frees and moves nothing.

    Invariants (``check_integrity`` of the cache checks them):

    - every node except the root has a device part, a host part, or both, of as many pages as it has keys;
    - a node with a device part has a parent with one, and the same for host parts: each tier holds whole prefixes, so
      only leaves of a tier are evicted from it and pinning a node pins its prefix;
    - a locked part is never evicted; a part with a transfer in flight is locked;
    - a window part covers the last pages of its node, at most all of them, and belongs to a node in the tree.

    Parameters
    ----------
    page_size
        Slots a page.
    order
        Queues what becomes an unlocked leaf of a tier.
    calls
        The seam to the engine.
    clock
        Seconds, for pins with a time to live.
    """

    def __init__(self, page_size: int, order: EvictionOrder, calls: EngineCalls, clock: Callable[[], float]) -> None:
        self.page_size = page_size
        self.order = order
        self.calls = calls
        self._clock = clock
        self.windows = order.windows
        self.root = TreeNode(0, None, b"")
        self._next_id = 1
        self._namespaces: WeakValueDictionary[Namespace, NamespaceUsage] = WeakValueDictionary()
        self._limited: set[NamespaceUsage] = set()
        self._references: Counter[tuple[int, bool]] = Counter()
        self._pinned: set[Match] = set()
        self._timed: list[tuple[float, int, Match]] = []

    def new_id(self) -> int:
        """Return a number for a node or a transfer that no other has."""
        self._next_id += 1
        return self._next_id - 1

    def clear(self) -> None:
        """Forget every node; namespaces and their quotas stay."""
        usages = list(self._namespaces.values())
        self.root = TreeNode(0, None, b"")
        self._references.clear()
        self._pinned.clear()
        self._timed.clear()
        for queue in self.order.all_queues():
            queue.clear()
        for usage in usages:
            usage.device_pages = usage.host_pages = 0
            for queue in usage.queues or ():
                queue.clear()

    # Namespaces

    def usage(self, namespace: Namespace | None) -> NamespaceUsage:
        """Return what the tree holds of a namespace."""
        key = NO_NAMESPACE if namespace is None else namespace
        usage = self._namespaces.get(key)
        if usage is None:
            usage = self._namespaces[key] = NamespaceUsage()
        return usage

    def set_quota(self, namespace: Namespace | None, quota: Quota) -> None:
        """Set the quota of a namespace, and queue its leaves if it had none."""
        usage = self.usage(namespace)
        usage.quota = quota
        if quota == NO_QUOTA:
            self._limited.discard(usage)
            return
        self._limited.add(usage)
        if usage.queues is None:
            usage.queues = tier_queues(of_namespace=True)
            for node in self.nodes():
                self.order.offer(node, device=True)
                self.order.offer(node, device=False)

    @property
    def host_pages(self) -> int:
        """Pages on the host, of all namespaces."""
        return sum(usage.host_pages for usage in self._namespaces.values())

    # Walking

    def walk(self, blob: bytes) -> TreeNode:
        """Follow the keys from the root as far as there are nodes, splitting the last where the keys end or differ."""
        node, end = self.root, len(blob) // KEY_BYTES
        while node.depth < end and (child := self.child(node, blob, node.depth)) is not None:
            node = child
        return node

    def child(self, node: TreeNode, blob: bytes, at: int) -> TreeNode | None:
        """Return the child that has the keys from page ``at`` on, or the head that is split off where they differ."""
        child = node.child(blob[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        if child is None:
            return None
        tail = blob[at * KEY_BYTES : at * KEY_BYTES + len(child.keys)]
        return child if tail == child.keys else self.split(child, common_pages(child.keys, tail))

    def follow(self, match: Match, pages: int) -> Iterator[tuple[TreeNode, slice]]:
        """Yield the nodes of the next pages after a match, and which of these pages each has.

        Nodes that reach beyond are split. A new node is yielded where there is none; the caller gives it a part.
        """
        node, at = match.node, 0
        blob = match.keys[match.pages * KEY_BYTES : (match.pages + pages) * KEY_BYTES]
        while at < pages:
            node = self.child(node, blob, at) or self.add_child(node, blob[at * KEY_BYTES :], match)
            yield node, slice(at, at + node.pages)
            at += node.pages

    @staticmethod
    def known(node: TreeNode, blob: bytes) -> Iterator[tuple[TreeNode, int]]:
        """Follow the keys from a node without splitting; yields each node and how many of its pages they share."""
        while blob:
            child = node.child(blob[:KEY_BYTES])
            if child is None:
                return
            same = common_pages(child.keys, blob[: len(child.keys)])
            yield child, same
            if same < child.pages:
                return
            node, blob = child, blob[same * KEY_BYTES :]

    def nodes(self) -> Iterator[TreeNode]:
        """Yield all nodes except the root, parents first."""
        stack = self.root.all_children()
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.all_children())

    # Windows of a prefix

    def needed(self, node: TreeNode, name: str) -> list[Needed] | None:
        """Return what a prefix ending with ``node`` needs in a windowed pool, last first; None if some is missing."""
        left = self.windows[name].window_pages
        parts: list[Needed] = []
        for above in node.path():
            part, needed = above.window(name), min(left, above.pages)
            if part is None or part.covered < needed:
                return None
            parts.append(Needed(part, needed))
            left -= needed
            if not left:
                break
        return parts

    def on_device(self, node: TreeNode) -> bool:
        """Return whether the device has a prefix ending with ``node``, windows included."""
        if node.device is None or not node.in_tree:
            return False
        parts = [self.needed(node, name) for name in self.windows]
        return all(
            mine is not None and all(part.count(device=True) >= needed for part, needed in mine) for mine in parts
        )

    def all_needed(self, node: TreeNode) -> Iterator[Needed]:
        """Yield what a prefix ending with ``node`` needs in those windowed pools that have all of it."""
        for name in self.windows:
            yield from self.needed(node, name) or ()

    def restorable(self, node: TreeNode) -> bool:
        """Return whether every windowed pool has what a prefix ending with ``node`` needs, on some side."""
        return all(self.needed(node, name) is not None for name in self.windows)

    def check_windows(self, names: Iterable[str]) -> None:
        """Raise ValueError unless these are windowed pools of the tree."""
        for name in names:
            if name not in self.windows:
                raise ValueError(f"windows has {name!s}; the tree's components are {list(self.windows)}")

    def last_restorable(self, node: TreeNode) -> TreeNode:
        """Go up from a node that may have left the tree to the end of the longest prefix that can be restored.

        Only ends of nodes matter: parts cover the last pages of their nodes, so if a prefix can be cut inside a node,
        it can be extended to that node's end.
        """
        while node.parent is not None and not (node.in_tree and self.restorable(node)):
            node = node.parent
        return node

    # Shape

    def add_child(self, parent: TreeNode, keys: bytes, match: Match) -> TreeNode:
        """Add a node of a request; the caller gives it pages."""
        depth, tick = parent.depth + len(keys) // KEY_BYTES, self.order.tick
        node = TreeNode(self.new_id(), parent, keys, match.owner, depth, created=tick, last_access=tick)
        if match.tokens is not None:
            node.tokens = own_tokens(match.tokens[parent.depth * self.page_size : depth * self.page_size])
        # It is queued for eviction before the use that brought it is counted, and has that use's value from the start.
        self.order.use(node, 0)
        node.hits = 0
        parent.add_child(node)
        return node

    def split(self, node: TreeNode, at: int) -> TreeNode:
        """Split a node and return the new head; the node itself stays the tail, with its locks and its id."""
        parent = node.parent
        if parent is None or not node.in_tree:
            raise ValueError(f"node {node.id} is the root or not in the tree; accepted is another node of the tree")
        if not 0 < at < node.pages:
            raise ValueError(f"pages is {at}; node {node.id} has {node.pages}, and accepted is less, but at least 1")
        head = TreeNode(self.new_id(), parent, node.keys[: at * KEY_BYTES], node.owner, parent.depth + at, node.created)
        head.hits, head.value, head.stored = node.hits, node.value, node.stored
        head.priority, head.last_access = node.priority, node.last_access
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
        upper = WindowPart(head, part.name, write=part.write, load=part.load, last_access=part.last_access)
        upper.stored = part.stored
        if part.device is not None and part.count(device=True) > tail_pages:
            upper.device, part.device = cut(part.device, part.count(device=True) - tail_pages)
        if part.host is not None and part.count(device=False) > tail_pages:
            upper.host, part.host = cut(part.host, part.count(device=False) - tail_pages)
        for pin in part.pins:
            if upper.part(device=pin.device) is not None:
                pin.hold(upper)
        head.windows = (*head.windows, upper)
        self.order.offer_windows([upper])

    # Parts of nodes

    def set_part(self, held: Held, pages: Pages, *, device: bool) -> None:
        """Give a node, or its part in a windowed pool, its pages in a tier; the caller queues the latter."""
        held.set_part(pack(pages), device=device)
        if isinstance(held, TreeNode):
            self._count_part(held, 1, device=device)
            self.order.offer(held, device=device)

    def clear_part(self, held: Held, *, device: bool) -> None:
        """Forget the pages in a tier of a node, or of its part in a windowed pool; the caller frees them."""
        held.set_part(None, device=device)
        if isinstance(held, TreeNode):
            self._count_part(held, -1, device=device)
        else:
            self.remove_empty(held)

    def _count_part(self, node: TreeNode, change: int, *, device: bool) -> None:
        """Count a part that a node got or lost, which may leave its parent a leaf."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root has no pages")
        if device:
            node.owner.device_pages += change * node.pages
            parent.device_children += change
        else:
            node.owner.host_pages += change * node.pages
            parent.host_children += change
        self.order.offer(parent, device=device)

    @staticmethod
    def remove_empty(part: WindowPart) -> None:
        """Take a part that has pages on neither side off its node."""
        if part.device is None and part.host is None:
            part.node.windows = tuple(other for other in part.node.windows if other is not part)

    # Locks

    def lock(self, node: TreeNode, *, device: bool, change: int = 1) -> None:
        """Keep a node's part in a tier, and with it the node's prefix."""
        if device:
            node.device_lock += change
        else:
            node.host_lock += change

    def unlock(self, node: TreeNode, *, device: bool) -> None:
        """Undo one :meth:`lock`."""
        self.lock(node, device=device, change=-1)
        self.order.offer(node, device=device)

    def unpin(self, *pins: Pin) -> None:
        """Release pins; with both sides released at once, both queues of most parts share one entry."""
        self.order.offer_windows([part for pin in pins for part in pin.release()])

    def add_reference(self, node: TreeNode, *, device: bool) -> None:
        """Lock a node for the engine."""
        tier, part = ("device", node.device) if device else ("host", node.host)
        if not node.in_tree:
            raise ValueError(f"node {node.id} is not in the tree; accepted is one that is")
        if part is None and node is not self.root:
            raise ValueError(f"node {node.id} is not on the {tier}; accepted is one that is")
        self._references[node.id, device] += 1
        self.lock(node, device=device)

    def drop_reference(self, node: TreeNode, *, device: bool) -> None:
        """Undo one :meth:`add_reference`."""
        if not self._references[node.id, device]:
            tier = "device" if device else "host"
            raise ValueError(f"node {node.id} has no lock reference on the {tier}; each is dropped once")
        self._references[node.id, device] -= 1
        if not self._references[node.id, device]:
            del self._references[node.id, device]
        self.unlock(node, device=device)

    # Matches

    def pin_match(self, request: Request, node: TreeNode) -> Match:
        """Pin the restorable prefix that ends with ``node``, for a request."""
        above = node
        while above.device is None and above.parent is not None:
            above = above.parent
        # Each part of a windowed pool is pinned on the device if all that is needed of it is there.
        on_device, on_host, hosted = Pin(device=True), Pin(device=False), node.depth - above.depth
        for part, needed in self.all_needed(node):
            (on_device if part.count(device=True) >= needed else on_host).hold(part)
        of_request = request.keys, request.owner, request.priority, request.tokens
        match = Match(*of_request, above.depth, hosted, above, node, on_device, on_host)
        self.lock(above, device=True)
        if hosted:
            self.lock(node, device=False)
        self._pinned.add(match)
        return match

    def check_pinned(self, match: Match) -> None:
        """Raise ValueError unless the match is pinned."""
        if match not in self._pinned:
            raise ValueError("match was released, or another one replaced it; accepted is one that is pinned")

    def unpin_match(self, match: Match) -> None:
        """Unpin a match."""
        self.check_pinned(match)
        self._pinned.remove(match)
        self.unlock(match.device_node, device=True)
        if match.host_pages:
            self.unlock(match.node, device=False)
        self.unpin(match.device_pin, match.host_pin)

    @contextmanager
    def handing_out(self, match: Match) -> Iterator[None]:
        """Unpin a match that the caller does not get, as the block or a callback of the engine raised.

        Interrupts come before and after the block, as one at the end of the call would take its result along.
        """
        try:
            self.raise_pending()
            yield
            self.raise_pending()
        except BaseException:
            self.unpin_match(match)
            raise

    def raise_pending(self) -> None:
        """Raise what a callback of the engine has raised, or an interrupt that has arrived."""
        self.calls.raise_first()
        interruptibly(lambda: None)

    def keep_match(self, match: Match, seconds: float) -> None:
        """Pin what a match covers once more, for some seconds."""
        kept = self.pin_match(match, match.node)
        heapq.heappush(self._timed, (self._clock() + seconds, self.new_id(), kept))

    def expire(self) -> int:
        """Unpin what was to be kept until now; returns how many pins there were."""
        expired = 0
        while self._timed and self._timed[0][0] <= self._clock():
            self.unpin_match(heapq.heappop(self._timed)[2])
            expired += 1
        return expired
