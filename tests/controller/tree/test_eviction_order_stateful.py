"""What leaves a tier first, for every strategy, against a model that knows when each page was used and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hicache_controller.tree import CacheEvent, Change, Tier, TreeNode, WritePolicy

WORDS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)


@dataclass
class Page:
    """What the model knows of a page: when it came, how often and when it was last used, with what clock."""

    created: int
    depth: int
    uses: int = 0
    last: int = 0
    priority: int = 0
    clock: float = 0
    node_pages: int = 0


VALUES: dict[str, Callable[[Page], float]] = {
    "lru": lambda page: page.last,
    "mru": lambda page: -page.last,
    "lfu": lambda page: page.uses,
    "fifo": lambda page: page.created,
    "filo": lambda page: -page.created,
    "slru": lambda page: (page.uses > 1) * 10**6 + page.last,
    "size_aware": lambda page: page.clock + page.uses / page.node_pages,
    "scattered": lambda page: page.last * 7919 % 101,
    "deepest": lambda page: -page.depth,
}


class Scattered:
    """Values that rise and fall from one use to the next."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float) -> float:
        return tick * 7919 % 101


class Deepest:
    """The deepest first."""

    def value(self, *, hits: int, pages: int, tick: int, clock: float, created: int, depth: int) -> float:
        return -depth


STRATEGIES: dict[str, Any] = {name: name for name in VALUES} | {"scattered": Scattered(), "deepest": Deepest()}


class Order:
    """Every page's history; a node that leaves must have the lowest rank of all that could."""

    def __init__(self, strategy: str) -> None:
        self.value = VALUES[strategy]
        self.pages: dict[bytes, Page] = {}
        self.now = 0
        self.clock: float = 0
        self.fault = ""
        self.nodes: Callable[[], Iterator[TreeNode]] = lambda: iter(())

    def use(self, keys: list[bytes], priority: int) -> None:
        """Note a use, before the tree is asked for it: what it evicts on the way is looked at with this use counted."""
        there = {node.key(at) for node in self.nodes() for at in range(node.pages)}
        self.pages = {key: page for key, page in self.pages.items() if key in there}
        self.now += 1
        for depth, key in enumerate(keys, 1):
            page = self.pages.setdefault(key, Page(self.now, depth))
            page.uses, page.last, page.priority = page.uses + 1, self.now, max(page.priority, priority)
            page.clock, page.node_pages = self.clock, 0

    def see_nodes(self) -> None:
        """Note of how many pages the nodes were that the last use found: later cuts change nothing."""
        for node in self.nodes():
            for at in range(node.pages):
                page = self.pages[node.key(at)]
                page.node_pages = page.node_pages or node.pages

    def rank(self, key: bytes) -> tuple[float, ...]:
        page = self.pages[key]
        return page.priority, self.value(page), page.last

    def listen(self, event: CacheEvent) -> None:
        if event.change is Change.STORED:
            return
        self.see_nodes()
        gone = self.rank(event.keys[-1])
        for node in self.nodes():
            part, children, lock = (
                (node.device, node.device_children, node.device_lock)
                if event.tier is Tier.DEVICE
                else (node.host, node.host_children, node.host_lock)
            )
            key = node.keys[-16:]
            # Its parent could not leave before it.
            if part is not None and not children and not lock and key != event.parent and self.rank(key) < gone:
                self.fault = f"{gone} left the {event.tier} before {self.rank(key)}"
        self.clock = gone[1]


def order_machine(model_type: Any, keys_of: Any, strategy: str) -> type[RuleBasedStateMachine]:
    class OrderMachine(RuleBasedStateMachine):
        held = Bundle("held")

        @initialize(policy=st.sampled_from((WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE)))
        def build(self, policy: WritePolicy) -> None:
            self.order = Order(strategy)
            self.model = model_type(
                device_pages=12,
                host_pages=14,
                synchronous=True,
                eviction=STRATEGIES[strategy],
                write_policy=policy,
                listener=lambda event: self.order.listen(event),
            )
            self.order.nodes = self.model.cache._tree.nodes

        def match(self, keys: list[bytes], priority: int) -> Any:
            self.order.use(keys[: self.model.cache.known_pages(keys)], priority)
            match = self.model.cache.match_prefix(keys, priority=priority)
            self.order.see_nodes()
            return match

        @rule(words=WORDS, priority=st.integers(0, 1))
        def look_up(self, words: tuple[int, ...], priority: int) -> None:
            self.model.cache.release(self.match(keys_of(words), priority))

        @rule(target=held, words=WORDS)
        def hold(self, words: tuple[int, ...]) -> object:
            return self.match(keys_of(words), 0)

        @rule(match=consumes(held))
        def release(self, match: object) -> None:
            self.model.cache.release(match)

        @rule(words=WORDS, priority=st.integers(0, 1))
        def serve(self, words: tuple[int, ...], priority: int) -> None:
            cache, keys = self.model.cache, keys_of(words)
            match = cache.load_back(self.match(keys, priority))
            pages = cache.alloc_device(len(keys) - match.pages) if match.on_device else None
            if pages is None:
                cache.release(match)
                return
            self.order.use(keys, priority)
            match = cache.insert(match, pages).match
            self.order.see_nodes()
            cache.release(match)

        @rule(count=st.integers(1, 4), device=st.booleans())
        def evict(self, count: int, device: bool) -> None:
            cache = self.model.cache
            (cache.evict_device if device else cache.evict_host)(count)

        @invariant()
        def tree_is_whole(self) -> None:
            if hasattr(self, "model"):
                self.model.cache.check_integrity()
                assert not self.order.fault

        def teardown(self) -> None:
            if hasattr(self, "model"):
                self.model.close()

    return OrderMachine


@pytest.mark.parametrize("strategy", VALUES)
def test_of_all_that_may_leave_the_lowest_rank_leaves(model_type: Any, keys_of: Any, strategy: str) -> None:
    case = order_machine(model_type, keys_of, strategy).TestCase
    case.settings = settings(max_examples=25, stateful_step_count=50, deadline=None)
    case("runTest").runTest()
