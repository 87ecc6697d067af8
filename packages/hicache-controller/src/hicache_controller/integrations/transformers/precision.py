"""Precision: whether what a session computed has the types that its pools keep, without rounding."""

from __future__ import annotations

from typing import Any

import torch

from .layers import FullAttention, IndexedLayer, RecurrentStates, StaticFullLayer, WindowAttention
from .past import PastCache, StaticPastCache
from .tiers import Tiers


def other_type(tiers: Tiers, past: PastCache | StaticPastCache) -> str | None:
    """Say which layer keeps rows or states of other types than its pool; None where all are the pools' own."""
    for number, (layer, kept) in enumerate(zip(past.layers, tiers.layout.layers, strict=False)):
        found: list[tuple[torch.Tensor | None, torch.dtype]] = []
        if kept.attention is not None:
            keys, values = _rows(layer)
            found += [(keys, kept.attention.key.dtype), (values, kept.attention.value.dtype)]
            if kept.attention.index_key is not None and isinstance(layer, IndexedLayer):
                found.append((layer.indexer_keys, kept.attention.index_key.dtype))
        if kept.states is not None and isinstance(layer, RecurrentStates):
            states = (*kept.states.conv, *kept.states.recurrent)
            found += zip(layer.state_tensors(), (state.dtype for _, state in states), strict=False)
        for tensor, dtype in found:
            if tensor is not None and tensor.dtype != dtype:
                return f"layer {number} has {tensor.dtype}, and its pool {dtype}"
    return None


def _rows(layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if isinstance(layer, (FullAttention, StaticFullLayer, WindowAttention)):
        return layer.keys, layer.values
    return None, None
