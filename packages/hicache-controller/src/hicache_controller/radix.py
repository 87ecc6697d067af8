"""UnifiedRadixCache: the prefix tree that decides what is cached in which tier.

Keys are chained page hashes (see :mod:`hicache_controller.hashing`), so equal keys at one place mean an equal prefix.
A node holds a run of pages; its device part and its host part are page numbers of the device and the host pool.

Invariants (:meth:`UnifiedRadixCache.check_integrity` checks them):

- every node but the root has a device part, a host part, or both, of as many pages as it has keys;
- a node with a device part has a parent with one, and the same for host parts: each tier holds whole prefixes, so only
  leaves of a tier are evicted from it and pinning a node pins its prefix;
- a locked part is never evicted; a part with a transfer in flight is locked.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .controller import HiCacheController

Pages = npt.NDArray[np.int64]

KEY_BYTES = 16


class WritePolicy(StrEnum):
    """When a node's pages are written from the device to the host (and from there to storage)."""

    WRITE_THROUGH = "write_through"
    """As soon as they are inserted."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """Once a node was matched ``selective_hits`` times."""
    WRITE_BACK = "write_back"
    """When they are evicted from the device."""


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


@dataclass(eq=False, slots=True)
class _Operation:
    """A transfer in flight and the nodes it moves; a split adds the new node."""

    nodes: list[TreeNode]


@dataclass(eq=False, slots=True)
class TreeNode:
    """A run of pages that share their prefix.

    Attributes
    ----------
    keys
        Page keys, :data:`KEY_BYTES` bytes each.
    device, host
        Page numbers, or None.
    device_children, host_children
        How many children have that part; a leaf of the tier has none.
    stored
        Every page of it was stored in, or read from, storage.
    """

    id: int
    parent: TreeNode | None
    keys: bytes
    device: Pages | None = None
    host: Pages | None = None
    stored: bool = False
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    device_children: int = 0
    host_children: int = 0
    device_lock: int = 0
    host_lock: int = 0
    hits: int = 0
    last_access: int = 0
    in_device_heap: bool = False
    in_host_heap: bool = False
    write: _Operation | None = None
    load: _Operation | None = None
    backup: _Operation | None = None

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.keys) // KEY_BYTES

    def key(self, page: int) -> bytes:
        """Key of one page."""
        return self.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]


@dataclass(frozen=True, eq=False)
class Match:
    """The longest cached prefix of a request, pinned until :meth:`UnifiedRadixCache.release`.

    Attributes
    ----------
    keys
        All page keys of the request.
    device_pages, host_pages
        Leading pages on the device, and further ones on the host.
    device_node, node
        Deepest matched node with a device part, and deepest matched node. Both are pinned, each in its tier.
    """

    keys: bytes
    device_pages: int
    host_pages: int
    device_node: TreeNode
    node: TreeNode

    @property
    def pages(self) -> int:
        """Matched pages, whatever their tier."""
        return self.device_pages + self.host_pages

    def rest(self) -> list[bytes]:
        """Keys of the pages behind the match."""
        return _key_list(self.keys[self.pages * KEY_BYTES :])


class InsertResult(NamedTuple):
    """Result of an insert: the match that covers the whole request, and how many of its pages the tree had already."""

    match: Match
    duplicates: int


class TreeStats(NamedTuple):
    """Size of the tree: nodes without the root, and pages by tier."""

    nodes: int
    device_pages: int
    host_pages: int


def _key_list(blob: bytes) -> list[bytes]:
    return [blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES)]


def _common_pages(left: bytes, right: bytes) -> int:
    """Leading pages two key runs share; keys are chained, so one comparison answers for all before it."""
    low, high = 0, min(len(left), len(right)) // KEY_BYTES
    while low < high:
        middle = (low + high) // 2
        at = slice(middle * KEY_BYTES, (middle + 1) * KEY_BYTES)
        if left[at] == right[at]:
            low = middle + 1
        else:
            high = middle
    return low


class UnifiedRadixCache:
    """Prefix tree over the device pool, the host pool and storage.

    Not thread-safe: an engine's scheduler thread owns it.

    Parameters
    ----------
    controller
        Moves the bytes and owns the host pool.
    device_allocator
        Hands out device pages; the anchor entry's ``device_alloc_fn`` draws on the same one.
    page_size
        Slots a page.
    write_policy
        See :class:`WritePolicy`.
    selective_hits
        Matches after which ``write_through_selective`` writes a node.
    """

    def __init__(
        self,
        controller: HiCacheController,
        device_allocator: PageAllocator,
        *,
        page_size: int,
        write_policy: WritePolicy | str = WritePolicy.WRITE_THROUGH,
        selective_hits: int = 2,
    ) -> None:
        if page_size <= 0:
            raise ValueError(f"page_size is {page_size}; it must be positive")
        if selective_hits <= 0:
            raise ValueError(f"selective_hits is {selective_hits}; it must be positive")
        self.controller = controller
        self.device_allocator = device_allocator
        self.page_size = page_size
        self.write_policy = WritePolicy(write_policy)
        self.selective_hits = selective_hits
        self.root = TreeNode(0, None, b"")
        self._next_id = 1
        self._tick = 0
        self._device_heap: list[tuple[int, int, TreeNode]] = []
        self._host_heap: list[tuple[int, int, TreeNode]] = []
        self._writes: dict[int, _Operation] = {}
        self._loads: dict[int, _Operation] = {}
        self._backups: dict[int, _Operation] = {}
        self._offsets = torch.arange(page_size)

    # Lookup

    def match_prefix(self, keys: Sequence[bytes]) -> Match:
        """Longest prefix of ``keys`` that is on the device or the host, pinned.

        Parameters
        ----------
        keys
            Page keys of the whole request, 16 bytes each.
        """
        blob = b"".join(keys)
        if len(blob) != KEY_BYTES * len(keys):
            raise ValueError(f"keys hold {len(blob)} bytes for {len(keys)} pages; {KEY_BYTES} bytes a page are needed")
        self._tick += 1
        node, matched = self._walk(self.root, blob, 0)
        device_pages, above = matched, node
        while above.device is None and above.parent is not None:
            device_pages -= above.pages
            above = above.parent
        match = Match(blob, device_pages, matched - device_pages, above, node)
        self._pin(match)
        self._touch(node)
        return match

    def release(self, match: Match) -> None:
        """Unpin a match; once for each match handed out."""
        self._unlock_device(match.device_node)
        if match.host_pages:
            self._unlock_host(match.node)

    def device_page_numbers(self, match: Match) -> Pages:
        """Device pages of the match's leading ``device_pages``, in order."""
        parts: list[Pages] = []
        for node in self._path(match.node):
            if node.device is not None:
                parts.append(node.device)
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int64)

    # What an engine does with a match

    def prefetch(self, match: Match) -> Match:
        """Bring the pages behind the match from storage to the host; the match it returns replaces the one given."""
        rest = match.rest()
        found = self.controller.storage_exists(rest) if rest else 0
        if not found:
            return match
        # The new node needs a host part above it, which must stay while room is made for it.
        above = match.node
        above.host_lock += 1
        longer = self._prefetch_below(match, rest[:found]) if self._settled_on_host(above) else None
        self._unlock_host(above)
        if longer is None:
            return match
        self.release(match)
        return longer

    def _prefetch_below(self, match: Match, keys: list[bytes]) -> Match | None:
        slots = self._alloc_host(len(keys))
        if slots is None:
            return None
        room = len(slots) // self.page_size
        operation = self.controller.prefetch(slots, keys[:room], request_id=str(self._next_id))
        operation.wait()
        got = operation.completed_pages
        if got < room:
            self.controller.evict_host(slots[got * self.page_size :])
        if not got:
            return None
        start = match.pages * KEY_BYTES
        node = self._add_child(match.node, match.keys[start : start + got * KEY_BYTES])
        node.stored = True
        self._set_host(node, self._pages(slots[: got * self.page_size]))
        longer = Match(match.keys, match.device_pages, match.host_pages + got, match.device_node, node)
        self._pin(longer)
        return longer

    def _settled_on_host(self, node: TreeNode) -> bool:
        """Whether the node has a host part whose write is done (the root needs none), writing it if need be."""
        if not self._ensure_host(node):
            return False
        while node.write is not None:
            self.poll(wait=True)
        return node is self.root or node.host is not None

    def load_back(self, match: Match) -> Match:
        """Load the match's host pages to the device and wait for them.

        The match it returns replaces the one given; it is shorter where the device has no room or the load failed.
        """
        nodes = [n for n in self._path(match.node) if n.device is None and n is not self.root][::-1]
        while nodes:
            hosts = [node.host for node in nodes if node.host is not None]
            slots = self._slots(np.concatenate(hosts))
            if self._make_device_room(len(slots) // self.page_size):
                target = self.controller.load(slots, node_id=nodes[-1].id)
                if target is not None:
                    self._start_load(nodes, self._pages(target))
                    break
            nodes.pop()
        while nodes and any(node.load is not None for node in nodes):
            self.poll(wait=True)
        node = match.node
        dropped = 0
        while node.device is None and node.parent is not None:
            dropped += node.pages
            node = node.parent
        loaded = Match(match.keys, match.pages - dropped, 0, node, node)
        self._pin(loaded)
        self.release(match)
        return loaded

    def alloc_device(self, count: int) -> Pages | None:
        """Allocate pages for the engine to compute into, evicting the least recently used; None if too few."""
        if not self._make_device_room(count):
            return None
        return self.device_allocator.alloc_pages(count)

    def insert(self, match: Match, pages: Pages, count: int | None = None) -> InsertResult:
        """Hand computed pages over to the tree, behind a match that is wholly on the device.

        Parameters
        ----------
        match
            Pinned match; the one in the result replaces it.
        pages
            Device page numbers of the pages behind the match whose every token was computed.
        count
            How many pages to publish (default: all of ``pages``).

        Returns
        -------
        InsertResult
            The pinned match over all published pages; where another request had inserted some of them first, the
            tree's pages stand and the duplicates among ``pages`` are freed.
        """
        if match.host_pages:
            raise ValueError(f"match has {match.host_pages} pages on the host; load_back must come before insert")
        count = len(pages) if count is None else count
        if not 0 <= count <= len(pages) or match.pages + count > len(match.keys) // KEY_BYTES:
            raise ValueError(
                f"{count} pages to insert behind {match.pages} matched ones; the request has "
                f"{len(match.keys) // KEY_BYTES} pages and {len(pages)} were given"
            )
        self._tick += 1
        begin, end = match.pages, match.pages + count
        blob = match.keys[: end * KEY_BYTES]
        node, at = match.node, begin
        duplicates: list[Pages] = []
        while at < end:
            child = node.children.get(blob[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if child is None:
                child = self._add_child(node, blob[at * KEY_BYTES :])
                self._set_device(child, pages[at - begin : end - begin])
            else:
                same = _common_pages(child.keys, blob[at * KEY_BYTES :])
                if same < child.pages:
                    child = self._split(child, same)
                own = pages[at - begin : at - begin + same]
                if child.device is None:
                    self._set_device(child, own)
                else:
                    duplicates.append(own)
            node, at = child, at + child.pages
        result = Match(match.keys, end, 0, node, node)
        self._pin(result)
        self.release(match)
        self._touch(node)
        if duplicates:
            self.controller.evict_device(self._slots(np.concatenate(duplicates)))
        if self.write_policy is WritePolicy.WRITE_THROUGH:
            self._ensure_host(node)
            self.controller.start_writing()
        return InsertResult(result, sum(map(len, duplicates)))

    # Eviction

    def evict_device(self, count: int) -> int:
        """Free at least ``count`` device pages if the unlocked leaves allow; returns how many were freed."""
        freed = 0
        saving: list[TreeNode] = []
        while freed < count:
            node = self._pop_leaf(self._device_heap, device=True)
            if node is None:
                if saving:
                    freed += self._finish_saving(saving)
                elif not self._wait():
                    break
            elif node.host is not None or self.write_policy is not WritePolicy.WRITE_BACK:
                freed += node.pages
                self._drop_device(node)
            elif self._ensure_host(node):
                # Its new host part must outlast the device part, or saving one node could undo another's.
                node.host_lock += 1
                saving.append(node)
                if freed + sum(n.pages for n in saving) >= count:
                    freed += self._finish_saving(saving)
            elif saving:
                freed += self._finish_saving(saving)
                self._offer(node, device=True)
            else:
                freed += node.pages
                self._drop_device(node)
        return freed + self._finish_saving(saving)

    def _finish_saving(self, saving: list[TreeNode]) -> int:
        """Wait for the writes of nodes that are to leave the device, drop their device parts, empty the list."""
        while self._writes and saving:
            self.poll(wait=True)
        freed = 0
        for node in saving:
            if node.host is not None and node.device is not None and not (node.device_children or node.device_lock):
                freed += node.pages
                self._drop_device(node)
            self._unlock_host(node)
        saving.clear()
        return freed

    def evict_host(self, count: int) -> int:
        """Free at least ``count`` host pages if the unlocked leaves allow; returns how many were freed."""
        freed = 0
        while freed < count:
            node = self._pop_leaf(self._host_heap, device=False)
            if node is None:
                if not self._wait():
                    break
                continue
            freed += node.pages
            self._drop_host(node)
        return freed

    # Transfers in flight

    def poll(self, *, wait: bool = False) -> bool:
        """Take in finished transfers (with ``wait``, at least one where any is in flight); True if there were any."""
        self.controller.start_writing()
        wait_writes = wait and bool(self._writes)
        wait_loads = wait and bool(self._loads) and not wait_writes
        wait_backups = wait and bool(self._backups) and not wait_writes and not wait_loads
        seen = False
        for ack in self.controller.poll_writes(wait=wait_writes):
            for node_id in ack.node_ids:
                seen = True
                self._finish_write(self._writes.pop(node_id), failed=ack.error is not None)
        for ack in self.controller.poll_loads(wait=wait_loads):
            for node_id in ack.node_ids:
                seen = True
                self._finish_load(self._loads.pop(node_id), failed=ack.error is not None)
        for stored in self.controller.poll_backups(wait=wait_backups):
            seen = True
            self._finish_backup(self._backups.pop(stored.node_id), stored.stored_pages)
        return seen

    def drain(self) -> None:
        """Wait until no transfer is in flight."""
        while self._wait():
            pass

    # Inspection

    def stats(self) -> TreeStats:
        """Size of the tree; walks all of it."""
        nodes = list(self._all_nodes())
        return TreeStats(
            len(nodes),
            sum(node.pages for node in nodes if node.device is not None),
            sum(node.pages for node in nodes if node.host is not None),
        )

    def check_integrity(self) -> None:
        """Check every invariant; raises RuntimeError naming the node and the fault."""
        device: list[Pages] = []
        host: list[Pages] = []
        for node in (self.root, *self._all_nodes()):
            for key, child in node.children.items():
                if child.parent is not node or child.key(0) != key:
                    raise RuntimeError(f"node {child.id} hangs wrongly below node {node.id}")
            counts = (
                sum(child.device is not None for child in node.children.values()),
                sum(child.host is not None for child in node.children.values()),
            )
            if counts != (node.device_children, node.host_children):
                raise RuntimeError(
                    f"node {node.id} counts {node.device_children} device and {node.host_children} host children; "
                    f"it has {counts[0]} and {counts[1]}"
                )
            if node is self.root:
                continue
            if node.device is None and node.host is None:
                raise RuntimeError(f"node {node.id} is in no tier")
            for name, part, above, parts in (
                ("device", node.device, node.parent and node.parent.device, device),
                ("host", node.host, node.parent and node.parent.host, host),
            ):
                if part is None:
                    continue
                if len(part) != node.pages:
                    raise RuntimeError(f"node {node.id} has {node.pages} keys and {len(part)} {name} pages")
                if above is None and node.parent is not self.root:
                    raise RuntimeError(f"node {node.id} has a {name} part and its parent has none")
                parts.append(part)
            in_flight = [operation for operation in (node.write, node.load, node.backup) if operation is not None]
            if any(node not in operation.nodes for operation in in_flight):
                raise RuntimeError(f"node {node.id} is not among the nodes of its own transfer")
        for name, parts in (("device", device), ("host", host)):
            pages = np.concatenate(parts) if parts else np.empty(0, np.int64)
            if len(np.unique(pages)) != len(pages):
                raise RuntimeError(f"a {name} page belongs to two nodes")

    def pretty(self, node: TreeNode | None = None, depth: int = 0) -> str:
        """Draw the tree as text, a node a line: pages, tiers (D, H, S), locks."""
        node = node or self.root
        tiers = "".join(
            letter if present else "-"
            for letter, present in (("D", node.device is not None), ("H", node.host is not None), ("S", node.stored))
        )
        line = f"{'  ' * depth}#{node.id} {node.pages} pages {tiers} locks {node.device_lock}/{node.host_lock}"
        return "\n".join([line, *(self.pretty(child, depth + 1) for child in node.children.values())])

    # Walking

    def _walk(self, node: TreeNode, blob: bytes, at: int) -> tuple[TreeNode, int]:
        end = len(blob) // KEY_BYTES
        while at < end:
            child = node.children.get(blob[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if child is None:
                break
            tail = blob[at * KEY_BYTES : at * KEY_BYTES + len(child.keys)]
            same = child.pages if tail == child.keys else _common_pages(child.keys, tail)
            if same < child.pages:
                child = self._split(child, same)
            node, at = child, at + same
        return node, at

    def _path(self, node: TreeNode) -> Iterator[TreeNode]:
        """Yield the node and its ancestors, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _all_nodes(self) -> Iterator[TreeNode]:
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _touch(self, node: TreeNode) -> None:
        write: TreeNode | None = None
        for above in self._path(node):
            above.last_access = self._tick
            above.hits += 1
            if write is None and above.hits >= self.selective_hits and above.device is not None and above.host is None:
                write = above
        if write is not None and self.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            self._ensure_host(write)

    # Shape of the tree

    def _add_child(self, parent: TreeNode, keys: bytes) -> TreeNode:
        node = TreeNode(self._next_id, parent, keys, last_access=self._tick)
        self._next_id += 1
        parent.children[node.key(0)] = node
        return node

    def _split(self, node: TreeNode, at: int) -> TreeNode:
        """Cut a node in two and return the new head; the node itself stays the tail, with its locks and its id."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root cannot be split")
        head = TreeNode(
            self._next_id,
            parent,
            node.keys[: at * KEY_BYTES],
            stored=node.stored,
            hits=node.hits,
            last_access=node.last_access,
        )
        self._next_id += 1
        node.keys = node.keys[at * KEY_BYTES :]
        if node.device is not None:
            head.device, node.device = node.device[:at], node.device[at:]
            head.device_children = 1
        if node.host is not None:
            head.host, node.host = node.host[:at], node.host[at:]
            head.host_children = 1
        for operation in (node.write, node.load, node.backup):
            if operation is not None:
                operation.nodes.append(head)
        # The head needs no locks of its own: its tail is locked, so it is no leaf.
        head.write, head.load, head.backup = node.write, node.load, node.backup
        parent.children[head.key(0)] = head
        head.children[node.key(0)] = node
        node.parent = head
        return head

    def _remove(self, node: TreeNode) -> None:
        if node.parent is not None:
            del node.parent.children[node.key(0)]

    def _set_device(self, node: TreeNode, pages: Pages) -> None:
        node.device = pages
        if node.parent is not None:
            node.parent.device_children += 1
        self._offer(node, device=True)

    def _set_host(self, node: TreeNode, pages: Pages) -> None:
        node.host = pages
        if node.parent is not None:
            node.parent.host_children += 1
        self._offer(node, device=False)

    def _clear_device(self, node: TreeNode) -> None:
        node.device = None
        if node.parent is not None:
            node.parent.device_children -= 1
            self._offer(node.parent, device=True)

    def _clear_host(self, node: TreeNode) -> None:
        node.host = None
        if node.parent is not None:
            node.parent.host_children -= 1
            self._offer(node.parent, device=False)

    def _drop_device(self, node: TreeNode) -> None:
        if node.device is not None:
            self.controller.evict_device(self._slots(node.device))
            self._clear_device(node)
        if node.host is None:
            self._remove(node)

    def _drop_host(self, node: TreeNode) -> None:
        if node.host is not None:
            self.controller.evict_host(self._slots(node.host))
            self._clear_host(node)
        if node.device is None:
            self._remove(node)

    # Locks and the heaps of leaves

    def _pin(self, match: Match) -> None:
        match.device_node.device_lock += 1
        if match.host_pages:
            match.node.host_lock += 1

    def _unlock_device(self, node: TreeNode) -> None:
        node.device_lock -= 1
        self._offer(node, device=True)

    def _unlock_host(self, node: TreeNode) -> None:
        node.host_lock -= 1
        self._offer(node, device=False)

    def _offer(self, node: TreeNode, *, device: bool) -> None:
        """Put an unlocked leaf of a tier into its heap; a stale entry is found out when it is popped."""
        if node is self.root:
            return
        if device:
            if node.device is not None and not (node.device_children or node.device_lock or node.in_device_heap):
                node.in_device_heap = True
                heapq.heappush(self._device_heap, (node.last_access, node.id, node))
        elif node.host is not None and not (node.host_children or node.host_lock or node.in_host_heap):
            node.in_host_heap = True
            heapq.heappush(self._host_heap, (node.last_access, node.id, node))

    def _pop_leaf(self, heap: list[tuple[int, int, TreeNode]], *, device: bool) -> TreeNode | None:
        """Least recently used unlocked leaf of a tier; what changed since it was offered goes out or back in."""
        while heap:
            tick, _, node = heapq.heappop(heap)
            if device:
                node.in_device_heap = False
                evictable = node.device is not None and not (node.device_children or node.device_lock)
            else:
                node.in_host_heap = False
                evictable = node.host is not None and not (node.host_children or node.host_lock)
            if evictable and tick == node.last_access:
                return node
            self._offer(node, device=device)
        return None

    # Room

    def _make_device_room(self, count: int) -> bool:
        missing = count - self.device_allocator.available_pages
        if missing > 0:
            self.evict_device(missing)
        return self.device_allocator.available_pages >= count

    def _alloc_host(self, count: int) -> torch.Tensor | None:
        """Take host slots for ``count`` pages, or for as many as evicting makes room for; None where there is none."""
        pool = self.controller.mem_pool_host
        missing = count - pool.available_size() // self.page_size
        if missing > 0:
            self.evict_host(missing)
        count = min(count, pool.available_size() // self.page_size)
        return pool.alloc(count * self.page_size) if count else None

    def _pages(self, slots: torch.Tensor) -> Pages:
        pages: Pages = (slots[:: self.page_size] // self.page_size).numpy()
        return pages

    def _slots(self, pages: Pages) -> torch.Tensor:
        return (torch.from_numpy(pages)[:, None] * self.page_size + self._offsets).reshape(-1)

    def _wait(self) -> bool:
        """Wait for one transfer; False if none is in flight."""
        return bool(self._writes or self._loads or self._backups) and self.poll(wait=True)

    # Starting and finishing transfers

    def _ensure_host(self, node: TreeNode) -> bool:
        """Give the node and its ancestors host parts; False if the host has no room for one of them.

        The writes are queued; the next :meth:`poll` starts them, merged.
        """
        return all(self._write(above) for above in [n for n in self._path(node) if n.host is None][::-1])

    def _write(self, node: TreeNode) -> bool:
        if node.device is None:
            return False
        slots = self._slots(node.device)
        # Whatever the eviction below frees, it is neither this node nor its prefix.
        node.device_lock += 1
        parent = node.parent
        if parent is not None:
            parent.host_lock += 1
        host = self.controller.write(slots, node_id=node.id)
        if host is None and self.evict_host(node.pages):
            host = self.controller.write(slots, node_id=node.id)
        if parent is not None:
            self._unlock_host(parent)
        if host is None:
            self._unlock_device(node)
            return False
        node.host_lock += 1
        node.write = self._writes[node.id] = _Operation([node])
        self._set_host(node, self._pages(host))
        return True

    def _finish_write(self, operation: _Operation, *, failed: bool) -> None:
        tail = operation.nodes[0]
        for node in operation.nodes:
            node.write = None
        self._unlock_device(tail)
        self._unlock_host(tail)
        if failed:
            for node in operation.nodes:
                self._forget_host(node)
            return
        # All of them lie on the tail's path; heads go first.
        for node in [n for n in self._path(tail) if n in operation.nodes][::-1]:
            self._start_backup(node)

    def _forget_host(self, node: TreeNode) -> None:
        """Take back the host part of a failed write (the controller freed the slots), with what hangs on it."""
        for child in [c for c in node.children.values() if c.host is not None and c.write is None]:
            self._drop_below(child, device=False)
        self._clear_host(node)

    def _forget_device(self, node: TreeNode) -> None:
        """Take back the device part of a failed load (the controller freed the slots), with what hangs on it."""
        for child in [c for c in node.children.values() if c.device is not None and c.load is None]:
            self._drop_below(child, device=True)
        self._clear_device(node)

    def _drop_below(self, node: TreeNode, *, device: bool) -> None:
        for child in [c for c in node.children.values() if (c.device if device else c.host) is not None]:
            self._drop_below(child, device=device)
        (self._drop_device if device else self._drop_host)(node)

    def _start_load(self, nodes: list[TreeNode], pages: Pages) -> None:
        operation = _Operation([nodes[-1], *nodes[:-1]])
        at = 0
        for node in nodes:
            self._set_device(node, pages[at : at + node.pages])
            node.load = operation
            at += node.pages
        nodes[-1].device_lock += 1
        nodes[-1].host_lock += 1
        self._loads[nodes[-1].id] = operation
        self.controller.start_loading()

    def _finish_load(self, operation: _Operation, *, failed: bool) -> None:
        tail = operation.nodes[0]
        for node in operation.nodes:
            node.load = None
        self._unlock_device(tail)
        self._unlock_host(tail)
        if failed:
            for node in operation.nodes:
                self._forget_device(node)

    def _start_backup(self, node: TreeNode) -> None:
        if node.stored or node.host is None or not self.controller.has_storage:
            return
        node.host_lock += 1
        node.backup = self._backups[node.id] = _Operation([node])
        keys = _key_list(node.keys)
        above = node.parent
        first = above.key(above.pages - 1) if above is not None and above.pages else None
        self.controller.backup(self._slots(node.host), keys, parents=[first, *keys[:-1]], node_id=node.id)

    def _finish_backup(self, operation: _Operation, stored_pages: int) -> None:
        tail = operation.nodes[0]
        complete = stored_pages == sum(node.pages for node in operation.nodes)
        for node in operation.nodes:
            node.backup = None
            node.stored = complete
        self._unlock_host(tail)
