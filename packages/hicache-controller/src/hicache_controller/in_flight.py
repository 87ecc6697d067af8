"""In-flight slots: which operations read or write which physical slots, and so what has to wait for what."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
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
    if not indices.is_cpu:
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
    if len(slots) % size or (len(slots) and slots[0] % size):
        return None
    breaks = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
    firsts = slots[::size]
    if len(breaks) and ((breaks % size).any() or (firsts % size).any()):
        return None
    blocks: Pages = firsts // size
    return blocks


class _Counts:
    """Uses of one side with one access: operations a page, their sum, and how many know no pages."""

    def __init__(self) -> None:
        self.of_page = np.zeros(0, dtype=np.int16)
        self.total = self.unknown = 0

    def add(self, pages: Pages | None, step: int) -> None:
        if pages is None:
            self.unknown += step
        elif len(pages):
            if step > 0 and (top := int(pages.max())) >= len(self.of_page):
                self.of_page = np.pad(self.of_page, (0, max(top + 1, 2 * len(self.of_page)) - len(self.of_page)))
            self.of_page[pages] += np.int16(step)
            self.total += step * len(pages)

    def busy(self, pages: Pages) -> npt.NDArray[np.bool_]:
        if self.unknown or not self.total:
            return np.full(len(pages), bool(self.unknown))
        inside = pages < len(self.of_page)
        return inside & (self.of_page[np.where(inside, pages, 0)] > 0)

    def touch(self, pages: Pages | None) -> bool:
        return bool(self.unknown or self.total) if pages is None else bool(self.busy(pages).any())


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
        self._counts: defaultdict[tuple[PoolSide, Access], _Counts] = defaultdict(_Counts)

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._uses

    def add(self, owner: Owner, uses: Iterable[PageUse]) -> None:
        """Note what ``owner``, unknown so far, uses."""
        with self._lock:
            if owner in self._uses:
                raise ValueError(f"{owner!r} is in flight already")
            self._uses[owner] = self._count(uses, 1)

    def remove(self, owner: Owner) -> None:
        """Forget ``owner``; without effect where it is not known."""
        with self._lock:
            self._count(self._uses.pop(owner, ()), -1)

    def narrow(self, owner: Owner, uses: Iterable[PageUse]) -> None:
        """Let ``owner`` use less than before; without effect where it is not known."""
        with self._lock:
            if owner in self._uses:
                self._count(self._uses[owner], -1)
                self._uses[owner] = self._count(uses, 1)

    def _count(self, uses: Iterable[PageUse], step: int) -> tuple[PageUse, ...]:
        uses = tuple(uses)
        for use in uses:
            self._counts[use.side, use.access].add(use.pages, step)
        return uses

    def owners(self) -> list[Owner]:
        """Everything in flight, oldest first."""
        with self._lock:
            return list(self._uses)

    def busy(self, side: PoolSide, pages: Pages) -> npt.NDArray[np.bool_]:
        """Return for each page whether anything reads or writes it."""
        with self._lock:
            return self._counts[side, Access.READ].busy(pages) | self._counts[side, Access.WRITE].busy(pages)

    def users(self, use: PageUse, accesses: Iterable[Access]) -> list[Owner]:
        """Operations that access, in one of ``accesses``, a page of ``use``; oldest first, each once."""
        with self._lock:
            wanted = [access for access in accesses if self._counts[use.side, access].touch(use.pages)]
            if not wanted:
                return []
            asked = _Counts()
            asked.add(use.pages, 1)
            return [
                owner
                for owner, uses in self._uses.items()
                if any(each.side == use.side and each.access in wanted and asked.touch(each.pages) for each in uses)
            ]

    def check_integrity(self) -> None:
        """Compare the counts with the uses.

        Raises
        ------
        RuntimeError
            Naming the side that differs.
        """
        with self._lock:
            expected: defaultdict[tuple[PoolSide, Access], _Counts] = defaultdict(_Counts)
            for uses in self._uses.values():
                for use in uses:
                    expected[use.side, use.access].add(use.pages, 1)
            for key, have in self._counts.items():
                want = expected[key]
                same = np.array_equal(np.trim_zeros(have.of_page, "b"), np.trim_zeros(want.of_page, "b"))
                if not same or (have.total, have.unknown) != (want.total, want.unknown):
                    raise RuntimeError(f"the {key[1].value} counts of {key[0]} are not those of the operations")
