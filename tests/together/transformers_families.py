"""Tiny random models, one for each kind of cache that transformers has, and what two runs of one are compared by."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from hicache_controller.integrations.transformers import HiCache
from hicache_controller.integrations.transformers.model_layout import cache_argument
from hicache_controller.integrations.transformers.tiers import MIN_CHECKPOINTS

_tokens = torch.Generator()
_tokens.seed()

PAGE = 8
VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
HYBRID_LAYERS = ["linear_attention", "full_attention", "linear_attention"]

FAMILIES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("mistral", "MistralConfig", "MistralForCausalLM", {"sliding_window": 21}),
    "gemma3": (
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "head_dim": 16,
            "layer_types": HYBRID_LAYERS,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            "head_dim": 8,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "bamba": (
        "bamba",
        "BambaConfig",
        "BambaForCausalLM",
        {
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        "DeepseekV32Config",
        "DeepseekV32ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "index_topk": 16,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
    ),
}
"""Module, configuration, model and options by family: full, grouped, all windows, some windows, states and indexers."""

RECURRENT = ("qwen3_next", "falcon_h1", "bamba")
WINDOWED = ("mistral", "gemma3", *RECURRENT)


@contextlib.contextmanager
def wrong_second_passes(model: Any, size: float) -> Iterator[None]:
    """Have a layer change the first token of each pass after another by this part of it, as if it had lost a state."""
    decoder = model.get_decoder()
    second = False

    def look(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        nonlocal second
        second = options[cache_argument(decoder.forward)].get_seq_length() > 0

    def change(module: Any, arguments: tuple[Any, ...], output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if second:
            hidden[:, :1] += size * hidden[:, :1].roll(1, -1)
        return output

    hooks = (
        decoder.register_forward_pre_hook(look, with_kwargs=True),
        decoder.layers[0].register_forward_hook(change),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class LeftError(Exception):
    """Leaves a session without keeping anything."""


def open_cache(model: Any, **options: Any) -> HiCache:
    """Make a small cache for a model."""
    return HiCache.for_model(model, **{"model_id": "tiny", "l2_gb": 0.02, "page_size": PAGE} | options)


def make_model(
    family: str, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """Build a model with random weights."""
    if family == "deepseek_v32" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 17):
        pytest.skip(f"transformers {transformers.__version__} computes its prompts in two passes in another way")
    module, configuration, kind, options = FAMILIES[family]
    home = importlib.import_module(f"transformers.models.{module}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(home, kind)(getattr(home, configuration)(**COMMON | options))
    return model.eval().to(device=device, dtype=dtype)


def random_tokens(count: int, *, batch: int = 1, device: torch.device | str = "cpu") -> torch.Tensor:
    """Draw tokens, none of which is padding."""
    return torch.randint(1, VOCABULARY, (batch, count), generator=_tokens).to(device)


def forward(model: Any, tokens: torch.Tensor, past: Any, **options: Any) -> torch.Tensor:
    """Run tokens with a cache; returns the logits of all of them."""
    if model.config.model_type == "bamba" and type(past) is DynamicCache:
        # It counts every pass from 0; a session passes positions by itself.
        begin = past.get_seq_length(1)
        options.setdefault("position_ids", torch.arange(begin, begin + tokens.shape[1], device=tokens.device)[None])
    with torch.no_grad():
        output = model(input_ids=tokens, use_cache=True, **{cache_argument(model.forward): past}, **options)
    return output.logits


def continuation(model: Any, tail: torch.Tensor, past: Any, *, steps: int = 5) -> tuple[list[int], list[torch.Tensor]]:
    """Run a tail and then greedy steps; returns the tokens chosen and all logits."""
    logits = [forward(model, tail, past)]
    chosen: list[int] = []
    for _ in range(steps):
        token = logits[-1][:, -1:].argmax(-1)
        chosen.append(int(token))
        logits.append(forward(model, token, past))
    return chosen, logits


@dataclass
class Prefix:
    """A prefix, and transformers' own cache after it, never off the device."""

    tokens: torch.Tensor
    kept: DynamicCache

    def cache(self) -> DynamicCache:
        """Copy the cache, to continue from it."""
        return copy.deepcopy(self.kept)


