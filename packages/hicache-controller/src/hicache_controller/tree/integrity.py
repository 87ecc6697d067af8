"""Checks of the tree's invariants, its sizes, and its drawing as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from .components import WindowPool
from .node import Pages, TreeNode, WindowPart, unpack
from .results import TreeStats, WindowStats


def check(root: TreeNode, windows: Mapping[str, WindowPool]) -> None:
    """Check every invariant below a root; raises RuntimeError naming the node and the fault."""
    parts: dict[str, list[Pages]] = {"device": [], "host": []}
    for node in _nodes(root):
        _check_children(node)
        if node is not root:
            _check_node(node, root, parts)
            for part in node.windows:
                _check_window(part, node, windows, parts)
    for name, pages in parts.items():
        joined = np.concatenate(pages) if pages else np.empty(0, np.int64)
        if len(np.unique(joined)) != len(joined):
            raise RuntimeError(f"a {name} page belongs to two nodes")


def _check_children(node: TreeNode) -> None:
    for child in node.all_children():
        if child.parent is not node or node.child(child.key(0)) is not child:
            raise RuntimeError(f"node {child.id} is wrongly a child of node {node.id}")
    counts = (
        sum(child.device is not None for child in node.all_children()),
        sum(child.host is not None for child in node.all_children()),
    )
    if counts != (node.device_children, node.host_children):
        raise RuntimeError(
            f"node {node.id} counts {node.device_children} device and {node.host_children} host children; "
            f"it has {counts[0]} and {counts[1]}"
        )


def _check_node(node: TreeNode, root: TreeNode, parts: dict[str, list[Pages]]) -> None:
    if not node.present:
        raise RuntimeError(f"node {node.id} is in no tier")
    if node.parent is not None and node.depth != node.parent.depth + node.pages:
        raise RuntimeError(f"node {node.id} ends at page {node.depth}; its parent ends at {node.parent.depth}")
    if node.device_lock < 0 or node.host_lock < 0:
        raise RuntimeError(f"node {node.id} has locks {node.device_lock} and {node.host_lock}")
    above = node.parent
    for name, mine, theirs, lock, children, bit in (
        ("device", node.device, above and above.device, node.device_lock, node.device_children, 1),
        ("host", node.host, above and above.host, node.host_lock, node.host_children, 2),
    ):
        if mine is None:
            continue
        if len(unpack(mine)) != node.pages:
            raise RuntimeError(f"node {node.id} has {node.pages} keys and {len(unpack(mine))} {name} pages")
        if theirs is None and above is not root:
            raise RuntimeError(f"node {node.id} has a {name} part and its parent has none")
        if not lock and not children and not node.queued & bit:
            raise RuntimeError(f"node {node.id} is an unlocked leaf of the {name} and does not wait for eviction")
        parts[name].append(unpack(mine))
    in_flight = [operation for operation in (node.write, node.load, node.backup) if operation is not None]
    if any(node not in operation.nodes for operation in in_flight):
        raise RuntimeError(f"node {node.id} is not among the nodes of its own transfer")


def _check_window(
    part: WindowPart, node: TreeNode, windows: Mapping[str, WindowPool], parts: dict[str, list[Pages]]
) -> None:
    pool = windows[part.name]
    if part.node is not node or not part.covered:
        raise RuntimeError(f"node {node.id} has a part in {part.name} that is empty or another node's")
    for name, mine, pins, queue in (
        ("device", part.device, part.device_pins, pool.device_queue),
        ("host", part.host, part.host_pins, pool.host_queue),
    ):
        if mine is None:
            continue
        pages = unpack(mine)
        if not 0 < len(pages) <= node.pages:
            raise RuntimeError(f"node {node.id} has {node.pages} pages and {len(pages)} {name} pages of {part.name}")
        if any(part not in pin.parts for pin in pins):
            raise RuntimeError(f"a pin of node {node.id}'s part in {part.name} does not know it")
        if not pins and part not in queue:
            raise RuntimeError(f"node {node.id}'s part in {part.name} does not wait for eviction from the {name}")
        parts.setdefault(f"{name} {part.name}", []).append(pages)


def sizes(root: TreeNode) -> TreeStats:
    """Return the size of a tree."""
    nodes = [node for node in _nodes(root) if node is not root]
    return TreeStats(
        len(nodes),
        sum(node.pages for node in nodes if node.device is not None),
        sum(node.pages for node in nodes if node.host is not None),
    )


def window_sizes(root: TreeNode, pool: str) -> WindowStats:
    """Return the size of a windowed pool in a tree."""
    parts = [part for node in _nodes(root) if (part := node.window(pool)) is not None]
    return WindowStats(sum(part.on_device for part in parts), sum(part.on_host for part in parts))


def draw(root: TreeNode) -> str:
    """Draw a tree as text, a node a line."""
    lines: list[str] = []
    stack = [(root, 0)]
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


def _nodes(root: TreeNode) -> Iterator[TreeNode]:
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.all_children())
