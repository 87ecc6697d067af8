"""The tree with all components against a naive model: a set of prefixes for each pool and tier, kept by the events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from tests.controller.tree.residency import Residency

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import Tier, WritePolicy
from hicache_controller.tree.policies import STRATEGIES

DEVICE_PAGES, HOST_PAGES = 12, 14
PAGE_BYTES = 2 * 2 * 2 * 8
"""K and V, two layers, two tokens, eight bytes."""
WORDS = st.lists(st.integers(0, 1), max_size=9).map(tuple)


def component_machine(model_type: Any, keys_of: Any) -> type[RuleBasedStateMachine]:
    class ComponentMachine(RuleBasedStateMachine):
        opened = Bundle("opened")
        retracted = Bundle("retracted")

        @initialize(
            policy=st.sampled_from(WritePolicy),
            eviction=st.sampled_from(tuple(STRATEGIES)),
            storage=st.sampled_from((None, "large", "small")),
            windows=st.booleans(),
            states=st.booleans(),
            synchronous=st.booleans(),
        )
        def build(
            self,
            policy: WritePolicy,
            eviction: str,
            storage: str | None,
            windows: bool,
            states: bool,
            synchronous: bool,
        ) -> None:
            self.now = 0.0
            # A page that storage removes while it is being stored again counts as removed until it is next used.
            self.exact = synchronous or storage != "small"
            self.model = model_type(
                device_pages=DEVICE_PAGES,
                host_pages=HOST_PAGES,
                windows=(6, 5) if windows else None,
                states=(4, 3) if states else None,
                storage=None if storage is None else MemoryStorage(3 * PAGE_BYTES if storage == "small" else None),
                write_policy=policy,
                eviction=eviction,
                listener=lambda event: self.naive.listen(event),
                clock=lambda: self.now,
                synchronous=synchronous,
            )
            self.naive = Residency(self.model.windows)
            pools = ("kv", *self.model.windows)
            self.faults = [self.model.gate(what, pool) for pool in pools for what in ("write", "load")]
            if storage:
                self.faults += [self.model.gate("get"), self.model.gate("set")]
            self.held = 0
            self.next_request = 0

        @rule(words=WORDS)
        def lookup(self, words: tuple[int, ...]) -> None:
            self.model.cache.drain()
            keys = keys_of(words)
            match = self.model.cache.match_prefix(keys)
            assert match.pages == self.naive.longest(keys, Tier.DEVICE, Tier.HOST)
            assert match.device_pages <= match.pages
            self.model.cache.release(match)

        @rule(target=opened, words=WORDS, priority=st.integers(0, 1))
        def request(self, words: tuple[int, ...], priority: int) -> object:
            cache, keys = self.model.cache, keys_of(words)
            match = cache.match_prefix(keys, priority=priority)
            found = match.pages
            match = cache.prefetch(match)
            assert found <= match.pages
            assert not self.exact or match.pages <= self.naive.longest(keys, *Tier)
            match = cache.load_back(match)
            self.model.verify_match(match)
            made = self.model.compute(match, len(keys) - match.pages)
            if made is None:
                cache.release(match)
                return multiple()
            self.held += 1
            return (match, *made)

        @rule(request=consumes(opened), publish=st.integers(0, 9), keep=st.booleans())
        def insert(self, request: Any, publish: int, keep: bool) -> None:
            match, pages, windows = request
            cache = self.model.cache
            count = min(publish, len(pages))
            whole = count == len(pages)
            result = cache.insert(match, pages, count, windows=windows if whole else None)
            if not whole:
                self.model.give_back(pages[count:], windows)
                end = cache.device_page_numbers(result.match)
                keys = [match.keys[i : i + 16] for i in range(0, (match.pages + count) * 16, 16)]
                self.model.verify("kv", keys, end)
            else:
                self.model.verify_match(result.match)
            if keep:
                cache.pin(result.match, 3.0)
            cache.release(result.match)
            self.held -= 1

        @rule(target=retracted, request=consumes(opened))
        def retract(self, request: Any) -> object:
            match, pages, windows = request
            name = str(self.next_request)
            self.next_request += 1
            if self.model.cache.retraction_backup(name, match, pages, windows=windows):
                return name, match.pages, len(pages)
            self.model.verify_match(match)
            self.model.verify(
                "kv", [match.keys[i : i + 16] for i in range(match.pages * 16, len(match.keys), 16)], pages
            )
            self.model.give_back(pages, windows)
            self.model.cache.release(match)
            self.held -= 1
            return multiple()

        @rule(target=opened, entry=consumes(retracted))
        def restore(self, entry: Any) -> object:
            name, found, private = entry
            restored = self.model.cache.retraction_restore(name)
            if restored is None:
                self.model.cache.retraction_discard(name)
                self.held -= 1
                return multiple()
            match, pages, windows = restored
            assert (match.pages, len(pages)) == (found, private)
            self.model.verify_match(match)
            rest = match.rest()
            self.model.verify("kv", rest, pages)
            for pool, mine in windows.items():
                self.model.verify(pool, rest[len(rest) - len(mine) :], mine)
            return match, pages, windows

        @rule(count=st.integers(1, DEVICE_PAGES))
        def evict_device(self, count: int) -> None:
            free = self.model.allocators["kv"].available_pages
            freed = self.model.cache.evict_device(count)
            assert self.model.allocators["kv"].available_pages == free + freed

        @rule(count=st.integers(1, HOST_PAGES))
        def evict_host(self, count: int) -> None:
            self.model.cache.evict_host(count)

        @rule(number=st.integers(0, 1), count=st.integers(1, 6), device=st.booleans())
        def evict_window(self, number: int, count: int, device: bool) -> None:
            names = list(self.model.windows)
            if number < len(names):
                cache = self.model.cache
                (cache.evict_window_device if device else cache.evict_window_host)(names[number], count)

        @rule(number=st.integers(0, 2), count=st.integers(1, 4), device=st.booleans())
        def allocate(self, number: int, count: int, device: bool) -> None:
            """Take slots as an engine would, so that the tree is asked to evict, and give them back."""
            name = ("kv", *self.model.windows)[number % (1 + len(self.model.windows))]
            group, slots = self.model.group, count * self.model.host[name].page_size
            mine = group.alloc_device(slots, name) if device else group.alloc(slots, name)
            if mine is not None:
                assert len(mine) == slots
                group.free_device(mine, name) if device else group.free(mine, name)

        @rule(number=st.integers(0, 7), failing=st.booleans())
        def fault(self, number: int, failing: bool) -> None:
            """Let one kind of transfer of one pool fail from now on, or work again."""
            self.faults[number % len(self.faults)].failing = failing

        @rule(seconds=st.sampled_from((0.5, 4.0)))
        def time_passes(self, seconds: float) -> None:
            self.now += seconds

        @invariant()
        def tree_is_whole(self) -> None:
            if hasattr(self, "model"):
                self.model.cache.poll()
                self.model.cache.check_integrity()

        def teardown(self) -> None:
            if not hasattr(self, "model"):
                return
            self.now += 1000.0
            for fault in self.faults:
                fault.failing = False
            if not self.held:
                self.model.empty()
                for (pool, tier), keys in self.naive.where.items():
                    assert tier is Tier.STORAGE or not keys
                    if tier is Tier.STORAGE and self.model.storage is not None:
                        there = set(self.model.storage._bytes.get(pool, ()))
                        assert keys == there if pool == "kv" and self.exact else keys <= there
            self.model.close()

    return ComponentMachine


@pytest.mark.parametrize("examples", [60])
def test_components_against_the_naive_model(model_type: Any, keys_of: Any, examples: int) -> None:
    case = component_machine(model_type, keys_of).TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    case("runTest").runTest()
