"""Recorder: notes which tokens a model was run on with a session's cache, so that none are kept under other tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...tree.keys import Tokens
from .past import PastCache, StaticPastCache
from .rows import Row


class Pass(NamedTuple):
    """A forward pass: the first column it computed, and what it was given."""

    first: int
    tokens: torch.Tensor
    positions: torch.Tensor | None
    mask: torch.Tensor | None

    @property
    def end(self) -> int:
        """The column behind those it computed."""
        return self.first + self.tokens.shape[1]

    def continues(self, before: Pass) -> bool:
        """Whether it went on where another pass ended, and was given the same things for as many sequences."""
        return (
            self.first == before.end
            and self.tokens.shape[0] == before.tokens.shape[0]
            and (self.positions is None) == (before.positions is None)
        )


class Recorder:
    """Hooks on the decoder of a model, for the time of a session.

    Parameters
    ----------
    decoder
        The module whose forward pass takes ``input_ids`` and the cache.
    past
        The session's cache; passes with another one are not looked at. With a static one the hooks go once the prompt
        is computed: the steps behind it may be compiled, and Python in them would be compiled along.
    rows
        The sequences of the batch.
    after_pass
        Called after each pass, with the columns the cache has then; None where nobody asks.
    """

    def __init__(
        self,
        decoder: Any,
        past: PastCache | StaticPastCache,
        rows: Sequence[Row],
        after_pass: Callable[[int], None] | None = None,
    ) -> None:
        self._past = past
        self._rows = rows
        self._groups: list[list[Pass]] = []
        self._unknown: str | None = None
        self._after_pass = after_pass
        self._prompt = rows[0].pad + rows[0].length
        self._prompt_only = isinstance(past, StaticPastCache)
        self._hooks = [decoder.register_forward_pre_hook(self._before, with_kwargs=True)]
        if after_pass is not None or self._prompt_only:
            self._hooks.append(decoder.register_forward_hook(self._after, with_kwargs=True))
        self.rolled_back_to = np.iinfo(np.int64).max
        """First column that was computed more than once, as after a crop."""

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not self._mine(options):
            return
        first = int(self._past.get_seq_length())
        tokens = options.get("input_ids", arguments[0] if arguments else None)
        if tokens is None:
            self._unknown = "a forward pass was given inputs_embeds, and embeddings tell no tokens"
            return
        if first and not self._groups and tokens.shape[1] >= self._prompt:
            raise ValueError(
                f"the forward pass was given {tokens.shape[1]} tokens, the whole prompt, and the cache has {first} of "
                "them; pass input_ids[:, past.get_seq_length():] (generate does so by itself)"
            )
        positions = options.get("position_ids")
        if positions is None and any(row.pad for row in self._rows):
            raise ValueError("the batch is padded and position_ids is missing; pass them, padding not counted")
        if self._groups and first < self._groups[-1][-1].end:
            self.rolled_back_to = min(self.rolled_back_to, first)
        mask = options.get("attention_mask")
        self._note(Pass(first, tokens.detach(), positions, mask if isinstance(mask, torch.Tensor) else None))

    def _note(self, following: Pass) -> None:
        """Add a pass to those it follows, so that a group of them costs one copy to the CPU, or begin a group."""
        if not self._groups or not following.continues(self._groups[-1][-1]):
            self._groups.append([following])
            return
        group = self._groups[-1]
        if len(group) > 1:
            # The mask of a step is as long as the sequence so far, and the one of the last pass shows the same.
            group[-1] = group[-1]._replace(mask=None)
        group.append(following)

    def _after(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if not self._mine(options):
            return
        columns = int(self._past.get_seq_length())
        if self._after_pass is not None:
            self._after_pass(columns)
        if self._prompt_only and columns >= self._prompt:
            self.remove()

    def _mine(self, options: dict[str, Any]) -> bool:
        return options.get("cache", options.get("past_key_values")) is self._past

    def tokens(self, columns: int) -> tuple[list[Tokens], str | None]:
        """Tokens of each sequence whose keys and values the cache has, padding left out.

        Parameters
        ----------
        columns
            Columns of the cache, padding included.

        Returns
        -------
        tuple
            The tokens, and why there are fewer than ``columns``, or None. It waits for the device.
        """
        known = min(self._past.cached_tokens, columns)
        table = np.zeros((len(self._rows), columns), np.int64)
        for number, row in enumerate(self._rows):
            table[number, row.pad : known] = row.tokens[: max(0, known - row.pad)]
        reason = self._unknown
        for batch in self._groups:
            first = batch[0].first
            if reason is None:
                reason = self._strange(batch, first)
            if reason is not None or first > known:
                break
            tokens = torch.cat([each.tokens for each in batch], dim=1).cpu().numpy()
            end = min(first + tokens.shape[1], columns)
            table[:, first:end] = tokens[:, : max(0, end - first)]
            known = max(known, end)
        if reason is None and known < columns and not self._prompt_only:
            reason = f"{columns - known} tokens were computed outside of the decoder's forward pass"
        return [table[number, row.pad : known] for number, row in enumerate(self._rows)], reason

    def _strange(self, passes: Sequence[Pass], first: int) -> str | None:
        """Why keys of these passes are not what plain causal attention over the sequences gives; None if they are."""
        pads = torch.tensor([row.pad for row in self._rows])
        for each in passes:
            if each.tokens.shape[0] != len(self._rows):
                return f"a forward pass had {each.tokens.shape[0]} sequences and the session {len(self._rows)}"
        if all(each.positions is not None for each in passes):
            positions = torch.cat([each.positions for each in passes if each.positions is not None], dim=-1).cpu()
            columns = torch.arange(first, first + positions.shape[-1])
            expected = columns - pads[:, None]
            if not bool(((positions == expected) | (expected < 0)).all()):
                return "position_ids were not those of the sequences without their padding"
        for mask in (passes[0].mask, passes[-1].mask):
            if mask is None:
                continue
            if mask.dim() != 2 and self._prompt_only:
                continue  # generate makes it from the two-dimensional one, for the compiled steps
            if mask.dim() != 2:
                return f"attention_mask had {mask.dim()} dimensions, so what it hid is not known"
            shown = torch.arange(mask.shape[1]) >= pads[:, None]
            if not bool(((mask.cpu() != 0) == shown).all()):
                return "attention_mask hid other tokens than the padding on the left"
        return None
