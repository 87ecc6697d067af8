"""Bytes that a model's KV cache takes, from its shape or from a Hugging Face ``config.json``."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dtypes import ELEMENT_BYTES

_MAX_VALUE = 1 << 31
_MAX_LAYERS = 1 << 16
_MAX_BYTES = 1 << 62
_INDEX_SCALE_VALUES = 128  # index keys of DSA share a float32 scale so many at a time, as in DSATokenToKVPool
_STATE_KINDS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid")
_ATTENTION_KINDS = ("full_attention", "attention", "global_attention", "indexed_attention", "hybrid")
_WINDOW_KINDS = ("sliding_attention", "chunked_attention", "local_attention")


class CapacityError(ValueError):
    """An argument of a capacity plan that cannot work, in one line."""


@dataclass(frozen=True)
class ModelGeometry:
    """What a model's caches take on one rank.

    Attributes
    ----------
    token_bytes
        Bytes of a token in all layers that keep every token (full attention, with indexers).
    window_bytes, window_tokens
        The same for sliding-window layers, and the window they need at the end of a prefix; 0 where there are none.
    state_bytes
        Bytes of one saved recurrent state, all layers; 0 where there is none. A cached prompt keeps one, at its end.
    notes
        What was assumed, a sentence each.
    """

    token_bytes: int
    window_bytes: int = 0
    window_tokens: int = 0
    state_bytes: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.token_bytes <= 0:
            raise CapacityError(f"token_bytes is {self.token_bytes}; a model needs layers that keep every token")
        for name in ("token_bytes", "window_bytes", "window_tokens", "state_bytes"):
            if not 0 <= getattr(self, name) <= _MAX_BYTES:
                raise CapacityError(f"{name} is {getattr(self, name)}; accepted is 0 to {_MAX_BYTES}")

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of the anchor: ``page_size`` tokens of the layers that keep every token."""
        return page_size * self.token_bytes

    def prompt_bytes(self, tokens: int, page_size: int) -> int:
        """Bytes a cached prompt takes: its whole pages, its window's last pages, one state; 0 below a page."""
        pages = tokens // page_size
        if not pages:
            return 0
        window_pages = min(pages, -(-self.window_tokens // page_size))
        return page_size * (pages * self.token_bytes + window_pages * self.window_bytes) + self.state_bytes


def attention_token_bytes(layers: int, kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of a token's keys and values in ``layers`` layers."""
    for name, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        _check_size(name, value)
    return layers * 2 * kv_heads * head_dim * element_bytes(dtype)


def latent_token_bytes(layers: int, latent_dim: int, dtype: str, *, index_head_dim: int = 0) -> int:
    """Bytes of a token's MLA latents in ``layers`` layers, with its index keys and their scales where there are any."""
    for name, value in (("layers", layers), ("latent_dim", latent_dim)):
        _check_size(name, value)
    index = index_head_dim + index_head_dim // _INDEX_SCALE_VALUES * 4
    return layers * (latent_dim * element_bytes(dtype) + index)


def element_bytes(dtype: str) -> int:
    """Bytes of a value; CapacityError for a type that is not in :data:`ELEMENT_BYTES`."""
    name = dtype.removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        raise CapacityError(f"dtype is {dtype!r}; one of {', '.join(ELEMENT_BYTES)} is expected")
    return ELEMENT_BYTES[name]


def geometry_from_config(
    config: Mapping[str, Any], *, dtype: str | None = None, tp: int = 1, state_bytes: int = 0
) -> ModelGeometry:
    """Geometry of a model from its Hugging Face ``config.json``.

    Parameters
    ----------
    config
        The parsed file; of a multimodal model its ``text_config`` counts.
    dtype
        Type of the cache; by default the model's.
    tp
        Tensor-parallel ranks. KV heads are divided among them (copied where there are fewer heads than ranks), an MLA
        latent is on every rank.
    state_bytes
        Bytes of one recurrent state on this rank, all layers: no ``config.json`` says how an engine keeps it.

    Raises
    ------
    CapacityError
        Naming the field that is missing or the shape that is not known.
    """
    _check_size("tp", tp)
    if isinstance(config.get("text_config"), Mapping):
        config = {**config, **config["text_config"]}
    notes: list[str] = []
    if dtype is None:
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
        if not dtype:
            raise CapacityError("config has neither dtype nor torch_dtype; give the dtype")
    kinds = _layer_kinds(config, notes)
    full = sum(kind in _ATTENTION_KINDS for kind in kinds)
    windowed = sum(kind in _WINDOW_KINDS for kind in kinds)
    states = sum(kind in _STATE_KINDS for kind in kinds)
    if states and not state_bytes:
        raise CapacityError(f"config has {states} recurrent layers; give state_bytes, the bytes of one saved state")
    if config.get("kv_lora_rank"):
        full_bytes = window_bytes = latent_token_bytes(
            1,
            _whole(config, "kv_lora_rank") + _whole(config, "qk_rope_head_dim"),
            dtype,
            index_head_dim=_whole(config, "index_head_dim") if config.get("index_head_dim") else 0,
        )
        notes.append("an MLA latent is on every rank")
    else:
        full_bytes = attention_token_bytes(1, _rank_heads(config, tp, "_global"), _head_dim(config, "global_"), dtype)
        window_bytes = attention_token_bytes(1, _rank_heads(config, tp), _head_dim(config), dtype)
    window = "sliding_window" if config.get("sliding_window") else "attention_chunk_size"
    window_tokens = _whole(config, window) if windowed else 0
    return ModelGeometry(full * full_bytes, windowed * window_bytes, window_tokens, state_bytes, tuple(notes))


def _layer_kinds(config: Mapping[str, Any], notes: list[str]) -> Sequence[str]:
    """Kind of each layer that keeps something of its own."""
    layers = _whole(config, "num_hidden_layers")
    listed = next((name for name in ("layer_types", "layers_block_type") if config.get(name)), None)
    pattern = config.get("sliding_window_pattern")
    period, indices = config.get("attn_layer_period"), config.get("attn_layer_indices")
    kinds: list[str]
    if listed:
        kinds = [str(kind) for kind in _listed(config, listed)]
        known = (*_ATTENTION_KINDS, *_WINDOW_KINDS, *_STATE_KINDS)
        unknown = [kind for kind in kinds if kind not in known]
        if unknown or len(kinds) != layers:
            fault = f"has layers of kind {unknown[0]!r}" if unknown else f"lists {len(kinds)} of {layers} layers"
            raise CapacityError(f"config {fault}; give the shape instead of a config")
    elif indices is not None:
        attention = {str(index) for index in _listed(config, "attn_layer_indices")}
        kinds = ["full_attention" if str(layer) in attention else "mamba" for layer in range(layers)]
    elif period:
        period = _whole(config, "attn_layer_period")
        offset = _whole(config, "attn_layer_offset", least=0) if config.get("attn_layer_offset") else 0
        kinds = ["full_attention" if layer % period == offset else "mamba" for layer in range(layers)]
    elif any(field.startswith("mamba_") for field in config):
        kinds = ["hybrid"] * layers
    elif isinstance(pattern, int) and pattern > 1:
        kinds = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    else:
        kinds = ["full_attention"] * layers
        if config.get("sliding_window") and config.get("use_sliding_window", True):
            notes.append("config has a sliding window but does not say in which layers: all are counted as full")
    shared = _whole(config, "num_kv_shared_layers", least=0) if config.get("num_kv_shared_layers") else 0
    return kinds[: max(layers - shared, 0)]


def _rank_heads(config: Mapping[str, Any], tp: int, kind: str = "") -> int:
    """KV heads of a rank; of full attention (``kind="_global"``) there may be another number than of windows."""
    names = (f"num{kind}_key_value_heads", "num_key_value_heads", "num_attention_heads")
    heads = _whole(config, next((name for name in names if config.get(name)), names[-1]))
    if heads % tp and tp % heads:
        raise CapacityError(f"tp is {tp}; it must divide, or be a multiple of, the {heads} KV heads")
    return max(1, heads // tp)


def _head_dim(config: Mapping[str, Any], kind: str = "") -> int:
    for name in (f"{kind}head_dim", "head_dim"):
        if config.get(name):
            return _whole(config, name)
    return max(_whole(config, "hidden_size") // _whole(config, "num_attention_heads"), 1)


def _whole(config: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    value = config.get(name)
    largest = _MAX_LAYERS if name == "num_hidden_layers" else _MAX_VALUE
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
        raise CapacityError(
            f"config has {name} {reprlib.repr(value)}; a whole number from {least} to {largest} is expected"
        )
    return value


def _listed(config: Mapping[str, Any], name: str) -> list[Any]:
    value = config[name]
    if not isinstance(value, list | tuple):
        raise CapacityError(f"config has {name} {reprlib.repr(value)}; a list is expected")
    return list(value)


def _check_size(name: str, value: int) -> None:
    largest = _MAX_LAYERS if name == "layers" else _MAX_VALUE
    if not 0 < value <= largest:
        raise CapacityError(f"{name} is {value}; accepted is 1 to {largest}")
