"""PageWriter: stores the pages of one call as files, heads before tails, a chunk at a time."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hicache_kernels.probe import warn_once

from .base import RegisteredPool
from .directory import disk_bytes, is_blocked, remove_file
from .file_pages import FilePages, part_of
from .io_threads import IoThreads
from .page_file import FOOTER_BYTES, write_page

_CHUNK_BYTES = 64 << 20  # written between two looks at what others write
_CHUNK_PAGES = 256
_SPREAD_WRITES = 64 << 10  # creating smaller files is slower in several threads: they wait for the file system's locks
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_OF_THE_FILE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFAULT, errno.EINTR, errno.EAGAIN})
"""Errors that are of the process or the system, and say nothing of the file."""


class Job(NamedTuple):
    """One page to store: position in the call, key, page in the index, host page, its parent there, and its time."""

    position: int
    key: bytes
    page: bytes
    host_page: int
    parent: bytes | None
    tick: int


class PageWriter:
    """The pages of one call of ``store_pages``, which do not make room for each other.

    Parameters
    ----------
    files, threads
        The directory, and what writes.
    pool
        Whose pages they are.
    model
        What makes a page of a key.
    pool_parts
        The parts of all pools, under any of which a page's parent may be stored.

    Attributes
    ----------
    stored
        For each key whether its page is stored.
    counts
        What to add to the storage's counters.
    """

    def __init__(
        self, files: FilePages, threads: IoThreads, pool: RegisteredPool, model: bytes, pool_parts: Sequence[str]
    ) -> None:
        self._files = files
        self._threads = threads
        self._pool = pool
        self._part = part_of(pool)
        self._model = model
        self._pool_parts = pool_parts
        self._size = disk_bytes(pool.page_bytes + FOOTER_BYTES)
        self._keep: set[bytes] = set()
        self.stored: list[bool] = []
        self.counts: Counter[str] = Counter()

    @property
    def chunk_pages(self) -> int:
        """Pages to store at once."""
        share = self._files.share()
        return max(1, min(_CHUNK_PAGES, (_CHUNK_BYTES if share is None else min(_CHUNK_BYTES, share)) // self._size))

    def jobs(self, keys: list[bytes], pages: list[int], parents: list[bytes | None]) -> list[Job]:
        """Return what there is to store, of which nothing is stored so far."""
        self.stored = [False] * len(keys)
        ticks = self._files.ticks(len(keys))
        return [
            Job(i, key, key + self._model, page, None if parent is None else parent + self._model, tick)
            for i, (key, page, parent, tick) in enumerate(zip(keys, pages, parents, ticks, strict=True))
        ]

    def store(self, jobs: list[Job]) -> bool:
        """Store a chunk; return whether anything was written. A failure of the medium is raised once all is settled."""
        todo = self._without_orphans(self._without_present(jobs))
        self._keep.update(page for job in jobs for page in (job.page, job.parent) if page is not None)
        if not todo:
            return False
        reserved = 0
        try:
            if not self._files.reserve(self._size, len(todo), self._keep):
                self.counts["no_room"] += len(todo)
                return False
            reserved = len(todo) * self._size
            failure = self._write_and_publish(todo)
        finally:
            self._files.release(reserved)
        if failure is not None:
            raise failure
        return True

    def settled(self, jobs: list[Job]) -> list[bool]:
        """Return what is stored as the call ends: other calls and other processes may have evicted some of it."""
        names = [job.page for job in jobs if self.stored[job.position]]
        there = {name: self._is_there(name) for name in names}
        # Times after those of the files, or these would count as another process's use.
        self._files.note(names, self._part, list(map(there.__getitem__, names)))
        return [there.get(job.page, False) for job in jobs]

    def _is_there(self, page: bytes) -> bool:
        return self._files.size(page, self._part) == self._pool.page_bytes + FOOTER_BYTES

    def _without_present(self, jobs: list[Job]) -> list[Job]:
        self._files.touch((job.parent, job.tick + 1) for job in jobs if job.parent is not None)
        todo = []
        for job in jobs:
            if not self._is_there(job.page):
                todo.append(job)
                continue
            self.stored[job.position] = True
            self.counts["present"] += 1
            self._files.add(job.page, self._part, self._size, job.parent, job.tick, fresh=False)
        return todo

    def _without_orphans(self, jobs: list[Job]) -> list[Job]:
        """Refuse pages whose parent is not stored before room is made for them."""
        known = {job.page for job in jobs}
        kept = [job for job in jobs if job.parent is None or job.parent in known or self._is_stored(job.parent)]
        self.counts["orphans"] += len(jobs) - len(kept)
        return kept

    def _is_stored(self, page: bytes) -> bool:
        """Return whether any part of a page is on disk, from this process or another; true while the lock is held."""
        return any(self._files.size(page, part) is not None for part in (*self._files.parts(page), *self._pool_parts))

    def _write_and_publish(self, jobs: list[Job]) -> OSError | None:
        """Write pages and give them their names; where the disk is full, once more after eviction. Return a failure."""
        written: dict[int, str | OSError] = {}
        begun: list[str] = []
        directory = self._files.directory
        try:
            with directory.locked(exclusive=False):
                self._write_all(jobs, written, begun)
                full = sum(isinstance(result, OSError) and result.errno in _FULL for result in written.values())
                if not full:
                    return self._publish(jobs, written)
            warn_once(
                f"storage {directory.root}: the disk or this user's quota is full; pages are evicted to store others"
            )
            self._files.make_room_on_disk(self._size, full, self._keep)
            with directory.locked(exclusive=False):
                self._write_all(jobs, written, begun)
                return self._publish(jobs, written)
        except BaseException:
            for path in begun:  # those that are published have another name
                remove_file(path)
            raise

    def _write_all(self, jobs: list[Job], written: dict[int, str | OSError], begun: list[str]) -> None:
        """Write what is not written yet under temporary names; a path or an error for each position."""
        left = [job for job in jobs if not isinstance(written.get(job.position), str)]
        worth = self._pool.page_bytes if self._pool.page_bytes >= _SPREAD_WRITES else 0
        results = self._threads.map(lambda job: self._write(job, begun), left, worth, waits=True)
        for job, result in zip(left, results, strict=True):
            if isinstance(result, OSError) and result.errno in NOT_OF_THE_FILE:
                result = self._write(job, begun)  # alone it may get what several at once did not
            written[job.position] = result

    def _write(self, job: Job, begun: list[str]) -> str | OSError:
        spare = self._files.take_spare()
        path = self._files.temporary_path(job.page, self._part) if spare is None else spare
        begun.append(path)
        try:
            # Its time is the page's place in the order of use, not the moment a busy disk was done with it.
            write_page(
                path,
                self._pool.memory(job.host_page),
                key=job.key,
                parent=None if job.parent is None else job.parent[: -len(self._model)],
                fingerprint=self._pool.digest,
                touched=job.tick,
                over=spare is not None,
            )
        except OSError as error:
            return error
        return path

    def _publish(self, jobs: list[Job], written: dict[int, str | OSError]) -> OSError | None:
        """Give written pages their names in order, so that no page is visible before its head; return a failure."""
        failure: OSError | None = None
        published: set[bytes] = set()
        for job in jobs:
            result = written[job.position]
            if isinstance(result, OSError):
                failure = failure or result
                continue
            if job.parent is not None and job.parent not in published and not self._is_stored(job.parent):
                self.counts["orphans"] += 1
                remove_file(result)
                continue
            path = self._files.path(job.page, self._part)
            try:
                os.rename(result, path)
            except OSError as error:
                remove_file(result)
                if is_blocked(path):  # of this page alone
                    self.counts["write_errors"] += 1
                    where = f"storage {self._files.root}: {path}"
                    warn_once(f"{where} is not a file, so its page cannot be stored; remove it")
                else:
                    failure = failure or error
                continue
            published.add(job.page)
            self.stored[job.position] = True
            self._files.add(job.page, self._part, self._size, job.parent, job.tick, fresh=True)
            self.counts["stored"] += 1
            self.counts["bytes_written"] += self._pool.page_bytes
        return failure
