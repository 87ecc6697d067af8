"""What leaves first, what may not leave, and what is written when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_controller.hashing import Namespace
from hicache_controller.tree import Quota, SequenceKeys, WritePolicy

MakeModel = Callable[..., Any]
KeysOf = Callable[[Any], list[bytes]]


def on_device(model: Any, *requests: tuple[int, ...]) -> list[bool]:
    """Whether each request is wholly on the device, looked at without counting as a use."""
    found = []
    for words in requests:
        node = model.cache.root
        at = 0
        keys = model.keys_of(words)
        while at < len(keys):
            node = node.child(keys[at])
            if node is None or node.device is None:
                break
            at += node.pages
        found.append(at >= len(keys))
    return found


@pytest.fixture
def model_with(make_model: MakeModel, keys_of: KeysOf) -> MakeModel:
    def make(**options: Any) -> Any:
        model = make_model(**options)
        model.keys_of = keys_of
        return model

    return make


def test_lru_evicts_what_was_used_longest_ago(model_with: MakeModel) -> None:
    model = model_with()
    for words in ((1,), (2,), (3,), (1,)):
        model.serve(words)
    model.cache.drain()
    model.cache.evict_device(1)
    assert on_device(model, (1,), (2,), (3,)) == [True, False, True]
    model.empty()


def test_lfu_evicts_what_was_used_least_often(model_with: MakeModel) -> None:
    model = model_with(eviction="lfu")
    for words in ((1,), (1,), (1,), (2,), (3,), (3,)):
        model.serve(words)
    model.cache.drain()
    model.cache.evict_device(1)
    assert on_device(model, (1,), (2,), (3,)) == [True, False, True]
    model.empty()


def test_size_aware_evicts_the_run_with_the_fewest_uses_a_page(model_with: MakeModel) -> None:
    model = model_with(eviction="size_aware")
    model.serve((1,))
    model.serve((2, 2, 2, 2))
    model.cache.drain()
    model.cache.evict_device(1)
    assert on_device(model, (1,), (2, 2, 2, 2)) == [True, False]
    model.empty()


def test_size_aware_lets_former_favourites_age(model_with: MakeModel) -> None:
    model = model_with(eviction="size_aware", device_pages=3, host_pages=4)
    for _ in range(3):
        model.serve((0,))
    # Each newcomer is worth the last evicted value and its own use, so that the favourite's turn comes.
    for word in range(1, 20):
        model.serve((word,))
    assert on_device(model, (0,)) == [False]
    model.empty()


def test_unknown_strategy_is_refused(model_with: MakeModel) -> None:
    with pytest.raises(ValueError, match="eviction is 'random'; accepted are lru, lfu, size_aware, fifo, filo, mru"):
        model_with(eviction="random")
    with pytest.raises(TypeError, match="eviction is None; accepted are lru"):
        model_with(eviction=None)


@pytest.mark.parametrize(
    ("eviction", "order"),
    [("fifo", "ABCD"), ("filo", "DCBA"), ("mru", "BDCA"), ("slru", "ACDB")],
)
def test_strategies_of_place_and_segment_follow_their_order(model_with: MakeModel, eviction: str, order: str) -> None:
    model = model_with(eviction=eviction)
    for word in b"ABCD":
        model.serve((word,))
    for word in b"DB":
        model.lookup((word,))
    model.cache.drain()
    gone = ""
    while len(gone) < 4:
        assert model.cache.evict_device(1) == 1
        gone += "".join(chr(word) for word in b"ABCD" if chr(word) not in gone and on_device(model, (word,)) == [False])
    assert gone == order
    model.empty()


class Falling:
    """What was used last leaves first, by values below or above those of nodes that were never used."""

    def __init__(self, top: int) -> None:
        self.top = top

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        return self.top - tick


@pytest.mark.parametrize("top", [0, 10**9])
def test_values_that_fall_are_followed(model_with: MakeModel, top: int) -> None:
    model = model_with(eviction=Falling(top))
    for word in range(4):
        model.serve((word,))
    model.cache.drain()
    assert model.cache.evict_device(1) == 1
    assert on_device(model, (0,), (1,), (2,), (3,)) == [True, True, True, False]
    model.lookup((0,))
    assert model.cache.evict_device(1) == 1
    assert on_device(model, (0,), (1,), (2,)) == [False, True, True]
    model.empty()


def test_queues_forget_what_falling_values_left_behind(model_with: MakeModel) -> None:
    model = model_with(eviction="mru")
    for words in ((1,), (2,)):
        model.serve(words)
    model.cache.drain()
    for _ in range(500):
        model.lookup((1,))
        model.lookup((2,))
    assert len(model.cache._tree.order.queues.device) <= 65
    assert len(model.cache._tree.order.queues.host) <= 65
    assert [model.cache.evict_device(1) for _ in range(3)] == [1, 1, 0]
    model.empty()


def test_parts_of_a_cut_node_keep_when_it_was_created(model_with: MakeModel) -> None:
    model = model_with(eviction="fifo")
    model.serve((1, 2, 3))
    model.serve((9,))
    model.serve((1, 2, 4))  # cuts the first
    model.cache.drain()
    assert model.cache.evict_device(1) == 1
    assert on_device(model, (1, 2, 3), (9,), (1, 2, 4)) == [False, True, True]
    assert model.cache.evict_device(1) == 1
    assert on_device(model, (9,), (1, 2, 4)) == [False, True]
    model.empty()


def test_value_that_is_not_a_number_is_refused(model_with: MakeModel) -> None:
    class NotANumber:
        def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
            return float("nan")

    model = model_with(eviction=NotANumber())
    match = model.cache.match_prefix(model.keys_of((1,)))
    pages = model.cache.alloc_device(1)
    with pytest.raises(ValueError, match="gave a node the value nan; accepted are numbers"):
        model.cache.insert(match, pages)
    assert model.cache.stats() == (0, 0, 0)
    model.cache.release(match)


def test_lower_priority_leaves_first_however_recent(model_with: MakeModel) -> None:
    model = model_with()
    model.serve((1,), priority=1)
    model.serve((2,))
    model.cache.drain()
    model.cache.evict_device(1)
    assert on_device(model, (1,), (2,)) == [True, False]
    model.empty()


def test_pin_with_a_time_to_live_holds_until_then(model_with: MakeModel, keys_of: KeysOf) -> None:
    now = [10.0]
    model = model_with(clock=lambda: now[0])
    model.serve((1, 2))
    match = model.cache.match_prefix(keys_of((1, 2)))
    model.cache.pin(match, 5.0)
    model.cache.release(match)
    model.cache.drain()
    now[0] = 14.9
    assert model.cache.evict_device(12) == 0
    now[0] = 15.0
    assert model.cache.evict_device(12) == 2
    model.empty()


def test_pin_of_a_prefix_on_the_host_holds_it_there(model_with: MakeModel, keys_of: KeysOf) -> None:
    now = [0.0]
    model = model_with(clock=lambda: now[0])
    model.serve((1, 2))
    model.cache.drain()
    model.cache.evict_device(2)
    match = model.cache.match_prefix(keys_of((1, 2)))
    model.cache.pin(match, 1.0)
    model.cache.release(match)
    assert model.cache.evict_host(16) == 0
    now[0] = 1.0
    assert model.cache.evict_host(16) == 2


def test_namespace_above_its_quota_loses_its_own_leaves(model_with: MakeModel) -> None:
    tenant, other = Namespace(salt="tenant"), Namespace(salt="other")
    model = model_with(quotas={tenant: Quota(device_pages=3, host_pages=4)})
    tokens = np.arange(1000)

    def serve(first: int, pages: int, namespace: Namespace) -> None:
        keys = SequenceKeys(2, tokens[first : first + 2 * pages], namespace=namespace)
        model.serve((), keys.hashes, namespace=namespace)

    serve(0, 4, other)
    for first in range(0, 60, 10):
        serve(first, 2, tenant)
        model.cache.drain()
        device, host = model.cache.namespace_stats(tenant)
        assert device <= 3
        assert host <= 4
        assert device >= 2
    assert model.cache.namespace_stats(other) == (4, 4)
    model.empty()
    assert model.cache.namespace_stats(tenant) == (0, 0)


def test_equal_tokens_of_two_namespaces_share_nothing(model_with: MakeModel) -> None:
    model = model_with()
    tokens = np.arange(6)
    plain, salted = (SequenceKeys(2, tokens, namespace=n) for n in (None, Namespace(salt="a")))
    assert model.serve((), plain.hashes) == 0
    assert model.serve((), salted.hashes) == 0
    assert model.serve((), plain.hashes) == 3
    model.empty()


def test_selective_write_waits_for_the_second_use(model_with: MakeModel) -> None:
    model = model_with(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, selective_hits=3)
    model.serve((1, 2))  # a match of nothing, then an insert: one use
    model.cache.drain()
    assert model.cache.stats().host_pages == 0
    model.serve((1, 2))  # a match and an insert
    model.cache.drain()
    assert model.cache.stats().host_pages == 2
    model.empty()


def test_write_back_writes_at_eviction_alone(model_with: MakeModel) -> None:
    model = model_with(write_policy=WritePolicy.WRITE_BACK)
    model.serve((1, 2))
    model.cache.drain()
    assert model.cache.stats() == (1, 2, 0)
    assert model.cache.evict_device(2) == 2
    assert model.cache.stats() == (1, 0, 2)
    assert model.serve((1, 2)) == 2
    model.empty()


def test_load_of_few_pages_is_not_worth_it_below_the_threshold(model_with: MakeModel, keys_of: KeysOf) -> None:
    model = model_with(load_back_pages=3)
    model.serve((1, 2, 3))
    model.serve((1, 2, 3, 4, 5))
    model.cache.drain()
    model.cache.evict_device(2)
    match = model.begin(keys_of((1, 2, 3, 4, 5)))
    assert match.pages == 3
    model.cache.release(match)
    model.cache.evict_device(3)
    match = model.begin(keys_of((1, 2, 3, 4, 5)))
    assert match.pages == 5
    model.cache.release(match)
    model.empty()


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_load_back_keeps_its_quota(model_with: MakeModel, keys_of: KeysOf, cut: int) -> None:
    model = model_with(load_quota_pages=cut)
    model.serve((1, 2, 3))
    model.serve((1, 2, 3, 4, 5))
    model.cache.drain()
    model.cache.evict_device(5)
    match = model.begin(keys_of((1, 2, 3, 4, 5)))
    assert match.pages == cut
    model.cache.check_integrity()
    model.cache.release(match)
    model.empty()


@pytest.mark.parametrize(("eviction", "order"), [("lru", "CDBA"), ("lfu", "ADCB"), ("size_aware", "BACD")])
def test_leaves_go_in_the_order_of_the_drawing(model_with: MakeModel, eviction: str, order: str) -> None:
    model = model_with(eviction=eviction)
    leaves = {"C": (2, 3), "D": (1, 2), "B": (8, 4), "A": (1, 1)}  # pages and uses, what was used last at the end
    for name, (pages, uses) in leaves.items():
        model.serve((ord(name),) * pages)
        for _ in range(uses - 1):
            model.lookup((ord(name),) * pages)
    model.cache.drain()
    gone = ""
    while len(gone) < len(leaves):
        model.cache.evict_device(1)
        gone += "".join(
            name
            for name, (pages, _) in leaves.items()
            if name not in gone and on_device(model, (ord(name),) * pages) == [False]
        )
    assert gone == order
    model.empty()
