"""IoThreads: does the same work for many pages, in as many threads as that is worth."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

_MIN_BYTES = 256 << 10  # less work than this is not worth a hop to another thread

_CPUS = len(os.sched_getaffinity(0))
_GIL_THREADS = 4  # that keep a CPU busy and need the GIL now and then: more would only take it from each other

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class IoThreads:
    """Threads that share work with the caller's.

    Parameters
    ----------
    threads
        Most that work at once for one call, the caller's included.
    compiled_threads
        The same for work that keeps CPUs busy and runs without the GIL; None for ``threads``.
    """

    def __init__(self, threads: int, compiled_threads: int | None = None) -> None:
        self._threads = threads
        self._compiled_threads = threads if compiled_threads is None else compiled_threads
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="hicache-file")

    def worth(self, items: int, item_bytes: int, *, waits: bool, compiled: bool) -> int:
        """Return how many threads some work is worth, one at least.

        Parameters
        ----------
        items, item_bytes
            How much there is to do.
        waits
            Whether it waits for a disk, which wants several requests at once. Work that keeps a CPU busy gets a thread
            a CPU.
        compiled
            Whether it runs without the GIL.
        """
        if waits:
            most = self._threads
        elif compiled:
            most = min(self._compiled_threads, _CPUS)
        else:
            most = min(self._threads, _CPUS, _GIL_THREADS)
        return max(1, min(most, items, items * item_bytes // _MIN_BYTES))

    def map(
        self, work: Callable[[_Item], _Result], items: Sequence[_Item], item_bytes: int, *, waits: bool
    ) -> list[_Result]:
        """Do the work of all items; results in order.

        Whatever happens, nothing is done any more once this returns or raises.

        Parameters
        ----------
        work, items
            What to do with each.
        item_bytes
            Bytes an item moves, about.
        waits
            Whether the work waits for a disk.
        """
        threads = self.worth(len(items), item_bytes, waits=waits, compiled=False)
        left = iter(enumerate(items))  # shared: who is done takes the next, however the system divides its CPUs
        results: dict[int, _Result] = {}

        def some() -> None:
            for position, item in left:
                results[position] = work(item)

        others = [self._workers.submit(some) for _ in range(threads - 1)]
        try:
            some()
        finally:
            others = [other for other in others if not other.cancel()]
            wait(others)
        for other in others:
            other.result()
        return [results[position] for position in range(len(items))]

    def shutdown(self) -> None:
        """Wait for what is running, and end the threads."""
        self._workers.shutdown()
