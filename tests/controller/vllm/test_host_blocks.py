"""Blocks of the host: what is kept, pinned and evicted, and what resets and failures leave; against a simple model."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_controller.integrations.vllm.host_blocks import BlockState, HostBlocks


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(36, "big") for number in numbers]


def filled(pages: int, *numbers: int, eviction: str = "lru") -> HostBlocks:
    blocks = HostBlocks(pages, eviction)
    assert blocks.take(keys(*numbers)) is not None
    blocks.finish(keys(*numbers))
    return blocks


def kept(blocks: HostBlocks, *numbers: int) -> list[int]:
    return [
        number for number, key in zip(numbers, keys(*numbers), strict=True) if blocks.state(key) is BlockState.READY
    ]


def test_a_block_is_pending_until_it_is_finished_and_then_ready():
    blocks = HostBlocks(4)
    assert blocks.state(*keys(1)) is BlockState.MISSING
    taken = blocks.take(keys(1, 2))
    assert (taken.keys, len(set(taken.pages)), taken.evicted) == (keys(1, 2), 2, [])
    assert blocks.state(*keys(1)) is BlockState.PENDING
    assert blocks.finish(keys(1, 2)) == keys(1, 2)
    assert blocks.state(*keys(1)) is BlockState.READY
    assert blocks.finish(keys(1)) == []


def test_pages_of_one_call_are_neighbours():
    assert HostBlocks(64).take(keys(*range(40))).pages == list(range(40))


def test_only_new_blocks_get_pages_in_the_order_given():
    blocks = filled(8, 3, 5)
    assert blocks.take(keys(5, 9, 3, 1)).keys == keys(9, 1)


def test_a_store_that_failed_leaves_nothing():
    blocks = HostBlocks(2)
    blocks.take(keys(1, 2))
    assert blocks.finish(keys(1, 2), success=False) == []
    assert (len(blocks), blocks.free_pages) == (0, 2)


def test_what_was_used_longest_ago_leaves_first():
    blocks = filled(3, 1, 2, 3)
    blocks.touch(keys(1))
    assert blocks.take(keys(4, 5)).evicted == keys(3, 2)


def test_tails_of_a_prefix_leave_before_its_head():
    blocks = filled(4, 1, 2, 3, 4)
    blocks.touch(keys(1, 2, 3, 4))
    assert blocks.take(keys(5, 6)).evicted == keys(4, 3)


def test_blocks_used_twice_outlive_those_used_once_with_slru():
    blocks = filled(3, 1, 2, 3, eviction="slru")
    blocks.pin(keys(1))
    blocks.unpin(keys(1))
    blocks.touch(keys(2, 3))
    assert blocks.take(keys(4, 5)).evicted == keys(3, 2)
    assert kept(blocks, 1) == [1]


def test_blocks_used_least_often_leave_first_with_lfu():
    blocks = filled(3, 1, 2, 3, eviction="lfu")
    for number, uses in ((1, 3), (2, 1), (3, 2)):
        for _ in range(uses):
            blocks.pin(keys(number))
            blocks.unpin(keys(number))
    assert blocks.take(keys(4)).evicted == keys(2)


def test_a_pinned_block_stays_until_every_pin_is_gone():
    blocks = filled(2, 1, 2)
    blocks.pin(keys(1))
    blocks.pin(keys(1, 2))
    assert blocks.take(keys(3)) is None
    blocks.unpin(keys(1, 2))
    assert blocks.take(keys(3, 4)) is None
    assert blocks.take(keys(3)).evicted == keys(2)
    blocks.unpin(keys(1))
    assert blocks.take(keys(4)).evicted == keys(1)


def test_no_room_changes_nothing():
    blocks = filled(3, 1, 2, 3)
    assert blocks.take(keys(1, 2, 4, 5)) is None  # two are asked for themselves
    assert kept(blocks, 1, 2, 3) == [1, 2, 3]
    blocks.check_integrity()


def test_a_block_that_is_not_ready_cannot_be_pinned_and_none_of_the_call_are():
    blocks = filled(3, 1)
    blocks.take(keys(2))
    for wrong in (2, 3):
        with pytest.raises(KeyError, match="not ready"):
            blocks.pin(keys(1, wrong))
    assert blocks.take(keys(4, 5)).evicted == keys(1)


def test_blocks_of_pages_that_failed_are_missing_at_once_and_leave_when_their_loads_end():
    blocks = filled(2, 1, 2)
    first, second = blocks.pin(keys(1, 2))
    assert blocks.discard_pages({first}) == keys(1)
    assert kept(blocks, 1, 2) == [2]
    assert blocks.free_pages == 0
    blocks.unpin(keys(1, 2))
    assert blocks.free_pages == 1
    assert blocks.discard_pages({second}) == keys(2)
    assert blocks.free_pages == 2


def test_a_pending_block_whose_page_failed_never_becomes_ready():
    blocks = HostBlocks(2)
    (page,) = blocks.take(keys(1)).pages
    blocks.discard_pages({page})
    assert blocks.finish(keys(1)) == []
    assert blocks.free_pages == 2


def test_a_reset_keeps_the_pages_that_storage_uses():
    blocks = filled(4, 1, 2)
    blocks.pin(keys(1))
    blocks.pin(keys(1), is_use=False)
    blocks.take(keys(3), pinned=True)
    blocks.reset(keep=keys(1, 3))
    assert (kept(blocks, 1, 2), blocks.free_pages) == ([], 2)
    blocks.unpin(keys(1))
    assert blocks.finish(keys(3)) == []
    assert blocks.free_pages == 4
    blocks.check_integrity()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="eviction is 'fifo'"):
        HostBlocks(2, "fifo")
    with pytest.raises(ValueError, match="pages"):
        HostBlocks(-1)


class Blocks(RuleBasedStateMachine):
    """Any order of calls keeps every page once, and says of each block what a dictionary says."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)
        self.blocks = HostBlocks(12, self.random.choice(["lru", "slru", "lfu"]))
        self.states: dict[bytes, BlockState] = {}
        self.pins: list[list[bytes]] = []

    some = st.lists(st.integers(0, 20), max_size=8, unique=True)

    @rule(numbers=some)
    def take(self, numbers: list[int]) -> None:
        taken = self.blocks.take(keys(*numbers))
        pinned = {key for group in self.pins for key in group}
        if taken is None:
            idle = [k for k, s in self.states.items() if s is BlockState.READY and k not in pinned]
            new = [key for key in keys(*numbers) if key not in self.states]
            assert len(new) > self.blocks.free_pages + len([key for key in idle if key not in keys(*numbers)])
            return
        for key in taken.evicted:
            assert self.states.pop(key) is BlockState.READY
            assert key not in pinned
        assert taken.keys == [key for key in keys(*numbers) if key not in self.states]
        self.states |= dict.fromkeys(taken.keys, BlockState.PENDING)

    @rule(success=st.booleans())
    def finish(self, success: bool) -> None:
        pending = [key for key, state in self.states.items() if state is BlockState.PENDING]
        chosen = pending[: len(pending) // 2 + 1]
        assert set(self.blocks.finish(chosen, success=success)) == (set(chosen) if success else set())
        for key in chosen:
            self.states[key] = BlockState.READY
            if not success:
                del self.states[key]

    @rule(numbers=some)
    def pin(self, numbers: list[int]) -> None:
        ready = [key for key in keys(*numbers) if self.states.get(key) is BlockState.READY]
        pages = self.blocks.pin(ready)
        assert len(set(pages)) == len(ready)
        self.pins.append(ready)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.blocks.unpin(self.pins.pop(0))

    @rule(numbers=some)
    def touch(self, numbers: list[int]) -> None:
        self.blocks.touch(keys(*numbers))

    @rule()
    def reset(self) -> None:
        self.blocks.reset()
        self.states, self.pins = {}, []
        assert self.blocks.free_pages == 12

    @invariant()
    def agrees(self) -> None:
        self.blocks.check_integrity()
        for key in keys(*range(21)):
            assert self.blocks.state(key) is self.states.get(key, BlockState.MISSING)


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
