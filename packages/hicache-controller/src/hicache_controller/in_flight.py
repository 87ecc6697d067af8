"""In-flight slots: which operations read or write which physical slots, and so what has to wait for what."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.ma  # else the first np.unique imports it, a third of a second of the scheduler's thread
import numpy.typing as npt
import torch

from hicache_pools.group_slots import Side

Pages = npt.NDArray[np.int64]
"""Page numbers of one side of a pool: each once, in any order."""

Owner = TypeVar("Owner")


class Access(StrEnum):
    """What an operation does with slots."""

    READ = "read"
    WRITE = "write"


class PoolSide(NamedTuple):
    """The host or the device slots of one pool."""

    pool: str
    side: Side


class PageUse(NamedTuple):
    """What an operation does with pages of one side of a pool; ``pages`` is None where they are not known on the CPU.

    Then it may use any page.
    """

    side: PoolSide
    access: Access
    pages: Pages | None


def pages_of(indices: torch.Tensor, page_size: int) -> Pages | None:
    """Pages that ``indices`` touch, without waiting for a device.

    Parameters
    ----------
    indices
        Integer slot indices ``[n]`` on any device.
    page_size
        Slots a page.

    Returns
    -------
    numpy.ndarray or None
        int64 page numbers, each once; None where the indices are not on the CPU.
    """
    if indices.device.type != "cpu":
        return None
    # With one slot a page the slots are the pages: a copy, for the tensor is the caller's.
    slots = indices.numpy().astype(np.int64, copy=page_size == 1)
    if page_size == 1:
        return slots
    pages = aligned_blocks(slots, page_size)
    return np.unique(slots // page_size) if pages is None else pages


def aligned_blocks(slots: npt.NDArray[Any], size: int) -> Pages | None:
    """Return the numbers of the blocks of ``size`` neighbours, each at a multiple of it, that ``slots`` consist of.

    None where they consist of anything else. Costs one comparison a slot.
    """
    firsts = slots[::size]
    if len(slots) % size or (firsts % size).any():
        return None
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    if (breaks % size).any():
        return None
    blocks: Pages = firsts // size
    return blocks


@dataclass
class _Counts:
    """Uses of one side: ``counts[access][page]`` operations, their sum, and how many know no pages."""

    counts: dict[Access, npt.NDArray[np.int16]] = field(
        default_factory=lambda: {access: np.zeros(0, dtype=np.int16) for access in Access}
    )
    total: dict[Access, int] = field(default_factory=lambda: dict.fromkeys(Access, 0))
    unknown: dict[Access, int] = field(default_factory=lambda: dict.fromkeys(Access, 0))

    def add(self, access: Access, pages: Pages | None, step: int) -> None:
        if pages is None:
            self.unknown[access] += step
        elif len(pages):
            counts = self.counts[access]
            top = int(pages.max())
            if top >= len(counts):
                grown = np.zeros(max(top + 1, 2 * len(counts)), dtype=np.int16)
                grown[: len(counts)] = counts
                self.counts[access] = counts = grown
            counts[pages] += np.int16(step)
            self.total[access] += step * len(pages)

    def busy(self, access: Access, pages: Pages) -> npt.NDArray[np.bool_]:
        if self.unknown[access]:
            return np.ones(len(pages), dtype=np.bool_)
        if not self.total[access]:
            return np.zeros(len(pages), dtype=np.bool_)
        counts = self.counts[access]
        inside = pages < len(counts)
        return inside & (counts[np.where(inside, pages, 0)] > 0)


class InFlight(Generic[Owner]):
    """Every slot that a queued or running operation reads or writes.

    Tracking is by page: two operations on different slots of one page count as one touching the other, which can make
    one wait needlessly and never lets one go wrongly. The usual question, whether anything at all touches some pages,
    is one indexed read; only when something does are the operations looked at, one array operation each.

    Safe to call from several threads.

    Invariant: ``counts`` of every side is the number of ``uses`` with that access that contain the page.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the uses and their counts: storage threads end what they use
        self._uses: dict[Owner, tuple[PageUse, ...]] = {}
        self._counts: dict[PoolSide, _Counts] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._uses

    def add(self, owner: Owner, uses: Iterable[PageUse]) -> None:
        """Note what ``owner``, unknown so far, uses."""
        uses = tuple(uses)
        with self._lock:
            if owner in self._uses:
                raise ValueError(f"{owner!r} is in flight already")
            self._uses[owner] = uses
            for use in uses:
                counts = self._counts.get(use.side)
                if counts is None:
                    counts = self._counts[use.side] = _Counts()
                counts.add(use.access, use.pages, 1)

    def remove(self, owner: Owner) -> None:
        """Forget ``owner``; without effect where it is not known."""
        with self._lock:
            for use in self._uses.pop(owner, ()):
                self._counts[use.side].add(use.access, use.pages, -1)

    def narrow(self, owner: Owner, uses: Iterable[PageUse]) -> None:
        """Let ``owner`` use less than before; without effect where it is not known."""
        uses = tuple(uses)
        with self._lock:
            if owner not in self._uses:
                return
            for use, step in (*((use, -1) for use in self._uses[owner]), *((use, 1) for use in uses)):
                self._counts[use.side].add(use.access, use.pages, step)
            self._uses[owner] = uses

    def owners(self) -> list[Owner]:
        """Everything in flight, oldest first."""
        with self._lock:
            return list(self._uses)

    def busy(self, side: PoolSide, pages: Pages) -> npt.NDArray[np.bool_]:
        """Return for each page whether anything reads or writes it."""
        with self._lock:
            counts = self._counts.get(side)
            if counts is None:
                return np.zeros(len(pages), dtype=np.bool_)
            return counts.busy(Access.READ, pages) | counts.busy(Access.WRITE, pages)

    def users(self, use: PageUse, accesses: Iterable[Access]) -> list[Owner]:
        """Operations that access, in one of ``accesses``, a page of ``use``; oldest first, each once."""
        with self._lock:
            counts = self._counts.get(use.side)
            if counts is None:
                return []
            wanted = [access for access in accesses if self._touched(counts, access, use.pages)]
            if not wanted:
                return []
            mark = self._mark(use.pages)
            return [
                owner
                for owner, uses in self._uses.items()
                if any(
                    other.side == use.side and other.access in wanted and self._meets(mark, other.pages)
                    for other in uses
                )
            ]

    def check_integrity(self) -> None:
        """Compare the counts with the uses.

        Raises
        ------
        RuntimeError
            Naming the side that differs.
        """
        with self._lock:
            expected: dict[PoolSide, _Counts] = {side: _Counts() for side in self._counts}
            for uses in self._uses.values():
                for use in uses:
                    expected[use.side].add(use.access, use.pages, 1)
            for side, counts in self._counts.items():
                for access in Access:
                    have = np.flatnonzero(counts.counts[access])
                    want = np.flatnonzero(expected[side].counts[access])
                    same = np.array_equal(have, want) and np.array_equal(
                        counts.counts[access][have], expected[side].counts[access][want]
                    )
                    same = same and counts.total[access] == expected[side].total[access]
                    if not same or counts.unknown[access] != expected[side].unknown[access]:
                        raise RuntimeError(f"the {access.value} counts of {side} are not those of the operations")

    @staticmethod
    def _touched(counts: _Counts, access: Access, pages: Pages | None) -> bool:
        if pages is None:
            return bool(counts.unknown[access] or counts.total[access])
        return bool(counts.busy(access, pages).any())

    @staticmethod
    def _mark(pages: Pages | None) -> npt.NDArray[np.bool_] | None:
        if pages is None:
            return None
        mark = np.zeros(int(pages.max()) + 1 if len(pages) else 0, dtype=np.bool_)
        mark[pages] = True
        return mark

    @staticmethod
    def _meets(mark: npt.NDArray[np.bool_] | None, pages: Pages | None) -> bool:
        if mark is None:
            return pages is None or len(pages) > 0
        if pages is None:
            return len(mark) > 0
        return bool(mark[pages[pages < len(mark)]].any())
