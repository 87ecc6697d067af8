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

Granules = npt.NDArray[np.int64]
"""Page numbers on one side of one pool: unique, in any order."""

Owner = TypeVar("Owner")


class Side(StrEnum):
    """Which memory of a pool."""

    DEVICE = "device"
    HOST = "host"


class Access(StrEnum):
    """What an operation does with slots."""

    READ = "read"
    WRITE = "write"


class Place(NamedTuple):
    """One side of one pool; pools that share slots on a side share the place."""

    pool: str
    side: Side


class Use(NamedTuple):
    """Slots of one place that an operation uses; ``granules`` None, where they are not on the CPU, stands for all."""

    place: Place
    access: Access
    granules: Granules | None


def page_granules(indices: torch.Tensor, page_size: int) -> Granules | None:
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
    # With one slot a page the slots are the pages: a copy, as the books keep them and the tensor is the caller's.
    slots = indices.numpy().astype(np.int64, copy=page_size == 1)
    if page_size == 1:
        return slots
    pages = aligned_blocks(slots, page_size)
    return np.unique(slots // page_size) if pages is None else pages


def aligned_blocks(slots: npt.NDArray[Any], size: int) -> Granules | None:
    """Return the numbers of the blocks of ``size`` neighbours, each at a multiple of it, that ``slots`` consist of.

    None where they consist of anything else. Costs one comparison a slot.
    """
    firsts = slots[::size]
    if len(slots) % size or (firsts % size).any():
        return None
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    if (breaks % size).any():
        return None
    blocks: Granules = firsts // size
    return blocks


@dataclass
class _Counts:
    """Uses of one place: ``counts[access][page]`` operations, their sum, and how many know no pages."""

    counts: dict[Access, npt.NDArray[np.int16]] = field(
        default_factory=lambda: {access: np.zeros(0, dtype=np.int16) for access in Access}
    )
    total: dict[Access, int] = field(default_factory=lambda: dict.fromkeys(Access, 0))
    unknown: dict[Access, int] = field(default_factory=lambda: dict.fromkeys(Access, 0))

    def add(self, access: Access, granules: Granules | None, step: int) -> None:
        if granules is None:
            self.unknown[access] += step
        elif len(granules):
            counts = self.counts[access]
            top = int(granules.max())
            if top >= len(counts):
                grown = np.zeros(max(top + 1, 2 * len(counts)), dtype=np.int16)
                grown[: len(counts)] = counts
                self.counts[access] = counts = grown
            counts[granules] += np.int16(step)
            self.total[access] += step * len(granules)

    def busy(self, access: Access, granules: Granules) -> npt.NDArray[np.bool_]:
        if self.unknown[access]:
            return np.ones(len(granules), dtype=np.bool_)
        if not self.total[access]:
            return np.zeros(len(granules), dtype=np.bool_)
        counts = self.counts[access]
        inside = granules < len(counts)
        return inside & (counts[np.where(inside, granules, 0)] > 0)


class InFlight(Generic[Owner]):
    """Every slot that a queued or running operation reads or writes.

    Tracking is by page: two operations on different slots of one page count as one touching the other, which can make
    one wait needlessly and never lets one go wrongly. The usual question, whether anything at all touches some pages,
    is one indexed read; only when something does are the operations looked at, one array operation each.

    Safe to call from several threads.

    Invariant: ``counts`` of every place is the number of ``uses`` with that access that contain the page.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[Owner, tuple[Use, ...]] = {}
        self._counts: dict[Place, _Counts] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, owner: Owner, uses: Iterable[Use]) -> None:
        """Note what ``owner``, unknown so far, uses."""
        uses = tuple(uses)
        with self._lock:
            if owner in self._uses:
                raise ValueError(f"{owner!r} is in flight already")
            self._uses[owner] = uses
            for use in uses:
                counts = self._counts.get(use.place)
                if counts is None:
                    counts = self._counts[use.place] = _Counts()
                counts.add(use.access, use.granules, 1)

    def remove(self, owner: Owner) -> None:
        """Forget ``owner``; without effect where it is not known."""
        with self._lock:
            for use in self._uses.pop(owner, ()):
                self._counts[use.place].add(use.access, use.granules, -1)

    def narrow(self, owner: Owner, uses: Iterable[Use]) -> None:
        """Let ``owner`` use less than before; without effect where it is not known."""
        uses = tuple(uses)
        with self._lock:
            if owner not in self._uses:
                return
            for use, step in (*((use, -1) for use in self._uses[owner]), *((use, 1) for use in uses)):
                self._counts[use.place].add(use.access, use.granules, step)
            self._uses[owner] = uses

    def owners(self) -> list[Owner]:
        """Everything in flight, oldest first."""
        with self._lock:
            return list(self._uses)

    def busy(self, place: Place, granules: Granules) -> npt.NDArray[np.bool_]:
        """Tell for each page whether anything reads or writes it."""
        with self._lock:
            counts = self._counts.get(place)
            if counts is None:
                return np.zeros(len(granules), dtype=np.bool_)
            return counts.busy(Access.READ, granules) | counts.busy(Access.WRITE, granules)

    def users(self, use: Use, accesses: Iterable[Access]) -> list[Owner]:
        """Operations that access, in one of ``accesses``, a page of ``use``; oldest first, each once."""
        with self._lock:
            counts = self._counts.get(use.place)
            if counts is None:
                return []
            wanted = [access for access in accesses if self._touched(counts, access, use.granules)]
            if not wanted:
                return []
            mark = self._mark(use.granules)
            return [
                owner
                for owner, uses in self._uses.items()
                if any(
                    other.place == use.place and other.access in wanted and self._meets(mark, other.granules)
                    for other in uses
                )
            ]

    def check_integrity(self) -> None:
        """Compare the counts with the uses.

        Raises
        ------
        RuntimeError
            Naming the place that differs.
        """
        with self._lock:
            expected: dict[Place, _Counts] = {place: _Counts() for place in self._counts}
            for uses in self._uses.values():
                for use in uses:
                    expected[use.place].add(use.access, use.granules, 1)
            for place, counts in self._counts.items():
                for access in Access:
                    have = np.flatnonzero(counts.counts[access])
                    want = np.flatnonzero(expected[place].counts[access])
                    same = np.array_equal(have, want) and np.array_equal(
                        counts.counts[access][have], expected[place].counts[access][want]
                    )
                    same = same and counts.total[access] == expected[place].total[access]
                    if not same or counts.unknown[access] != expected[place].unknown[access]:
                        raise RuntimeError(f"the {access.value} counts of {place} are not those of the operations")

    @staticmethod
    def _touched(counts: _Counts, access: Access, granules: Granules | None) -> bool:
        if granules is None:
            return bool(counts.unknown[access] or counts.total[access])
        return bool(counts.busy(access, granules).any())

    @staticmethod
    def _mark(granules: Granules | None) -> npt.NDArray[np.bool_] | None:
        if granules is None:
            return None
        mark = np.zeros(int(granules.max()) + 1 if len(granules) else 0, dtype=np.bool_)
        mark[granules] = True
        return mark

    @staticmethod
    def _meets(mark: npt.NDArray[np.bool_] | None, granules: Granules | None) -> bool:
        if mark is None:
            return granules is None or len(granules) > 0
        if granules is None:
            return len(mark) > 0
        return bool(mark[granules[granules < len(mark)]].any())
