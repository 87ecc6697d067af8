"""The fragmentation report: its replay by hand, on generated traces, and through the command."""

import importlib.util
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.processes import faults_of_import_orders, run_within_a_gib

from hicache_pools.extents import ExtentAllocator
from hicache_pools.fragmentation import (
    STRATEGIES,
    BestFitPages,
    FifoPages,
    fragmentation_report,
    replay,
)
from hicache_pools.trace import TraceRequest, read_trace


def conversations(requests: int) -> list[TraceRequest]:
    """Chats that grow turn by turn after one shared prefix, in random order."""
    chats: list[list[int]] = []
    fresh = iter(range(1, 10**9))
    made = []
    for number in range(requests):
        if not chats or random.random() < 0.4:
            chats.append([0])
        chat = random.choice(chats[-20:])
        chat.extend(next(fresh) for _ in range(random.randint(1, 12)))
        made.append(TraceRequest(number // 3, tuple(chat)))
    return made


def write(path: Path, requests: list[TraceRequest]) -> Path:
    lines = (json.dumps({"timestamp": request.timestamp, "hash_ids": request.blocks}) for request in requests)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_replay_follows_the_rules_written_down() -> None:
    requests = [
        TraceRequest(0, (0, 1, 2)),  # pages 0..5
        TraceRequest(1, (3, 4)),  # pages 6..9
        TraceRequest(2, (0, 1, 5)),  # a child of the first node, which stays whole; pages 10, 11
        TraceRequest(3, (6, 7)),  # the pool is full: the second request's node is the oldest leaf
        TraceRequest(4, (8, 9, 10)),  # evicts the child, then its parent: pages 10, 11 and 0..5 in the FIFO list
    ]
    fifo = replay(requests, FifoPages(12), name="fifo", node_blocks=None, pages_per_block=2, window=1)
    assert fifo.curve == (6.0, 4.0, 2.0, 4.0, 3.0)
    assert (fifo.allocations, fifo.pages, fifo.runs) == (3, 12, 4)
    assert fifo.pages_per_run == 3.0
    best = replay(requests, ExtentAllocator(12), name="extents", node_blocks=None, pages_per_block=2, window=1)
    assert best.curve == (6.0, 4.0, 2.0, 4.0, 6.0)


def test_nodes_end_at_multiples_of_their_size() -> None:
    requests = [TraceRequest(0, tuple(range(3))), TraceRequest(1, tuple(range(9)))]
    result = replay(requests, FifoPages(90), name="fifo", node_blocks=4, pages_per_block=10, window=1)
    # 3 blocks; then block 3, blocks 4..7, block 8, each one run.
    assert result.curve == (30.0, 20.0)
    assert result.allocations == 3


def test_a_request_larger_than_the_pool_is_cut_short() -> None:
    requests = [TraceRequest(0, (1, 2, 3, 4)), TraceRequest(1, (5,))]
    whole = replay(requests, FifoPages(3), name="fifo", node_blocks=None, pages_per_block=1)
    assert whole.pages == 1
    pieces = replay(requests, FifoPages(3), name="fifo", node_blocks=2, pages_per_block=1, window=1)
    assert pieces.curve == (2.0, 1.0)


def test_strategies_are_charged_with_the_same_allocations() -> None:
    report = fragmentation_report(conversations(300), pool_blocks=120, pages_per_block=4, node_blocks=(None, 4, 1))
    assert len(report.results) == 3 * len(STRATEGIES)
    for size in (None, 4, 1):
        results = [result for result in report.results if result.node_blocks == size]
        assert [result.strategy for result in results] == list(STRATEGIES)
        assert len({(result.allocations, result.pages) for result in results}) == 1
        assert all(result.pages_per_run > 0 for result in results)


def test_extents_keep_pages_together_better_than_a_fifo_list() -> None:
    report = fragmentation_report(conversations(1500), pool_blocks=300, pages_per_block=4, node_blocks=(4,))
    figures = {result.strategy: result.pages_per_run for result in report.results}
    assert figures["extents"] > figures["fifo"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_hands_out_free_pages_once(strategy: str) -> None:
    pages = 200
    tested = STRATEGIES[strategy](pages)
    held: list[np.ndarray] = []
    owned: set[int] = set()
    for _ in range(400):
        if held and random.random() < 0.5:
            given = held.pop(random.randrange(len(held)))
            tested.free_pages(given)
            owned -= set(given.tolist())
        else:
            wanted = random.randint(1, 60)
            taken = tested.alloc_pages(wanted)
            assert (taken is None) == (wanted > pages - len(owned))
            if taken is not None:
                assert len(set(taken.tolist()) - owned) == wanted
                owned |= set(taken.tolist())
                held.append(taken)
        assert tested.available_pages == pages - len(owned)


def test_plain_best_fit_needs_as_few_runs_as_the_allocator_for_the_next_allocation() -> None:
    pages = 300
    plain, extents = BestFitPages(pages), ExtentAllocator(pages)
    for strategy in (plain, extents):
        strategy.alloc_pages(pages)
    freed = np.random.default_rng().permutation(pages)[:150]
    wanted = random.randint(1, 150)
    runs = []
    for strategy in (plain, extents):
        strategy.free_pages(freed)
        taken = strategy.alloc_pages(wanted)
        assert taken is not None
        runs.append(np.count_nonzero(np.diff(taken) != 1))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(("name", "value"), [("node_blocks", 0), ("pages_per_block", 0), ("window", -1)])
def test_numbers_out_of_range_raise(name: str, value: int) -> None:
    arguments: dict[str, int | None] = {"node_blocks": None, name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        replay([], FifoPages(4), name="fifo", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pool_blocks=0"):
        fragmentation_report([], pool_blocks=0)


def test_a_trace_is_read_up_to_the_limit(tmp_path: Path) -> None:
    requests = conversations(20)
    path = write(tmp_path / "trace.jsonl", requests)
    assert read_trace(path) == requests
    assert read_trace(path, 7) == requests[:7]


@pytest.mark.parametrize("line", ["no json", "[]", '{"timestamp": 3}', '{"timestamp": 1, "hash_ids": ["x"]}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "trace.jsonl", conversations(2))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 3"):
        read_trace(path)


def command_line() -> Any:
    for package in ("typer", "rich", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install hicache-pools[cli]")
    from hicache_pools.cli import app

    return app


def test_the_command_writes_table_json_and_plot(tmp_path: Path) -> None:
    app = command_line()
    from typer.testing import CliRunner

    path = write(tmp_path / "trace.jsonl", conversations(200))
    written, drawn = tmp_path / "report.json", tmp_path / "report.png"
    options = "--requests 150 --pool-blocks 60 --pages-per-block 2 --node-blocks 0 --node-blocks 3"
    options += f" --json {written} --plot {drawn}"
    outcome = CliRunner().invoke(app, ["fragmentation", str(path), *options.split()])
    assert outcome.exit_code == 0, outcome.output
    assert "extents" in outcome.output
    report = json.loads(written.read_text())
    assert report["requests"] == 150
    assert [result["node_blocks"] for result in report["results"]] == [None] * 3 + [3] * 3
    assert drawn.read_bytes()[:4] == b"\x89PNG"


def test_the_command_refuses_a_file_that_is_no_trace(tmp_path: Path) -> None:
    app = command_line()
    from typer.testing import CliRunner

    path = tmp_path / "trace.jsonl"
    path.write_text("nothing\n")
    outcome = CliRunner().invoke(app, ["fragmentation"], env={"HICACHE_TRACE": str(path)})
    assert outcome.exit_code == 2


@pytest.mark.parametrize(
    ("line", "options", "complaint"),
    [
        ("", ["--pool-blocks", "9" * 12], "--pool-blocks is 999999999999 and --pages-per-block 32; accepted is"),
        ("", ["--json", "/dev/null/report.json"], "--json is /dev/null/report.json, which cannot be written"),
        ("", ["--plot", "picture.txt"], "--plot is picture.txt; a name that ends with one of"),
        ("nothing", [], "{trace}, line 3: no object with timestamp and hash_ids"),
        ("[" * 200_000, [], "{trace}, line 3: no object with timestamp and hash_ids"),
        ('{"timestamp": Infinity, "hash_ids": []}', [], "{trace}, line 3: no object with timestamp and hash_ids"),
    ],
    ids=lambda value: None if len(value) < 40 else "long",
)
def test_what_cannot_work_is_one_line_without_torch(
    tmp_path: Path, line: str, options: list[str], complaint: str
) -> None:
    path = write(tmp_path / "trace.jsonl", conversations(2))
    path.write_text(f"{path.read_text()}{line}\n")
    run = run_within_a_gib("hicache_pools.cli", "fragmentation", path, *options)
    assert run.returncode == 2
    assert run.stderr.startswith(f"hicache-pools: {complaint.format(trace=path)}")
    assert run.stderr.count("\n") == 1, run.stderr


def test_file_without_lines_is_not_read_into_memory() -> None:
    run = run_within_a_gib("hicache_pools.cli", "fragmentation", "/dev/zero")
    assert (run.returncode, run.stderr) == (2, "hicache-pools: /dev/zero: not a file\n")


def test_help_needs_no_torch() -> None:
    run = run_within_a_gib("hicache_pools.cli", "fragmentation", "--help")
    assert (run.returncode, run.stderr) == (0, "")


def test_missing_matplotlib_is_named_with_its_extra_before_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = command_line()
    from typer.testing import CliRunner

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = write(tmp_path / "trace.jsonl", conversations(2))
    outcome = CliRunner().invoke(app, ["fragmentation", str(path), "--plot", "picture.png"])
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr == "hicache-pools: --plot needs matplotlib: install hicache-pools[cli]\n"


def test_public_names_do_not_depend_on_what_was_imported_before() -> None:
    assert faults_of_import_orders("hicache_pools") == ""


def test_pages_per_run_on_the_conversation_trace() -> None:
    trace = os.environ.get("HICACHE_TRACE")
    if trace is None or not Path(trace).exists():
        pytest.skip("HICACHE_TRACE does not name the conversation trace")
    report = fragmentation_report(read_trace(trace, 6000))
    figures = {(result.strategy, result.node_blocks): result.pages_per_run for result in report.results}
    assert figures["extents", None] >= 220
    assert figures["extents", 8] >= 78
    assert figures["extents", None] > figures["best fit", None] > figures["fifo", None]
    assert figures["extents", 8] > figures["best fit", 8] > figures["fifo", 8]
