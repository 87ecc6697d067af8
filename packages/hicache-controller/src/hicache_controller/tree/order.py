"""EvictionOrder: the value of each node by the strategy, and the queues of what may leave the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .components import WindowPool
from .keys import KEY_BYTES
from .node import TreeNode, WindowPart
from .policies import AnyStrategy, eviction_strategy, is_placed
from .queue import EvictionQueue, TierQueues

_BITS, _NAMESPACE_BITS = (1, 2, 64), (4, 8, 128)
"""Bits of ``TreeNode.queued`` of the queues of the tree, and of a namespace's own."""
_ALL_BITS = sum(_BITS + _NAMESPACE_BITS)


class EvictionOrder:
    """Who leaves a tier first.

    Parameters
    ----------
    strategy
        Gives nodes their values.
    windows
        Pools whose parts are queued by themselves.

    Attributes
    ----------
    tick
        Grows with every request.
    evicted_value
        Value of the node that was evicted last; the strategy's clock.
    """

    def __init__(self, strategy: AnyStrategy | str, windows: Mapping[str, WindowPool]) -> None:
        self.strategy = eviction_strategy(strategy)
        self.windows = windows
        self.queues = tier_queues()
        self.tick = 0
        self.evicted_value: float = 0
        self._value: Callable[..., float] = self.strategy.value
        self._placed = is_placed(self.strategy)

    def use(self, node: TreeNode, priority: int) -> None:
        """Note that a request uses a node."""
        tick = node.last_access = self.tick
        hits = node.hits = node.hits + 1
        if priority > node.priority:
            node.priority = priority
        pages, clock = len(node.keys) // KEY_BYTES, self.evicted_value
        if self._placed:
            value = self._value(hits=hits, pages=pages, tick=tick, clock=clock, created=node.created, depth=node.depth)
        else:
            value = self._value(hits=hits, pages=pages, tick=tick, clock=clock)
        if value >= node.value:
            node.value = value
            return
        if value != value:
            raise ValueError(f"eviction {self.strategy!r} gave a node the value {value}; accepted are numbers")
        # Its entries are above its rank now, so it needs new ones.
        node.value = value
        node.queued &= ~_ALL_BITS
        self.offer(node, device=True)
        self.offer(node, device=False)

    def offer(self, node: TreeNode, *, device: bool) -> None:
        """Queue a node where it is an unlocked leaf of the tier."""
        if node.parent is None:
            return
        own = node.owner.queues
        for queues in (self.queues,) if own is None else (self.queues, own):
            if device:
                queues.device.offer(node)
                continue
            queues.host.offer(node)
            if node.backup is not None:
                queues.unsaved.offer(node)

    def offer_windows(self, parts: Iterable[WindowPart]) -> None:
        """Queue the sides of window parts that may be evicted."""
        for part in parts:
            pool = self.windows[part.name]
            pool.host_queue.offer(part, pool.device_queue.offer(part))

    def all_queues(self) -> Iterator[EvictionQueue[Any]]:
        """Yield every queue, except those of namespaces."""
        yield from self.queues
        for pool in self.windows.values():
            yield from (pool.device_queue, pool.host_queue)


def tier_queues(*, of_namespace: bool = False) -> TierQueues:
    """Return queues of the leaves of the tiers, of the whole tree or of a namespace with a quota."""
    device, host, unsaved = _NAMESPACE_BITS if of_namespace else _BITS
    return TierQueues(
        EvictionQueue(device, _rank, _may_leave_device),
        EvictionQueue(host, _rank, _may_leave_host),
        EvictionQueue(unsaved, _rank, _may_leave_unsaved),
    )


def _rank(node: TreeNode) -> tuple[float, float, int]:
    return node.priority, node.value, node.last_access


def _may_leave_device(node: TreeNode) -> bool:
    return node.device is not None and not (node.device_children or node.device_lock)


def _may_leave_host(node: TreeNode) -> bool:
    return node.host is not None and not (node.host_children or node.host_lock)


def _may_leave_unsaved(node: TreeNode) -> bool:
    return node.host is not None and not node.host_children and node.host_lock == 1 and node.backup is not None
