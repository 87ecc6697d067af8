"""The prefix tree against a naive model, with bytes, pins held open, and evictions at any moment."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hicache_controller.radix import Match, WritePolicy
from hicache_controller.tools.replay import Replay, ReplayOptions
from hicache_controller.tools.trace import TraceRequest

L1_PAGES, L2_PAGES = 12, 16


def key(prefix: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr(prefix).encode(), digest_size=16).digest()


def keys_of(words: tuple[int, ...]) -> list[bytes]:
    return [key(words[: i + 1]) for i in range(len(words))]


class TreeMachine(RuleBasedStateMachine):
    """Requests are short words over a small alphabet, so that they share, extend and split prefixes all the time."""

    open_requests = Bundle("open_requests")

    @initialize(policy=st.sampled_from(WritePolicy), storage=st.booleans())
    def build(self, policy: WritePolicy, storage: bool) -> None:
        options = ReplayOptions(
            layers=2,
            row_bytes=8,
            page_size=2,
            block_tokens=2,
            l1_pages=L1_PAGES,
            l2_pages=L2_PAGES,
            l3_bytes=None if storage else 0,
            write_policy=policy,
            storage="memory",
        )
        self.replay = Replay([TraceRequest(0, 0, 0, ())], options)
        self.cache = self.replay.cache
        assert self.replay.rows is not None
        self.rows = self.replay.rows
        self.inserted: set[bytes] = set()
        self.pinned = 0
        self.lossless = storage and policy is not WritePolicy.WRITE_THROUGH_SELECTIVE

    def longest(self, keys: list[bytes]) -> int:
        return next((i for i, k in enumerate(keys) if k not in self.inserted), len(keys))

    @rule(target=open_requests, words=st.lists(st.integers(0, 2), max_size=10).map(tuple))
    def request(self, words: tuple[int, ...]) -> object:
        keys = keys_of(words)
        cache = self.cache
        match = cache.match_prefix(keys)
        assert match.pages <= self.longest(keys)
        on_device = match.device_pages
        match = cache.prefetch(match)
        assert match.pages <= self.longest(keys)
        if self.lossless and not self.pinned:
            assert match.pages == self.longest(keys)
        match = cache.load_back(match)
        pages = cache.device_page_numbers(match)
        assert len(pages) == match.pages
        self.rows.verify(keys[: match.pages], pages)
        if not self.pinned:
            assert match.pages >= on_device
        missing = len(keys) - match.pages
        fresh = cache.alloc_device(missing)
        if fresh is None:
            assert self.pinned, "nothing is pinned and yet there is no room"
            cache.release(match)
            return multiple()
        self.rows.fill(keys[match.pages :], fresh)
        self.pinned += 1
        return match, fresh

    @rule(opened=consumes(open_requests), publish=st.integers(0, 10))
    def insert(self, opened: tuple[Match, object], publish: int) -> None:
        match, fresh = opened
        count = min(publish, len(fresh))  # type: ignore[arg-type]
        begin = match.pages
        result = self.cache.insert(match, fresh, count)  # type: ignore[arg-type]
        if count < len(fresh):  # type: ignore[arg-type]
            self.cache.device_allocator.free_pages(fresh[count:])  # type: ignore[index]
        keys = [match.keys[i : i + 16] for i in range(0, len(match.keys), 16)]
        assert result.match.pages == begin + count
        self.inserted.update(keys[: begin + count])
        self.rows.verify(keys[: begin + count], self.cache.device_page_numbers(result.match))
        self.cache.release(result.match)
        self.pinned -= 1

    @rule(count=st.integers(1, L1_PAGES))
    def evict_device(self, count: int) -> None:
        before = self.cache.device_allocator.available_pages
        freed = self.cache.evict_device(count)
        assert self.cache.device_allocator.available_pages == before + freed
        if not self.pinned:
            assert freed >= min(count, L1_PAGES - before)

    @rule(count=st.integers(1, L2_PAGES))
    def evict_host(self, count: int) -> None:
        freed = self.cache.evict_host(count)
        if not self.pinned and self.cache.stats().host_pages:
            assert freed > 0

    @rule()
    def drain(self) -> None:
        self.cache.drain()

    @invariant()
    def tree_is_whole(self) -> None:
        if hasattr(self, "cache"):
            self.cache.poll()
            self.cache.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.drain()
        self.cache.check_integrity()
        stats = self.cache.stats()
        if not self.pinned:
            assert stats.device_pages == L1_PAGES - self.cache.device_allocator.available_pages
            self.cache.evict_device(L1_PAGES)
            self.cache.evict_host(L2_PAGES)
            self.cache.drain()
            self.cache.evict_device(L1_PAGES)
            self.cache.evict_host(L2_PAGES)
            assert self.cache.stats() == (0, 0, 0)
            assert self.replay.host_pool.available_size() == L2_PAGES * 2
        self.replay.close()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def replay() -> Replay:
    options = ReplayOptions(
        layers=1, row_bytes=8, page_size=2, block_tokens=2, l1_pages=8, l2_pages=16, storage="memory"
    )
    with Replay([TraceRequest(0, 0, 0, ())], options) as made:
        yield made  # type: ignore[misc]


def insert(replay: Replay, words: tuple[int, ...]) -> None:
    cache, keys = replay.cache, keys_of(words)
    match = cache.load_back(cache.prefetch(cache.match_prefix(keys)))
    pages = cache.alloc_device(len(keys) - match.pages)
    assert pages is not None
    assert replay.rows is not None
    replay.rows.fill(keys[match.pages :], pages)
    cache.release(cache.insert(match, pages).match)


def test_same_request_computed_twice_keeps_one_copy_and_frees_the_other(replay: Replay) -> None:
    cache, keys = replay.cache, keys_of((1, 2, 3))
    first, second = cache.match_prefix(keys), cache.match_prefix(keys)
    pages = [cache.alloc_device(3), cache.alloc_device(3)]
    assert pages[0] is not None
    assert pages[1] is not None
    one = cache.insert(first, pages[0])
    two = cache.insert(second, pages[1])
    assert (one.duplicates, two.duplicates) == (0, 3)
    assert cache.device_page_numbers(two.match).tolist() == pages[0].tolist()
    cache.release(one.match)
    cache.release(two.match)
    cache.drain()
    assert cache.device_allocator.available_pages == 5


def test_pinned_prefix_survives_any_eviction(replay: Replay) -> None:
    insert(replay, (1, 2, 3, 4))
    match = replay.cache.match_prefix(keys_of((1, 2)))
    replay.cache.drain()
    replay.cache.evict_device(8)
    assert replay.cache.match_prefix(keys_of((1, 2, 3))).device_pages == 2
    replay.cache.release(match)


def test_tail_is_evicted_before_its_head_however_recent(replay: Replay) -> None:
    insert(replay, (1, 2, 3, 4))
    for _ in range(3):
        replay.cache.release(replay.cache.match_prefix(keys_of((1, 2, 3, 4))))
    insert(replay, (1, 2))
    replay.cache.drain()
    replay.cache.evict_device(1)
    match = replay.cache.match_prefix(keys_of((1, 2, 3, 4)))
    assert match.pages == 4
    assert match.device_pages < 4
    replay.cache.release(match)


def test_insert_of_a_match_still_on_the_host_is_refused(replay: Replay) -> None:
    insert(replay, (1, 2))
    replay.cache.drain()
    replay.cache.evict_device(8)
    match = replay.cache.match_prefix(keys_of((1, 2, 3)))
    assert match.host_pages == 2
    with pytest.raises(ValueError, match="load_back must come before insert"):
        replay.cache.insert(match, replay.cache.alloc_device(1))  # type: ignore[arg-type]
    replay.cache.release(match)


def test_keys_of_another_length_are_refused(replay: Replay) -> None:
    with pytest.raises(ValueError, match="16 bytes a page"):
        replay.cache.match_prefix([b"short"])


def test_load_back_never_evicts_the_device_part_of_its_own_prefix(replay: Replay) -> None:
    cache = replay.cache
    insert(replay, (1, 2, 3, 4))
    insert(replay, (1, 2, 3, 4, 5, 6))
    cache.drain()
    cache.evict_device(2)  # the tail of the long request leaves first: pages 5 and 6 are on the host alone
    held = cache.match_prefix(keys_of((9, 9, 9)))
    pages = cache.alloc_device(3)
    assert pages is not None
    held = cache.insert(held, pages).match
    match = cache.match_prefix(keys_of((1, 2, 3, 4, 5, 6)))
    assert (match.device_pages, match.host_pages) == (4, 2)
    match = cache.load_back(match)  # one page is free, which the next takes; three are pinned by the other request
    cache.check_integrity()
    assert match.pages == 5
    assert replay.rows is not None
    replay.rows.verify(keys_of((1, 2, 3, 4, 5)), cache.device_page_numbers(match))
    cache.release(match)
    cache.release(held)


def test_match_that_was_replaced_or_released_is_refused_and_changes_nothing(replay: Replay) -> None:
    cache = replay.cache
    match = cache.match_prefix(keys_of((1, 2)))
    pages = cache.alloc_device(2)
    assert pages is not None
    longer = cache.insert(match, pages).match
    for misuse in (
        lambda: cache.insert(match, pages),
        lambda: cache.release(match),
        lambda: cache.load_back(match),
        lambda: cache.prefetch(match),
    ):
        with pytest.raises(ValueError, match="match was released, or another one replaced it"):
            misuse()
    assert cache.device_page_numbers(longer).tolist() == pages.tolist()
    cache.release(longer)
    with pytest.raises(ValueError, match="match was released"):
        cache.release(longer)
    cache.check_integrity()
    cache.drain()
    assert cache.stats().device_pages == 2 == 8 - cache.device_allocator.available_pages


@pytest.mark.parametrize(
    ("pages", "fault"),
    [([900, 901], "from 900 to 901"), ([-1, 0], "from -1 to 0"), ([5, 5], "a page twice"), ([0.5, 1], "type")],
)
def test_pages_that_are_none_of_the_pool_are_refused_and_change_nothing(
    replay: Replay, pages: list[float], fault: str
) -> None:
    cache = replay.cache
    match = cache.match_prefix(keys_of((1, 2)))
    with pytest.raises(ValueError, match=fault):
        cache.insert(match, pages)  # type: ignore[arg-type]
    cache.release(match)
    assert cache.match_prefix(keys_of((1, 2))).pages == 0
    assert cache.stats() == (0, 0, 0)
