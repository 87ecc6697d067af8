"""Two ranks with different storage contents and failing allocations act on the same prefixes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


def run_ranks(rounds, mode):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    worker = Path(__file__).parent / "ranks_worker.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(port), str(rounds), mode],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # Some versions of gloo greet on standard output, so the report is the last line and nothing else is.
    reports = [output.splitlines()[-1:] for output in outputs]
    return [json.loads(lines[0]) if lines and lines[0].startswith("{") else None for lines in reports]


def test_ranks_agree_on_every_prefix_for_a_hundred_rounds():
    first, second = run_ranks(100, "agree")
    assert first == second
    rounds = first["rounds"]
    assert len(rounds) == 100
    assert not first["broken"]
    assert {free for _, _, _, free in rounds} == {24}
    assert any(found for found, *_ in rounds)
    assert any(0 < pages == found for found, pages, *_ in rounds)
    assert any(found and not pages for found, pages, *_ in rounds)


def test_a_dead_rank_ends_the_sharing_and_not_the_serving():
    survivor, dead = run_ranks(10, "dies")
    assert dead is None
    assert survivor["broken"]
    assert len(survivor["rounds"]) == 10
    assert all(found == pages == 0 for found, pages, *_ in survivor["rounds"][3:])
