"""PastCache: the cache a session hands to the model; transformers' own, with layers that fill themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import Cache

from .layers import LAYER_OF
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


class PastCache(DynamicCache):
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
