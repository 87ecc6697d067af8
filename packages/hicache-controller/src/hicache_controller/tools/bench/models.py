"""Random-weight models of known sizes to measure with, made on the device they are measured on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MAX_VALUES = {"layers": 4096, "vocabulary": 1 << 24}
_MAX_WIDTH = 1 << 20


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Llama-like model.

    Attributes
    ----------
    layers, hidden, intermediate
        Layers, and the widths of their residual stream and of their feed-forward part.
    heads, kv_heads, head_dim
        Query heads, key and value heads, and values a head.
    vocabulary
        Tokens there are; embedding and head share their weights.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            largest = _MAX_VALUES.get(field.name, _MAX_WIDTH)
            if not 0 < value <= largest:
                raise ValueError(f"{field.name} is {value}; accepted is 1 to {largest}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}, no multiple of kv_heads {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary positions need an even one")

    @property
    def parameters(self) -> int:
        """Parameters, without the norms' few."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    @property
    def token_values(self) -> int:
        """Keys and values of a token, in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim


PRESETS = {
    "tiny": ModelShape(4, 256, 1024, 8, 2, 32, 1024),
    "1b": ModelShape(16, 2048, 8192, 32, 8, 64, 128_256),
    "2b": ModelShape(28, 2048, 8192, 16, 8, 128, 65_536),
}
"""Shapes by name: one for a CPU, and two of 1.2 and 1.9 billion parameters that keep 32 and 112 KiB a token in bf16."""


def shape_of(preset: str, **changes: int | None) -> ModelShape:
    """Return the shape of a preset with some sizes changed (None: as they are); ValueError for an unknown preset."""
    if preset not in PRESETS:
        raise ValueError(f"model is {preset!r}; accepted are {', '.join(PRESETS)}")
    return dataclasses.replace(PRESETS[preset], **{name: size for name, size in changes.items() if size is not None})


def random_model(shape: ModelShape, *, positions: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a Llama of this shape with seeded random weights.

    Parameters
    ----------
    shape
        Its sizes.
    positions
        Longest sequence it is run on.
    dtype
        Of weights, keys and values.
    device
        Where the weights are made, and stay.

    Returns
    -------
    Any
        A ``LlamaForCausalLM`` in evaluation mode, with PyTorch's own attention.

    Raises
    ------
    ModuleNotFoundError
        Where transformers is missing.
    """
    import torch

    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "models come from transformers, which is missing: install hicache-controller[transformers]"
        ) from error
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        # Wide enough that the logits of different prompts differ clearly.
        initializer_range=shape.hidden**-0.5,
    )
    torch.manual_seed(0)
    with torch.device(device):
        make: Any = AutoModelForCausalLM.from_config
        model = make(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def count(parameters: int) -> str:
    """Write a number of parameters as people do: 4.06M, 1.24B."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 10**9 else f"{parameters / 1e6:.3g}M"
