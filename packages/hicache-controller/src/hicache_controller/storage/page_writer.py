"""PageWriter: stores the pages of one call as files, heads before tails, a chunk at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_kernels.probe import warn_once

from .base import RegisteredPool
from .directory import MODEL_BYTES, disk_bytes, is_blocked, remove_file
from .file_pages import FilePages, part_of
from .io_threads import IoThreads
from .page_file import FOOTER_BYTES, PageId, write_page

_CHUNK_BYTES = 64 << 20  # written between two looks at what others write
_CHUNK_PAGES = 256
_SPREAD_WRITES = 64 << 10  # creating smaller files is slower in several threads: they wait for the file system's locks
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_OF_THE_FILE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFAULT, errno.EINTR, errno.EAGAIN})
"""Errors that are of the process or the system, and say nothing of the file."""


@dataclass(slots=True)
class Job:
    """One page to store: its name and its parent's in the index, its host page and its time; and what became of it."""

    page: bytes
    parent: bytes | None
    host_page: int
    tick: int
    path: str | None = None  # of what is being written
    error: OSError | None = None
    written: bool = False
    stored: bool = False


@dataclass(eq=False)
class PageWriter:
    """The pages of one call of ``store_pages``, which do not make room for each other.

    Parameters
    ----------
    files, threads
        The directory, and what writes.
    pool
        Whose pages they are.
    pool_parts
        The parts of all pools, under any of which a page's parent may be stored.
    count
        Adds to the storage's counters.
    """

    files: FilePages
    threads: IoThreads
    pool: RegisteredPool
    pool_parts: Sequence[str]
    count: Callable[..., None]

    def __post_init__(self) -> None:
        self._part = part_of(self.pool)
        self._size = disk_bytes(self.pool.page_bytes + FOOTER_BYTES)
        self._keep: set[bytes] = set()

    @property
    def chunk_pages(self) -> int:
        """Pages to store at once."""
        return max(1, min(_CHUNK_PAGES, min(_CHUNK_BYTES, self.files.share) // self._size))

    def store(self, jobs: list[Job]) -> bool:
        """Store a chunk; return whether anything was written. A failure of the medium is raised once all is settled."""
        todo = self._without_orphans(self._without_present(jobs))
        self._keep.update(page for job in jobs for page in (job.page, job.parent) if page is not None)
        if not todo:
            return False
        with self.files.room_for(self._size, len(todo), self._keep) as there_is_room:
            if there_is_room:
                self._write_and_publish(todo)
            else:
                self.count(no_room=len(todo))
        return there_is_room

    def settled(self, jobs: list[Job]) -> list[bool]:
        """Return what is stored as the call ends: other calls and other processes may have evicted some of it."""
        there = {job.page: self.files.has(job.page, self._part, self.pool.page_bytes) for job in jobs if job.stored}
        # Times after those of the files, or these would count as another process's use.
        self.files.note(list(there), self._part, list(there.values()))
        return [there.get(job.page, False) for job in jobs]

    def _without_present(self, jobs: list[Job]) -> list[Job]:
        self.files.touch((job.parent, job.tick + 1) for job in jobs if job.parent is not None)
        for job in jobs:
            job.stored = self.files.has(job.page, self._part, self.pool.page_bytes)
            if job.stored:
                self.files.add(job.page, self._part, self._size, job.parent, job.tick, fresh=False)
        todo = [job for job in jobs if not job.stored]
        self.count(present=len(jobs) - len(todo))
        return todo

    def _without_orphans(self, jobs: list[Job]) -> list[Job]:
        """Refuse pages whose parent is not stored before room is made for them."""
        known = {job.page for job in jobs}
        kept = [job for job in jobs if job.parent in known or self._is_stored(job.parent)]
        self.count(orphans=len(jobs) - len(kept))
        return kept

    def _is_stored(self, page: bytes | None) -> bool:
        """Return whether any part of a page is on disk, from this process or another; true while the lock is held.

        What comes before a first page, None, always is.
        """
        if page is None:
            return True
        return any(self.files.size(page, part) is not None for part in (*self.files.parts(page), *self.pool_parts))

    def _write_and_publish(self, jobs: list[Job]) -> None:
        """Write pages and give them their names; where the disk is full, once more after eviction."""
        directory = self.files.directory
        try:
            with directory.locked(exclusive=False):
                self._write_all(jobs)
                full = sum(job.error is not None and job.error.errno in _FULL for job in jobs)
                if not full:
                    self._publish(jobs)
                    return
            warn_once(
                f"storage {directory.root}: the disk or this user's quota is full; pages are evicted to store others"
            )
            self.files.make_room_on_disk(self._size, full, self._keep)
            with directory.locked(exclusive=False):
                self._write_all(jobs)
                self._publish(jobs)
        except BaseException:
            for job in jobs:
                if job.path is not None:  # those that are published have another name
                    remove_file(job.path)
            raise

    def _write_all(self, jobs: list[Job]) -> None:
        """Write what is not written yet under temporary names."""
        left = [job for job in jobs if not job.written]
        worth = self.pool.page_bytes if self.pool.page_bytes >= _SPREAD_WRITES else 0
        self.threads.map(self._write, left, worth, waits=True)
        for job in left:
            if job.error is not None and job.error.errno in NOT_OF_THE_FILE:
                self._write(job)  # alone it may get what several at once did not

    def _write(self, job: Job) -> None:
        spare = self.files.take_spare()
        job.path = spare or self.files.directory.temporary_path(self.files.path(job.page, self._part))
        try:
            # Its time is the page's place in the order of use, not the moment a busy disk was done with it.
            write_page(
                job.path,
                self.pool.memory(job.host_page),
                PageId(job.page[:-MODEL_BYTES], self.pool.digest, self.pool.page_bytes),
                parent=None if job.parent is None else job.parent[:-MODEL_BYTES],
                touched=job.tick,
                over=spare is not None,
            )
            job.written, job.error = True, None
        except OSError as error:
            job.error = error

    def _publish(self, jobs: list[Job]) -> None:
        """Give written pages their names in order, so that no page is visible before its head; raise what failed."""
        failure: OSError | None = None
        published: set[bytes | None] = set()
        for job in jobs:
            if job.path is None or not job.written:
                failure = failure or job.error
                continue
            if job.parent not in published and not self._is_stored(job.parent):
                self.count(orphans=1)
                remove_file(job.path)
                continue
            path = self.files.path(job.page, self._part)
            try:
                os.rename(job.path, path)
            except OSError as error:
                remove_file(job.path)
                if is_blocked(path):  # of this page alone
                    self.count(write_errors=1)
                    where = f"storage {self.files.directory.root}: {path}"
                    warn_once(f"{where} is not a file, so its page cannot be stored; remove it")
                else:
                    failure = failure or error
                continue
            published.add(job.page)
            job.stored = True
            self.files.add(job.page, self._part, self._size, job.parent, job.tick, fresh=True)
        stored = sum(job.stored for job in jobs)
        self.count(stored=stored, bytes_written=stored * self.pool.page_bytes)
        if failure is not None:
            raise failure
