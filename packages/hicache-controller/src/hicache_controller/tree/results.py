"""What the tree hands out: matches, results and sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hicache_pools.pool_transfer import PoolTransfer

from ..storage_tasks import PrefetchOperation
from .keys import KEY_BYTES, Tokens, key_list
from .node import Pages, Pin, TreeNode
from .queue import NamespaceUsage


@dataclass(frozen=True, eq=False)
class Request:
    """What is known of a request without its match; see :class:`Match`."""

    keys: bytes = field(repr=False)
    owner: NamespaceUsage = field(repr=False)
    priority: int
    tokens: Tokens | None = field(repr=False)


@dataclass(frozen=True, eq=False)
class Match(Request):
    """The longest cached prefix of a request, pinned until :meth:`UnifiedRadixCache.release`.

    Attributes
    ----------
    keys
        All page keys of the request.
    device_pages, host_pages
        Leading pages on the device, and those after them on the host.
    device_node, node
        Deepest matched node with a device part, and deepest matched node. Both are pinned, each in its tier.
    device_pin, host_pin
        The parts of windowed pools that the prefix needs at its end.
    owner, priority, tokens
        Of the request: what its namespace has, its priority, the tokens of its complete pages where they are known.
    """

    device_pages: int
    host_pages: int
    device_node: TreeNode = field(repr=False)
    node: TreeNode = field(repr=False)
    device_pin: Pin = field(repr=False)
    host_pin: Pin = field(repr=False)

    @property
    def pages(self) -> int:
        """Matched pages, whatever their tier."""
        return self.device_pages + self.host_pages

    @property
    def on_device(self) -> bool:
        """Whether everything it needs has a device part (which a load may still be filling)."""
        return not self.host_pages and not self.host_pin.parts

    @property
    def consumers(self) -> tuple[int, ...]:
        """Consumer ids of the loads in flight that fill its device parts, for ``layer_done_counter``."""
        filled = [*self.device_node.path(), *self.device_pin.parts]
        return tuple(sorted({each.load.consumer for each in filled if each.load is not None}))

    def rest(self) -> list[bytes]:
        """Keys of the pages after the match."""
        return key_list(self.keys[self.pages * KEY_BYTES :])


class InsertResult(NamedTuple):
    """Result of an insert: the match that covers the whole request, and how many of its pages the tree had already."""

    match: Match
    duplicates: int


class TreeStats(NamedTuple):
    """Size of the tree: nodes without the root, and pages by tier."""

    nodes: int
    device_pages: int
    host_pages: int


class WindowStats(NamedTuple):
    """Pages of a windowed pool that the tree holds, by tier."""

    device_pages: int
    host_pages: int


class Restored(NamedTuple):
    """A request that is back on the device: its pinned match, its private pages, and those of windowed pools."""

    match: Match
    pages: Pages
    windows: dict[str, Pages]


@dataclass(frozen=True, eq=False)
class Prefetching:
    """Pages on their way from storage to the host, for ``finish_prefetch``.

    Attributes
    ----------
    match
        What they follow; still pinned.
    slots, transfers
        Host slots of the anchor and of windowed pools that are being filled.
    operation
        The controller's; None where storage has nothing, or the host no room.
    storage_changes
        How often the storage had changed when it began.
    """

    match: Match
    slots: torch.Tensor
    transfers: list[PoolTransfer]
    operation: PrefetchOperation | None
    storage_changes: int = 0
