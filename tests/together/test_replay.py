"""The main job end to end: hit counts of real and generated traces, every byte checked, every fault refused."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner, Result

from hicache_controller.policies import EVICTION_STRATEGIES
from hicache_controller.storage import MemoryStorage
from hicache_controller.storage.base import RegisteredPool
from hicache_controller.tools.cli import app
from hicache_controller.tools.replay import Replay, ReplayError, ReplayOptions, ReplayReport, VerificationError
from hicache_controller.tools.replay import report as reports
from hicache_controller.tools.trace import TraceRequest, make_trace, read_trace, write_trace
from hicache_controller.tree.policies import STRATEGIES


def reuse(requests: list[TraceRequest]) -> tuple[int, int, int]:
    """Blocks, blocks an unbounded prefix cache hits, and distinct blocks: counted from the ids alone."""
    seen: set[int] = set()
    blocks = hits = 0
    for request in requests:
        blocks += len(request.blocks)
        for block in request.blocks:
            if block not in seen:
                break
            hits += 1
        seen.update(request.blocks)
    return blocks, hits, len(seen)


def small_options(requests: list[TraceRequest], **changes: object) -> ReplayOptions:
    """One page of 4 tokens a block; L1 a twentieth and L2 a tenth of the distinct blocks, or the largest request."""
    distinct = reuse(requests)[2]
    largest = max(len(request.blocks) for request in requests)
    settings: dict[str, object] = {
        "layers": 2,
        "row_bytes": 16,
        "page_size": 4,
        "block_tokens": 4,
        "l1_pages": max(distinct // 20, largest),
        "l2_pages": max(distinct // 10, largest),
    }
    return ReplayOptions(**(settings | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def real_trace() -> Path:
    path = os.environ.get("HICACHE_TRACE")
    if not path:
        pytest.skip("HICACHE_TRACE does not name the conversation trace")
    return Path(path)


@pytest.fixture
def chats() -> list[TraceRequest]:
    return make_trace(120, seed=int.from_bytes(os.urandom(4)))


def hicache(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_unbounded_cache_finds_the_reuse_of_the_conversation_trace(real_trace: Path) -> None:
    requests = read_trace(real_trace, 500)
    blocks, hits = 13_662, 2_278
    assert reuse(requests)[:2] == (blocks, hits)
    distinct = reuse(requests)[2]
    options = small_options(requests, l1_pages=distinct, l2_pages=distinct, data=False)
    with Replay(requests, options) as replay:
        report = replay.run()
        replay.cache.check_integrity()
    assert (report.blocks, report.hits, report.l1_hits) == (blocks, hits, hits)


def test_constant_eviction_loses_no_hit_and_no_byte_of_the_conversation_trace(real_trace: Path, tmp_path: Path) -> None:
    requests = read_trace(real_trace, 500)
    blocks, hits = 13_662, 2_278
    distinct = reuse(requests)[2]
    options = small_options(requests, l1_pages=distinct // 20, l2_pages=distinct // 10, l3_dir=tmp_path)
    with Replay(requests, options) as replay:
        report = replay.run()
        replay.cache.check_integrity()
    assert (report.blocks, report.hits) == (blocks, hits)
    assert report.l2_hits > 0
    assert report.l3_hits > 0
    loaded_blocks = report.l2_hits + report.l3_hits
    assert report.rows_verified == loaded_blocks * options.page_size * options.layers * options.components


def test_whole_conversation_trace_in_bookkeeping_alone(real_trace: Path) -> None:
    requests = read_trace(real_trace)
    distinct = reuse(requests)[2]
    options = small_options(requests, l1_pages=distinct // 20, l2_pages=distinct // 10, data=False)
    with Replay(requests, options) as replay:
        report = replay.run()
    assert (report.requests, report.blocks, report.hits) == (12_031, 276_491, 105_592)


@pytest.mark.parametrize("pool", ["mha", "mla"])
@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_generated_trace_verifies_under_eviction_for_every_policy(
    chats: list[TraceRequest], tmp_path: Path, pool: str, policy: str
) -> None:
    blocks, hits, distinct = reuse(chats)
    # Saving what leaves the device needs host room in addition to the request that is being loaded.
    room = 2 * max(len(request.blocks) for request in chats)
    options = small_options(chats, pool=pool, write_policy=policy, l2_pages=max(distinct // 10, room), l3_dir=tmp_path)
    with Replay(chats, options) as replay:
        report = replay.run()
        replay.cache.check_integrity()
        stats = replay.cache.stats()
        assert stats.host_pages == options.l2_pages - replay.host_pool.available_size() // options.page_size
        assert stats.device_pages == options.l1_pages - replay.cache.device_allocator.available_pages
    assert report.blocks == blocks
    # A page seen once is not written under write_through_selective, so its second use may miss.
    assert report.hits == hits if policy != "write_through_selective" else 0 < report.hits <= hits
    assert report.rows_verified > 0
    for name in ("L1 to L2", "L2 to L1"):
        assert report.paths[name].bytes > 0
        assert report.paths[name].seconds > 0
        assert report.paths[name].mean_run >= 1


@pytest.mark.parametrize("eviction", STRATEGIES)
def test_every_eviction_strategy_replays_without_a_wrong_byte(chats: list[TraceRequest], eviction: str) -> None:
    with Replay(chats, small_options(chats, storage="memory", eviction=eviction)) as replay:
        report = replay.run()
        replay.cache.check_integrity()
        assert type(replay.cache.strategy) is STRATEGIES[eviction]
    assert tuple(STRATEGIES) == EVICTION_STRATEGIES
    assert 0 < report.l1_hits < report.hits <= reuse(chats)[1]


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_prefetch_that_does_not_wait_costs_hits_and_never_bytes(chats: list[TraceRequest], policy: str) -> None:
    options = small_options(chats, storage="memory", prefetch_policy=policy)
    with Replay(chats, options) as replay:
        report = replay.run()
        replay.cache.check_integrity()
    assert 0 < report.hits <= reuse(chats)[1]


def test_second_run_on_the_same_directory_starts_warm(chats: list[TraceRequest], tmp_path: Path) -> None:
    options = small_options(chats, l3_dir=tmp_path)
    blocks, hits, _ = reuse(chats)
    with Replay(chats, options) as replay:
        assert replay.run().hits == hits
    with Replay(chats, options) as replay:
        warm = replay.run()
    assert warm.hits == blocks
    assert warm.l3_hits > 0


def test_other_geometry_on_the_same_directory_never_loads(chats: list[TraceRequest], tmp_path: Path) -> None:
    hits = reuse(chats)[1]
    with Replay(chats, small_options(chats, l3_dir=tmp_path)) as replay:
        replay.run()
    # Pages of as many bytes that mean something else: their size alone would not tell them apart.
    other = small_options(chats, l3_dir=tmp_path, layers=1, row_bytes=32)
    assert other.page_bytes == small_options(chats).page_bytes
    with Replay(chats, other) as replay:
        assert replay.run().hits == hits


def test_flipped_byte_in_l2_ends_the_run_and_names_the_place(chats: list[TraceRequest]) -> None:
    options = small_options(chats, l2_pages=reuse(chats)[2], l3_bytes=0)
    with Replay(chats, options) as replay:
        replay.serve(chats[:60])
        replay.cache.drain()
        replay.host_pool.buffer.bitwise_xor_(torch.ones((), dtype=torch.uint8))
        with pytest.raises(VerificationError, match=r"position \d+, layer \d, component \d, byte \d+: 0x"):
            replay.serve(chats[60:])


def test_flipped_byte_in_l3_is_a_counted_miss(chats: list[TraceRequest], tmp_path: Path) -> None:
    options = small_options(chats, l3_dir=tmp_path)
    with Replay(chats, options) as replay:
        replay.run()
    flipped = 0
    for file in tmp_path.rglob("*"):
        if file.is_file() and file.stat().st_size > replay.host_pool.page_bytes:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
            flipped += 1
    assert flipped
    with Replay(chats, options) as replay:
        report = replay.run()
        assert replay.storage is not None
        assert replay.storage.stats().damaged > 0
    assert report.hits < report.blocks


def test_wrong_byte_from_storage_ends_the_command_with_code_1_and_the_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = MemoryStorage.load_pages

    def load_with_a_flipped_bit(self: MemoryStorage, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> Any:
        loaded = load(self, pool, keys, pages)
        pool.pool.page_memory(pages[-1])[-1][-1] ^= 1
        return loaded

    monkeypatch.setattr(MemoryStorage, "load_pages", load_with_a_flipped_bit)
    run = hicache("replay", "--requests", "100", "--storage", "memory", "--page-size", "4", "--block-tokens", "4")
    assert run.exit_code == 1
    assert re.search(r"wrong bytes: page \d+ .* position 3, layer 3, component 1, byte 63: 0x.. where 0x..", run.stderr)


def test_machine_without_a_compiler_replays_in_plain_torch_and_says_so(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hicache_controller.tools.cli", "replay", "--requests", "20"],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "write-back: reference, load-back: reference" in run.stdout
    assert "no g++ found" in run.stdout


def test_sizes_that_cannot_hold_one_request_are_refused(chats: list[TraceRequest]) -> None:
    for name in ("l1_pages", "l2_pages"):
        with pytest.raises(ReplayError, match=rf"{name} is 1; the largest request"):
            Replay(chats, small_options(chats, **{name: 1}))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"timestamp": 0, "input_length": ' + "9" * 5_000 + "}", "not JSON"),
        ("[]", "a list where an object is expected"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "no field 'hash_ids'"),
        ('{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": []}', "input_length is -5"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "2 are expected"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["x"]}', "not a list of whole numbers"),
    ],
)
def test_malformed_line_names_file_line_and_fault_and_stops(tmp_path: Path, line: str, fault: str) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, make_trace(2))
    with trace.open("a") as out:
        out.write(line + "\n")
    run = hicache("replay", trace)
    assert run.exit_code == 2
    assert f"{trace}, line 3: " in run.stderr
    assert fault in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["no-such-file.jsonl"], "No such file"),
        (["--l1-pages", "1"], "the largest request of the trace needs"),
        (["--l2-pages", "1"], "the largest request of the trace needs"),
        (["--l3-dir", "/proc/no/such/place"], "/proc/no/such/place"),
        (["--block-tokens", "100"], "no multiple of page_size"),
        (["--row-bytes", "6"], "a multiple of 4 is expected"),
        (
            ["--eviction", "random"],
            "eviction is 'random'; one of lru, lfu, size_aware,",
        ),
        (["--pool", "abc"], "one of mha, mla"),
        (["--l1-pages", "many"], "--l1-pages is 'many'"),
        (["--l1-pages", "10000000"], "host memory"),
        (["--l1-pages", "9" * 20], "accepted is 1 to"),
        (["--layers", "9" * 11], "accepted is 1 to"),
        (["--json", "/proc/figures.json"], "--json is /proc/figures.json"),
        (["--json", "."], "--json is ."),
        (["--plot", "picture.foo"], "one of .png"),
        (["--l3-dir", "never-made", "--l3-bytes", "0"], "nothing would be stored there"),
        (["/dev/zero"], "not a file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], fault: str) -> None:
    run = hicache("replay", "--requests", "20", *arguments)
    assert run.exit_code == 2, run.stderr
    assert fault in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1, run.stderr


def test_directory_of_foreign_files_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    run = hicache("replay", "--requests", "20", "--l3-dir", tmp_path)
    assert run.exit_code == 2
    assert "holds other files and no storage" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_trace_of_requests_shorter_than_a_block_has_nothing_to_cache(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, [TraceRequest(0, 400, 1, (0,))])
    run = hicache("replay", trace)
    assert run.exit_code == 0, run.stderr


def test_trace_is_not_overwritten_by_its_figures(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, make_trace(2))
    before = trace.read_bytes()
    run = hicache("replay", trace, "--json", trace)
    assert run.exit_code == 2
    assert "that is an input" in run.stderr
    assert trace.read_bytes() == before


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_leaves_a_directory_the_next_run_opens(tmp_path: Path, ending: signal.Signals) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, make_trace(2_000, seed=7))
    storage = tmp_path / "l3"
    arguments = ["replay", trace, "--l3-dir", storage, "--page-size", "4", "--block-tokens", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hicache_controller.tools.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # the set-up line: the replay is about to start
    while process.poll() is None and not any(path.is_file() for path in storage.rglob("*")):
        pass
    process.send_signal(ending)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    again = hicache(*arguments[:2], "--requests", "50", *arguments[2:])
    assert again.exit_code == 0, again.stderr
    assert again.stderr == ""


def test_command_writes_its_figures_and_its_picture(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    run = hicache("replay", "--requests", "40", "--json", figures, "--plot", picture)
    assert run.exit_code == 0, run.stderr
    report = json.loads(figures.read_text())["report"]
    assert report["requests"] == 40
    assert report["hits"] + report["misses"] == report["blocks"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    for word in ("L1 device", "L2 host", "L3 storage", "rows verified"):
        assert word in run.stdout


def test_picture_shows_the_last_requests_too(tmp_path: Path) -> None:
    requests = random.randint(8, 12)
    misses = random.randint(1, 9)
    report = ReplayReport(paths={}, pools={}, history=[(misses, 0, 0, 0)] * (requests - 1) + [(0, 0, 0, misses)])
    reports.plot(report, ReplayOptions(), tmp_path / "picture.png")
    pixels = matplotlib.image.imread(tmp_path / "picture.png")[:, :, :3]
    colour = matplotlib.colors.to_rgb(reports._COLOURS[-1])
    # The legend has a patch of it; the last request a column of the whole height.
    assert (abs(pixels - colour).max(axis=2) < 0.02).sum() > 10_000


def test_info_names_versions_paths_and_reasons() -> None:
    run = hicache("info")
    assert run.exit_code == 0, run.stderr
    for word in ("hicache-kernels", "hicache-pools", "hicache-controller", "torch", "write-back", "load-back"):
        assert word in run.stdout
