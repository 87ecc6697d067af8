"""Events for routers, and the keys of a growing sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_controller.hashing import Namespace, page_hashes
from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import CacheEvent, Change, SequenceKeys, Tier

MakeModel = Callable[..., Any]


@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 9], [2, 4, 6], list(range(1, 12))])
def test_extended_keys_are_those_of_the_whole_sequence(cuts: list[int]) -> None:
    tokens = np.random.default_rng().integers(0, 2**31, 13)
    namespace = Namespace(adapter="a")
    keys = SequenceKeys(3, namespace=namespace)
    for begin, end in zip([0, *cuts], [*cuts, 13], strict=True):
        keys.extend(tokens[begin:end])
    assert keys.hashes == page_hashes(tokens, 3, namespace=namespace)
    assert keys.token_count == 13
    assert keys.tokens().tolist() == tokens[:12].tolist()


def test_tokens_of_another_kind_are_refused_and_change_nothing() -> None:
    keys = SequenceKeys(2, np.arange(5))
    with pytest.raises(TypeError, match="int32 or int64"):
        keys.extend(np.arange(5).astype(np.float32))  # type: ignore[arg-type]
    assert keys.token_count == 5


def test_events_name_tier_parent_and_tokens(make_model: MakeModel) -> None:
    events: list[CacheEvent] = []
    model = make_model(states=(8, 8), storage=MemoryStorage(), listener=events.append)
    tokens = np.random.default_rng().integers(0, 1000, 11)
    keys = SequenceKeys(2, tokens[:4])
    model.serve((), keys)
    keys.extend(tokens[4:])
    model.serve((), keys)
    model.cache.drain()

    def stored(tier: Tier, pool: str) -> list[tuple[tuple[bytes, ...], bytes | None, list[int]]]:
        return [
            (e.keys, e.parent, [] if e.tokens is None else e.tokens.tolist())
            for e in events
            if (e.change, e.tier, e.pool) == (Change.STORED, tier, pool)
        ]

    hashes = page_hashes(tokens, 2)
    for tier in Tier:
        assert stored(tier, "kv") == [
            (tuple(hashes[:2]), None, tokens[:4].tolist()),
            (tuple(hashes[2:]), hashes[1], tokens[4:10].tolist()),
        ]
        assert stored(tier, "mamba") == [
            ((hashes[1],), hashes[0], tokens[2:4].tolist()),
            ((hashes[4],), hashes[3], tokens[8:10].tolist()),
        ]
    events.clear()
    model.empty()
    gone = {(e.tier, e.pool, key) for e in events for key in e.keys if e.change is Change.REMOVED}
    expected = {(tier, "kv", key) for tier in (Tier.DEVICE, Tier.HOST) for key in hashes}
    assert gone == expected | {(t, "mamba", hashes[i]) for t in (Tier.DEVICE, Tier.HOST) for i in (1, 4)}


def test_split_keeps_the_tokens_of_both_halves(make_model: MakeModel) -> None:
    events: list[CacheEvent] = []
    model = make_model(listener=events.append)
    tokens = np.arange(8)
    model.serve((), SequenceKeys(2, tokens))
    model.cache.drain()
    model.serve((), SequenceKeys(2, np.array([0, 1, 2, 3, 9, 9])))
    events.clear()
    model.empty()
    for event in events:
        assert event.tokens is not None
        first = 0 if event.parent is None else 4
        wanted = [0, 1, 2, 3] if event.parent is None else ([4, 5, 6, 7] if len(event.keys) == 2 else [9, 9])
        assert event.tokens.tolist() == wanted, first
