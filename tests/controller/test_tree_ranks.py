"""Two ranks whose storages and allocations fail, or are of unequal speed and room, keep identical trees."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)

WORKER = Path(__file__).parent / "tree_ranks_worker.py"


def run_ranks(rounds, mode):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(port), str(rounds), mode],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # Some versions of gloo greet on standard output; the report is the last line.
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def assert_identical(first, second):
    for number, (mine, theirs) in enumerate(zip(first["rounds"], second["rounds"], strict=True)):
        assert mine == theirs, number
    assert not first["broken"]
    assert not second["broken"]
    assert first["free"] == second["free"]
    assert first["free_after_reset"] == second["free_after_reset"] == [16, 24]


def test_two_ranks_keep_identical_trees_and_no_lock_for_a_hundred_rounds():
    first, second = run_ranks(100, "faults")
    assert_identical(first, second)
    rounds = first["rounds"][:-1]
    assert len(rounds) == 100
    locks = [lock for _, tree in rounds for lock in re.findall(r"locks (\d+)/(\d+)", tree)]
    assert set(locks) == {("0", "0")}
    # It was about something: pages came from every tier, the storages differed, and allocations failed.
    assert any(device for (device, *_), _ in rounds)
    assert any(host for (_, host, *_), _ in rounds)
    assert any(prefetched > device + host for (device, host, prefetched, *_), _ in rounds)
    assert first["storage"] != second["storage"]
    assert first["refused"] + second["refused"] > 0


def test_ranks_whose_storages_have_unequal_speed_and_engines_unequal_room_drop_and_load_the_same():
    first, second = run_ranks(100, "unequal")
    assert_identical(first, second)
    rounds = first["rounds"][:-1]
    assert set(re.findall(r"locks (\d+)/(\d+)", first["rounds"][-1][1])) <= {("0", "0")}
    # It was about something: pages were dropped before storage had taken them, and some came from the host.
    assert first["skipped"] + second["skipped"] > 0
    assert first["storage"] != second["storage"]
    assert any(host for (_, host, *_), _ in rounds)
