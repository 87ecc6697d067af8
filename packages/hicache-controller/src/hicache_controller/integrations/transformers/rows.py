"""Rows: the sequences of a batch without their padding, and copies between their cache layers and pool pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ...tree import Match, Pages
from .errors import UnsupportedError

Tokens = npt.NDArray[np.int64]
"""Token ids of one sequence, ``[n]``."""


@dataclass(eq=False)
class Row:
    """A sequence of the batch.

    Attributes
    ----------
    tokens
        Its prompt, without padding.
    pad
        Padding tokens before it.
    match
        What the tree has of it, pinned.
    taken
        Tokens restored from the match; at most all of its pages'.
    shared
        Tokens of the prompt that some tier knows, whether or not a window or a state lets a prefix end there.
    """

    tokens: Tokens
    pad: int
    match: Match | None = None
    taken: int = 0
    shared: int = 0

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)


def batch_rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Row]:
    """Split a left-padded batch into its sequences.

    Raises
    ------
    ValueError
        If shapes do not fit.
    UnsupportedError
        For padding that is not all on the left.
    """
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(
            f"input_ids has shape {tuple(input_ids.shape)}; accepted is [batch, tokens] with a token at least"
        )
    # A copy: the caller may reuse the tensor before the session ends.
    tokens = input_ids.cpu().numpy().astype(np.int64, copy=True)
    if attention_mask is None:
        return [Row(row, 0) for row in tokens]
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} for input_ids of shape {tuple(input_ids.shape)}; "
            "both must be the same"
        )
    mask = attention_mask.cpu().numpy() != 0
    pads = mask.shape[1] - mask.sum(axis=1)
    for number, (row, pad) in enumerate(zip(mask, pads, strict=True)):
        if not row[pad:].all() or pad == mask.shape[1]:
            raise UnsupportedError(
                f"attention_mask of sequence {number} masks tokens after the first that it shows, or all of them; "
                "supported is padding on the left"
            )
    return [Row(row[pad:], int(pad)) for row, pad in zip(tokens, pads, strict=True)]


@dataclass(frozen=True, eq=False)
class PageRows:
    """Rows of some pages of a pool, to be read and written as one tensor.

    Attributes
    ----------
    pages
        Page numbers, in order.
    page_size
        Rows a page.
    device
        Of the pool.
    """

    pages: Pages
    page_size: int
    device: torch.device

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.pages) * self.page_size

    @cached_property
    def _first(self) -> int | None:
        """First row where the pages are neighbours in order, as they are whenever the allocator could."""
        first = int(self.pages[0]) if len(self.pages) else 0
        neighbours = len(self.pages) < 2 or bool((np.diff(self.pages) == 1).all())
        return first * self.page_size if neighbours else None

    @property
    def slots(self) -> torch.Tensor:
        """Numbers of the rows, int64 ``[len(self)]`` on CPU."""
        return torch.from_numpy(np.add.outer(self.pages * self.page_size, np.arange(self.page_size)).reshape(-1))

    @cached_property
    def _rows(self) -> torch.Tensor:
        return self.slots.to(self.device)

    def read(self, pool: torch.Tensor) -> torch.Tensor:
        """Rows of ``pool`` ``[rows, ...]``: a view of it where the pages are neighbours, a copy otherwise."""
        if (first := self._first) is not None:
            return pool[first : first + len(self)]
        return pool.index_select(0, self._rows)

    def write(self, pool: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy ``rows`` ``[len(self), ...]`` into ``pool``."""
        if (first := self._first) is not None:
            copy_rows(pool[first : first + len(self)], rows)
        else:
            pool.index_copy_(0, self._rows, rows)


WORD = torch.int64
"""What rows are copied as where they allow it: a copy that also turns dimensions moves one element a thread."""


def copy_rows(target: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy ``rows`` into ``target``, of the same shape and type, in words of 8 bytes if both can be seen as such."""
    if target.dtype == rows.dtype and _holds_words(target) and _holds_words(rows):
        target, rows = target.view(WORD), rows.view(WORD)
    target.copy_(rows)


def _holds_words(tensor: torch.Tensor) -> bool:
    item = tensor.element_size()
    if tensor.dim() == 0 or tensor.stride(-1) != 1 or item >= WORD.itemsize:
        return False
    elements = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return all(count * item % WORD.itemsize == 0 for count in elements)
