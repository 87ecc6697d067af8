"""ModelLayout: what each layer of a model keeps, found by looking at the cache that a two-token forward pass fills."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from .errors import UnsupportedError

_Shape = TypeVar("_Shape")

KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers of transformers' own cache that can be restored; exactly these, as a subclass keeps more."""


EMPTY_LAYER = "DummyLayer"
"""Name of transformers' layer for what keeps nothing by design; its first versions that are served have none."""

EMPTY_LAYER_TYPES = ("mlp", "moe")
"""Types of layers that keep nothing, in a configuration's ``layer_types``."""

LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
"""Rotations whose frequencies change with the length of the sequence."""


class RowShape(NamedTuple):
    """One component of a token and layer: heads, values a head, and their type."""

    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a row."""
        return self.heads * self.dim * self.dtype.itemsize


class StateShape(NamedTuple):
    """A recurrent or convolution state of one sequence and layer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of a state."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class AttentionShape(NamedTuple):
    """What an attention layer keeps for a token; the index key is None where the layer has no indexer."""

    key: RowShape
    value: RowShape
    index_key: RowShape | None = None

    @property
    def bytes(self) -> int:
        """Bytes of a token and layer."""
        return self.key.bytes + self.value.bytes + (self.index_key.bytes if self.index_key is not None else 0)


class StatesShape(NamedTuple):
    """The states a linear-attention layer keeps, by their numbers in the layer."""

    conv: tuple[tuple[int, StateShape], ...]
    recurrent: tuple[tuple[int, StateShape], ...]

    @property
    def bytes(self) -> int:
        """Bytes of a sequence and layer."""
        return sum(state.bytes for _, state in (*self.conv, *self.recurrent))


@dataclass(frozen=True)
class LayerLayout:
    """What one model layer keeps.

    Attributes
    ----------
    attention
        Shapes of its keys and values; None without attention.
    window
        Tokens its attention sees, for a sliding or chunked window; 0 for full attention.
    states
        Shapes of its states; None without any.
    kind
        The class of transformers' own layer; None for a layer that keeps nothing.
    options
        What that class was made with, besides the window.
    """

    attention: AttentionShape | None = None
    window: int = 0
    states: StatesShape | None = None
    kind: type | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelLayout:
    """What all layers of a model keep.

    Attributes
    ----------
    layers
        One a model layer.
    device
        Where every layer keeps it.
    given_tokens
        Whether the decoder is given tokens where the model is; False where it gets embeddings.
    full, sliding, recurrent
        Numbers of the layers with full attention, with a window, and with states.
    """

    layers: tuple[LayerLayout, ...]
    device: torch.device
    given_tokens: bool = True

    @property
    def full(self) -> tuple[int, ...]:
        """Layers with full attention."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention is not None and not layer.window)

    @property
    def sliding(self) -> tuple[int, ...]:
        """Layers with a sliding or chunked window."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.attention is not None and layer.window)

    @property
    def recurrent(self) -> tuple[int, ...]:
        """Layers with states."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.states is not None)

    def attention_of(self, layers: Sequence[int], what: str) -> AttentionShape:
        """Return the shape that these layers share; UnsupportedError where they differ."""
        return _shared([self.layers[i].attention for i in layers], layers, what)

    def window_of(self, layers: Sequence[int]) -> int:
        """Return the window that these layers share; UnsupportedError where they differ."""
        return _shared([self.layers[i].window for i in layers], layers, "windows")

    def states_of(self, layers: Sequence[int]) -> StatesShape:
        """Return the states that these layers share; UnsupportedError where they differ."""
        return _shared([self.layers[i].states for i in layers], layers, "states")


def cache_argument(forward: Any) -> str:
    """Return the name under which a forward pass takes its cache; it changed within transformers 5."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; some print a whole module after it."""
    return str(error).partition("\n")[0]


def takes_positions(forward: Any) -> bool:
    """Return whether a forward pass takes ``position_ids``."""
    return "position_ids" in inspect.signature(forward).parameters


def decoder_of(model: Any) -> Any:
    """Return the module that computes the layers, below the head."""
    decoder = model.get_decoder()
    # In some models that is a part of the head.
    return decoder if _takes_cache(decoder) or not _takes_cache(model.base_model) else model.base_model


def _takes_cache(module: Any) -> bool:
    return not {"cache", "past_key_values"}.isdisjoint(inspect.signature(module.forward).parameters)


def model_layout(model: Any) -> ModelLayout:
    """Run two tokens through the model and look at what its layers keep.

    Raises
    ------
    UnsupportedError
        For a model that cannot run on transformers' own cache, a layer the integration does not know or that keeps
        nothing where it should, layers on several devices, a model without attention or with an encoder, and rotations
        that depend on the length of the sequence.
    """
    _check_configuration(model.config)
    cache, given_tokens = _run_two_tokens(model)
    devices = {tensor.device for layer in cache.layers for tensor in _tensors(layer)}
    if not devices:
        raise UnsupportedError(
            "the model kept nothing in the cache it was given: it has none, as an encoder, or one of its own"
        )
    types = model.config.get_text_config(decoder=True).to_dict().get("layer_types") or ()
    layers = tuple(
        _layer_layout(number, layer, types[number] if number < len(types) else None)
        for number, layer in enumerate(cache.layers)
    )
    if len(devices) != 1:
        names = sorted(str(device) for device in devices)
        raise UnsupportedError(f"the model keeps its cache on {names}; one device is supported")
    layout = ModelLayout(layers, devices.pop(), given_tokens)
    if layout.device.type == "meta":
        raise UnsupportedError("the model is on the meta device, where it has no weights to compute with")
    if not layout.full and not layout.sliding:
        raise UnsupportedError("no layer of the model has attention, so the length of its cache is not known")
    return layout


