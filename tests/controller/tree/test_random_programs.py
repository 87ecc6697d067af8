"""Random programs on random stacks: no wrong byte, nothing lost, nothing left over.

``HICACHE_SEEDS=N`` runs more of them, ``HICACHE_SEED=K`` one again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.controller.tree.random_program import RandomProgram

SEEDS = 25


def seeds() -> list[int]:
    if "HICACHE_SEED" in os.environ:
        return [int(os.environ["HICACHE_SEED"])]
    return list(range(int(os.environ.get("HICACHE_SEEDS", SEEDS))))


@pytest.mark.parametrize("seed", seeds())
def test_a_random_program_finds_no_fault(
    model_type: type[Any], tmp_path: Path, interrupted_at: Callable[..., bool], seed: int
) -> None:
    RandomProgram(seed, model_type, tmp_path, interrupted_at).run()
