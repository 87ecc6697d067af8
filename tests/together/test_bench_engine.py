"""`hicache bench engine`: what it reports is what was measured, and what would mean something else is refused."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hicache_controller.tools.bench.engine import BenchError, EngineBench, PromptTimes
from hicache_controller.tools.bench.models import PRESETS, ModelShape, random_model, shape_of
from hicache_controller.tools.bench.options import EngineOptions
from hicache_controller.tools.cli import app

if importlib.util.find_spec("transformers") is None:  # CI installs the extra for these tests
    pytest.skip("transformers is not installed", allow_module_level=True)

PAGE, TAIL = 16, 24


@pytest.fixture
def shape() -> ModelShape:
    return ModelShape(
        layers=random.randint(1, 3),
        hidden=64,
        intermediate=96,
        heads=4,
        kv_heads=random.choice((1, 2, 4)),
        head_dim=random.choice((16, 24)),
        vocabulary=random.randint(100, 200),
    )


def options(shape: ModelShape, *prompts: int, **changes: Any) -> EngineOptions:
    given = {"tail": TAIL, "page_size": PAGE, "repeats": 2} | changes
    return EngineOptions(shape, "float32", "cpu", prompts, **given)


def bench_engine(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(app, ["bench", "engine", *map(str, arguments)])


def test_report_holds_exact_bytes_and_the_ratios_of_its_times(tmp_path: Path) -> None:
    lengths = sorted(random.sample(range(TAIL + PAGE, 300), 2))
    report, picture = tmp_path / "new" / "report.json", tmp_path / "new" / "picture.png"
    sizes = ("--tail", TAIL, "--page-size", PAGE, "--repeats", 1, "--layers", 2)
    result = bench_engine("--prompts", ",".join(map(str, lengths)), *sizes, "--json", report, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 10_000
    data = json.loads(report.read_text())
    assert [row["prompt"] for row in data["times"]] == lengths
    assert data["options"]["page_size"] == PAGE
    token_bytes = 2 * 2 * PRESETS["tiny"].kv_heads * PRESETS["tiny"].head_dim * 4
    for row in data["times"]:
        prefix = (row["prompt"] - TAIL) // PAGE * PAGE
        assert row["computed"] == row["prompt"] - prefix
        assert row["load_bytes"] == prefix * token_bytes
        assert row["load_path"] in ("direct", "staged", "reference")
        assert row["load_seconds"] > 0
        assert row["fetch_seconds"] > 0
        assert all(row[name] > 0 for name in ("prefill", "l1", "l2", "l3", "copy"))
        assert row["l2_over_bound"] == pytest.approx(row["l2"] / max(row["copy"], row["l1"]))
        assert row["prefill_over_l2"] == pytest.approx(row["prefill"] / row["l2"])
        assert row["l3_over_l2"] == pytest.approx(row["l3"] / row["l2"])


def test_tiers_that_were_not_asked_for_are_left_out(shape: ModelShape) -> None:
    with EngineBench(options(shape, 100, tiers=("l2",))) as bench:
        assert bench.storage is None
        (times,) = bench.run()
    assert times.l2 is not None
    assert times.l3 is None
    assert times.l3_over_l2 is None
    assert PromptTimes(100, 20, 1.0, 0.5).l2_over_bound is None


def test_prompt_in_chunks_gives_the_same_first_token(shape: ModelShape) -> None:
    prompt = torch.randint(shape.vocabulary, (1, 90))
    with torch.no_grad():
        tokens = []
        for chunk in (None, random.randint(1, 89)):
            with EngineBench(options(shape, 90, chunk=chunk, tiers=())) as bench:
                tokens.append(bench._prefill(prompt)[1])
    torch.testing.assert_close(*tokens)


class NothingLeavesL1(EngineBench):
    def _leave_in(self, tier: str) -> None:
        self.cache.flush()


class WrongBytesOnTheHost(EngineBench):
    def _leave_in(self, tier: str) -> None:
        super()._leave_in(tier)
        if tier == "l2":
            self.cache.tiers.controller.storage_host_pool.buffer.fill_(1)


def test_time_from_another_tier_than_the_one_named_is_an_error(shape: ModelShape) -> None:
    with (
        NothingLeavesL1(options(shape, 100)) as bench,
        pytest.raises(BenchError, match=r"64 tokens was to come from l2.*device=64"),
    ):
        bench.run()


def test_wrong_bytes_in_a_tier_are_an_error(shape: ModelShape) -> None:
    with WrongBytesOnTheHost(options(shape, 100)) as bench, pytest.raises(BenchError, match="logits from l2 differ"):
        bench.run()


def test_storage_directory_is_empty_of_pages_afterwards(shape: ModelShape, tmp_path: Path) -> None:
    stored = []

    def look(_: str) -> None:
        stored.append(0 if bench.storage is None else bench.storage.stats().pages)

    with EngineBench(options(shape, 100, storage=tmp_path)) as bench:
        bench.run(look)
    assert max(stored) == 64 // PAGE
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 4096


def test_cache_is_closed_though_what_was_stored_cannot_be_removed(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = EngineBench(options(shape, 100))
    assert bench.storage is not None

    def fail() -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(bench.storage, "clear", fail)
    with pytest.raises(OSError, match="the disk is gone"), bench:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        bench.storage.batch_exists([b"key"])
    with pytest.raises(RuntimeError, match="closed"), bench.cache.session(torch.zeros(1, 40, dtype=torch.long)):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "huge"), "model is 'huge'; accepted are tiny, 1b, 2b"),
        (("--prompts", "a,b"), "--prompts is 'a,b'"),
        (("--prompts", "100", "--tail", "90", "--page-size", "16"), "prompts has one of 100 tokens"),
        (("--tiers", "l2,l4"), "tiers has 'l4'"),
        (("--repeats", "0"), "repeats is 0"),
        (("--page-size", "0"), "page_size is 0"),
        (("--storage-threads", "0"), "storage_threads is 0"),
        (("--heads", "7"), "heads is 7"),
        (("--head-dim", "31"), "head_dim is 31"),
        (("--layers", "0"), "layers is 0"),
        (("--dtype", "int8"), "dtype is 'int8'"),
        (("--plot", "picture.txt"), "--plot is picture.txt"),
        (("--device", "xyz"), "--device is 'xyz'; accepted are cpu and cuda"),
        (("--device", "meta"), "--device is 'meta'; accepted are cpu and cuda"),
        (("--device", "cuda:99"), "--device is 'cuda:99', and torch sees"),
        (("--json", "/"), "--json is /, a directory"),
        (("--json", "/dev/null/report.json"), "--json is /dev/null/report.json, which cannot be written: /dev/null: "),
    ],
)
def test_option_that_cannot_work_is_named_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = bench_engine(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"hicache: {message}")
    assert result.stderr.count("\n") == 1


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = bench_engine("--device", "cuda")
    assert (result.exit_code, result.stderr) == (2, "hicache: --device is 'cuda', and torch sees 0 GPUs here\n")


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_reported_before_anything_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineBench, "__init__", lambda *_: pytest.fail("something was measured"))
    directory = tmp_path / "report.png"
    directory.mkdir()
    result = bench_engine(option, directory)
    assert result.exit_code == 2
    assert result.stderr == f"hicache: {option} is {directory}, a directory; the name of a file is expected\n"
    result = bench_engine(option, "/proc/new.png")
    assert result.exit_code == 2
    assert f"{option} is /proc/new.png, which cannot be written: " in result.stderr


def test_missing_transformers_is_reported_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = bench_engine()
    assert result.exit_code == 2
    assert "install hicache-controller[transformers]" in result.stderr


@pytest.mark.parametrize(("name", "least", "most"), [("1b", 1.0e9, 1.5e9), ("2b", 1.5e9, 2.2e9)])
def test_large_presets_have_one_to_two_billion_parameters(name: str, least: float, most: float) -> None:
    assert least < PRESETS[name].parameters < most


def test_parameters_are_those_of_the_model(shape: ModelShape) -> None:
    model = random_model(shape, positions=64, dtype=torch.bfloat16, device=torch.device("cpu"))
    matrices = sum(weights.numel() for weights in model.parameters() if weights.dim() > 1)
    assert matrices == shape.parameters
    assert {weights.dtype for weights in model.parameters()} == {torch.bfloat16}
    assert shape_of("tiny", layers=9).layers == 9
