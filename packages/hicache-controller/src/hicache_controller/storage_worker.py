"""Backup and prefetch: the threads that move pages between the host pool and storage, and what they work on."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from .events import Event, wait_until_done
from .interrupts import interruptibly, interrupts_held_back
from .metrics import Metrics
from .operations import OperationCancelledError
from .policies import PrefetchPolicy as PrefetchPolicy
from .storage.base import HiCacheStorage
from .storage_tasks import BackupOperation, PrefetchOperation, StoragePart, StorageTask

logger = logging.getLogger(__name__)

ANCHOR = "kv"
"""Name of the anchor's pool in a storage, whatever its entry is called."""

_STOP_CHECK_SECONDS = 0.1

PageGet = Callable[[Sequence[bytes], torch.Tensor, str], list[bool]]
"""``page_get(keys, host_indices, pool_name)`` fills host pages; tells for each key whether its page is there."""

PageSet = Callable[[Sequence[bytes], torch.Tensor, Sequence[bytes | None] | None, str], list[bool]]
"""``page_set(keys, host_indices, parents, pool_name)`` stores host pages; tells for each key whether it is stored."""


class GenericStorage(Protocol):
    """A backend that moves pages as tensors, for engines' own; :class:`HiCacheStorage` moves them without a copy."""

    def register_mem_pool_host(self, pool: Any, name: str = "kv") -> None:
        """Learn about a host pool."""

    def batch_exists(self, keys: Sequence[bytes], *, name: str = "kv") -> int:
        """Return how many leading keys have a page."""

    def get(self, key: bytes, *, name: str = "kv") -> torch.Tensor | None:
        """Return a page, uint8 ``[page_bytes]`` on CPU, or None."""

    def set(self, key: bytes, page: torch.Tensor, *, parent: bytes | None = None, name: str = "kv") -> bool:
        """Store a page; tell whether it is stored."""


StorageBackend = HiCacheStorage | GenericStorage


def zero_copy_page_functions(storage: HiCacheStorage) -> tuple[PageGet, PageSet]:
    """Page functions of a backend that reads and writes the pool's memory itself."""

    def page_get(keys: Sequence[bytes], host_indices: torch.Tensor, name: str) -> list[bool]:
        return storage.batch_get(keys, host_indices, name=name)

    def page_set(
        keys: Sequence[bytes], host_indices: torch.Tensor, parents: Sequence[bytes | None] | None, name: str
    ) -> list[bool]:
        return storage.batch_set(keys, host_indices, parents=parents, name=name)

    return page_get, page_set


def generic_page_functions(storage: GenericStorage, pools: Callable[[str], Any]) -> tuple[PageGet, PageSet]:
    """Page functions of a backend that takes and gives tensors; ``pools`` finds the host pool of a name."""

    def page_get(keys: Sequence[bytes], host_indices: torch.Tensor, name: str) -> list[bool]:
        pool = pools(name)
        found = []
        for key, page in zip(keys, _pages(host_indices, pool), strict=True):
            data = storage.get(key, name=name)
            if data is not None:
                pool.write_page(page, data)
            found.append(data is not None)
        return found

    def page_set(
        keys: Sequence[bytes], host_indices: torch.Tensor, parents: Sequence[bytes | None] | None, name: str
    ) -> list[bool]:
        pool = pools(name)
        before = [None] * len(keys) if parents is None else parents
        return [
            storage.set(key, pool.read_page(page), parent=parent, name=name)
            for key, page, parent in zip(keys, _pages(host_indices, pool), before, strict=True)
        ]

    return page_get, page_set


def no_page_get(keys: Sequence[bytes], host_indices: torch.Tensor, name: str) -> list[bool]:
    """Find nothing: the page function without a backend."""
    return [False] * len(keys)


def no_page_set(
    keys: Sequence[bytes], host_indices: torch.Tensor, parents: Sequence[bytes | None] | None, name: str
) -> list[bool]:
    """Store nothing: the page function without a backend."""
    return [False] * len(keys)


