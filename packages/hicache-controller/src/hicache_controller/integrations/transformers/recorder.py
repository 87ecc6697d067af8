"""Recorder: records which tokens a model ran on with a session's cache, so that none are kept under other tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .errors import UnsupportedError
from .generation import WITHOUT_CACHE
from .passes import Padding, Pass, Signature
from .past import PastCache, StaticPastCache
from .rows import Row, Tokens

NOT_COMPILED = (
    "a session notes which tokens the prompt was computed of, which is no part of a graph: compile the steps, not the "
    "prompt (torch.compile of a function that the prompt does not go through), or do without fullgraph=True"
)
OTHER_POSITIONS = "position_ids were not those of the sequences without their padding"


class Recorder:
    """Hooks on the decoder of a model, for the time of a session.

    The arguments of a pass are checked on the device, and the result is read when the session ends. Only the first pass
    after a restored prefix waits for the device.

    Parameters
    ----------
    decoder
        The module whose forward pass takes ``input_ids`` and the cache.
    past
        The session's cache; passes with another one are ignored. With a static one the hooks are removed once the
        prompt is computed: the steps after it may be compiled, and so would Python in them.
    rows
        The sequences of the batch.
    changed_setting
        Names a setting of the model that has changed since the session began; None without one.
    after_pass
        Called after each pass with the columns of the cache; None for no call.
    needs_positions
        Whether the model counts every pass from 0 unless it is given positions: then it is given them here.
    """

    def __init__(
        self,
        decoder: Any,
        past: PastCache | StaticPastCache,
        rows: Sequence[Row],
        changed_setting: Callable[[], str | None],
        after_pass: Callable[[int], None] | None = None,
        *,
        needs_positions: bool = False,
    ) -> None:
        self._decoder = decoder
        self._past = past
        self._rows = rows
        self._padding = Padding(rows)
        self._signature = Signature(decoder.forward)
        self._passes: list[Pass] = []
        self._running: Pass | None = None
        self._unknown: str | None = None
        self._changed_setting = changed_setting
        self._after_pass = after_pass
        self._needs_positions = needs_positions
        self._prompt = rows[0].pad + rows[0].length
        self._prompt_only = isinstance(past, StaticPastCache)
        self._restored = past.cached_tokens
        self._prefix = self._restored
        self._prefix_checked = False
        self._batch = len(rows)
        self._reached = 0
        # Compiled, they would guard on every length; so a graph ends before the decoder's layers, or cannot be made.
        before = torch.compiler.disable(self._before, reason=NOT_COMPILED)  # type: ignore[no-untyped-call]
        after = torch.compiler.disable(self._after, reason=NOT_COMPILED)  # type: ignore[no-untyped-call]
        self._hooks = [
            decoder.register_forward_pre_hook(before, with_kwargs=True),
            decoder.register_forward_hook(after, with_kwargs=True),
        ]
        self.rolled_back_to = np.iinfo(np.int64).max
        """First column that was computed more than once, as after a crop."""

    def begin_after_prefix(self) -> None:
        """Take what the session has computed by itself as the prefix from which the caller's passes continue."""
        self._prefix = int(self._past.get_seq_length())
        self._prefix_checked = False

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before(
        self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._mine(arguments, options):
            return None
        first = int(self._past.get_seq_length())
        self._cut_what_went()
        self._cut_prefix(first)
        if first < self._reached:
            self.rolled_back_to = min(self.rolled_back_to, first)
        if (self._unknown is None or self._prefix) and (changed := self._changed_setting()) is not None:
            self._keep_nothing(
                f"a forward pass ran with another {changed} than the session began with", spoils_prefix=True
            )
        given = self._signature.bind(arguments, options)
        use_cache = given.get("use_cache")
        if use_cache is False or (use_cache is None and getattr(self._decoder.config, "use_cache", None) is False):
            raise ValueError(WITHOUT_CACHE)
        if conditions := self._signature.conditions(given):
            self._keep_nothing(
                f"a forward pass was given {', '.join(conditions)}, so it may have computed something else than what "
                "follows from the tokens",
                spoils_prefix=True,
            )
        tokens = given.get("input_ids")
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
            self._keep_nothing("a forward pass was given inputs_embeds, whose tokens are not known")
            return None
        self._check_batch(tokens.shape[0], first)
        if 0 < first < self._prompt <= tokens.shape[1] and self._begins_with_prompt(tokens):
            raise ValueError(
                f"the forward pass was given {tokens.shape[1]} tokens, the whole prompt, and the cache has {first} of "
                "them; pass input_ids[:, past.get_seq_length():] (generate does so by itself)"
            )
        end = first + tokens.shape[1]
        self._reached = max(self._reached, end)
        # A copy: callers reuse the tensor for the next token.
        running = Pass(first, end, [tokens.detach().clone()])
        self._look_at_mask(given.get("attention_mask"), running)
        self._look_at_positions(given.get("position_ids"), running)
        self._look_at_columns(given.get("cache_position"), running)
        self._prefix_checked = True
        if self._unknown is None:
            self._running = running
        if not self._needs_positions or given.get("position_ids") is not None:
            return None
        positions = torch.arange(first, end, device=tokens.device).expand(len(tokens), -1)
        return arguments, options | {"position_ids": positions}

    def _after(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        if not self._mine(arguments, options):
            return
        columns = int(self._past.get_seq_length())
        running, self._running = self._running, None
        if running is not None and columns != running.end:
            self._keep_nothing(
                f"a forward pass of {running.end - running.first} tokens left {columns - running.first} more in the "
                "cache"
            )
        elif running is not None and not (self._passes and self._passes[-1].take(running)):
            self._passes.append(running)
        if self._after_pass is not None:
            self._after_pass(columns)
        if self._prompt_only and columns >= self._prompt:
            self.remove()

    def _mine(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        return any(value is self._past for value in (*arguments, *options.values()))

    def _keep_nothing(self, reason: str, *, spoils_prefix: bool = False) -> None:
        """Note why nothing of the session's passes is kept; raise where it also makes a restored prefix a wrong one."""
        self._unknown = self._unknown or reason
        if spoils_prefix and self._prefix:
            raise ValueError(
                f"{reason}; the cache began with {self._prefix} tokens that were computed otherwise: generate without "
                "the session's cache, or pass the attention_mask of the padding to the session"
            )

    def _cut_what_went(self) -> None:
        """Drop columns that a crop removed, or that a pass which failed may have overwritten."""
        failed, self._running = self._running, None
        for column in (self._past.take_shortest(), None if failed is None else failed.first):
            if column is None:
                continue
            self._cut_prefix(column)
            if self._passes and self._passes[-1].end > column:
                self._passes.append(Pass(column, column))

    def _cut_prefix(self, column: int) -> None:
        self._restored = min(self._restored, column)
        self._prefix = min(self._prefix, column)

    def _check_batch(self, batch: int, first: int) -> None:
        if not first:
            self._batch = batch
        if batch != self._batch:
            raise UnsupportedError(
                f"the forward pass has {batch} sequences, the session's cache {self._batch}; beam search and several "
                "return sequences are not supported: repeat the prompt in the input_ids of the session"
            )
        if batch != len(self._rows):
            self._keep_nothing(f"a forward pass had {batch} sequences and the session {len(self._rows)}")

    def check_prompt(self, tokens: torch.Tensor) -> None:
        """Raise ValueError where ``generate`` is given other tokens than the session's, or than its cache has.

        Parameters
        ----------
        tokens
            int64 ``[batch, tokens]``, of which a forward pass will see only those that the cache does not have.
        """
        columns = int(self._past.get_seq_length())
        # Before the prompt is computed, all of it has to be there; after it, what the cache has and one more token.
        held, _ = self.tokens(columns)
        wanted = [row.tokens for row in self._rows] if columns < self._prompt else held
        if tokens.shape[1] < max(self._prompt, columns + 1) or not all(
            np.array_equal(given[row.pad : row.pad + len(expected)], expected)
            for given, row, expected in zip(tokens.cpu().numpy(), self._rows, wanted, strict=False)
        ):
            raise ValueError(
                f"generate was given {tokens.shape[1]} tokens that do not begin with the session's prompt of "
                f"{self._prompt}, or with the {columns} that its cache has and one more; pass the input_ids of the "
                "session, and begin another session for another prompt"
            )

    def _begins_with_prompt(self, tokens: torch.Tensor) -> bool:
        prompts = tokens[:, : self._prompt].cpu().numpy()
        return len(prompts) == len(self._rows) and all(
            np.array_equal(prompt[row.pad :], row.tokens) for prompt, row in zip(prompts, self._rows, strict=True)
        )

    def _look_at_mask(self, mask: Any, running: Pass) -> None:
        if mask is None:
            if self._padding.exists:
                self._keep_nothing("the batch is padded and attention_mask is missing", spoils_prefix=True)
            return
        # generate makes masks of four dimensions for a static cache, one for each kind of layer.
        several = self._prompt_only and isinstance(mask, dict) and len(mask) > 0
        for each in mask.values() if several else (mask,):
            if several and each is None and self._is_causal_without(running):
                continue
            plain = self._plain(each, running)
            if plain is None:
                what = f"of shape {tuple(each.shape)}" if isinstance(each, torch.Tensor) else f"a {type(each).__name__}"
                self._keep_nothing(f"attention_mask was {what}, so what it hid is not known")
                return
            running.require(plain)

    def _is_causal_without(self, running: Pass) -> bool:
        """Return whether the kernel hides the future by itself where a kind of layer is given no mask."""
        kernel = self._decoder.config._attn_implementation
        return kernel == "sdpa" and running.first == 0 and running.end > 1 and not self._padding.exists

    def _plain(self, mask: Any, running: Pass) -> torch.Tensor | None:
        """Return whether a mask hides only the padding, as a bool on the device; None for one not understood."""
        if not isinstance(mask, torch.Tensor) or mask.shape[0] != len(self._rows):
            return None
        self._check_prefix_is_shown(mask)
        queries, columns = running.end - running.first, mask.shape[-1]
        if columns != running.end and not (self._prompt_only and columns > running.end):
            # Kernels differ in which columns of a longer one they leave out, which is the same where all are shown.
            whole = columns > running.end and mask.dim() == 2 and not self._padding.exists
            return self._padding.is_all_that(mask) if whole else None
        if mask.dim() == 2:
            return self._padding.is_all_that(mask[:, : running.end])
        if mask.dim() == 4 and self._prompt_only and mask.shape[2] == queries:
            return self._padding.is_all_besides_the_future(mask, running.first)
        return None

    def _check_prefix_is_shown(self, mask: torch.Tensor) -> None:
        if self._prefix_checked or not self._prefix or mask.dim() != 2:
            return
        shown = mask[:, : self._prefix]
        if shown.shape[1] < self._prefix:
            raise ValueError(
                f"attention_mask has {shown.shape[1]} columns and the cache began with {self._prefix}; the pass begins "
                "with the prompt again, as those of generate with prefill_chunk_size do in older transformers: leave "
                "that out"
            )
        if not bool(self._padding.is_all_that(shown)):
            self._keep_nothing("attention_mask hid other tokens than the padding of the session", spoils_prefix=True)

    def _look_at_positions(self, positions: Any, running: Pass) -> None:
        if positions is None:
            if self._padding.exists:
                raise ValueError("the batch is padded and position_ids is missing; pass them, padding not counted")
            return
        width = running.end - running.first
        if not isinstance(positions, torch.Tensor) or not self._padding.may_be_positions(positions, width):
            self._keep_nothing(f"position_ids were not of the shape of input_ids, [{len(self._rows)}, {width}]")
            return
        running.positions = [positions.detach().clone()]
        if self._prefix and not self._prefix_checked and not self._padding.are_positions(positions, running.first):
            self._keep_nothing(OTHER_POSITIONS, spoils_prefix=True)

    def _look_at_columns(self, columns: Any, running: Pass) -> None:
        if columns is None:
            return
        if not isinstance(columns, torch.Tensor) or columns.shape != (running.end - running.first,):
            self._keep_nothing("cache_position was not of the length of input_ids")
            return
        running.require((columns == torch.arange(running.first, running.end, device=columns.device)).all())

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
        self._cut_what_went()
        if self._prompt_only:
            # What came after was not recorded.
            columns = min(columns, self._prompt)
        known = min(self._restored, columns)
        table = np.zeros((len(self._rows), columns), np.int64)
        for number, row in enumerate(self._rows):
            table[number, row.pad : known] = row.tokens[: max(0, known - row.pad)]
        reason = self._unknown
        for each in self._passes if reason is None else ():
            if each.first > known:
                continue
            strange = self._strange(each)
            if strange is not None:
                reason = reason or strange
                known = each.first
                continue
            known = min(each.end, columns)
            if each.tokens:
                tokens = torch.cat(each.tokens, dim=1).cpu().numpy()
                table[:, each.first : known] = tokens[:, : max(0, known - each.first)]
        if reason is None and known < columns and not self._prompt_only:
            reason = f"{columns - known} tokens were computed outside of the decoder's forward pass"
        return [table[number, row.pad : known] for number, row in enumerate(self._rows)], reason

    def _strange(self, each: Pass) -> str | None:
        """Why keys of a pass are not what plain causal attention over the sequences gives; None if they are."""
        if each.positions and not self._padding.are_positions(torch.cat(each.positions, dim=-1), each.first):
            return OTHER_POSITIONS
        if each.plain is not None and not bool(each.plain):
            return "attention_mask hid other tokens than the padding on the left, or cache_position was another"
        return None
