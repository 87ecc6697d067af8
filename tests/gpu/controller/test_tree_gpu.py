"""The tree over pools on the GPU: every byte right under eviction, early release and retraction, on every path."""

from __future__ import annotations

import os
import random
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache_controller.storage.memory import MemoryStorage
from hicache_controller.tree import WritePolicy

CPU_TESTS = Path(__file__).parents[2] / "controller" / "tree"
HELPERS = CPU_TESTS / "conftest.py"

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
@pytest.mark.parametrize("policy", list(WritePolicy))
def test_retracted_request_comes_back_bit_exact(
    make_model: MakeModel, helpers: dict[str, Any], policy: WritePolicy, transfer_policy: str
) -> None:
    model = make_model(transfer_policy=transfer_policy, write_policy=policy)
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


@pytest.mark.parametrize("transfer_policy", ["auto", "staged", "direct"])
def test_retraction_under_full_pools_comes_back_bit_exact_or_changes_nothing(
    make_model: MakeModel, helpers: dict[str, Any], transfer_policy: str
) -> None:
    keys_of = helpers["keys_of"]
    model = make_model(transfer_policy=transfer_policy, device_pages=8, host_pages=6, windows=None, states=(4, 2))
    model.serve((1, 2))
    requests = []
    for words in ((1, 2, 3, 4), (7, 7, 7, 7)):
        match = model.begin(keys_of(words))
        requests.append((match, *model.compute(match, len(words) - match.pages)))
    (first, pages, windows), (second, other_pages, other_windows) = requests
    assert model.cache.retraction_backup("first", first, pages, windows=windows)
    # The host has two pages left for four, and everything else there is pinned.
    assert not model.cache.retraction_backup("second", second, other_pages, windows=other_windows)
    model.verify("kv", second.rest(), other_pages)
    model.give_back(other_pages, other_windows)
    model.cache.release(second)
    model.serve((8, 8, 8, 8))
    restored = model.cache.retraction_restore("first")
    assert restored is not None
    model.verify_match(restored.match)
    model.verify("kv", restored.match.rest(), restored.pages)
    model.verify("mamba", restored.match.rest()[-1:], restored.windows["mamba"])
    model.give_back(restored.pages, restored.windows)
    model.cache.release(restored.match)
    model.empty()


@pytest.mark.parametrize("policy", ["auto", "staged", "direct"])
@pytest.mark.parametrize("tier", ["host", "storage"])
def test_restored_states_give_bit_equal_outputs(gpu: torch.device, tmp_path: Path, tier: str, policy: str) -> None:
    divergence = runpy.run_path(str(CPU_TESTS / "test_recurrent.py"))["restore_divergence"]
    assert divergence(tmp_path, tokens=16 * 36, cycles=11, tier=tier, policy=policy, on="cuda") == 0


@pytest.mark.parametrize("policy", ["auto", "staged", "direct"])
@pytest.mark.parametrize("tier", ["host", "storage"])
def test_restored_states_give_bit_equal_outputs_over_32k_tokens(
    gpu: torch.device, tmp_path: Path, tier: str, policy: str
) -> None:
    if not os.environ.get("HICACHE_LONG_TESTS"):
        pytest.skip("HICACHE_LONG_TESTS is not set; 32768 tokens and 100 cycles take a while")
    divergence = runpy.run_path(str(CPU_TESTS / "test_recurrent.py"))["restore_divergence"]
    assert divergence(tmp_path, tokens=32768, cycles=100, tier=tier, policy=policy, on="cuda") == 0
