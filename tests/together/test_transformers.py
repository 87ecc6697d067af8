"""The prefix cache of transformers: what is restored equals what never left the device, bit for bit."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from hicache_controller.integrations.transformers import HiCache


def _families() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "transformers_families", Path(__file__).with_name("transformers_families.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fam = _families()
PREFIX = 8 * fam.PAGE


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    family = request.param
    if family not in models:
        models[family] = fam.make_model(family, seed=1)
    return models[family]


class LeftError(Exception):
    """Leaves a session without keeping anything."""


def open_cache(model: Any, **options: Any) -> HiCache:
    return HiCache.for_model(model, model_id="tiny", l2_gb=0.02, page_size=fam.PAGE, **options)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts that share a prefix of whole pages and three tokens more."""
    shared = fam.random_tokens(PREFIX + 3)
    first, second = fam.random_tokens(9), fam.random_tokens(10)
    second[0, 0] = first[0, 0] % (fam.VOCABULARY - 1) + 1
    return torch.cat([shared, first], 1), torch.cat([shared, second], 1)


@pytest.mark.parametrize("model", fam.FAMILIES, indirect=True)
def test_continuing_from_every_tier_equals_continuing_from_the_device_cache(model: Any, tmp_path: Path) -> None:
    first, second = prompts()
    prefix = fam.compute_prefix(model, first[:, :PREFIX])
    tokens, logits = fam.continuation(model, second[:, PREFIX:], prefix.cache())

    def check_continuation(cache: HiCache, tier: str) -> None:
        # What is left with an error keeps nothing, so the next tier's hit is the same.
        with contextlib.suppress(LeftError), cache.session(second, checkpoints=()) as past:
            assert past.get_seq_length() == past.cached_tokens == PREFIX
            assert past.hits[0].tokens == getattr(past.hits[0], tier) == PREFIX
            chosen, seen = fam.continuation(model, second[:, PREFIX:], past)
            assert chosen == tokens
            assert all(torch.equal(a, b) for a, b in zip(seen, logits, strict=True))
            raise LeftError
        fam.check(cache)

    with open_cache(model, storage=tmp_path) as cache:
        fam.keep(cache, first, PREFIX)
        check_continuation(cache, "device")
        cache.drop_device()
        check_continuation(cache, "host")
    with open_cache(model, storage=tmp_path) as cache:
        check_continuation(cache, "storage")
