"""The tree over pools on the GPU: every byte right under eviction, early release and retraction, on every path."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import WritePolicy

HELPERS = Path(__file__).parents[2] / "controller" / "tree" / "conftest.py"

pytestmark = pytest.mark.gpu

MakeModel = Callable[..., Any]


@pytest.fixture
def helpers() -> dict[str, Any]:
    return runpy.run_path(str(HELPERS))


@pytest.fixture
def make_model(gpu: torch.device, helpers: dict[str, Any]) -> Iterator[MakeModel]:
    """Make models on the GPU, with rows large enough for a transfer to take its time."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(
            helpers["Model"](**{"on": "cuda", "row_bytes": 4096, "windows": (6, 8), "states": (4, 8)} | options)
        )
        return made[-1]

    yield make
    for model in made:
        model.cache.check_integrity()
        model.close()


@pytest.mark.parametrize("transfer_policy", ["auto", "staged", "direct"])
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_every_byte_is_right_under_constant_eviction(
    make_model: MakeModel, policy: WritePolicy, transfer_policy: str
) -> None:
    model = make_model(transfer_policy=transfer_policy, write_policy=policy, storage=MemoryStorage())
    found = 0
    for _ in range(60):
        found += model.serve(tuple(random.choices(range(2), k=random.randrange(1, 8))))
        model.cache.check_integrity()
    assert found
    model.empty()


@pytest.mark.parametrize("transfer_policy", ["auto", "staged", "direct"])
def test_slots_reused_while_their_write_is_under_way_lose_nothing(make_model: MakeModel, transfer_policy: str) -> None:
    model = make_model(
        transfer_policy=transfer_policy,
        write_policy=WritePolicy.WRITE_BACK,
        host_pages=64,
        row_bytes=1 << 16,
        windows=None,
        states=None,
    )
    requests = [(word, *range(9)) for word in range(6)]
    for words in requests:
        # The device holds one request: the next takes its slots the moment the write has read them.
        assert model.serve(words) == 0
    for words in requests:
        assert model.serve(words) == len(words)
    model.empty()


@pytest.mark.parametrize("transfer_policy", ["auto", "staged", "direct"])
def test_retracted_request_comes_back_bit_exact(
    make_model: MakeModel, helpers: dict[str, Any], transfer_policy: str
) -> None:
    model = make_model(transfer_policy=transfer_policy)
    model.serve((1, 2, 3))
    match = model.begin(helpers["keys_of"]((1, 2, 3, 4, 5)))
    pages, windows = model.compute(match, 2)
    assert model.cache.retraction_backup("r", match, pages, windows=windows)
    model.cache.evict_device(100)
    for name in model.windows:
        model.cache.evict_window_device(name, 100)
    for rows in model.device.values():
        for buffer in rows:
            buffer.random_(256)
    restored = model.cache.retraction_restore("r")
    assert restored is not None
    model.verify_match(restored.match)
    rest = restored.match.rest()
    model.verify("kv", rest, restored.pages)
    for name, mine in restored.windows.items():
        model.verify(name, rest[len(rest) - len(mine) :], mine)
    model.cache.release(model.cache.insert(restored.match, restored.pages, windows=restored.windows).match)
    model.empty()
