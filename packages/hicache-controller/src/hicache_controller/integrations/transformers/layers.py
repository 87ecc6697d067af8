"""Cache layers of transformers that fill themselves from the device pool when the forward pass first touches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from .errors import UnsupportedError
from .filling import Fill, FilledOnTouch, KeysAndValues
from .model_layout import AttentionShape, RowShape, StatesShape

GROWTH_TOKENS = 256
"""Room for new tokens after a prompt; buffers grow by half when it is used up."""

WINDOW_SLACK = 256
"""Tokens a sliding window's buffer takes before it is shifted."""


class FixedBatch:
    """Refuses what moves sequences within the batch of a session, or changes how many there are."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse: beams mix the sequences of the batch."""
        self._refuse()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse: the batch of a session is fixed."""
        self._refuse()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refuse: the batch of a session is fixed."""
        self._refuse()

    def _refuse(self) -> None:
        raise UnsupportedError(
            "beam search reorders the sequences of the batch, which a session does not support; generate without beams"
        )


class FullAttention(KeysAndValues, FixedBatch):
    """Keys and values of all tokens, in buffers with room to grow: a new token is written, and nothing else is copied.

    ``keys`` and ``values`` are views of the first tokens of ``_buffers``, until the model replaces them.
    """

    is_initialized: bool
    device: Any
    dtype: Any
    expected_tokens: int = 0
    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None
    _views: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, shape: AttentionShape, batch: int, tokens: int, device: torch.device, fill: Fill) -> None:
        """Allocate, and take over ``tokens`` tokens that ``fill`` will write."""
        size = max(self.expected_tokens, tokens) + GROWTH_TOKENS
        self._buffers = (
            _empty(shape.key, batch, size, device),
            _empty(shape.value, batch, size, device),
        )
        self._show(tokens)
        self.fill_with(fill)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens; returns those of all tokens."""
        self.fill()
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        keys, values = self._buffers_for(key_states, value_states, length, end)
        keys[:, :, length:end].copy_(key_states)
        values[:, :, length:end].copy_(value_states)
        return self._show(end)

    def _show(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._buffers is None:
            raise RuntimeError("the layer has no buffers yet")
        keys, values = self._buffers
        self._keys, self._values = self._views = keys[:, :, :tokens], values[:, :, :tokens]
        self.device, self.dtype, self.is_initialized = keys.device, keys.dtype, True
        return self._views

    def _buffers_for(
        self, key_states: torch.Tensor, value_states: torch.Tensor, length: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers with the tokens so far and room up to ``end``, of their own unless they already are."""
        check_states(key_states, None if length == 0 or self.keys is None else self.keys)
        buffers = self._buffers
        # A crop leaves a view of the same memory, anything else (a reordering, a selection) another tensor.
        mine = buffers is not None and self.keys is not None and self.keys.data_ptr() == buffers[0].data_ptr()
        if buffers is not None and (mine or length == 0) and end <= buffers[0].shape[-2] and _fits(buffers, key_states):
            return buffers
        size = max(end, self.expected_tokens) + GROWTH_TOKENS + (length // 2 if length else 0)
        fresh = _like(key_states, size), _like(value_states, size)
        for buffer, kept in zip(fresh, (self.keys, self.values), strict=True):
            if kept is not None and length:
                buffer[:, :, :length].copy_(kept)
        self._buffers = fresh
        return fresh

    def get_seq_length(self) -> int:
        """Count the tokens; it does not wait for them."""
        return 0 if self._keys is None or not self._keys.numel() else self._keys.shape[-2]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens."""
        self.fill()
        super().crop(tokens_to_remove)  # type: ignore[misc]

    def reset(self) -> None:
        """Forget everything."""
        self.fill_with(None)
        self.keys = self.values = self._buffers = self._views = None
        self.is_initialized = False


class FullLayer(FullAttention, DynamicLayer):  # type: ignore[no-untyped-call]
    """Full attention."""


class IndexedLayer(FullAttention, DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    """Full attention with the keys of a sparse indexer."""

    _index_buffer: torch.Tensor | None = None
    _indexer_keys: torch.Tensor | None = None

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """Index keys ``[batch, tokens, dim]``; None before the first."""
        self.fill()
        return self._indexer_keys

    @indexer_keys.setter
    def indexer_keys(self, indexer_keys: torch.Tensor | None) -> None:
        self.fill()
        self._indexer_keys = indexer_keys

    def begin(self, shape: AttentionShape, batch: int, tokens: int, device: torch.device, fill: Fill) -> None:
        """Allocate, and take over ``tokens`` tokens that ``fill`` will write."""
        super().begin(shape, batch, tokens, device, fill)
        if shape.index_key is not None and self._buffers is not None:
            _, dim, dtype = shape.index_key
            self._index_buffer = torch.empty((batch, self._buffers[0].shape[-2], dim), dtype=dtype, device=device)
            self._show_index(tokens)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append the index keys of new tokens; returns those of all tokens."""
        self.fill()
        length = 0 if self.indexer_keys is None else self.indexer_keys.shape[1]
        end = length + indexer_key_states.shape[1]
        buffer = self._index_buffer
        if buffer is None or end > buffer.shape[1]:
            size = max(end, self.expected_tokens) + GROWTH_TOKENS + length // 2
            batch, _, dim = indexer_key_states.shape
            with torch.inference_mode(False):
                buffer = torch.empty(
                    (batch, size, dim), dtype=indexer_key_states.dtype, device=indexer_key_states.device
                )
            if self.indexer_keys is not None:
                buffer[:, :length].copy_(self.indexer_keys)
            self._index_buffer = buffer
        buffer[:, length:end].copy_(indexer_key_states)
        return self._show_index(end)

    def _show_index(self, tokens: int) -> torch.Tensor:
        if self._index_buffer is None:
            raise RuntimeError("the layer has no index keys yet")
        self._indexer_keys = keys = self._index_buffer[:, :tokens]
        self.indexer_device, self.indexer_dtype = keys.device, keys.dtype
        self.is_indexer_initialized = True
        return keys

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.indexer_keys = self._index_buffer = None
        self.is_indexer_initialized = False


class WindowAttention(KeysAndValues, FixedBatch):
    """Keys and values of a window's tokens, and of some before it.

    transformers keeps ``sliding_window - 1`` tokens; here ``retained`` are kept, which is more, so that the window
    before the last page boundary is still there when the sequence has reached the middle of a page.

    Invariant: the buffers' first ``_held`` tokens are the last ``_held`` ones of the sequence.
    """

    is_initialized: bool
    device: Any
    dtype: Any
    sliding_window: int
    cumulative_length: int
    record_past: bool
    retained: int = 0
    watch: Callable[[Any, torch.Tensor, torch.Tensor, int], None] | None = None
    """Called with the layer itself, what is held, ``[batch, heads, n, dim]``, and the number of its first token."""
    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None
    _held: int = 0

    def begin(
        self, shape: AttentionShape, batch: int, tokens: int, held: int, device: torch.device, fill: Fill
    ) -> None:
        """Allocate, and take over a sequence of ``tokens`` tokens, of whose last ``held`` ones ``fill`` writes rows."""
        size = max(self.retained, held) + WINDOW_SLACK
        self._buffers = (_empty(shape.key, batch, size, device), _empty(shape.value, batch, size, device))
        self.cumulative_length = tokens
        self._show(held)
        self.fill_with(fill)

    @property
    def first_held(self) -> int:
        """Number of the first token that is held."""
        return self.cumulative_length - self._held

    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens from ``first_held`` on, ``[batch, heads, n, dim]``."""
        self.fill()
        if self._buffers is None:
            raise RuntimeError("the layer keeps nothing yet")
        return self._buffers[0][:, :, : self._held], self._buffers[1][:, :, : self._held]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens; returns theirs, after those of the window before them."""
        self.fill()
        check_states(key_states, None if self._buffers is None else self._buffers[0])
        new = key_states.shape[-2]
        visible = min(self.cumulative_length, self.sliding_window - 1) + new
        if self._buffers is None:
            size = self.retained + WINDOW_SLACK
            self._buffers = _like(key_states, size), _like(value_states, size)
        end = self._held + new
        both = self._buffers
        if end <= both[0].shape[-2]:
            for buffer, states in zip(both, (key_states, value_states), strict=True):
                buffer[:, :, self._held : end].copy_(states)
            whole = both[0][:, :, :end], both[1][:, :, :end]
        else:
            whole = (
                torch.cat((both[0][:, :, : self._held], key_states), dim=-2),
                torch.cat((both[1][:, :, : self._held], value_states), dim=-2),
            )
            kept = min(end, self.retained)
            for buffer, rows in zip(both, whole, strict=True):
                buffer[:, :, :kept].copy_(rows[:, :, end - kept :])
            end = kept
        self.cumulative_length += new
        self._show(end)
        if self.watch is not None:
            self.watch(self, *whole, self.cumulative_length - whole[0].shape[-2])
        return whole[0][:, :, -visible:], whole[1][:, :, -visible:]

    def _show(self, held: int) -> None:
        if self._buffers is None:
            raise RuntimeError("the layer has no buffers yet")
        self._held = held
        first = max(0, held - (self.sliding_window - 1))
        keys, values = self._buffers
        self._keys, self._values = keys[:, :, first:held], values[:, :, first:held]
        self.device, self.dtype, self.is_initialized = keys.device, keys.dtype, True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as far as the window before them is still held.

        Raises
        ------
        RuntimeError
            If it is not.
        """
        self.fill()
        left = self.cumulative_length - abs(tokens_to_remove)
        held = self._held - abs(tokens_to_remove)
        if held < min(left, self.sliding_window - 1):
            raise RuntimeError(f"crop removes {abs(tokens_to_remove)} tokens; the window before them is gone")
        self.cumulative_length = left
        self._show(held)

    def reset(self) -> None:
        """Forget everything."""
        self.fill_with(None)
        self.keys = self.values = self._buffers = None
        self._held = self.cumulative_length = 0
        self.is_initialized = False


class WindowLayer(WindowAttention, DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Attention with a sliding or chunked window."""


States = dict[int, torch.Tensor | None]


class RecurrentStates(FilledOnTouch, FixedBatch):
    """Convolution and recurrent states, filled when the model first asks for one."""

    is_conv_states_initialized: dict[int, bool]
    is_recurrent_states_initialized: dict[int, bool]
    has_previous_state: dict[int, bool]
    conv_kernel_size: dict[int, int | None]
    device: Any
    dtype: Any
    _conv_states: States
    _recurrent_states: States

    @property
    def conv_states(self) -> States:
        """Convolution states by number, each ``[batch, ...]``."""
        self.fill()
        return self._conv_states

    @conv_states.setter
    def conv_states(self, states: States) -> None:
        self.fill()
        self._conv_states = states

    @property
    def recurrent_states(self) -> States:
        """Recurrent states by number, each ``[batch, ...]``."""
        self.fill()
        return self._recurrent_states

    @recurrent_states.setter
    def recurrent_states(self, states: States) -> None:
        self.fill()
        self._recurrent_states = states

    def begin_states(self, shape: StatesShape, batch: int, device: torch.device, fill: Fill) -> None:
        """Allocate, and take over the states of a sequence that ``fill`` will write."""

        def allocate(states: tuple[tuple[int, Any], ...], into: States) -> None:
            for number, state in states:
                into[number] = torch.empty((batch, *state.shape), dtype=state.dtype, device=device)
                self.has_previous_state[number] = True

        allocate(shape.conv, self._conv_states)
        allocate(shape.recurrent, self._recurrent_states)
        for number, state in shape.conv:
            self.is_conv_states_initialized[number] = True
            self.conv_kernel_size[number] = state.shape[-1]
            self.dtype = state.dtype
        for number, _ in shape.recurrent:
            self.is_recurrent_states_initialized[number] = True
        self.device = device
        self.fill_with(fill)

    def state_tensors(self) -> list[torch.Tensor]:
        """All states, convolution states first, each ``[batch, ...]``."""
        found = (*self.conv_states.values(), *self.recurrent_states.values())
        return [state for state in found if state is not None]


class RecurrentLayer(RecurrentStates, LinearAttentionLayer):
    """Linear attention, or a convolution, alone."""


class HybridLayer(  # type: ignore[no-untyped-call, override]
    RecurrentStates, FullAttention, LinearAttentionAndFullAttentionLayer
):
    """Linear attention and full attention side by side."""

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        FullAttention.reset(self)


class HybridWindowLayer(  # type: ignore[no-untyped-call, override]
    RecurrentStates, WindowAttention, LinearAttentionAndSlidingWindowAttentionLayer
):
    """Linear attention and attention with a window side by side."""

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        WindowAttention.reset(self)


class StaticFullLayer(KeysAndValues, FixedBatch, StaticLayer):  # type: ignore[no-untyped-call]
    """Full attention in a buffer of one size, for ``torch.compile``."""

    def begin(self, shape: AttentionShape, batch: int, tokens: int, device: torch.device, fill: Fill) -> None:
        """Allocate, and take over ``tokens`` tokens that ``fill`` will write."""
        self.lazy_initialization(_empty(shape.key, batch, 0, device), _empty(shape.value, batch, 0, device))
        self.cumulative_length.fill_(tokens)
        self.fill_with(fill)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new tokens; returns the whole buffers."""
        if self._fill is not None:
            check_states(key_states, self.keys)
            self.fill()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values


LAYER_OF: dict[type, type] = {
    DynamicLayer: FullLayer,
    DynamicIndexedLayer: IndexedLayer,
    DynamicSlidingWindowLayer: WindowLayer,
    LinearAttentionLayer: RecurrentLayer,
    LinearAttentionAndFullAttentionLayer: HybridLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: HybridWindowLayer,
}
"""Which layer stands in for each of transformers' own."""


def check_states(states: torch.Tensor, kept: torch.Tensor | None) -> None:
    """Raise where new keys are of another batch than those kept, or belong to a graph of gradients."""
    if kept is not None and states.shape[0] != kept.shape[0]:
        raise UnsupportedError(
            f"the forward pass has {states.shape[0]} sequences, the session {kept.shape[0]}; beam search and several "
            "return sequences are not supported: repeat the prompt in the input_ids of the session"
        )
    if states.requires_grad:
        raise UnsupportedError("the forward pass records gradients; run it under torch.no_grad() or inference_mode()")


def _empty(shape: RowShape, batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    # Not an inference tensor, even in inference mode: those cannot be written to outside of it.
    with torch.inference_mode(False):
        return torch.empty((batch, shape.heads, tokens, shape.dim), dtype=shape.dtype, device=device)


def _like(states: torch.Tensor, tokens: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty((*states.shape[:2], tokens, states.shape[-1]), dtype=states.dtype, device=states.device)


def _fits(buffers: tuple[torch.Tensor, torch.Tensor], states: torch.Tensor) -> bool:
    return buffers[0].shape[0] == states.shape[0] and buffers[0].dtype == states.dtype
