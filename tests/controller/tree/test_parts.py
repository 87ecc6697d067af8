"""The parts of the tree by themselves: the radix tree and its eviction order need no controller and no pools."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hicache_controller.tree
from hicache_controller.engine_calls import EngineCalls
from hicache_controller.tree import Quota, UnifiedRadixCache
from hicache_controller.tree.node import unpack
from hicache_controller.tree.order import EvictionOrder
from hicache_controller.tree.radix_tree import RadixTree
from hicache_controller.tree.results import Match, Request

KeysOf = Callable[[Any], list[bytes]]
SOURCES = sorted(Path(hicache_controller.tree.__file__).parent.glob("*.py"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_tree(strategy: str = "lru") -> RadixTree:
    return RadixTree(1, EvictionOrder(strategy, {}), EngineCalls("tree"), Clock())


def request(tree: RadixTree, keys: list[bytes]) -> Request:
    return Request(b"".join(keys), tree.usage(None), 0, None)


def add(tree: RadixTree, keys: list[bytes], *, device: bool = True) -> Match:
    """Give a request's pages, numbered by their depth, to the tree; returns its pinned match."""
    tree.order.tick += 1
    asked = request(tree, keys)
    match = tree.pin_match(asked, tree.walk(asked.keys))
    at, node = match.pages, match.node
    for node, own in tree.follow(match, len(keys) - at):
        tree.set_part(node, np.arange(at, len(keys))[own], device=device)
    tree.unpin_match(match)
    return tree.pin_match(asked, node)


def test_walking_splits_a_node_where_keys_differ_and_each_part_keeps_its_pages(keys_of: KeysOf) -> None:
    tree = make_tree()
    tree.unpin_match(add(tree, keys_of((1, 2, 3, 4))))
    tree.unpin_match(add(tree, keys_of((1, 2, 5))))
    assert [(node.depth, list(unpack(node.device))) for node in tree.nodes()] == [(2, [0, 1]), (3, [2]), (4, [2, 3])]
    node = tree.walk(b"".join(keys_of((1, 9))))
    assert (node.pages, node.depth) == (1, 1)
    assert [shared for _, shared in tree.known(tree.root, b"".join(keys_of((1, 2, 3))))] == [1, 1, 1]


def test_only_unlocked_leaves_are_queued_and_the_first_used_leaves_first(keys_of: KeysOf) -> None:
    tree = make_tree()
    first, second = add(tree, keys_of((1, 2))), add(tree, keys_of((1, 3)))
    queue = tree.order.queues.device
    assert queue.pop() is None
    for match in (second, first):
        tree.unpin_match(match)
    assert queue.pop() is first.node
    tree.clear_part(first.node, device=True)
    first.node.parent.remove_child(first.node)
    assert queue.pop() is second.node
    assert queue.pop() is None, "its parent has a child still"


def test_pins_with_a_time_to_live_end_with_it(keys_of: KeysOf) -> None:
    tree = make_tree()
    match = add(tree, keys_of((1,)))
    tree.keep_match(match, 5.0)
    tree.unpin_match(match)
    assert tree.expire() == 0
    assert match.node.device_lock == 1
    tree._clock.now = 5.0
    assert tree.expire() == 1
    assert match.node.device_lock == 0


def test_a_match_that_is_not_handed_out_is_unpinned(keys_of: KeysOf) -> None:
    tree = make_tree()
    match = add(tree, keys_of((1,)))
    with pytest.raises(KeyError), tree.handing_out(match):
        raise KeyError
    with pytest.raises(ValueError, match="match was released"):
        tree.check_pinned(match)
    assert match.node.device_lock == 0


def test_a_quota_queues_the_leaves_that_are_there_and_clearing_keeps_it(keys_of: KeysOf) -> None:
    tree = make_tree()
    match = add(tree, keys_of((1, 2)))
    tree.unpin_match(match)
    tree.set_quota(None, Quota(device_pages=1))
    usage = tree.usage(None)
    assert usage.device_pages == 2
    assert usage.queues is not None
    assert match.node in usage.queues.device
    tree.clear()
    assert tree.usage(None) is usage
    assert (usage.device_pages, len(usage.queues.device)) == (0, 0)
    assert tree.root.children is None


def test_the_cache_inherits_from_nothing_and_takes_no_unnamed_options() -> None:
    assert UnifiedRadixCache.__bases__ == (object,)
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
                assert source.name == "calls.py", f"{source.name}: {node.name} takes **{node.args.kwarg.arg}"


def test_no_part_reaches_into_another() -> None:
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                assert isinstance(node.value, ast.Name), f"{source.name}:{node.lineno}: {ast.unparse(node)}"
                assert node.value.id in ("self", "_signal"), f"{source.name}:{node.lineno}: {ast.unparse(node)}"
