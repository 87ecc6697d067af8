"""What cache layers that fill themselves share: they are filled when an attribute of theirs is first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Fill = Callable[[Any], None]
"""Writes the content of the layer it is given, which may be a copy of the one it was made for."""


class FilledOnTouch:
    """What calls a function once, when its content is first needed.

    A copy of a layer that is not filled yet is not filled either: it calls the function itself, for itself.
    """

    _fill: Fill | None = None

    def fill_with(self, fill: Fill | None) -> None:
        """Set what fills it; None where there is nothing to fill."""
        self._fill = fill

    def fill(self) -> None:
        """Fill it, the first time that succeeds."""
        if self._fill is None:
            return
        fill, self._fill = self._fill, None
        try:
            fill(self)
        except BaseException:
            self._fill = fill
            raise


class KeysAndValues(FilledOnTouch):
    """Keys and values that are filled before anybody sees or replaces them.

    What needs their shape alone looks at ``_keys`` and ``_values``, which wait for nothing.
    """

    _keys: torch.Tensor | None = None
    _values: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys ``[batch, heads, tokens, dim]``; None before the first."""
        self.fill()
        return self._keys

    @keys.setter
    def keys(self, keys: torch.Tensor | None) -> None:
        self.fill()
        self._keys = keys

    @property
    def values(self) -> torch.Tensor | None:
        """Values ``[batch, heads, tokens, dim]``; None before the first."""
        self.fill()
        return self._values

    @values.setter
    def values(self, values: torch.Tensor | None) -> None:
        self.fill()
        self._values = values

    def rows(self, row: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some tokens of a sequence of the batch, each ``[heads, end - begin, dim]``."""
        if self.keys is None or self.values is None:
            raise RuntimeError("the layer keeps nothing yet")
        return self.keys[row, :, begin:end], self.values[row, :, begin:end]
