"""PastCache: the cache of a session; transformers' own, with layers that fill themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from .errors import UnsupportedError
from .generation import NOT_ASSISTED
from .layers import LAYER_OF, StaticFullLayer
from .model_layout import ModelLayout


@dataclass(frozen=True)
class Hit:
    """How many tokens of a prompt need no computing, and where they came from.

    Attributes
    ----------
    tokens
        Tokens whose keys, values and states are restored.
    device, host, storage
        Tokens found in each tier; together the longest prefix the tiers had, of which ``tokens`` are used.
    """

    tokens: int
    device: int = 0
    host: int = 0
    storage: int = 0


class Rewinds:
    """Remembers the shortest length of a cache since :meth:`take_shortest` was called.

    Passes of a compiled model are not always seen, so the cache itself records when it is made shorter.
    """

    _shortest: torch.Tensor | int | None = None

    def take_shortest(self) -> int | None:
        """Columns left by the deepest crop or reset since the last call, or None; of a static cache it waits."""
        shortest, self._shortest = self._shortest, None
        return None if shortest is None else int(shortest)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; the number is negative (older transformers take a positive one for what stays)."""
        try:
            super().crop(tokens_to_remove)  # type: ignore[misc]
        finally:
            self._note(self.get_seq_length())  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Forget everything."""
        self._note(0)
        super().reset()  # type: ignore[misc]

    def activate_past_recording(self) -> None:
        """Refuse: transformers calls this as it begins with assisted decoding or prompt lookup."""
        raise UnsupportedError(f"this is assisted decoding or prompt lookup; {NOT_ASSISTED}")

    def _note(self, left: torch.Tensor | int) -> None:
        if isinstance(left, torch.Tensor):
            # The length of a static cache is on the device and stays there; the cache changes it in place.
            left = left.clone() if self._shortest is None else left.clamp(max=self._shortest)
        elif self._shortest is not None:
            left = min(left, int(self._shortest))
        self._shortest = left


class PastCache(Rewinds, DynamicCache):
    """A cache for ``past_key_values`` that holds the restored prefix of each sequence of the batch.

    Attributes
    ----------
    hits
        One a sequence.
    cached_tokens
        Tokens, padding included, that the forward pass need not compute: what ``get_seq_length()`` is at first.
    """

    def __init__(self, layout: ModelLayout, config: Any) -> None:
        layers = list(DynamicCache(config=config).layers)
        for number, layer in enumerate(layout.layers):
            if layer.kind is None:
                continue
            window = {"sliding_window": layer.window} if layer.window else {}
            layers[number] = LAYER_OF[layer.kind](**window, **layer.options)
        Cache.__init__(self, layers=layers)
        self.hits: tuple[Hit, ...] = ()
        self.cached_tokens = 0


class StaticPastCache(Rewinds, StaticCache):
    """The same in buffers of one size, for ``torch.compile``; attributes as in :class:`PastCache`.

    Parameters
    ----------
    layout, config
        Of the model.
    max_cache_len
        Tokens the buffers hold.

    Raises
    ------
    UnsupportedError
        If the model keeps anything but full attention.
    """

    def __init__(self, layout: ModelLayout, config: Any, max_cache_len: int) -> None:
        layers = list(StaticCache(config=config, max_cache_len=max_cache_len).layers)
        for number, layer in enumerate(layout.layers):
            if layer.kind is None:
                continue
            if layer.kind is not DynamicLayer:
                raise UnsupportedError(
                    f"layer {number} keeps its cache in a {layer.kind.__name__}; a static cache is restored for full "
                    "attention alone: leave max_cache_len out"
                )
            layers[number] = StaticFullLayer(max_cache_len=max_cache_len)
        Cache.__init__(self, layers=layers)
        self.hits: tuple[Hit, ...] = ()
        self.cached_tokens = 0