def _run_two_tokens(model: Any) -> tuple[DynamicCache, bool]:
    """Return the cache that two tokens fill, and whether the decoder was given them as tokens."""
    given: list[bool] = []

    def look(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given.append(options.get("input_ids", arguments[0] if arguments else None) is not None)

    hook = decoder_of(model).register_forward_pre_hook(look, with_kwargs=True)
    try:
        cache = DynamicCache(config=model.config)
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
        with torch.no_grad():
            model(input_ids=tokens, use_cache=True, **{cache_argument(model.forward): cache})
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot run two tokens on transformers' own cache: {type(error).__name__}: "
            f"{first_line(error)} (an encoder has no cache)"
        ) from error
    finally:
        hook.remove()
    return cache, bool(given) and all(given)


def _check_configuration(config: Any) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedError("the model has an encoder; supported are models of a decoder alone")
    text = config.get_text_config(decoder=True).to_dict()
    for kind in _rope_types(text.get("rope_parameters")):
        if kind in LENGTH_DEPENDENT_ROPES:
            raise UnsupportedError(
                f"rope_type is {kind!r}, with which a key depends on the length of the sequence it is computed in, so "
                "that none fits every sequence with the same beginning"
            )


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yield the kinds of rotations of a configuration, which may have one for each type of layer."""
    if isinstance(parameters, Mapping):
        for name, value in parameters.items():
            if name == "rope_type" and isinstance(value, str):
                yield value
            else:
                yield from _rope_types(value)


def _layer_layout(number: int, layer: Any, layer_type: str | None) -> LayerLayout:
    if not _tensors(layer):
        if type(layer).__name__ != EMPTY_LAYER and layer_type not in EMPTY_LAYER_TYPES:
            raise UnsupportedError(
                f"layer {number} left its {type(layer).__name__} empty; what it keeps elsewhere, as in the model "
                "itself, cannot be restored"
            )
        return LayerLayout()
    if type(layer) not in KNOWN_LAYERS:
        raise UnsupportedError(
            f"layer {number} keeps its cache in a {type(layer).__name__}; supported are "
            f"{', '.join(known.__name__ for known in KNOWN_LAYERS)}"
        )
    attention: AttentionShape | None = None
    window = 0
    options: dict[str, Any] = {}
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        index_key: RowShape | None = None
        if isinstance(layer, DynamicIndexedLayer) and layer.indexer_keys is not None:
            index_key = RowShape(1, layer.indexer_keys.shape[-1], layer.indexer_keys.dtype)
        attention = AttentionShape(_row_shape(layer.keys), _row_shape(layer.values), index_key)
    if isinstance(layer, DynamicSlidingWindowLayer):
        window = int(layer.sliding_window)
    states: StatesShape | None = None
    if isinstance(layer, LinearAttentionLayer):
        options["number_of_states"] = layer.number_of_states
        states = StatesShape(_state_shapes(layer.conv_states), _state_shapes(layer.recurrent_states))
    return LayerLayout(attention, window, states, type(layer), options)


def _row_shape(tensor: torch.Tensor) -> RowShape:
    return RowShape(tensor.shape[1], tensor.shape[3], tensor.dtype)


def _state_shapes(states: Mapping[int, torch.Tensor | None]) -> tuple[tuple[int, StateShape], ...]:
    return tuple((i, StateShape(tuple(s.shape[1:]), s.dtype)) for i, s in states.items() if s is not None)


def _tensors(layer: Any) -> list[torch.Tensor]:
    """All tensors that a layer keeps for a sequence."""
    found: list[torch.Tensor | None] = []
    if isinstance(layer, DynamicLayer):
        found += [layer.keys, layer.values]
    if isinstance(layer, DynamicIndexedLayer):
        found.append(layer.indexer_keys)
    if isinstance(layer, LinearAttentionLayer):
        found += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    if not isinstance(layer, (DynamicLayer, LinearAttentionLayer)):
        # A layer of another kind: whatever tensors it has, it will be refused by name.
        found += [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return [tensor for tensor in found if tensor is not None and tensor.numel()]


def _shared(values: Iterable[_Shape | None], layers: Sequence[int], what: str) -> _Shape:
    distinct = list(dict.fromkeys(values))
    if len(distinct) == 1 and distinct[0] is not None:
        return distinct[0]
    raise UnsupportedError(f"layers {list(layers)} have {what} of {len(distinct)} kinds, {distinct}; supported is one")
