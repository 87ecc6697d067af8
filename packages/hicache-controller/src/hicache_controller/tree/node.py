"""TreeNode: a run of pages; WindowPart: what a windowed pool keeps of its last pages; Operation: a transfer of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .keys import KEY_BYTES, Tokens

Pages = npt.NDArray[np.int64]
"""Page numbers of one pool on one side."""

NO_PAGES: Pages = np.empty(0, np.int64)


@dataclass(eq=False, slots=True)
class Pin:
    """Window parts that stay on one side while it is held; a split adds the new part."""

    parts: list[WindowPart] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Operation:
    """A transfer in flight and what it moves; a split adds the new node.

    Attributes
    ----------
    id
        The ``node_id`` the controller knows it by.
    nodes
        Nodes whose pages move, the tail first; it holds the locks, and so its prefix.
    pages
        Pages a backup must report for all of it to be stored.
    device_pin, host_pin
        Window parts that move.
    holds_device
        Whether the tail's device lock is still held.
    consumer
        Id in the layer counter, for loads.
    whole
        Whether a backup carries all pages of its nodes; otherwise only their windows are new.
    """

    id: int
    nodes: list[TreeNode]
    pages: int = 0
    device_pin: Pin = field(default_factory=Pin)
    host_pin: Pin = field(default_factory=Pin)
    holds_device: bool = True
    consumer: int = -1
    whole: bool = True
    failed: bool = False
    done: bool = False


@dataclass(eq=False, slots=True)
class WindowPart:
    """What a windowed pool (sliding window, recurrent state) keeps of a node: its last pages, on either side.

    Attributes
    ----------
    node
        Whose pages.
    name
        The pool.
    device, host
        Page numbers in that pool, or None; each side covers the last ``len`` pages of the node.
    device_pins, host_pins
        What keeps a side from being evicted.
    stored
        Storage has the pages of the host side.
    """

    node: TreeNode
    name: str
    device: Pages | None = None
    host: Pages | None = None
    device_pins: list[Pin] = field(default_factory=list)
    host_pins: list[Pin] = field(default_factory=list)
    stored: bool = False
    write: Operation | None = None
    load: Operation | None = None
    last_access: int = 0
    queued: int = 0

    @property
    def covered(self) -> int:
        """Last pages of the node that are there on some side."""
        if self.device is not None:
            return len(self.device)
        return 0 if self.host is None else len(self.host)


@dataclass(eq=False, slots=True)
class TreeNode:
    """A run of pages that share their prefix.

    Attributes
    ----------
    keys
        Page keys, :data:`KEY_BYTES` bytes each.
    device, host
        Page numbers, or None.
    children
        By the key of their first page; None while there are none.
    device_children, host_children
        How many children have that part; a leaf of the tier has none.
    stored
        Every page of it was stored in, or read from, storage.
    owner
        Number of its namespace's books.
    queued
        In which eviction queues it is, a bit each.
    windows
        Parts in windowed pools, by pool; None while there are none.
    tokens
        Token ids, where somebody listens to events.
    """

    id: int
    parent: TreeNode | None
    keys: bytes
    owner: int = 0
    device: Pages | None = None
    host: Pages | None = None
    stored: bool = False
    children: dict[bytes, TreeNode] | None = None
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
    windows: dict[str, WindowPart] | None = None
    tokens: Tokens | None = None

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.keys) // KEY_BYTES

    @property
    def present(self) -> bool:
        """Whether it has a part in a tier, as every node in the tree has."""
        return self.device is not None or self.host is not None

    def key(self, page: int) -> bytes:
        """Key of one page."""
        return self.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]

    def last_key(self) -> bytes | None:
        """Key of the last page; None for the root."""
        return self.keys[-KEY_BYTES:] or None

    def child(self, key: bytes) -> TreeNode | None:
        """Return the child whose first page has this key."""
        return None if self.children is None else self.children.get(key)

    def all_children(self) -> list[TreeNode]:
        """Return the children; a list of its own."""
        return [] if self.children is None else list(self.children.values())

    def window(self, name: str) -> WindowPart | None:
        """Return its part in a windowed pool."""
        return None if self.windows is None else self.windows.get(name)

    def all_windows(self) -> list[WindowPart]:
        """Return its parts in windowed pools; a list of its own."""
        return [] if self.windows is None else list(self.windows.values())
