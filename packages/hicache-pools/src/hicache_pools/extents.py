"""ExtentAllocator: host slots handed out in as few runs of neighbouring pages as possible."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hicache_kernels.checks import check_tensor
from hicache_kernels.validation import whole

from .extent_index import MAX_PAGES, ExtentIndex, Run

PageArray = npt.NDArray[np.int64]


class ExtentStats(NamedTuple):
    """What an allocator holds now, and what it has done since it was made or cleared.

    Attributes
    ----------
    page_num, free_pages
        All pages, and those that are free.
    free_runs, largest_free_run
        Number of maximal runs of free pages, and the pages of the largest (0 when nothing is free).
    allocations, failed_allocations, frees
        Calls that handed pages out, that returned None for lack of pages, and that took pages back.
        Calls for no pages count nowhere.
    allocated_pages, allocated_runs
        Pages handed out, and the runs they came in.
    mean_run_pages
        Pages a run: ``allocated_pages / allocated_runs``, 0.0 before the first allocation.
    bookkeeping_bytes
        Memory of the allocator itself.
    """

    page_num: int
    free_pages: int
    free_runs: int
    largest_free_run: int
    allocations: int
    failed_allocations: int
    frees: int
    allocated_pages: int
    allocated_runs: int
    mean_run_pages: float
    bookkeeping_bytes: int


class ExtentAllocator:
    """Best-fit allocation of pages, with neighbouring free runs joined on every free.

    Indices handed out are owned by the caller: they share no memory with the allocator. A call that raises or returns
    None has changed nothing but the counter of failed allocations. Safe to call from several threads.

    Parameters
    ----------
    pages
        Number of pages, from 0 to 2**31 - 1.
    page_size
        Slots a page, at least 1. Page ``p`` is slots ``p * page_size .. (p + 1) * page_size - 1``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not a whole number in its range.

    Invariant
    ---------
    A page is either free, and in the index, or owned by exactly one caller.
    """

    def __init__(self, pages: int, page_size: int = 1) -> None:
        self._page_num = whole("pages", pages, least=0, most=MAX_PAGES)
        self._page_size = whole("page_size", page_size, most=MAX_PAGES)
        self._lock = threading.Lock()  # guards the index of free pages and the counters
        self._index = ExtentIndex(self._page_num)
        self._reset()

    @property
    def page_num(self) -> int:
        """Number of pages."""
        return self._page_num

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self._page_size

    @property
    def size(self) -> int:
        """Number of slots."""
        return self._page_num * self._page_size

    @property
    def available_pages(self) -> int:
        """Pages that are free."""
        return self._available

    def available_size(self) -> int:
        """Slots that are free."""
        return self._available * self._page_size

    def alloc(self, n_slots: int) -> torch.Tensor | None:
        """Take slots, whole pages of them.

        Parameters
        ----------
        n_slots
            A multiple of ``page_size``; 0 gives an empty tensor.

        Returns
        -------
        torch.Tensor or None
            int64 ``[n_slots]`` on CPU, owned by the caller, page after page; None if fewer slots are free.

        Raises
        ------
        ValueError
            If ``n_slots`` is negative or not a multiple of ``page_size``.
        """
        pages, rest = divmod(whole("n_slots", n_slots, least=0), self._page_size)
        if rest:
            raise ValueError(f"n_slots is {n_slots}; it must be a multiple of page_size {self._page_size}")
        runs = self._take(pages)
        if runs is None:
            return None
        slots = _numbers(runs, self._page_size)
        if not torch.is_inference_mode_enabled():
            return torch.from_numpy(slots)
        # Indices outlive the mode they were made in, and a tensor made in inference mode cannot be changed outside it.
        with torch.inference_mode(False):
            return torch.from_numpy(slots)

    def alloc_pages(self, n: int) -> PageArray | None:
        """Take pages.

        Parameters
        ----------
        n
            Number of pages; 0 gives an empty array.

        Returns
        -------
        numpy.ndarray or None
            Page numbers, int64 ``[n]``, owned by the caller; None if fewer pages are free.

        Raises
        ------
        ValueError
            If ``n`` is negative.
        """
        runs = self._take(whole("n", n, least=0))
        return None if runs is None else _numbers(runs, 1)

    def free(self, indices: torch.Tensor) -> int:
        """Give slots back: whole pages, each page's slots in order, the pages in any order.

        Parameters
        ----------
        indices
            Integer tensor ``[n]``; indices from several allocations, or a part of one, may be freed together. On a
            device other than CPU they are copied first, which waits for that device.

        Returns
        -------
        int
            Number of slots freed.

        Raises
        ------
        ValueError
            Naming the first index that is out of range, not part of a whole page, free already, or given twice;
            or if ``indices`` is not a one-dimensional tensor of integers.
        """
        return self._give(self._whole_pages(_slots(indices)), self._page_size) * self._page_size

    def owned_pages(self, indices: torch.Tensor) -> PageArray:
        """Return the pages of slots that are owned, and change nothing.

        Parameters
        ----------
        indices
            As :meth:`free` accepts them.

        Returns
        -------
        numpy.ndarray
            Page numbers, int64, in the order of ``indices``.

        Raises
        ------
        ValueError
            As :meth:`free`, naming the first index that is out of range, not part of a whole page, free or given twice.
        """
        pages = self._whole_pages(_slots(indices))
        if len(pages):
            ordered = self._ordered(pages, self._page_size)
            with self._lock:
                self._check_taken(ordered, self._page_size)
        return pages

    def free_pages(self, pages: npt.ArrayLike) -> int:
        """Give pages back, in any order.

        Parameters
        ----------
        pages
            Page numbers, integers ``[n]``.

        Returns
        -------
        int
            Number of pages freed.

        Raises
        ------
        ValueError
            Naming the first page that is out of range, free already, or given twice; or if ``pages`` is not
            one-dimensional and of integers.
        """
        return self._give(_integers("pages", pages), 1)

    def clear(self) -> None:
        """Make every page free and start the counters again; indices handed out before are no longer owned."""
        with self._lock:
            self._index.clear()
            self._reset()

    def stats(self) -> ExtentStats:
        """Read the state and the counters, at one moment."""
        with self._lock:
            return ExtentStats(
                page_num=self._page_num,
                free_pages=self._available,
                free_runs=self._index.runs,
                largest_free_run=self._index.largest,
                allocations=self._allocations,
                failed_allocations=self._failed_allocations,
                frees=self._frees,
                allocated_pages=self._allocated_pages,
                allocated_runs=self._allocated_runs,
                mean_run_pages=self._allocated_pages / self._allocated_runs if self._allocated_runs else 0.0,
                bookkeeping_bytes=self._index.bookkeeping_bytes(),
            )

    def check_integrity(self) -> None:
        """Check every invariant, in time linear in the pages.

        Raises
        ------
        RuntimeError
            Naming the first that does not hold.
        """
        with self._lock:
            self._index.check_integrity()
            free = int(np.count_nonzero(self._index.free))
            if free != self._available:
                raise RuntimeError(f"{self._available} pages are counted as free, {free} are")

    def _reset(self) -> None:
        self._available = self._page_num
        self._allocations = 0
        self._failed_allocations = 0
        self._frees = 0
        self._allocated_pages = 0
        self._allocated_runs = 0

    def _take(self, pages: int) -> list[Run] | None:
        if not pages:
            return []
        with self._lock:
            if pages > self._available:
                self._failed_allocations += 1
                return None
            runs = self._index.take(pages)
            self._available -= pages
            self._allocations += 1
            self._allocated_pages += pages
            self._allocated_runs += len(runs)
        return runs

    def _whole_pages(self, slots: PageArray) -> PageArray:
        """Turn slot indices into page numbers; every error that needs no lock."""
        size = self._page_size
        if size == 1:
            return slots
        whole = len(slots) - len(slots) % size
        first = slots[:whole:size]
        # Where slots do not follow each other a page begins: one comparison a slot.
        breaks = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
        if not len(breaks) and whole == len(slots) > 0 and not slots[0] % size:
            return np.arange(slots[0] // size, slots[-1] // size + 1)
        if whole == len(slots) and not ((first % size).any() or (breaks % size).any()):
            return first // size
        table = slots[:whole].reshape(-1, size)
        wrong = (table - first[:, None] != np.arange(size)) | (first % size != 0)[:, None]
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise ValueError(
                f"index {table[row, column]} at position {row * size + column} is not slot {column} of a page whose "
                f"{size} slots are given in order"
            )
        raise ValueError(
            f"index {slots[whole]} at position {whole} starts a page of which only {len(slots) - whole} of "
            f"page_size={size} slots are given"
        )

    def _give(self, pages: PageArray, unit: int) -> int:
        """Check all pages, then free them; ``unit`` is the number of indices a page in the caller's words."""
        if not len(pages):
            return 0
        ordered = self._ordered(pages, unit)
        cuts = (ordered[1:] - ordered[:-1] != 1).nonzero()[0]
        starts = [int(ordered[0]), *ordered[cuts + 1].tolist()]
        ends = [*ordered[cuts].tolist(), int(ordered[-1])]
        with self._lock:
            self._check_taken(ordered, unit)
            for start, end in zip(starts, ends, strict=True):
                self._index.give(start, end - start + 1)
            self._available += len(ordered)
            self._frees += 1
        return len(ordered)

    def _ordered(self, pages: PageArray, unit: int) -> PageArray:
        """Sort pages, at least one; ValueError where one is out of range or there twice."""
        # Compared, not subtracted: differences of foreign values may overflow.
        rising = len(pages) == 1 or (pages[1:] > pages[:-1]).all()
        ordered = pages if rising else np.sort(pages)
        if ordered[0] < 0 or ordered[-1] >= self._page_num:
            wrong = pages[(pages < 0) | (pages >= self._page_num)][0]
            raise ValueError(f"index {wrong * unit} is foreign: it is not in 0..{self._page_num * unit - 1}")
        if not rising and not (steps := ordered[1:] - ordered[:-1]).all():
            raise ValueError(f"index {ordered[np.argmin(steps)] * unit} is given more than once in one call")
        return ordered

    def _check_taken(self, pages: PageArray, unit: int) -> None:
        """Raise ValueError where a page is free; with the lock held."""
        free = self._index.free[pages]
        if np.count_nonzero(free):
            raise ValueError(
                f"index {pages[np.argmax(free)] * unit} is free already: it was given back, or never taken"
            )


def _numbers(runs: list[Run], size: int) -> PageArray:
    """Every number of the runs, at ``size`` numbers a page."""
    parts = [np.arange(start * size, (start + length) * size, dtype=np.int64) for start, length in runs]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _slots(indices: Any) -> PageArray:
    if type(indices) is torch.Tensor and indices.is_cpu and indices.dtype is torch.int64 and indices.ndim == 1:
        return indices.numpy()
    if isinstance(indices, torch.Tensor):
        check_tensor("indices", indices, "one dimension of integers")
    return _integers("indices", indices.detach().cpu().numpy() if isinstance(indices, torch.Tensor) else indices)


def _integers(name: str, values: Any) -> PageArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} has shape {array.shape} and dtype {array.dtype}; accepted: one dimension of integers")
    return array.astype(np.int64, copy=False)
