"""A tiny transformer with seeded random weights for the minimal engine; nothing in here knows of a cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import rms_norm, silu

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, MAX_TOKENS = 4, 256, 8, 2, 32, 512, 2048
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float64
"""Double precision, so that a batch of another shape does not round its way to another token."""

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of a layer: its number, queries ``[n, HEADS, HEAD_DIM]``, keys and values ``[n, KV_HEADS, HEAD_DIM]``."""


class Model:
    """The layers without attention, which the caller passes in because it knows where keys and values are."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def weights(*shape: int, scale: float = HIDDEN**-0.5) -> torch.Tensor:
            return (torch.randn(*shape, dtype=DTYPE, generator=generator) * scale).to(DEVICE)

        self.embedding = weights(VOCABULARY, HIDDEN, scale=1)
        self.positions = weights(MAX_TOKENS, HIDDEN, scale=1)
        # Twice the usual scale: sharp attention, so that wrong keys or values anywhere show in the tokens.
        self.qkv = weights(LAYERS, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, scale=2 * HIDDEN**-0.5)
        self.out = weights(LAYERS, HEADS * HEAD_DIM, HIDDEN)
        self.up = weights(LAYERS, HIDDEN, 4 * HIDDEN)
        self.down = weights(LAYERS, 4 * HIDDEN, HIDDEN)
        self.head = weights(HIDDEN, VOCABULARY)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Hidden states ``[n, HIDDEN]`` of ``n`` tokens, which may belong to several requests."""
        x = self.embedding[tokens] + self.positions[positions]
        for layer in range(LAYERS):
            heads = (rms_norm(x, (HIDDEN,)) @ self.qkv[layer]).view(len(x), -1, HEAD_DIM)
            q, k, v = heads[:, :HEADS], heads[:, HEADS:-KV_HEADS], heads[:, -KV_HEADS:]
            x = x + attention(layer, q, k, v).flatten(1) @ self.out[layer]
            x = x + silu(rms_norm(x, (HIDDEN,)) @ self.up[layer]) @ self.down[layer]
        return rms_norm(x, (HIDDEN,))
