"""Locks and cuts of single nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def only_node(model: Any) -> Any:
    (node,) = model.cache.root.all_children()
    return node


def test_referenced_node_stays_in_its_tier_until_the_last_reference_is_gone(make_model: MakeModel) -> None:
    model = make_model()
    model.serve((1, 2, 3))
    model.cache.drain()
    node = only_node(model)
    for inc, dec, evict in (
        (model.cache.inc_lock_ref, model.cache.dec_lock_ref, model.cache.evict),
        (model.cache.inc_host_lock_ref, model.cache.dec_host_lock_ref, model.cache.evict_host),
    ):
        inc(node)
        inc(node)
        assert evict(3) == 0
        dec(node)
        assert evict(3) == 0
        dec(node)
        model.cache.check_integrity()
        assert evict(3) == 3
    model.empty()


def test_reference_keeps_the_prefix_and_both_halves_of_a_node_that_is_cut(make_model: MakeModel) -> None:
    model = make_model()
    model.serve((1, 2))
    model.serve((1, 2, 3, 4))
    model.cache.drain()
    (tail,) = only_node(model).all_children()
    model.cache.inc_lock_ref(tail)
    model.cache.split(tail, 1)
    model.cache.check_integrity()
    assert model.cache.evict(4) == 0
    model.cache.dec_lock_ref(tail)
    assert model.cache.evict(4) == 4
    model.empty()


def test_split_keeps_every_byte_and_gives_the_head(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(windows=(8, 8), states=(8, 8))
    model.serve((1, 2, 3, 4))
    node = only_node(model)
    head = model.cache.split(node, 3)
    assert (head.pages, node.pages, node.parent) == (3, 1, head)
    model.cache.check_integrity()
    match = model.begin(keys_of((1, 2, 3, 4)))
    assert match.pages == 4
    model.cache.release(match)
    model.empty()


def test_misuse_of_references_is_refused_and_changes_nothing(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model()
    model.serve((1, 2, 3))
    model.cache.drain()
    node, cache = only_node(model), model.cache
    held = cache.match_prefix(keys_of((1, 2, 3)))
    for dec in (cache.dec_lock_ref, cache.dec_host_lock_ref):
        with pytest.raises(ValueError, match="has no lock reference on the"):
            dec(node)
    for pages in (0, 3, 4):
        with pytest.raises(ValueError, match=rf"pages is {pages}; node {node.id} has 3"):
            cache.split(node, pages)
    with pytest.raises(ValueError, match="is the root or not in the tree"):
        cache.split(cache.root, 1)
    cache.release(held)
    assert cache.evict(3) == 3
    with pytest.raises(ValueError, match="is not on the device"):
        cache.inc_lock_ref(node)
    assert cache.evict_host(3) == 3
    for refused in (cache.inc_host_lock_ref, lambda node: cache.split(node, 1)):
        with pytest.raises(ValueError, match="not in the tree"):
            refused(node)
    model.empty()


def test_tree_prints_its_nodes_with_tiers_locks_and_windows(make_model: MakeModel, keys_of: KeysOf) -> None:
    model = make_model(states=(8, 8))
    model.serve((1, 2))
    model.serve((1, 2, 3))
    model.cache.drain()
    model.cache.evict(1)
    held = model.cache.match_prefix(keys_of((1, 2)))
    lines = model.cache.pretty().splitlines()
    assert len(lines) == 3
    assert "2 pages DH- mamba DH-x1 locks 1/0" in lines[1]
    assert "1 pages -H- mamba DH-x1 locks 0/0" in lines[2]
    assert len(lines[2]) - len(lines[2].lstrip()) == 4, "a child stands below its parent"
    model.cache.release(held)
    model.empty()
