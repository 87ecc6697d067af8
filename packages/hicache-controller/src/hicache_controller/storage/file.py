"""The default storage backend: pages as files of one directory, which several processes may share."""

from __future__ import annotations

import errno
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable

from hicache_kernels.validation import whole
from hicache_pools.host_memory import MAX_THREADS

from .backoff import Backoff
from .base import HiCacheStorage, RegisteredPool, StoragePool, StorageStats
from .directory import MODEL_BYTES, remove_file, renew
from .file_pages import FilePages, part_of
from .fingerprint import Fingerprint
from .io_threads import IoThreads
from .page_file import Outcome, PageId, PageRead
from .page_reader import PageRequest, compiled_reads, read_pages
from .page_writer import NOT_OF_THE_FILE, Job, PageWriter
from .running_calls import RunningCalls

logger = logging.getLogger(__name__)

_READ_PAGES = 1024  # of one compiled call
_THREADS = 8  # disks want several requests at once, whatever the number of cores
_CPU_THREADS = 16  # a core copies and sums up 3 to 4 GB/s out of the page cache, 16 of them 37 (on a GPU host)
_TOUCH_NS = 60 * 10**9  # a file's time is renewed at most this often, so that reading does not turn into writing


class FileStorage(HiCacheStorage):
    """Pages as files: atomic, checked, evicted least recently used first and tails before heads.

    Parameters
    ----------
    directory
        Created with mode 0700 where it does not exist. Only files with a page's name are ever touched. It and what is
        in it must belong to this user or root; other users must not be able to write it, nor what is in it.
    fingerprint
        Model and rank. Processes of other models and ranks may share the directory and its capacity.
    capacity_bytes
        Most bytes of the whole directory, in blocks of 4 KiB; None for no limit but that of the disk. With other
        writers present each keeps back 1/32 of it for each of them. Where the disk is full before, pages are evicted.
    threads
        Threads that move pages; the GIL is free while they read, write and wait. Unless given, 8, and up to 16 for
        pages in the page cache, but no more than CPUs there.
    clock
        Seconds that grow; for tests.

    Raises
    ------
    ValueError
        Where the capacity or the number of threads is not positive.
    OSError
        Where the directory cannot be created, written or listed, or other users can write it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        fingerprint: Fingerprint,
        capacity_bytes: int | None = None,
        threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if capacity_bytes is not None:
            whole("capacity_bytes", capacity_bytes)
        if threads is not None:
            whole("threads", threads, most=MAX_THREADS)
        self._fingerprint = fingerprint
        self._model = fingerprint.digest()[:MODEL_BYTES]
        self._capacity = capacity_bytes
        self._root = os.path.abspath(directory)
        self._reads, self._writes = Backoff(clock), Backoff(clock)
        self._calls = RunningCalls()  # that move or remove pages
        self._threads = IoThreads(threads or _THREADS, threads or _CPU_THREADS)
        compiled_reads()  # starts to load them
        try:
            self._files = FilePages(self._root, capacity_bytes, self._lock, self._counts, self._note_part_removed)
        except OSError as error:
            why = f"directory is {self._root!r}, which cannot be used as storage: {error.strerror or error}"
            raise type(error)(error.errno, why, error.filename) from error

    def page_path(self, key: bytes, name: str = "kv") -> str:
        """Path of the file that keeps a key's page of pool ``name``, whether it exists or not."""
        return self._files.path(self._keys([key])[0] + self._model, part_of(self._pool(name)))

    def clear(self) -> None:
        """Remove every page of this fingerprint; pages of other models and ranks stay."""
        self.check_open()
        try:
            with self._calls.one(), self._files.directory.locked(exclusive=True):
                self._files.remove(self._model)
        except OSError as error:
            self._count(write_errors=1)
            self._failed(self._writes, "clear", error)
        finally:
            self.report_removed()

    def stats(self) -> StorageStats:
        """Return counters since the storage was opened; ``pages`` and ``bytes`` are what it knows of the directory."""
        with self._lock:
            return StorageStats(
                pages=len(self._files.index),
                bytes=self._files.index.total_bytes,
                capacity_bytes=self._capacity,
                backing_off=self._reads.active or self._writes.active,
                compiled_reads=compiled_reads(),
                **self._counts,
            )

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` where the index contradicts itself."""
        with self._lock:
            self._files.index.check_integrity()

    def close(self) -> None:
        """Wait for calls of other threads that load, store or clear, then leave the directory. Idempotent.

        Nothing reads or writes a pool's memory any more once this has returned.
        """
        super().close()
        if self._calls.end():
            self._threads.shutdown()
            self._files.directory.close()

    def format_digest(self, pool: StoragePool) -> bytes:
        """Return the fingerprint's digest of the pool's format."""
        return self._fingerprint.pool_digest(pool.geometry)

    # Reading

    def find_pages(self, pool: RegisteredPool, keys: list[bytes], *, leading: bool) -> list[bool]:
        """Return for each key whether its file is there, in full."""
        if self._reads.active:
            self._count(skipped=len(keys))
            return [False] * len(keys)
        names, part, present = [key + self._model for key in keys], part_of(pool), []
        for name in names:
            present.append(self._files.has(name, part, pool.page_bytes))
            if leading and not present[-1]:
                break
        self._files.note(names, part, present)
        return present

    def load_pages(self, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> list[bool]:
        """Fill pages from files; remove files that are not the pages they should be."""
        with self._calls.one():
            if self._reads.active:
                self._count(skipped=len(keys))
                return [False] * len(keys)
            names, part, outcomes = [key + self._model for key in keys], part_of(pool), []
            for start in range(0, len(keys), _READ_PAGES):
                these = slice(start, start + _READ_PAGES)
                requests = [
                    PageRequest(
                        self._files.path(name, part),
                        functools.partial(pool.memory, page),
                        PageId(name[:-MODEL_BYTES], pool.digest, pool.page_bytes),
                    )
                    for name, page in zip(names[these], pages[these], strict=True)
                ]
                found = zip(requests, read_pages(self._threads, requests), strict=True)
                outcomes += [self._settled(request.path, page) for request, page in found]
        loaded = [outcome is Outcome.HIT for outcome in outcomes]
        self._files.note(names, part, loaded)  # one that another process stored gets its parent with the next scan
        # Also where it was not known to be there.
        missed = [key for key, hit in zip(keys, loaded, strict=True) if not hit]
        self.note_removed((key for key in missed if self._files.size(key + self._model, part) is None), pool.name)
        hits = len(keys) - len(missed)
        counts = {outcome.value: count for outcome, count in Counter(outcomes).items()}
        self._count(**counts | {"misses": len(missed), "bytes_read": hits * pool.page_bytes})
        if hits and self._reads.succeeded():
            logger.info("storage %s: reading works again", self._root)
        return loaded

    def _settled(self, path: str, found: PageRead | OSError) -> Outcome:
        """Renew a page that is used, remove one that cannot be, and return which it is."""
        if isinstance(found, OSError):
            self._count(read_errors=1)
            if found.errno in NOT_OF_THE_FILE or remove_file(path) is not None:
                self._failed(self._reads, "read", found)
            return Outcome.MISSING
        if found.outcome is Outcome.HIT:
            if time.time_ns() - found.touched > _TOUCH_NS:
                renew(path)
        elif found.outcome is not Outcome.MISSING:
            logger.debug("storage %s: page %s is %s and removed", self._root, path, found.outcome.value)
            remove_file(path)
        return found.outcome

    # Writing

    def store_pages(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: list[bytes | None]
    ) -> list[bool]:
        """Store pages as files, as far as there is room; return for each key whether its page is stored."""
        with self._calls.one():
            parts = [part_of(each) for each in self._pools.values()]
            writer = PageWriter(self._files, self._threads, pool, parts, self._count)
            jobs = [
                Job(key + self._model, None if parent is None else parent + self._model, page, tick)
                for key, parent, page, tick in zip(keys, parents, pages, self._files.ticks(len(keys)), strict=True)
            ]
            step = writer.chunk_pages
            for start in range(0, len(jobs), step):
                if self._writes.active:
                    self._count(skipped=len(jobs) - start)
                    break
                try:
                    self._files.reopen_if_lost()
                    if writer.store(jobs[start : start + step]) and self._writes.succeeded():
                        logger.info("storage %s: writing works again", self._root)
                except OSError as error:
                    self._count(write_errors=1)
                    self._failed(self._writes, "store", error)
                    break
            return writer.settled(jobs)

    # Faults

    def _note_part_removed(self, page: bytes, part: str) -> None:
        """Note a part that is gone, if it is one of this model and of a pool as it is registered here."""
        pool = self._pools.get(part.rpartition("-")[0])
        if pool is not None and part_of(pool) == part and page.endswith(self._model):
            self.note_removed((page[:-MODEL_BYTES],), pool.name)

    def _failed(self, backoff: Backoff, what: str, error: OSError) -> None:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            self._files.lost = True
        if backoff.failed():
            logger.warning("storage %s: cannot %s (%s); going on without it and trying again", self._root, what, error)
