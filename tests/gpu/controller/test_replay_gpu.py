"""Short replays of every kind of model on the GPU, through pinned memory and storage, every loaded row checked."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.together.test_replay_pools import (
    check_every_pool_went_through_every_tier,
    options_for,
    reuse,
    run,
    short_chats,
)

from hicache_controller.tools.replay import POOLS, Replay, ReplayOptions, VerificationError
from hicache_controller.tools.trace import TraceRequest

pytestmark = pytest.mark.gpu


@pytest.fixture
def chats() -> list[TraceRequest]:
    return short_chats(60)


def options_on_gpu(requests: list[TraceRequest], pool: str, **changes: object) -> ReplayOptions:
    """Rows that every path takes, and pages of some kilobytes."""
    page_size = 128 if pool == "deepseek_v4" else 16
    sizes = {"page_size": page_size, "block_tokens": 2 * page_size, "window_tokens": 2 * page_size, "row_bytes": 256}
    options = options_for(requests, pool, storage="memory", **(sizes | changes))
    # The CPU tests count one page a block.
    return dataclasses.replace(options, device="cuda", l1_pages=2 * options.l1_pages, l2_pages=2 * options.l2_pages)


@pytest.mark.parametrize("pool", POOLS)
def test_constant_eviction_loses_no_hit_and_no_byte_of_any_pool_on_the_gpu(
    gpu: torch.device, chats: list[TraceRequest], pool: str
) -> None:
    options = options_on_gpu(chats, pool)
    report = run(chats, options)
    assert (report.blocks, report.hits) == reuse(chats)[:2]
    check_every_pool_went_through_every_tier(report, options)


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_every_write_policy_verifies_on_several_pools_on_the_gpu(
    gpu: torch.device, chats: list[TraceRequest], policy: str
) -> None:
    report = run(chats, options_on_gpu(chats, "hybrid_dsa", write_policy=policy))
    assert 0 < report.hits <= reuse(chats)[1]
    assert all(counts.rows_verified for counts in report.pools.values())


def test_scarce_checkpoints_cost_hits_and_never_bytes_on_the_gpu(gpu: torch.device, chats: list[TraceRequest]) -> None:
    report = run(chats, options_on_gpu(chats, "hybrid", l1_checkpoints=8, l2_checkpoints=8))
    assert 0 < report.hits <= reuse(chats)[1]


@pytest.mark.parametrize("name", ["kv", "indexer", "swa", "mamba"])
def test_flipped_byte_in_pinned_memory_is_found_in_every_pool(
    gpu: torch.device, chats: list[TraceRequest], name: str
) -> None:
    options = options_on_gpu(chats, "hybrid_dsa", l2_pages=reuse(chats)[2], l1_checkpoints=8, l3_bytes=0)
    with Replay(chats, options) as replay:
        replay.serve(chats[:30])
        replay.cache.drain()
        replay.model.group.get_pool(name).buffer.bitwise_xor_(torch.ones((), dtype=torch.uint8))
        with pytest.raises(VerificationError, match=rf"pool {name}, key"):
            replay.serve(chats[30:])
