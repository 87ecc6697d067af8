"""Checkpoints: the page boundaries of a session at which windows and recurrent states are saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hicache_pools import PoolName

from ...tree import Pages
from .layers import RecurrentStates, WindowAttention
from .past import PastCache, StaticPastCache
from .rows import PageRows, Row
from .tiers import Tiers


@dataclass(eq=False)
class Checkpoint:
    """What a sequence's windowed layers keep at a page boundary, copied into pages of the device pools.

    Attributes
    ----------
    row
        Sequence of the batch.
    tokens
        Tokens before the boundary, a multiple of the page size.
    sliding, states
        Device pages, still the session's; None where the model has none of the kind, or they were given away.
    missing
        Sliding layers whose rows are not copied yet.
    has_states
        Whether the states are copied.
    """

    row: int
    tokens: int
    sliding: Pages | None = None
    states: Pages | None = None
    missing: set[int] = field(default_factory=set)
    has_states: bool = False

    def windows(self, published: int) -> dict[str, Pages]:
        """Pages for an insert that publishes ``published`` pages before the boundary; they are the tree's then."""
        given: dict[str, Pages] = {}
        if self.sliding is not None:
            kept = self.sliding[-published:]
            given[PoolName.SWA] = kept
            self.sliding = self.sliding[: len(self.sliding) - len(kept)]
        if self.states is not None:
            given[PoolName.MAMBA] = self.states
            self.states = None
        return given

    def take_back(self, given: Mapping[str, Pages]) -> None:
        """Own the pages again that an insert did not take."""
        if self.sliding is not None and PoolName.SWA in given:
            self.sliding = np.concatenate([self.sliding, given[PoolName.SWA]])
        if PoolName.MAMBA in given:
            self.states = given[PoolName.MAMBA]


