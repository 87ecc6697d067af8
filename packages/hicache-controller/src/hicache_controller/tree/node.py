"""TreeNode: a run of pages; WindowPart: what a windowed pool keeps of its last pages; Operation: a transfer of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .keys import KEY_BYTES, Tokens
from .queue import NO_USAGE, NamespaceUsage

Pages = npt.NDArray[np.int64]
"""Page numbers of one pool on one side."""

NO_PAGES: Pages = np.empty(0, np.int64)
NO_SLOTS = torch.empty(0, dtype=torch.int64)

PagesByPool = dict[str, Pages]
"""Pages of the anchor and of windowed pools, by their names."""

PackedPages = int | bytes
"""Page numbers as nodes and window parts keep them: a run of neighbours as one integer, all else as int32.

Allocators hand out runs, so that most nodes need 32 bytes for what a numpy array takes 112 and more.
"""

_COUNT_BITS = 29
_COUNT = (1 << _COUNT_BITS) - 1


def pack(pages: Pages) -> PackedPages:
    """Copy page numbers into the form nodes keep them in."""
    count = len(pages)
    if count:
        first = int(pages[0])
        if count == 1 or np.array_equal(pages, np.arange(first, first + count)):
            return first << _COUNT_BITS | count
    return pages.astype(np.int32).tobytes()


def unpack(packed: PackedPages) -> Pages:
    """Copy page numbers out of a node."""
    if isinstance(packed, int):
        first = packed >> _COUNT_BITS
        return np.arange(first, first + (packed & _COUNT), dtype=np.int64)
    return np.frombuffer(packed, np.int32).astype(np.int64)


def packed_count(packed: PackedPages | None) -> int:
    """Count packed page numbers."""
    if packed is None:
        return 0
    return packed & _COUNT if isinstance(packed, int) else len(packed) // 4


def cut(packed: PackedPages, at: int) -> tuple[PackedPages, PackedPages]:
    """Cut packed page numbers in two."""
    pages = unpack(packed)
    return pack(pages[:at]), pack(pages[at:])


def joined(held: Iterable[Tiered], *, device: bool) -> Pages:
    """Join the page numbers that nodes or window parts have on the device, or on the host."""
    pages = [unpack(packed) for each in held if (packed := each.part(device=device)) is not None]
    return np.concatenate(pages) if pages else NO_PAGES


_STORED = 32
"""Bit of ``queued``, where it takes no memory of its own."""


class Tiered:
    """What has pages in both tiers, transfers between them, and a copy in storage."""

    __slots__ = ("device", "host", "load", "queued", "write")
    queued: int
    device: PackedPages | None
    host: PackedPages | None
    write: Operation | None
    load: Operation | None

    def part(self, *, device: bool) -> PackedPages | None:
        """Return its pages on the device, or on the host."""
        return self.device if device else self.host

    def count(self, *, device: bool) -> int:
        """Return how many pages it has on the device, or on the host."""
        return packed_count(self.device if device else self.host)

    def transfer(self, *, device: bool) -> Operation | None:
        """Return the transfer under way to the device, or to the host."""
        return self.load if device else self.write

    def set_part(self, packed: PackedPages | None, *, device: bool) -> None:
        """Set its pages on the device, or on the host; storage's copy counts only while the host has one."""
        if device:
            self.device = packed
            return
        self.host = packed
        if packed is None:
            self.stored = False

    def set_transfer(self, operation: Operation | None, *, device: bool) -> None:
        """Set the transfer under way to the device, or to the host."""
        if device:
            self.load = operation
        else:
            self.write = operation

    @property
    def stored(self) -> bool:
        """Whether storage is known to have all of its pages."""
        return bool(self.queued & _STORED)

    @stored.setter
    def stored(self, stored: bool) -> None:
        self.queued = self.queued | _STORED if stored else self.queued & ~_STORED


@dataclass(eq=False, slots=True)
class Pin:
    """Window parts that stay on the device, or on the host, while it is held; a split adds the new part."""

    device: bool
    parts: list[WindowPart] = field(default_factory=list)

    def hold(self, part: WindowPart) -> None:
        """Keep its side of a part."""
        self.parts.append(part)
        part.pins = (*part.pins, self)

    def release(self) -> list[WindowPart]:
        """Release all parts, and return them."""
        parts, self.parts = self.parts, []
        for part in parts:
            part.pins = tuple(pin for pin in part.pins if pin is not self)
        return parts


@dataclass(eq=False, slots=True)
class Operation:
    """A transfer in flight and what it moves; a split adds the new node.

    Attributes
    ----------
    id
        The ``node_id`` the controller knows it by.
    device
        Whether it fills the device: a load. A write fills the host.
    nodes
        Nodes whose pages move, the tail first; it holds the locks, and so its prefix.
    pages
        Pages a backup must report for all of it to be stored.
    device_pin, host_pin
        Window parts that move.
    holds_device
        Whether the device parts are still kept.
    consumer
        Id in the layer counter, for loads.
    whole
        Whether a backup carries all pages of its nodes; otherwise only their windows are new.
    """

    id: int
    device: bool = False
    nodes: list[TreeNode] = field(default_factory=list)
    pages: int = 0
    device_pin: Pin = field(default_factory=lambda: Pin(device=True))
    host_pin: Pin = field(default_factory=lambda: Pin(device=False))
    holds_device: bool = True
    consumer: int = -1
    whole: bool = True
    failed: bool = False

    @property
    def target_pin(self) -> Pin:
        """The pin of the side that a load or a write fills."""
        return self.device_pin if self.device else self.host_pin

    def heads_first(self) -> list[TreeNode]:
        """Return its nodes in the order of their prefix: all of them are on the tail's path."""
        return [node for node in self.nodes[0].path() if node in self.nodes][::-1]


