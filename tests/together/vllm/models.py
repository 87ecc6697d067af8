"""Configurations of small models with random weights, one of each kind of layers that vLLM caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON = {"hidden_size": 64, "vocab_size": 256, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
           "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
_WINDOWED = ["sliding_attention", "sliding_attention", "full_attention"] * 2

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        **_ATTENTION,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 128,
        "query_pre_attn_scalar": 32,
        "layer_types": _WINDOWED,
        "attention_bias": False,
        **_ATTENTION,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "intermediate_size": 128,
        "hidden_size": 128,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "conv_L_cache": 3,
        "conv_dim": 128,
        "conv_dim_out": 128,
        "conv_use_xavier_init": True,
        "conv_bias": False,
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        **_ATTENTION,
    },
}


def write_model(family: str, directory: Path) -> str:
    """Write the configuration of a model; vLLM makes its weights (``load_format="dummy"``)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_COMMON | MODELS[family]))
    return str(directory)
