"""Checks of the tree's invariants, its sizes, and its drawing as text."""

from __future__ import annotations

from itertools import product

import numpy as np

from .events import tier
from .node import Held, Pages, TreeNode, joined
from .radix_tree import RadixTree
from .results import TreeStats, WindowStats


def check(tree: RadixTree) -> None:
    """Check every invariant of a tree; raises RuntimeError naming the node and the fault."""
    pages: dict[str, list[Pages]] = {}
    for node in (tree.root, *tree.nodes()):
        _check_children(node)
        if node is tree.root:
            continue
        _check_node(node)
        for held, device in product(node.holders(), (True, False)):
            if held.part(device=device) is not None:
                place = _check_pages(tree, node, held, device=device)
                pages.setdefault(place, []).append(joined([held], device=device))
    for place, mine in pages.items():
        numbers = np.concatenate(mine)
        if len(np.unique(numbers)) != len(numbers):
            raise RuntimeError(f"a {place} page belongs to two nodes")


def _check_children(node: TreeNode) -> None:
    children = node.all_children()
    for child in children:
        if child.parent is not node or node.child(child.key(0)) is not child:
            raise RuntimeError(f"node {child.id} is wrongly a child of node {node.id}")
    counts = tuple(sum(child.part(device=device) is not None for child in children) for device in (True, False))
    if counts != (node.device_children, node.host_children):
        raise RuntimeError(
            f"node {node.id} counts {node.device_children} device and {node.host_children} host children; "
            f"it has {counts[0]} and {counts[1]}"
        )


def _check_node(node: TreeNode) -> None:
    above = node.parent
    if not node.present or above is None:
        raise RuntimeError(f"node {node.id} is in no tier")
    if node.depth != above.depth + node.pages:
        raise RuntimeError(f"node {node.id} ends at page {node.depth}; its parent ends at {above.depth}")
    if node.device_lock < 0 or node.host_lock < 0:
        raise RuntimeError(f"node {node.id} has locks {node.device_lock} and {node.host_lock}")
    for part in node.windows:
        if part.node is not node or not part.covered:
            raise RuntimeError(f"node {node.id} has a part in {part.name} that is empty or another node's")
    in_flight = [operation for operation in (node.write, node.load, node.backup) if operation is not None]
    if any(node not in operation.nodes for operation in in_flight):
        raise RuntimeError(f"node {node.id} is not among the nodes of its own transfer")


def _check_pages(tree: RadixTree, node: TreeNode, held: Held, *, device: bool) -> str:
    """Check what a node or its part in a windowed pool has in a tier; returns the tier and the pool."""
    side, count = tier(device=device), held.count(device=device)
    if isinstance(held, TreeNode):
        queue, place = tree.order.queues.device if device else tree.order.queues.host, str(side)
        if count != node.pages:
            raise RuntimeError(f"node {node.id} has {node.pages} keys and {count} {side} pages")
        if node.parent is not None and node.parent.part(device=device) is None and node.parent is not tree.root:
            raise RuntimeError(f"node {node.id} has a {side} part and its parent has none")
    else:
        pool, place = tree.windows[held.name], f"{side} {held.name}"
        queue = pool.device_queue if device else pool.host_queue
        if not 0 < count <= node.pages:
            raise RuntimeError(f"node {node.id} has {node.pages} pages and {count} {side} pages of {held.name}")
        if any(held not in pin.parts for pin in held.pins):
            raise RuntimeError(f"a pin of node {node.id}'s part in {held.name} does not know it")
    if queue.evictable(held) and held not in queue:
        raise RuntimeError(f"node {node.id} may leave the {place} and does not wait for eviction")
    return place


def sizes(tree: RadixTree) -> TreeStats:
    """Return the size of a tree."""
    nodes = list(tree.nodes())
    device, host = (sum(node.count(device=device) for node in nodes) for device in (True, False))
    return TreeStats(len(nodes), device, host)


def window_sizes(tree: RadixTree, pool: str) -> WindowStats:
    """Return the size of a windowed pool in a tree."""
    parts = [part for node in tree.nodes() if (part := node.window(pool)) is not None]
    return WindowStats(sum(part.count(device=True) for part in parts), sum(part.count(device=False) for part in parts))


def draw(tree: RadixTree) -> str:
    """Draw a tree as text, a node a line."""
    lines: list[str] = []
    stack = [(tree.root, 0)]
    while stack:
        node, depth = stack.pop()
        tiers = _letters(node.device, node.host, node.stored)
        windows = "".join(
            f" {part.name} {_letters(part.device, part.host, part.stored)}x{part.covered}" for part in node.windows
        )
        lines.append(
            f"{'  ' * depth}#{node.id} {node.pages} pages {tiers}{windows} locks {node.device_lock}/{node.host_lock}"
        )
        stack += [(child, depth + 1) for child in node.all_children()[::-1]]
    return "\n".join(lines)


def _letters(device: object | None, host: object | None, stored: bool) -> str:
    return "".join(
        letter if present else "-"
        for letter, present in (("D", device is not None), ("H", host is not None), ("S", stored))
    )
