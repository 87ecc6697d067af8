"""What a cache serves of a prompt, and sessions that compute one in a single pass."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from tests.together import transformers_families as fam
from transformers import DynamicCache

from hicache_controller import Namespace
from hicache_controller.integrations.transformers import HiCache
from hicache_controller.integrations.transformers.identity import model_fingerprint


def served(cache: HiCache, tokens: torch.Tensor) -> int:
    """Tokens that are restored of a prompt with three more after it; what follows them must be as computed anew."""
    prompt = torch.cat([tokens, fam.random_tokens(3)], 1)
    count = -1
    with contextlib.suppress(fam.LeftError), cache.session(prompt, checkpoints=()) as past:
        count = past.cached_tokens
        logits = fam.forward(cache.model, prompt[:, count:], past)
        fresh = fam.forward(cache.model, prompt, DynamicCache(config=cache.model.config))
        torch.testing.assert_close(logits, fresh[:, count:])
        raise fam.LeftError
    return count


def compute(cache: HiCache, prompt: torch.Tensor, **options: Any) -> None:
    """Compute a prompt in one pass through a session, which keeps it."""
    with cache.session(prompt, **options) as past:
        fam.forward(cache.model, prompt, past)


def hit(cache: HiCache, prompt: torch.Tensor, *, namespace: Namespace | None = None, **options: Any) -> int:
    """Compute a prompt through a session, which keeps it; returns the tokens that were restored.

    The logits must be those of the model as it is now, without a session; ``options`` go to both forward passes.
    """
    with cache.session(prompt, namespace=namespace) as past:
        count = past.cached_tokens
        logits = fam.forward(cache.model, prompt[:, count:], past, **options)
    fresh = fam.forward(cache.model, prompt, DynamicCache(config=cache.model.config), **options)
    torch.testing.assert_close(logits, fresh[:, -logits.shape[1] :], rtol=1e-4, atol=1e-4)
    return count


def digest(model: Any) -> bytes:
    """Digest of a model's storage fingerprint."""
    return model_fingerprint(model, "tiny", revision=None, page_size=fam.PAGE).digest()
