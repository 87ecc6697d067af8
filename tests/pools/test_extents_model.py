"""The extent allocator against a plain model: the set of free pages."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hicache_pools.extents import ExtentAllocator


def fewest_runs(free: set[int], pages: int) -> int:
    """Count the runs needed when the longest go first."""
    lengths, length = [], 0
    for page in range(max(free) + 2):
        if page in free:
            length += 1
        elif length:
            lengths.append(length)
            length = 0
    needed = 0
    for length in sorted(lengths, reverse=True):
        if pages <= 0:
            break
        pages -= length
        needed += 1
    return needed


class AgainstModel(RuleBasedStateMachine):
    held = Bundle("held")

    @initialize(pages=st.integers(1, 70), page_size=st.sampled_from([1, 2, 3, 16]))
    def make(self, pages: int, page_size: int) -> None:
        self.allocator = ExtentAllocator(pages, page_size)
        self.free = set(range(pages))
        self.generation = 0

    @rule(target=held, pages=st.integers(0, 40), as_slots=st.booleans())
    def allocate(self, pages: int, as_slots: bool) -> object:
        size = self.allocator.page_size
        if as_slots:
            slots = self.allocator.alloc(pages * size)
            result = None if slots is None else slots.reshape(-1, size)[:, 0].numpy() // size
            if slots is not None and result is not None:
                assert torch.equal(slots, torch.from_numpy((result[:, None] * size + np.arange(size)).reshape(-1)))
        else:
            result = self.allocator.alloc_pages(pages)
        if pages > len(self.free):
            assert result is None
            return multiple()
        assert result is not None
        assert len(result) == pages
        if not pages:
            return multiple()
        given = set(result.tolist())
        assert len(given) == pages
        assert given <= self.free
        assert 1 + np.count_nonzero(np.diff(result) != 1) == fewest_runs(self.free, pages)
        self.free -= given
        return (self.generation, result)

    @rule(target=held, owned=consumes(held), data=st.data(), as_slots=st.booleans())
    def give_back_some(self, owned: tuple[int, np.ndarray], data: st.DataObject, as_slots: bool) -> object:
        generation, pages = owned
        if generation != self.generation:
            return multiple()
        order = np.array(data.draw(st.permutations(range(len(pages)))), dtype=np.int64)
        count = data.draw(st.integers(1, len(pages)))
        chosen, rest = pages[order[:count]], pages[np.sort(order[count:])]
        self.give_back(chosen, as_slots)
        return (generation, rest) if len(rest) else multiple()

    @rule(first=consumes(held), second=consumes(held), as_slots=st.booleans())
    def give_back_two(self, first: tuple[int, np.ndarray], second: tuple[int, np.ndarray], as_slots: bool) -> None:
        live = [pages for generation, pages in (first, second) if generation == self.generation]
        if live:
            self.give_back(np.concatenate(live), as_slots)

    def give_back(self, pages: np.ndarray, as_slots: bool) -> None:
        size = self.allocator.page_size
        if as_slots:
            slots = torch.from_numpy((pages[:, None] * size + np.arange(size)).reshape(-1))
            assert self.allocator.free(slots) == len(slots)
        else:
            assert self.allocator.free_pages(pages) == len(pages)
        self.free |= set(pages.tolist())

    @rule(pages=st.lists(st.integers(-3, 73), min_size=1, max_size=6))
    def give_back_wrongly(self, pages: list[int]) -> None:
        owned = set(range(self.allocator.page_num)) - self.free
        if len(set(pages)) == len(pages) and set(pages) <= owned:
            return
        before = self.allocator.stats()
        with pytest.raises(ValueError, match="index"):
            self.allocator.free_pages(pages)
        assert self.allocator.stats() == before

    @rule()
    def clear(self) -> None:
        self.allocator.clear()
        self.free = set(range(self.allocator.page_num))
        self.generation += 1

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_integrity()
        assert self.allocator.available_pages == len(self.free)
        assert set(np.flatnonzero(self.allocator._index.free).tolist()) == self.free


AgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstModel = AgainstModel.TestCase
