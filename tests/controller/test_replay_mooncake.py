"""The README's replay of a hybrid model on a Mooncake store, against a real master and a client that gives memory."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.fixture
def store(own_master: Any) -> Iterator[str]:
    """Run a master, and a client that lends the store memory, for as long as a test; its address."""
    address = own_master.start().address
    client = None
    try:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        client = subprocess.Popen(
            [
                own_master.binary.with_name("mooncake_client"),
                "--host=127.0.0.1",
                f"--master_server_address={address}",
                "--metadata_server=P2PHANDSHAKE",
                "--protocol=tcp",
                "--global_segment_size=512MB",
                f"--port={port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # It listens once its memory is part of the store.
        while True:
            assert client.poll() is None, "mooncake_client ended"
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                pass
        yield address
    finally:
        if client is not None:
            client.kill()
            client.wait()


def replay(arguments: list[str], master: str, figures: Path) -> tuple[str, dict[str, Any]]:
    """What the command prints, and its figures."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hicache_controller.tools.cli", *arguments),
            *("--device", "cpu", "--mooncake-master", master, "--json", str(figures)),
        ],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(figures.read_text())["report"]


def shape(output: str) -> list[str]:
    """First cells of the tables."""
    return [line[1:].split(line[0])[0].strip() for line in output.splitlines() if line.startswith(("│", "┃"))]


def test_hybrid_replay_of_the_readme_is_warm_the_second_time(store: str, tmp_path: Path) -> None:
    found = re.search(r"^hicache (replay [^\n]*--storage mooncake[^\n]*)\n.*?```text\n(.*?)```", README, re.M | re.S)
    assert found is not None
    arguments, shown = shlex.split(found[1]), found[2]
    assert {"--pool", "hybrid"} <= set(arguments)
    cold = replay(arguments, store, tmp_path / "cold.json")[1]
    assert cold["misses"] > 0
    printed, warm = replay(arguments, store, tmp_path / "warm.json")
    assert (warm["blocks"], warm["misses"]) == (cold["blocks"], 0)
    assert warm["l3_hits"] > cold["l3_hits"]
    for report in (cold, warm):
        assert report["pools"].keys() == {"kv", "swa", "mamba"}
        for name, pool in report["pools"].items():
            assert pool["fetched"] > 0, name
            assert pool["loaded_back"] > 0, name
            assert pool["rows_verified"] > 0, name
    assert shape(printed) == shape(shown)
    assert len(shape(shown)) > 15
    assert f"{warm['tokens']:,}" in shown
    assert f"{warm['blocks']:,}" in shown
