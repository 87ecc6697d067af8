"""Free runs of pages, found by size: the index under the extent allocator."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

Run = tuple[int, int]
"""First page and number of pages."""

MAX_PAGES = 2**31 - 1
"""Page numbers and lengths are kept as int32."""

CANDIDATES = 8
"""How many runs of one length a placement looks at; more bring nothing on the conversation trace."""

_NONE = -1


class ExtentIndex:
    """Free runs over pages ``0 .. pages - 1``; every page is free at first.

    Arrays of 13 bytes a page, whatever the fragmentation; scalar access goes through memoryviews of them, which is
    several times faster than indexing numpy. There are at most ``sqrt(2 * pages)`` different run lengths at a time
    (their sum is at most ``pages``), so a sorted list of the lengths in use, and a table from length to the first run
    of that length, stay small: finding a length is one bisection, and runs of one length form a linked list threaded
    through the arrays. Every operation on a run is O(log n) in the number of runs, plus marking its pages (and the
    move of at most ``sqrt(2 * pages)`` pointers when a length comes into use or goes out of it).

    Placement: best fit, and among runs of one length the one whose neighbours were taken last. Pages taken together
    tend to be given back together, so what is left of that run, and the pages next to it, join again soon. A page's
    time is kept where only free runs keep their links, so it costs no memory.

    Invariants
    ----------
    - ``free[p]`` is 1 exactly for the pages of free runs, and two free runs never touch.
    - The first and the last page of a free run hold its length in ``length``.
    - ``next`` and ``previous`` of a free run's first page are its links; ``next`` of a taken page is the number of the
      take that took it (modulo 2**31: a wrong order after that costs placement quality once, nothing else).
    - Each free run is in exactly one list, that of its length, linked by its first page.
    - ``sizes`` is sorted and holds exactly the keys of ``heads``, the lengths of the non-empty lists.

    Not thread-safe, and arguments are not checked: the allocator does both.
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.free = np.empty(pages, dtype=np.uint8)
        self._length_array = np.empty(pages, dtype=np.int32)
        self._next_array = np.empty(pages, dtype=np.int32)
        self._previous_array = np.empty(pages, dtype=np.int32)
        self._free = self.free.data
        self._length = self._length_array.data
        self._next = self._next_array.data
        self._previous = self._previous_array.data
        self._sizes: list[int] = []
        self._heads: dict[int, int] = {}
        self.runs = 0
        self._takes = 0
        self.clear()

    @property
    def largest(self) -> int:
        """Pages of the largest free run; 0 when nothing is free."""
        return self._sizes[-1] if self._sizes else 0

    def clear(self) -> None:
        """Make every page free, as one run."""
        self.free.fill(1)
        self._sizes.clear()
        self._heads.clear()
        self.runs = 0
        if self.pages:
            self._link(0, self.pages)

    def take(self, pages: int) -> list[Run]:
        """Remove ``pages`` pages, at most the number that is free, in as few runs as possible.

        The smallest run that is long enough gives its first pages. Where none is, the longest runs go whole until
        one can give the rest, so the number of runs is the least possible and at most one run is cut.
        """
        taken: list[Run] = []
        self._takes = (self._takes + 1) & MAX_PAGES
        while pages:
            position = bisect_left(self._sizes, pages)
            size = self._sizes[position] if position < len(self._sizes) else self._sizes[-1]
            start = self._next_to_youngest(size) if size >= pages else self._heads[size]
            used = min(size, pages)
            self._unlink(start, size)
            if used < size:
                self._link(start + used, size - used)
            self.free[start : start + used] = 0
            self._next_array[start : start + used] = self._takes
            taken.append((start, used))
            pages -= used
        return taken

    def give(self, start: int, pages: int) -> None:
        """Add a run of pages that are not free, and join it with the free runs on either side."""
        end = start + pages
        self.free[start:end] = 1
        if start and self._free[start - 1]:
            before = self._length[start - 1]
            self._unlink(start - before, before)
            start -= before
        if end < self.pages and self._free[end]:
            after = self._length[end]
            self._unlink(end, after)
            end += after
        self._link(start, end - start)

    def free_runs(self) -> list[Run]:
        """Every free run, by address, read from the page flags."""
        edges = np.flatnonzero(np.diff(self.free, prepend=0, append=0))
        return [(int(start), int(end - start)) for start, end in edges.reshape(-1, 2)]

    def bookkeeping_bytes(self) -> int:
        """Bytes of the arrays and tables."""
        arrays = (self.free, self._length_array, self._next_array, self._previous_array)
        # A list slot and a dict entry, with the int objects they may own.
        return (
            sum(array.nbytes for array in arrays)
            + self._sizes.__sizeof__()
            + self._heads.__sizeof__()
            + 96 * len(self._sizes)
        )

    def check_integrity(self) -> None:
        """Compare the lists with the page flags.

        Raises
        ------
        RuntimeError
            Naming the first invariant that does not hold.
        """
        runs = self.free_runs()
        for start, size in runs:
            if self._length[start] != size or self._length[start + size - 1] != size:
                raise RuntimeError(f"the free run of {size} pages at {start} does not hold its length at both ends")
        if self._sizes != sorted(self._heads):
            raise RuntimeError(f"the sorted lengths {self._sizes} are not those of the lists {sorted(self._heads)}")
        listed: list[Run] = []
        for size, head in self._heads.items():
            previous, start = _NONE, head
            while start != _NONE:
                if self._previous[start] != previous:
                    raise RuntimeError(f"page {start} in the list of length {size} does not link back to {previous}")
                listed.append((start, size))
                if len(listed) > len(runs):
                    raise RuntimeError(f"the lists hold more than the {len(runs)} free runs")
                previous, start = start, self._next[start]
        if sorted(listed) != runs:
            raise RuntimeError(f"the lists do not hold the free runs: {sorted(set(listed) ^ set(runs))[:8]} differ")
        if self.runs != len(runs):
            raise RuntimeError(f"{self.runs} free runs are counted, {len(runs)} exist")

    def _next_to_youngest(self, size: int) -> int:
        """Find, among the first runs of this length, the one whose neighbours were taken last."""
        best = start = self._heads[size]
        following = self._next[start]
        if following == _NONE:
            return best
        youngest = 2 * _NONE
        for _ in range(CANDIDATES):
            end = start + size
            # Free runs never touch, so the pages on either side are taken and hold their time.
            before = self._next[start - 1] if start else _NONE
            after = self._next[end] if end < self.pages else _NONE
            if before + after > youngest:
                best, youngest = start, before + after
            if following == _NONE:
                break
            start, following = following, self._next[following]
        return best

    def _link(self, start: int, size: int) -> None:
        self._length[start] = self._length[start + size - 1] = size
        head = self._heads.get(size, _NONE)
        if head == _NONE:
            insort(self._sizes, size)
        else:
            self._previous[head] = start
        self._next[start] = head
        self._previous[start] = _NONE
        self._heads[size] = start
        self.runs += 1

    def _unlink(self, start: int, size: int) -> None:
        following, previous = self._next[start], self._previous[start]
        if following != _NONE:
            self._previous[following] = previous
        if previous != _NONE:
            self._next[previous] = following
        elif following != _NONE:
            self._heads[size] = following
        else:
            del self._heads[size]
            del self._sizes[bisect_left(self._sizes, size)]
        self.runs -= 1
