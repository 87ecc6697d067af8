"""A prefill process stores what it computed, a decode process loads it and finds every byte."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "prefill_decode_program.py"


@contextlib.contextmanager
def process(role: str, storage: str, words: list[int]) -> Iterator[int]:
    """Run a process; gives the pages it found, and ends it after the block."""
    command = [sys.executable, str(PROGRAM), role, storage, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            line = running.stdout.readline()
            assert line, f"the {role} process ended without an answer"
            yield int(line)
            running.stdin.close()
            assert running.wait(60) == 0
        finally:
            running.kill()


@pytest.fixture
def words() -> list[int]:
    return [random.randrange(100) for _ in range(6)]


def test_decode_process_loads_what_the_prefill_process_stored(tmp_path: Path, words: list[int]) -> None:
    with process("prefill", str(tmp_path), words) as found:
        assert found == 0
    with process("decode", str(tmp_path), words) as found:
        assert found == 6


def test_decode_process_loads_over_mooncake_while_the_prefill_process_lives(own_master: Any, words: list[int]) -> None:
    storage = f"mooncake:{own_master.start().address}"
    with process("prefill", storage, words) as stored, process("decode", storage, words) as found:
        assert (stored, found) == (0, 6)