def compute_prefix(model: Any, tokens: torch.Tensor) -> Prefix:
    """Compute a prefix in one forward pass with transformers' own cache."""
    cache = DynamicCache(config=model.config)
    forward(model, tokens, cache)
    return Prefix(tokens, cache)


def keep(cache: HiCache, prompt: torch.Tensor, at: int) -> None:
    """Compute a prompt through a session in two forward passes, cut at a page boundary, and let the session keep it."""
    with cache.session(prompt, checkpoints=[at]) as past:
        for begin, end in spans(int(past.get_seq_length()), at, prompt.shape[1]):
            forward(cache.model, prompt[:, begin:end], past)


def spans(*ends: int) -> Iterator[tuple[int, int]]:
    """Pairs of neighbours that are not equal."""
    return ((begin, end) for begin, end in itertools.pairwise(ends) if begin < end)


def evict(cache: HiCache) -> None:
    """Empty the device tier and overwrite its memory, so that nothing can come from there by accident."""
    cache.drop_device()
    for entry in cache.tiers.group.entries:
        for component in () if entry.device_pool is None else entry.device_pool.components:
            for tensor in component.tensors:
                tensor.fill_(7.5)


def forked_prompts(shared: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make two prompts that share so many tokens, whole pages, and three more."""
    prefix = random_tokens(shared + 3)
    first, second = random_tokens(9), random_tokens(10)
    second[0, 0] = first[0, 0] % (VOCABULARY - 1) + 1
    return torch.cat([prefix, first], 1), torch.cat([prefix, second], 1)


def check(cache: HiCache) -> None:
    """Check the integrity of tree and controller."""
    cache.tiers.tree.check_integrity()
    cache.tiers.controller.check_integrity()


def check_random_sessions(model: Any, storage: Path, *, rounds: int) -> None:
    """Run prompts that begin alike through tiers so small that all of them evict, and compute each anew as well."""
    seed = random.randrange(1 << 30)
    _tokens.manual_seed(seed)
    try:
        _check_random_sessions(model, storage, random.Random(seed), rounds)
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise


def _check_random_sessions(model: Any, storage: Path, draw: random.Random, rounds: int) -> None:
    pages = 12
    with open_cache(model) as cache:
        page_bytes = {str(entry.name): entry.host_pool.page_bytes for entry in cache.tiers.group.entries}
        checkpoint = page_bytes.get("swa", 0) * cache.tiers.window_pages + page_bytes.get("mamba", 0)
    size = (MIN_CHECKPOINTS * checkpoint + (pages + 0.5) * page_bytes["kv"]) / 1e9
    cache = open_cache(model, storage=storage, l1_gb=size, l2_gb=size * 1.5)
    known = [random_tokens(draw.randint(20, 60), device=model.device) for _ in range(3)]
    hits = 0
    for _ in range(rounds):
        base = draw.choice(known)
        kept = base if draw.random() < 0.4 else base[:, : draw.randint(1, base.shape[1])]
        prompt = torch.cat([kept, random_tokens(draw.randint(1, 20), device=model.device)], 1)[:, : PAGE * pages - 12]
        wanted = draw.choice([None, (), [draw.randint(1, 40)]])
        leave = draw.random() < 0.2
        with contextlib.suppress(LeftError), cache.session(prompt, checkpoints=wanted) as past:
            hits += past.cached_tokens > 0
            begin, end = int(past.get_seq_length()), prompt.shape[1]
            cut = draw.randint(begin, end)
            logits = [forward(model, prompt[:, a:b], past) for a, b in spans(begin, cut, end)][-1]
            tokens = prompt
            for _ in range(draw.randint(0, 10)):
                token = logits[:, -1:].argmax(-1)
                tokens = torch.cat([tokens, token], 1)
                logits = forward(model, token, past)
            fresh = forward(model, tokens, DynamicCache(config=model.config))
            torch.testing.assert_close(logits[:, -1], fresh[:, -1], atol=1e-3, rtol=1e-3)
            if leave:
                raise LeftError
        known.append(tokens)
        step = draw.random()
        if step < 0.2:
            evict(cache)
        elif step < 0.3:
            cache.close()
            cache = open_cache(model, storage=storage, l1_gb=size, l2_gb=size * 1.5)
        check(cache)
    cache.close()
    assert hits