class Checkpoints:
    """The checkpoints of one session.

    A window is saved by the layer's own update, as soon as it has gone past the boundary. States are saved where a
    forward pass ends; of those that were not asked for, the last of each sequence is kept.
    """

    def __init__(self, tiers: Tiers, rows: Sequence[Row], past: PastCache | StaticPastCache) -> None:
        self._tiers = tiers
        self._rows = rows
        self._past = past
        self._saved: list[Checkpoint] = []
        self._latest: dict[int, Checkpoint] = {}
        self._rest: list[Checkpoint] = []

    def want(self, tokens: Sequence[int] | None) -> None:
        """Ask for checkpoints at numbers of tokens, cut to whole pages.

        By default at the last page boundary before the end of the prompt, and where it leaves what is known: others
        went on from there, so more will.
        """
        size = self._tiers.page_size
        for index, row in enumerate(self._rows):
            # What the session computes up to a state must leave a token for the caller's pass.
            last = row.length if self._tiers.states is None else row.length - 1
            wanted = [row.shared, row.length - 1] if tokens is None else tokens
            for end in sorted({min(each, last) // size * size for each in wanted}):
                if end > row.taken:
                    self._new(index, end)
        if any(not checkpoint.missing for checkpoint in self._saved):
            return
        for number in self._tiers.layout.sliding:
            layer = self._past.layers[number]
            if isinstance(layer, WindowAttention) and self._saved:
                layer.watch = self._watcher(number)

    def columns(self) -> list[int]:
        """Columns of the batch at which there are checkpoints."""
        return sorted({self._rows[each.row].pad + each.tokens for each in self._saved})

    def after_pass(self, columns: int) -> None:
        """Save the states after a forward pass, where it ended at a page boundary."""
        if self._tiers.states is None:
            return
        for index, row in enumerate(self._rows):
            tokens = columns - row.pad
            if tokens <= row.taken or tokens % self._tiers.page_size:
                continue
            wanted = next((each for each in self._saved if each.row == index and each.tokens == tokens), None)
            checkpoint = wanted or self._latest.get(index) or self._new_latest(index)
            if checkpoint is None:
                continue
            checkpoint.tokens = tokens
            self._save_states(checkpoint)

    def save_last(self, columns: int) -> None:
        """Save the windows before the last page boundary of each sequence, or before its last states."""
        size = self._tiers.page_size
        if self._tiers.sliding is None:
            return
        for index, row in enumerate(self._rows):
            checkpoint = self._latest.get(index)
            if self._tiers.states is None:
                end = (columns - row.pad) // size * size
                if end <= row.taken or any(each.row == index and each.tokens == end for each in self._saved):
                    continue
                checkpoint = self._latest[index] = Checkpoint(index, end)
            if checkpoint is None:
                continue
            checkpoint.sliding = self._window_pages(checkpoint.tokens)
            checkpoint.missing = set(self._tiers.layout.sliding)
            if checkpoint.sliding is None:
                continue
            for number in self._tiers.layout.sliding:
                layer = self._past.layers[number]
                if isinstance(layer, WindowAttention):
                    keys, values = layer.held()
                    self._save_window(checkpoint, number, keys, values, layer.first_held)

    def drop_behind(self, columns: int) -> None:
        """Drop checkpoints after a column from which on the sequences were computed anew."""
        for each in [*self._saved, *self._latest.values()]:
            if self._rows[each.row].pad + each.tokens > columns:
                each.missing.add(-1)

    def complete(self, row: int, tokens: int) -> list[Checkpoint]:
        """Checkpoints of a sequence at most ``tokens`` tokens after its start that have all they need, in order."""
        found = [each for each in (*self._saved, *self._latest.values()) if each.row == row and each.tokens <= tokens]
        tiers = self._tiers
        whole = [
            each
            for each in found
            if not each.missing
            and (tiers.sliding is None or each.sliding is not None)
            and (tiers.states is None or each.has_states)
        ]
        return sorted(whole, key=lambda each: each.tokens)

    def discard(self) -> None:
        """Free the pages that were not inserted."""
        controller = self._tiers.controller
        for each in (*self._saved, *self._latest.values()):
            for name, pages, size in (
                (PoolName.SWA, each.sliding, self._tiers.page_size),
                (PoolName.MAMBA, each.states, 1),
            ):
                if pages is not None and len(pages):
                    controller.evict_device(PageRows(pages, size, torch.device("cpu")).slots, pool=name)
            each.sliding = each.states = None
        self._saved.clear()
        self._latest.clear()

    def _new(self, row: int, tokens: int) -> None:
        """Allocate pages for a checkpoint; there is none if all are in use."""
        checkpoint = Checkpoint(row, tokens)
        self._saved.append(checkpoint)
        if self._tiers.sliding is not None:
            checkpoint.sliding = self._window_pages(tokens)
            checkpoint.missing = set(self._tiers.layout.sliding)
        if self._tiers.states is not None:
            checkpoint.states = self._tiers.tree.alloc_window(PoolName.MAMBA, 1)

    def _new_latest(self, row: int) -> Checkpoint | None:
        states = self._tiers.tree.alloc_window(PoolName.MAMBA, 1)
        if states is None:
            return None
        checkpoint = self._latest[row] = Checkpoint(row, 0, states=states)
        return checkpoint

    def _window_pages(self, tokens: int) -> Pages | None:
        count = min(self._tiers.window_pages, tokens // self._tiers.page_size)
        return self._tiers.tree.alloc_window(PoolName.SWA, count)

    def _watcher(self, number: int) -> Callable[[Any, torch.Tensor, torch.Tensor, int], None]:
        def watch(layer: Any, keys: torch.Tensor, values: torch.Tensor, first: int) -> None:
            if layer is not self._past.layers[number]:
                return  # A copy of the session's cache continues with other tokens.
            for checkpoint in self._saved:
                if number in checkpoint.missing and checkpoint.sliding is not None:
                    self._save_window(checkpoint, number, keys, values, first)

        return watch

    def _save_window(
        self, checkpoint: Checkpoint, number: int, keys: torch.Tensor, values: torch.Tensor, first: int
    ) -> None:
        """Copy the window before a boundary out of what a layer holds from column ``first`` on, if all is there."""
        tiers = self._tiers
        if checkpoint.sliding is None or tiers.sliding is None:
            return
        end = self._rows[checkpoint.row].pad + checkpoint.tokens - first
        begin = end - len(checkpoint.sliding) * tiers.page_size
        if begin < 0 or end > keys.shape[2]:
            return
        local = tiers.layout.sliding.index(number)
        pools = ((tiers.sliding.k_buffer[local], keys), (tiers.sliding.v_buffer[local], values))
        if any(rows.dtype != pool.dtype for pool, rows in pools):
            return  # as under autocast, where nothing is kept
        target = PageRows(checkpoint.sliding, tiers.page_size, tiers.layout.device)
        for pool, rows in pools:
            target.write(pool, rows[checkpoint.row, :, begin:end].transpose(0, 1))
        checkpoint.missing.discard(number)

    def _save_states(self, checkpoint: Checkpoint) -> None:
        tiers = self._tiers
        if checkpoint.states is None:
            return
        checkpoint.has_states = False
        target = PageRows(checkpoint.states, 1, tiers.layout.device)
        for local, number in enumerate(tiers.layout.recurrent):
            layer = self._past.layers[number]
            if isinstance(layer, RecurrentStates):
                for state, pool in zip(layer.state_tensors(), tiers.state_buffers(local), strict=True):
                    if state.dtype != pool.dtype:
                        return  # as under autocast, where nothing is kept
                    target.write(pool, state[checkpoint.row : checkpoint.row + 1])
        checkpoint.has_states = True