def _pages(host_indices: torch.Tensor, pool: Any) -> list[int]:
    pages: list[int] = (host_indices[:: pool.page_size] // pool.page_size).tolist()
    return pages


Task = TypeVar("Task", bound=StorageTask)


class StorageThread(Generic[Task]):
    """Runs tasks in order on one thread (or at once, where synchronous), from a queue bounded in pages.

    Parameters
    ----------
    name
        Of the thread.
    work
        Does one task; what it raises becomes the task's error.
    finished
        Called behind each task, on the thread, before its signal fires.
    queue_pages
        Most pages waiting; one task may always wait.
    synchronous
        Do each task before ``submit`` returns.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Task], None],
        finished: Callable[[Task], None],
        *,
        queue_pages: int,
        synchronous: bool,
    ) -> None:
        self._work = work
        self._finished = finished
        self._queue_pages = queue_pages
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()
        self._depth = 0
        self._running: Task | None = None
        self.stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if not synchronous:
            self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
            self._thread.start()

    @property
    def depth(self) -> int:
        """Pages waiting."""
        return self._depth

    def submit(self, task: Task, *, timeout: float | None) -> bool:
        """Queue a task, blocking while the queue is full, at most ``timeout`` seconds; tell whether it was queued."""
        if self._thread is None:
            task.queued = True
            self._run(task)
            return True
        with self._changed:
            admitted = interruptibly(lambda: self._changed.wait_for(lambda: self._admits(task), timeout))
            if not admitted or self.stopping.is_set():
                return False
            with interrupts_held_back():  # it is this thread's to read from exactly when it counts as queued
                task.queued = True
                self._tasks.append(task)
                self._depth += task.pages
                self._changed.notify_all()
        return True

    def withdraw(self, task: Task) -> bool:
        """End a task that was cancelled and still waits; tell whether it did."""
        with self._changed:
            if task not in self._tasks:
                return False
            self._tasks.remove(task)
            self._depth -= task.pages
            self._changed.notify_all()
        task.error = OperationCancelledError("the operation was cancelled before it could start")
        self._finished(task)
        task.host_ready.fire()
        return True

    def _admits(self, task: Task) -> bool:
        return self.stopping.is_set() or not self._tasks or self._depth + task.pages <= self._queue_pages

    def drain(self, timeout: float) -> bool:
        """Block until nothing waits or runs, at most ``timeout`` seconds; tell whether that came."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and self._running is None, timeout)

    def stop(self) -> None:
        """Let the thread end behind the task that runs."""
        self.stopping.set()
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Stop behind the task that runs; what waits is cancelled. Tell whether the thread ended in time."""
        self.stop()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self.stopping.is_set())
                if not self._tasks:
                    return
                task = self._running = self._tasks.popleft()
                self._depth -= task.pages
                self._changed.notify_all()
            try:
                self._run(task)
            except BaseException:  # the task has it as its error; those behind it are to be done
                logger.exception("a storage operation was ended by what is no Exception")
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def _run(self, task: Task) -> None:
        try:
            if self._wait_for(task.after):
                task.check_writers()
                self._work(task)
            else:
                task.cancelled = True
                task.error = OperationCancelledError("the storage thread stopped before the operation could start")
        except BaseException as error:
            task.error = error
            if not isinstance(error, Exception):
                raise
            logger.debug("a storage operation failed", exc_info=True)
        finally:
            self._finished(task)
            task.host_ready.fire()

    def _wait_for(self, events: Iterable[Event]) -> bool:
        for event in events:
            while not wait_until_done(event, _STOP_CHECK_SECONDS):
                if self.stopping.is_set():
                    return False
        return not self.stopping.is_set()


class StorageMover:
    """Moves the pages of one task, batch by batch, with retries; shared by the threads of both directions.

    Parameters
    ----------
    page_get, page_set
        The backend's page functions.
    batch_pages
        Pages a call: what a cancel may have to wait for.
    retries
        Further attempts at a page that could not be stored.
    retry_seconds
        Pause before the first of them; doubled for each further one.
    skipped
        Called with the pages of a pool that a cancelled backup has not stored, and the pool's name.

    Attributes
    ----------
    backup_calls
        Calls to store pages that have ended, so that it shows whether storage gets on.
    """

    def __init__(
        self,
        page_get: PageGet,
        page_set: PageSet,
        metrics: Metrics,
        *,
        batch_pages: int,
        retries: int,
        retry_seconds: float,
        skipped: Callable[[int, str], None],
    ) -> None:
        self.page_get = page_get
        self.page_set = page_set
        self._metrics = metrics
        self._batch_pages = batch_pages
        self._retries = retries
        self._retry_seconds = retry_seconds
        self._skipped = skipped
        self.backup_calls = 0

    def backup(self, task: BackupOperation, stopping: threading.Event) -> None:
        """Store pages in order; behind a page that cannot be stored nothing is, as nobody would find it."""
        while task.stored_pages < task.pages and not stopping.is_set():
            start = task.stored_pages
            end = min(start + self._batch_pages, task.pages)
            if not task.begin_call(slice(start, end)):
                break
            stored = min(self._store(task, part.batch(start, end), stopping) for part in task.whole_parts)
            task.stored_pages += stored
            self._metrics.count("backup_pages", stored)
            if stored < end - start:
                break
        if task.stored_pages < task.pages:
            self._count_missing(task, task.parts[0], task.pages - task.stored_pages)
            return
        for part in task.trailing_parts:
            # Kept whole while it is stored: the slots of a pool that shares others' are free once those are.
            stored = self._store(task, part, stopping) if task.begin_call(slice(None)) else 0
            task.pool_pages[part.name] = stored
            if stored < len(part.keys):
                self._count_missing(task, part, len(part.keys))
                task.error = RuntimeError(f"storage did not take the last pages of pool {part.name}")

    def _count_missing(self, task: BackupOperation, part: StoragePart, pages: int) -> None:
        if task.cancelled:
            self._skipped(pages, part.name)
        else:
            self._metrics.count("backup_failed_pages", pages)

    def _store(self, task: BackupOperation, part: StoragePart, stopping: threading.Event) -> int:
        """Store pages of one pool, trying those that fail again; returns how many leading ones are stored."""
        done = attempts = 0
        while True:
            rest = part.batch(done, len(part.keys))
            stored = self._call("backup", rest.name, self.page_set, rest.keys, rest.host_indices, rest.parents)
            self.backup_calls += 1
            done += stored
            if done == len(part.keys):
                return done
            attempts = 1 if stored else attempts + 1
            if task.cancelled or attempts > self._retries:
                return done
            if stopping.wait(self._retry_seconds * 2 ** (attempts - 1)) or task.cancelled:
                return done
            self._metrics.count("backup_retries")

    def prefetch(self, task: PrefetchOperation, stopping: threading.Event) -> None:
        """Fetch pages in order up to the first that is missing in any pool."""
        done = 0
        # Without its last pages a prefix is of no use, so nothing else is fetched then.
        complete = all(
            task.begin_call(slice(None)) and self._fetch(part) == len(part.keys) for part in task.trailing_parts
        )
        while complete and done < task.pages and not stopping.is_set():
            end = min(done + self._batch_pages, task.pages)
            if not task.begin_call(slice(done, end)):
                break
            found = min(self._fetch(part.batch(done, end)) for part in task.whole_parts)
            task.progress(found)
            self._metrics.count("prefetch_pages", found)
            complete = done + found == end
            done += found
        if not complete and not task.cancelled:
            self._metrics.count("prefetch_missing_pages", task.pages - done)
        elif done < task.pages:
            self._metrics.count("prefetch_cancelled")

    def _fetch(self, part: StoragePart) -> int:
        return self._call("prefetch", part.name, self.page_get, part.keys, part.host_indices)

    def _call(self, operation: str, pool: str, function: Callable[..., list[bool]], *arguments: Any) -> int:
        """Leading pages that a page function moved; none where it raises."""
        began = time.perf_counter()
        try:
            moved = function(*arguments, pool)
        except Exception:
            self._metrics.count("storage_errors", operation=operation)
            logger.debug("storage failed to %s pages", operation, exc_info=True)
            return 0
        finally:
            self._metrics.observe("storage_seconds", time.perf_counter() - began, operation=operation)
        pages = next((position for position, each in enumerate(moved) if not each), len(moved))
        self._metrics.count("storage_pages", pages, operation=operation, pool=pool)
        return pages
