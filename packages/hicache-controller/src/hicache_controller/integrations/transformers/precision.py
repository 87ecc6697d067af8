"""Precision: tells whether what a session computed is of the types that its pools keep, and not rounded on the way."""

from __future__ import annotations

from typing import Any

import torch

from .layers import FullAttention, IndexedLayer, RecurrentStates, StaticFullLayer, WindowAttention
from .past import PastCache, StaticPastCache
from .tiers import Tiers


class AutocastWatch:
    """A hook on the decoder of a model that notes whether a pass with a session's cache ran under ``torch.autocast``.

    Its keys and values need not show it: what was computed in another type is converted where it joins what was there.

    Parameters
    ----------
    decoder
        The module whose forward pass takes the cache.
    past
        The session's cache. With a static one no hook is set, as steps that are compiled would have it compiled along;
        its buffers keep the type they were made with, and take no other.
    device_type
        Of the model.
    """

    def __init__(self, decoder: Any, past: PastCache | StaticPastCache, device_type: str) -> None:
        self.seen = False
        self._past = past
        self._device_type = device_type
        self._hooks = (
            []
            if isinstance(past, StaticPastCache)
            else [decoder.register_forward_pre_hook(self._look, with_kwargs=True)]
        )

    def remove(self) -> None:
        """Take the hook off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _look(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(value is self._past for value in (*arguments, *options.values())):
            self.seen = self.seen or torch.is_autocast_enabled(self._device_type)


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
