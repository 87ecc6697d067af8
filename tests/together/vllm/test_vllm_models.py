"""Engines with every kind of layers, and engines that follow each other: what one kept comes back bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if "HICACHE_VLLM" not in os.environ:  # there it must not hide that vLLM cannot be imported
    pytest.importorskip("vllm", reason="vLLM is not installed; `nox -s vllm` installs it")

from tests.together.vllm.engine import BLOCK, Engine, equal, prompt
from tests.together.vllm.models import write_model

from hicache_controller.integrations.vllm import VllmSettings

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "lfm2"])
def test_every_kind_of_layer_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    engine = Engine(write_model(family, tmp_path), VllmSettings(l2_gb=0.05), blocks=192)
    try:
        prompts = [prompt(400, 1), prompt(300, 2)]
        first = engine.generate(*prompts)
        engine.poison()
        again = engine.generate(*prompts)
        assert all(answer.cached >= 200 for answer in again)
        assert equal(again, first)
    finally:
        engine.close()


def run_program(model: str, directory: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.together.vllm.restart_program", model, str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_another_process_loads_what_one_stored(tmp_path: Path) -> None:
    model, storage = write_model("llama", tmp_path / "model"), tmp_path / "l3"
    engine = Engine(model, VllmSettings(l2_gb=0.02, storage=f"file://{storage}"))
    try:
        first = engine.generate(prompt(400, 1), prompt(300, 2))
        engine.settle()
        assert engine.metrics()["vllm:hicache_stored_blocks"] >= (384 + 288) // BLOCK
    finally:
        engine.close()
    again = run_program(model, storage)
    assert [cached for *_, cached in again["answers"]] == [384, 288]
    expected = [(answer.tokens, [sorted(step.items()) for step in answer.logprobs]) for answer in first]
    found = [(tokens, [[tuple(pair) for pair in step] for step in steps]) for tokens, steps, _ in again["answers"]]
    assert found == expected
    assert again["counters"]["vllm:hicache_fetched_blocks"] == (384 + 288) // BLOCK
