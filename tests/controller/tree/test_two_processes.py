"""A prefill process stores what it computed, a decode process loads it and finds every byte."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "prefill_decode_program.py"


def run(role: str, directory: Path, words: list[int]) -> int:
    command = [sys.executable, str(PROGRAM), role, str(directory), *map(str, words)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout)


def test_decode_process_loads_what_the_prefill_process_stored(tmp_path: Path) -> None:
    words = [random.randrange(100) for _ in range(6)]
    assert run("prefill", tmp_path, words) == 0
    assert run("decode", tmp_path, words) == 6