@dataclass(eq=False, slots=True)
class WindowPart(Tiered):
    """What a windowed pool (sliding window, recurrent state) keeps of a node: its last pages, on either side.

    Attributes
    ----------
    node
        Whose pages.
    name
        The pool.
    device, host
        Page numbers in that pool, or None; each side covers the last pages of the node, as many as it has numbers.
    pins
        What keeps its sides from being evicted.
    """

    node: TreeNode
    name: str
    device: PackedPages | None = None
    host: PackedPages | None = None
    pins: tuple[Pin, ...] = ()
    write: Operation | None = None
    load: Operation | None = None
    last_access: int = 0
    queued: int = 0

    def __lt__(self, other: WindowPart) -> bool:
        return self.node.id < other.node.id

    @property
    def covered(self) -> int:
        """Last pages of the node that are there on some side."""
        return max(packed_count(self.device), packed_count(self.host))

    def pin_count(self, *, device: bool) -> int:
        """Return how many pins keep its pages on the device, or on the host."""
        return [pin.device for pin in self.pins].count(device)


class Needed(NamedTuple):
    """A window part, and how many of its last pages a prefix needs."""

    part: WindowPart
    pages: int


@dataclass(eq=False, slots=True)
class TreeNode(Tiered):
    """A run of pages that share their prefix.

    Attributes
    ----------
    keys
        Page keys, :data:`KEY_BYTES` bytes each.
    depth
        Pages from the root to its end.
    created
        Tick of the request that brought its pages; both parts of a node that is cut keep it.
    device, host
        Page numbers, or None.
    children
        None, the only one, or by the key of their first page where there are several: most nodes have one.
    device_children, host_children
        How many children have that part; a leaf of the tier has none.
    owner
        What its namespace has in the tree.
    queued
        In which queues it is, a bit each.
    windows
        Parts in windowed pools, at most one each: a node has few, and a tuple is a fifth of a dict.
    tokens
        Token ids, where there is a listener for events.
    """

    id: int
    parent: TreeNode | None
    keys: bytes
    owner: NamespaceUsage = NO_USAGE
    depth: int = 0
    created: int = 0
    device: PackedPages | None = None
    host: PackedPages | None = None
    children: TreeNode | dict[bytes, TreeNode] | None = None
    device_children: int = 0
    host_children: int = 0
    device_lock: int = 0
    host_lock: int = 0
    hits: int = 0
    value: float = 0
    priority: int = 0
    last_access: int = 0
    queued: int = 0
    write: Operation | None = None
    load: Operation | None = None
    backup: Operation | None = None
    windows: tuple[WindowPart, ...] = ()
    tokens: Tokens | None = None

    def __lt__(self, other: TreeNode) -> bool:
        return self.id < other.id

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.keys) // KEY_BYTES

    @property
    def present(self) -> bool:
        """Whether it has a part in a tier, as every node in the tree has."""
        return self.device is not None or self.host is not None

    @property
    def in_tree(self) -> bool:
        """Whether it is still in the tree."""
        return self.parent is None or (self.present and self.parent.child(self.key(0)) is self)

    def path(self) -> Iterator[TreeNode]:
        """Yield the node and its ancestors, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def holders(self) -> tuple[Held, ...]:
        """Return what has pages of the node: its parts in windowed pools, and the node itself for the anchor."""
        return *self.windows, self

    def key(self, page: int) -> bytes:
        """Key of one page."""
        return self.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]

    def key_before(self, page: int) -> bytes | None:
        """Key of the page before a page; None at the start of a sequence."""
        if page:
            return self.key(page - 1)
        return None if self.parent is None else self.parent.keys[-KEY_BYTES:] or None

    def child(self, key: bytes) -> TreeNode | None:
        """Return the child whose first page has this key."""
        children = self.children
        if isinstance(children, TreeNode):
            return children if children.keys.startswith(key) else None
        return None if children is None else children.get(key)

    def all_children(self) -> list[TreeNode]:
        """Return the children; a list of its own."""
        children = self.children
        if isinstance(children, TreeNode):
            return [children]
        return [] if children is None else list(children.values())

    def add_child(self, child: TreeNode) -> None:
        """Add a child with another first page than its siblings'."""
        if self.children is None:
            self.children = child
            return
        if isinstance(self.children, TreeNode):
            self.children = {self.children.key(0): self.children}
        self.children[child.key(0)] = child

    def replace_child(self, child: TreeNode, other: TreeNode) -> None:
        """Put another node with the same first page in a child's place."""
        if isinstance(self.children, dict):
            self.children[other.key(0)] = other
        elif self.children is child:
            self.children = other

    def remove_child(self, child: TreeNode) -> None:
        """Take a child out."""
        if self.children is child:
            self.children = None
        elif isinstance(self.children, dict):
            del self.children[child.key(0)]
            if len(self.children) == 1:
                (self.children,) = self.children.values()

    def window(self, name: str) -> WindowPart | None:
        """Return its part in a windowed pool."""
        for part in self.windows:
            if part.name == name:
                return part
        return None


Held = TreeNode | WindowPart
"""What has pages of a node in some pool: the node itself in the anchor, or its part in a windowed pool."""
