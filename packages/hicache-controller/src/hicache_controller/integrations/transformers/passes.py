"""Forward passes: what one was given, and whether its keys and values follow from the tokens alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .rows import Row

NEUTRAL = frozenset(
    {
        "attention_mask",
        "cache",
        "cache_position",
        "input_ids",
        "inputs_embeds",
        "is_first_iteration",
        "logits_to_keep",
        "next_sequence_length",
        "num_logits_to_keep",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of a forward pass that are looked at by themselves, or change no keys and values; so do ``output_*``."""


class Signature:
    """Arguments of a module's forward pass by name.

    Parameters
    ----------
    forward
        The forward pass.
    """

    def __init__(self, forward: Any) -> None:
        parameters = inspect.signature(forward).parameters.values()
        self._names = tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)
        self._defaults = {each.name: each.default for each in parameters if each.default is not each.empty}

    def bind(self, arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was given, by name."""
        return dict(zip(self._names, arguments, strict=False)) | dict(options)

    def conditions(self, given: Mapping[str, Any]) -> list[str]:
        """Names of what was given and may change keys and values: all that is not known to change none."""
        return [
            name
            for name, value in given.items()
            if value is not None
            and name not in NEUTRAL
            and not name.startswith("output_")
            and value is not self._defaults.get(name)
        ]


@dataclass
class Pass:
    """A forward pass, or several that followed one another and are read in one copy.

    Attributes
    ----------
    first, end
        The columns it computed.
    tokens
        Of each pass, int ``[batch, tokens]``, on the device; copies that nothing else writes to.
    positions
        The same of ``position_ids``, ``[..., tokens]``; empty where the model counts them itself.
    plain
        Whether all that was required of it held, such as that its masks hid the padding and nothing else: a bool on the
        device, or None where there was nothing.
    """

    first: int
    end: int
    tokens: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    plain: torch.Tensor | None = None

    def take(self, following: Pass) -> bool:
        """Add a pass that went on where this one ended; False if it did not."""
        if not (self.tokens and following.tokens and following.first == self.end):
            return False
        if len(self.positions) and len(following.positions):
            if self.positions[-1].shape[:-1] != following.positions[0].shape[:-1]:
                return False
        elif len(self.positions) or len(following.positions):
            return False
        self.end = following.end
        self.tokens += following.tokens
        self.positions += following.positions
        if following.plain is not None:
            self.require(following.plain)
        return True

    def require(self, holds: torch.Tensor) -> None:
        """Note a bool on the device that has to be true."""
        self.plain = holds if self.plain is None else self.plain & holds.to(self.plain.device)


class Padding:
    """The padding of a batch, and what masks and positions have to be for it.

    Parameters
    ----------
    rows
        The sequences of the batch.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._pads = torch.tensor([row.pad for row in rows])
        self.exists = any(row.pad for row in rows)
        self._shown: torch.Tensor | None = None

    def may_be_positions(self, positions: torch.Tensor, tokens: int) -> bool:
        """Return whether positions are ``[..., batch or 1, tokens]``, or ``[tokens]``."""
        return (
            positions.dim() > 0
            and positions.shape[-1] == tokens
            and (positions.dim() == 1 or positions.shape[-2] in (1, len(self._pads)))
        )

    def are_positions(self, positions: torch.Tensor, first: int) -> bool:
        """Return whether positions count the tokens from column ``first`` on without padding; waits for the device."""
        expected = torch.arange(first, first + positions.shape[-1]) - self._pads[:, None]
        return bool(((positions.cpu() == expected) | (expected < 0)).all())

    def shown(self, columns: int, device: torch.device) -> torch.Tensor:
        """Where there is no padding in the first columns, bool ``[batch, columns]``."""
        shown = self._shown
        if shown is None or shown.shape[1] < columns or shown.device != device:
            numbers = torch.arange(2 * columns, device=device)
            shown = self._shown = numbers >= self._pads.to(device)[:, None]
        return shown[:, :columns]

    def is_all_that(self, mask: torch.Tensor) -> torch.Tensor:
        """Return whether a two-dimensional mask of the first columns hides nothing else: a bool on its device."""
        if not self.exists:
            return mask.all()
        return ((mask != 0) == self.shown(mask.shape[1], mask.device)).all()

    def is_all_besides_the_future(self, mask: torch.Tensor, first: int) -> torch.Tensor:
        """Return whether a mask ``[batch, heads, queries, columns]``, bool or to be added, is only causal."""
        queries, columns = mask.shape[-2:]
        numbers = torch.arange(columns, device=mask.device)
        rows = torch.arange(first, first + queries, device=mask.device)
        shown = self.shown(max(columns, first + queries), mask.device)
        causal = (numbers <= rows[:, None]) & shown[:, None, None, :columns]
        if mask.dtype == torch.bool:
            same = mask == causal
        else:
            # What is hidden has the smallest number of the type added, anything between is a bias.
            same = torch.where(causal, mask == 0, mask <= torch.finfo(mask.dtype).min / 2)
        # Rows of padding do not count.
        return (same | ~shown[:, None, first : first + queries, None]).all()
