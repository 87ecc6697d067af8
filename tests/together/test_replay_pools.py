"""Replays of models with several pools: windows, states, indexers and drafts through every tier, every row checked."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.together.test_replay import hicache, reuse

from hicache_controller.storage import MemoryStorage
from hicache_controller.storage.base import RegisteredPool
from hicache_controller.tools.replay import Replay, ReplayError, ReplayOptions, ReplayReport, VerificationError
from hicache_controller.tools.trace import TraceRequest, make_trace, read_trace

SEVERAL = ("swa", "mamba", "dsa", "deepseek_v4", "draft", "hybrid", "hybrid_dsa")


def short_chats(count: int) -> list[TraceRequest]:
    """Chats none of which fills a device pool that holds a quarter of the distinct blocks, so that all are evicted."""
    while True:
        requests = make_trace(count, seed=int.from_bytes(os.urandom(4)), turns=3)
        if 4 * max(len(request.blocks) for request in requests) <= reuse(requests)[2]:
            return requests


@pytest.fixture
def chats() -> list[TraceRequest]:
    return short_chats(80)


def options_for(requests: list[TraceRequest], pool: str, **changes: object) -> ReplayOptions:
    """One page a block, windows of 2; L1 a twentieth and L2 a tenth of the distinct blocks, or the largest request."""
    distinct = reuse(requests)[2]
    largest = max(len(request.blocks) for request in requests)
    page_size = 128 if pool == "deepseek_v4" else 4
    settings: dict[str, object] = {
        "pool": pool,
        "layers": 5,
        "row_bytes": 16,
        "page_size": page_size,
        "block_tokens": page_size,
        "window_tokens": 2 * page_size,
        "l1_pages": max(distinct // 20, largest),
        "l2_pages": max(distinct // 10, largest),
    }
    return ReplayOptions(**(settings | changes))  # type: ignore[arg-type]


def run(requests: list[TraceRequest], options: ReplayOptions) -> ReplayReport:
    """Replay; then empty the cache, after which every page of every pool must be free."""
    with Replay(requests, options) as replay:
        report = replay.run()
        replay.cache.check_integrity()
        empty(replay)
    return report


def empty(replay: Replay) -> None:
    cache, group, options = replay.cache, replay.model.group, replay.options
    for _ in range(2):  # what leaves the device may be saved on the host first
        cache.drain()
        cache.evict_device(options.l1_pages)
        cache.evict_host(options.l2_pages)
        for name in cache.windows:
            cache.evict_window_device(name, 1 << 30)
            cache.evict_window_host(name, 1 << 30)
    cache.drain()
    cache.check_integrity()
    replay.controller.check_integrity()
    assert cache.stats() == (0, 0, 0)
    assert cache.device_allocator.available_pages == options.l1_pages
    for plan in options.plans:
        if plan.window_pages is not None:
            taken = group.alloc_device(options.pool_pages(plan)[0] * (plan.page_size if options.data else 1), plan.name)
            assert taken is not None, f"device pages of {plan.name} are lost"
    for entry in group.entries:
        if str(entry.name) in cache.windows or entry is group.anchor_entry:
            assert entry.host_pool.available_size() == entry.host_pool.size, entry.name


def rows_a_page(options: ReplayOptions) -> dict[str, int]:
    """Rows of a page of each host pool, over all its layers and buffers."""
    rows: dict[str, int] = {}
    for plan in options.plans:
        for buffer in plan.buffers:
            name = str(buffer.host_pool or plan.name)
            rows[name] = rows.get(name, 0) + plan.page_size // buffer.slots_per_row * plan.layer_num
    return rows


def check_every_pool_went_through_every_tier(report: ReplayReport, options: ReplayOptions) -> None:
    rows = rows_a_page(options)
    assert rows.keys() == report.pools.keys() - ({"kv"} if options.pool == "deepseek_v4" else set())
    for name, count in rows.items():
        pool = report.pools[name]
        for what in ("written_back", "loaded_back", "stored", "fetched"):
            assert getattr(pool, what) > 0, (name, what)
        assert pool.rows_verified >= pool.loaded_back * count, name
    assert report.rows_verified == sum(pool.rows_verified for pool in report.pools.values())


@pytest.mark.parametrize(
    ("pool", "storage"), [*((pool, "memory") for pool in SEVERAL), ("hybrid", "file"), ("hybrid_dsa", "file")]
)
def test_constant_eviction_loses_no_hit_and_no_byte_of_any_pool(
    chats: list[TraceRequest], pool: str, storage: str
) -> None:
    options = options_for(chats, pool, storage=storage)
    report = run(chats, options)
    # States are kept after every block, so every prefix that attention alone would find can be restored.
    assert (report.blocks, report.hits) == reuse(chats)[:2]
    check_every_pool_went_through_every_tier(report, options)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_every_write_policy_verifies_on_several_pools(chats: list[TraceRequest], policy: str) -> None:
    # Saving what leaves the device needs host room in addition to the request that is being loaded.
    room = 2 * max(len(request.blocks) for request in chats)
    report = run(chats, options_for(chats, "hybrid_dsa", write_policy=policy, l2_pages=room, storage="memory"))
    hits = reuse(chats)[1]
    # A page seen once is not written under write_through_selective, so its second use may miss.
    assert report.hits == hits if policy != "write_through_selective" else 0 < report.hits <= hits
    assert all(counts.rows_verified for counts in report.pools.values())


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_every_prefetch_policy_verifies_on_several_pools(chats: list[TraceRequest], policy: str) -> None:
    report = run(chats, options_for(chats, "hybrid", prefetch_policy=policy, storage="memory"))
    assert 0 < report.hits <= reuse(chats)[1]


@pytest.mark.parametrize("pool", SEVERAL)
def test_bookkeeping_finds_what_a_run_with_bytes_finds(chats: list[TraceRequest], pool: str) -> None:
    report = run(chats, options_for(chats, pool, data=False))
    assert (report.blocks, report.hits) == reuse(chats)[:2]
    assert report.l3_hits > 0
    assert report.rows_verified == 0


def test_windows_come_back_while_attention_stays_on_the_device(chats: list[TraceRequest]) -> None:
    distinct = reuse(chats)[2]
    options = options_for(chats, "hybrid", l1_pages=distinct, l2_pages=distinct, l1_checkpoints=8, l3_bytes=0)
    report = run(chats, options)
    assert report.l1_hits == report.hits == reuse(chats)[1]
    assert report.pools["kv"].loaded_back == 0
    for name in ("swa", "mamba"):
        assert report.pools[name].loaded_back > 0
        assert report.pools[name].rows_verified > 0


@pytest.mark.parametrize("checkpoint_blocks", [1, 3])
def test_scarce_checkpoints_cost_hits_and_never_bytes(chats: list[TraceRequest], checkpoint_blocks: int) -> None:
    options = options_for(
        chats, "hybrid", l1_checkpoints=8, l2_checkpoints=8, checkpoint_blocks=checkpoint_blocks, storage="memory"
    )
    report = run(chats, options)
    assert 0 < report.hits <= reuse(chats)[1]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("method", ["backup_from_device_all_layer", "load_to_device_per_layer"])
def test_failing_transfers_cost_hits_and_never_bytes_or_pages(
    chats: list[TraceRequest], method: str, policy: str
) -> None:
    options = options_for(chats, "hybrid_dsa", write_policy=policy, storage="memory")
    with Replay(chats, options) as replay:
        calls = itertools.count(1)
        every = random.choice((2, 3, 5, 11))

        def failing(call: Callable[..., Any]) -> Callable[..., Any]:
            def fail_now_and_then(*arguments: Any, **named: Any) -> Any:
                if next(calls) % every == 0:
                    raise RuntimeError("injected")
                return call(*arguments, **named)

            return fail_now_and_then

        for entry in replay.model.group.entries:
            setattr(entry.host_pool, method, failing(getattr(entry.host_pool, method)))
        report = replay.run()
        empty(replay)
        assert replay.controller.metrics.snapshot().total("transfer_failures") > 0
    assert 0 < report.hits <= reuse(chats)[1]


@pytest.mark.parametrize("pool", ["hybrid", "hybrid_dsa", "draft"])
def test_second_run_of_several_pools_on_the_same_directory_is_warm(
    chats: list[TraceRequest], tmp_path: Path, pool: str
) -> None:
    options = options_for(chats, pool, l3_dir=tmp_path)
    run(chats, options)
    warm = run(chats, options)
    assert (warm.hits, warm.misses) == (warm.blocks, 0)
    assert warm.l3_hits > 0
    for name, counts in warm.pools.items():
        assert counts.fetched > 0, name
        assert counts.rows_verified > 0, name


def test_directory_that_another_kind_of_model_filled_gives_no_wrong_byte(
    chats: list[TraceRequest], tmp_path: Path
) -> None:
    # The pools of one name have one geometry in all of these, and share what is stored.
    for pool, layers in (("swa", 4), ("mamba", 4), ("hybrid", 6), ("mha", 2)):
        report = run(chats, options_for(chats, pool, layers=layers, l3_dir=tmp_path))
        assert report.hits >= reuse(chats)[1]
    assert report.hits == report.blocks


@pytest.mark.parametrize("name", ["kv", "indexer", "swa", "mamba"])
def test_flipped_byte_in_l2_is_found_in_every_pool_and_names_it(chats: list[TraceRequest], name: str) -> None:
    options = options_for(chats, "hybrid_dsa", l2_pages=reuse(chats)[2], l1_checkpoints=8, l3_bytes=0)
    with Replay(chats, options) as replay:
        replay.serve(chats[:40])
        replay.cache.drain()
        replay.model.group.get_pool(name).buffer.bitwise_xor_(torch.ones((), dtype=torch.uint8))
        place = rf"pool {name}, key .*, position \d+, layer \d, component \d, byte \d+: 0x"
        with pytest.raises(VerificationError, match=place):
            replay.serve(chats[40:])


@pytest.mark.parametrize(
    ("pool", "name"),
    [("draft", "kv"), ("draft", "draft"), ("hybrid", "swa"), ("hybrid", "mamba"), ("deepseek_v4", "deepseek_v4_c128")],
)
def test_wrong_last_byte_from_storage_is_found_in_every_pool(
    chats: list[TraceRequest], monkeypatch: pytest.MonkeyPatch, pool: str, name: str
) -> None:
    load = MemoryStorage.load_pages

    def load_with_a_flipped_bit(self: MemoryStorage, into: RegisteredPool, keys: list[bytes], pages: list[int]) -> Any:
        loaded = load(self, into, keys, pages)
        if into.name == name:
            into.pool.page_memory(pages[-1])[-1][-1] ^= 1
        return loaded

    monkeypatch.setattr(MemoryStorage, "load_pages", load_with_a_flipped_bit)
    with pytest.raises(VerificationError, match=rf"pool {name}, key"):
        run(chats, options_for(chats, pool, storage="memory"))


def test_hybrid_replay_of_the_conversation_trace_loses_no_hit_and_is_warm_out_of_storage(tmp_path: Path) -> None:
    path = os.environ.get("HICACHE_TRACE")
    if not path:
        pytest.skip("HICACHE_TRACE does not name the conversation trace")
    requests = read_trace(Path(path), 150)
    options = options_for(requests, "hybrid", l3_dir=tmp_path)
    report = run(requests, options)
    assert (report.blocks, report.hits) == reuse(requests)[:2]
    check_every_pool_went_through_every_tier(report, options)
    warm = run(requests, options)
    assert warm.misses == 0
    assert warm.l3_hits > 0
    for name, counts in warm.pools.items():
        assert counts.fetched > 0, name
        assert counts.rows_verified > 0, name


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"layers": 2}, "layers is 2; that leaves none for mamba of pool hybrid"),
        (
            {"pool": "deepseek_v4", "page_size": 64, "block_tokens": 64},
            "page_size is 64; pool deepseek_v4 needs a multiple of 128",
        ),
        ({"l1_checkpoints": 1}, "l1_checkpoints is 1, which gives swa 1 pages; it needs 8"),
        ({"l2_checkpoints": 0}, "l2_checkpoints is 0; accepted is 1 to"),
        ({"checkpoint_blocks": 0}, "checkpoint_blocks is 0; accepted is 1 to"),
        ({"window_tokens": -1}, "window_tokens is -1; accepted is 1 to"),
        ({"mooncake_segment_bytes": -1}, "mooncake_segment_bytes is -1; accepted is 0"),
        ({"storage": "tape"}, "storage backend is 'tape'; accepted are file, memory, mooncake"),
    ],
)
def test_models_and_sizes_that_cannot_be_are_refused(
    chats: list[TraceRequest], changes: dict[str, object], fault: str
) -> None:
    with pytest.raises(ReplayError, match=fault):
        Replay(chats, options_for(chats, **({"pool": "hybrid"} | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", ["hybrid", "deepseek_v4"])
def test_command_shows_what_each_pool_moved_and_its_path(tmp_path: Path, pool: str) -> None:
    figures = tmp_path / "figures.json"
    command = hicache("replay", "--requests", "20", "--pool", pool, "--json", figures, "--storage", "memory")
    assert command.exit_code == 0, command.stderr
    found = json.loads(figures.read_text())
    assert found["options"]["page_size"] == (256 if pool == "deepseek_v4" else 64)
    assert found["report"]["pools"]["swa"]["rows_verified"] > 0
    assert "Pages by pool" in command.stdout
    assert "swa: write-back: " in command.stdout


def test_command_of_one_pool_shows_no_table_of_pools() -> None:
    command = hicache("replay", "--requests", "10", "--storage", "memory")
    assert command.exit_code == 0, command.stderr
    assert "Pages by pool" not in command.stdout
    assert "\nwrite-back: " in command.stdout


def test_info_shows_the_path_of_every_pool_in_every_layout_it_has() -> None:
    command = hicache("info", "--pool", "hybrid_dsa", "--layers", "4", "--row-bytes", "64", "--device", "cpu")
    assert command.exit_code == 0, command.stderr
    table = command.stdout[command.stdout.index("hybrid_dsa pool on cpu") :]
    rows = [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]
    assert {name: rows.count(name) for name in set(rows) - {""}} == {"kv": 12, "indexer": 12, "swa": 12, "mamba": 8}
