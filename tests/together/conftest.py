"""What the tests of all three packages need: in CI a missing extra must not hide behind skipped tests."""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if os.environ.get("CI") and importlib.util.find_spec("transformers") is None:
    raise pytest.UsageError("transformers is not installed; CI installs the extra for these tests")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: small models are faster that way, and other tests have the other cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Models of transformers by family, made when they are first asked for."""
    return {}


@pytest.fixture
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    """Give a model of the family that the test is parametrised with."""
    from tests.together.transformers_families import make_model

    if request.param not in models:
        models[request.param] = make_model(request.param, seed=1)
    return models[request.param]


@pytest.fixture
def harmless_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hooks that only watch be no setting of a model, which those of a test would be."""
    from hicache_controller.integrations.transformers import describe

    monkeypatch.setattr(describe, "_is_harmless", lambda _: True)
