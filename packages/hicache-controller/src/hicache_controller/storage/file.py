"""The default storage backend: pages as files of one directory, which several processes may share."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hicache_kernels.validation import whole
from hicache_pools.host_memory import MAX_THREADS

from .backoff import Backoff
from .base import HiCacheStorage, RegisteredPool, StoragePool, StorageStats
from .directory import (
    StorageDirectory,
    disk_bytes,
    file_size,
    is_blocked,
    last_use,
    remove_file,
    remove_page,
    renew,
)
from .fingerprint import Fingerprint
from .io_threads import IoThreads
from .page_cache import is_cached
from .page_file import FOOTER_BYTES, VERSION, Outcome, PageRead, write_page
from .page_index import PageEntry, PageIndex
from .page_reader import PageReader, PageRequest
from .running_calls import RunningCalls

logger = logging.getLogger(__name__)

_READ_PAGES = 1024  # of one compiled call
_CHUNK_BYTES = 64 << 20  # written between two looks at what others write
_CHUNK_PAGES = 256
_SPREAD_WRITES = 64 << 10  # creating smaller files is slower in several threads: they wait for the file system's locks
_SHARE = 32  # with other writers, a capacity / 32 is what one may write before it looks at what the others did; less
# with more than 16 others, or their shares would leave no room
_THREADS = 8  # disks want several requests at once, whatever the number of cores
_CPU_THREADS = 16  # a core copies and sums up 3 to 4 GB/s out of the page cache, 16 of them 37 (on a GPU host)
# What these say is of the process or the system, and nothing of the file.
_NOT_OF_THE_FILE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFAULT, errno.EINTR, errno.EAGAIN})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_TOUCH_NS = 60 * 10**9  # a file's time is renewed at most this often, so that reading does not turn into writing


class _Job(NamedTuple):
    """One page to store: position in the batch, name in the index, host page, its parent's name, and its time."""

    position: int
    key: bytes
    page: bytes
    host_page: int
    parent: bytes | None
    tick: int


class FileStorage(HiCacheStorage):
    """Pages as files: atomic, checked, evicted least recently used first and tails before heads.

    Parameters
    ----------
    directory
        Created with mode 0700 where it does not exist. Only files with a page's name are ever touched. It and what is
        in it must belong to this user or root; it must not be writable by everybody, and what is in it by nobody else.
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
        self._model = fingerprint.digest()[:8]
        self._capacity = capacity_bytes
        self._root = os.path.abspath(directory)
        self._mutex = threading.Lock()  # index, counts, and what is reserved; never held while waiting for a lock
        self._index = PageIndex()
        self._counts: Counter[str] = Counter()
        self._reserved = 0
        self._spares: list[str] = []
        self._unseen = 0
        self._presence = (0, 0)
        self._tick = 0
        self._reads, self._writes = Backoff(clock), Backoff(clock)
        self._lost = False
        self._reopening = threading.Lock()
        self._calls = RunningCalls()  # that move or remove pages
        with contextlib.ExitStack() as undo:
            try:
                self._directory = StorageDirectory(self._root)
                undo.callback(self._directory.close)
                self._scan()
                self._reserve(0, 0, set())
            except OSError as error:
                why = f"directory is {self._root!r}, which cannot be used as storage: {error.strerror or error}"
                raise type(error)(error.errno, why, error.filename) from error
            self._threads = IoThreads(threads or _THREADS, threads or _CPU_THREADS)
            self._reader = PageReader(self._threads, os.geteuid())
            undo.pop_all()

    def page_path(self, key: bytes, name: str = "kv") -> str:
        """Path of the file that keeps a key's page of pool ``name``, whether it exists or not."""
        return self._path(self._pool(name), self._keys([key])[0] + self._model)

    def clear(self) -> None:
        """Remove every page of this fingerprint; pages of other models and ranks stay."""
        self._check_open()
        try:
            with self._calls.one(), self._directory.locked(exclusive=True):
                self._scan()
                with self._mutex:
                    for entry in [e for e in self._index if e.key.endswith(self._model)]:
                        self._unlink(entry, [part for part, _ in entry.parts])
        except OSError as error:
            self._failed(self._writes, "write_errors", "clear", error)
        finally:
            self.report_removed()

    def stats(self) -> StorageStats:
        """Return counters since the storage was opened; ``pages`` and ``bytes`` are what it knows of the directory."""
        with self._mutex:
            return StorageStats(
                pages=len(self._index),
                bytes=self._index.total_bytes,
                capacity_bytes=self._capacity,
                backing_off=self._reads.active or self._writes.active,
                compiled_reads=self._reader.compiled,
                **self._counts,
            )

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` where the index contradicts itself."""
        with self._mutex:
            self._index.check_integrity()

    def close(self) -> None:
        """Wait for calls of other threads that load, store or clear, then leave the directory. Idempotent.

        Nothing reads or writes a pool's memory any more once this has returned.
        """
        super().close()
        if self._calls.end():
            self._threads.shutdown()
            self._directory.close()

    def format_digest(self, pool: StoragePool) -> bytes:
        """Return the fingerprint's digest of the pool's format."""
        return self._fingerprint.pool_digest(pool.geometry)

    @staticmethod
    def _part(pool: RegisteredPool) -> str:
        return f"{pool.name}-{pool.digest[:4].hex()}"

    def _path(self, pool: RegisteredPool, page: bytes) -> str:
        return self._directory.page_path(page, self._part(pool))

    def _is_there(self, pool: RegisteredPool, page: bytes) -> bool:
        return file_size(self._path(pool, page)) == pool.page_bytes + FOOTER_BYTES

    # Reading

    def find_pages(self, pool: RegisteredPool, keys: list[bytes], *, leading: bool) -> list[bool]:
        """Return for each key whether its page is there."""
        if self._reads.active:
            self._count("skipped", len(keys))
            return [False] * len(keys)
        present = []
        for key in keys:
            present.append(self._is_there(pool, key + self._model))
            if leading and not present[-1]:
                break
        with self._mutex:
            for key, there, tick in zip(keys, present, self._ticks(len(keys)), strict=False):
                if there:
                    self._index.touch(key + self._model, tick)
                else:
                    self._forget_if_gone(key + self._model, self._part(pool))
        return present

    def load_pages(self, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> list[bool]:
        """Fill pages from files; remove files that are not the pages they should be."""
        with self._calls.one():
            return self._load_from_files(pool, keys, pages)

    def _load_from_files(self, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> list[bool]:
        if self._reads.active:
            self._count("skipped", len(keys))
            return [False] * len(keys)
        # Pages that are read together were mostly written together.
        part = self._part(pool)
        ends = {self._directory.page_path(key + self._model, part) for key in (keys[0], keys[-1])}
        waits = not all(is_cached(path) for path in ends)
        outcomes: list[Outcome] = []
        for start in range(0, len(keys), _READ_PAGES):
            end = start + _READ_PAGES
            outcomes += self._read(pool, keys[start:end], pages[start:end], waits)
        with self._mutex:
            for key, outcome, tick in zip(keys, outcomes, self._ticks(len(keys)), strict=True):
                if outcome is Outcome.HIT:
                    # A page another process stored gets its parent with the next scan.
                    self._index.touch(key + self._model, tick)
                elif file_size(self._directory.page_path(key + self._model, part)) is None:
                    self._index.remove_part(key + self._model, part)
                    self.note_removed((key,), pool.name)
            self._counts.update({outcome.value: count for outcome, count in Counter(outcomes).items()})
            hits = outcomes.count(Outcome.HIT)
            self._counts["misses"] += len(keys) - hits - outcomes.count(Outcome.MISSING)
            self._counts["bytes_read"] += hits * pool.page_bytes
        if hits and self._reads.succeeded():
            logger.info("storage %s: reading works again", self._root)
        return [outcome is Outcome.HIT for outcome in outcomes]

    def _read(self, pool: RegisteredPool, keys: list[bytes], pages: list[int], waits: bool) -> list[Outcome]:
        part = self._part(pool)
        requests = [
            PageRequest(
                self._directory.page_path(key + self._model, part), functools.partial(_page_memory, pool, page), key
            )
            for key, page in zip(keys, pages, strict=True)
        ]
        found = self._reader.read(requests, fingerprint=pool.digest, page_bytes=pool.page_bytes, waits=waits)
        now = time.time_ns()
        return [self._settled(request.path, page, now) for request, page in zip(requests, found, strict=True)]

    def _settled(self, path: str, found: PageRead | OSError, now: int) -> Outcome:
        """Renew a page that is used, remove one that nobody can use, and tell what it is."""
        if isinstance(found, OSError):
            self._count("read_errors")
            if found.errno in _NOT_OF_THE_FILE or not (remove_file(path) or is_blocked(path)):
                self._failed(self._reads, None, "read", found)
            return Outcome.MISSING
        if found.outcome is Outcome.HIT:
            if now - found.touched > _TOUCH_NS:
                renew(path)
        elif found.outcome is not Outcome.MISSING:
            logger.debug("storage %s: page %s is %s and removed", self._root, path, found.outcome.value)
            remove_file(path)
        return found.outcome

    # Writing

    def store_pages(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: list[bytes | None]
    ) -> list[bool]:
        """Store pages; return for each key whether its page is stored."""
        with self._calls.one():
            return self._store_to_files(pool, keys, pages, parents)

    def _store_to_files(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: list[bytes | None]
    ) -> list[bool]:
        stored = [False] * len(keys)
        size = disk_bytes(pool.page_bytes + FOOTER_BYTES)
        most = _CHUNK_BYTES
        if self._capacity is not None:
            most = min(most, self._share(self._capacity, self._presence[0]))
        step = max(1, min(_CHUNK_PAGES, most // size))
        with self._mutex:
            ticks = self._ticks(len(keys))
        jobs = [
            _Job(i, key, key + self._model, page, None if parent is None else parent + self._model, tick)
            for i, (key, page, parent, tick) in enumerate(zip(keys, pages, parents, ticks, strict=True))
        ]
        keep: set[bytes] = set()  # pages of this call do not make room for each other
        for start in range(0, len(jobs), step):
            if self._writes.active:
                self._count("skipped", len(jobs) - start)
                break
            try:
                self._reopen_if_lost()
                self._store_chunk(pool, size, jobs[start : start + step], stored, keep)
            except OSError as error:
                self._failed(self._writes, "write_errors", "store", error)
                break
        done = [job for job in jobs if stored[job.position]]
        for job in done:  # other calls and other processes may have evicted it meanwhile
            stored[job.position] = self._is_there(pool, job.page)
        with self._mutex:  # times after those of the files, or these would count as another process's use
            for job, tick in zip(done, self._ticks(len(done)), strict=True):
                if stored[job.position]:
                    self._index.touch(job.page, tick)
                else:
                    self._forget_if_gone(job.page, self._part(pool))
        return stored

    def _store_chunk(
        self, pool: RegisteredPool, size: int, jobs: list[_Job], stored: list[bool], keep: set[bytes]
    ) -> None:
        """Store pages of one chunk and mark them; a failure of the medium is raised once the rest is settled."""
        todo = self._without_orphans(self._without_present(pool, size, jobs, stored))
        keep.update(page for job in jobs for page in (job.page, job.parent) if page is not None)
        if not todo:
            return
        try:
            if not self._reserve(size, len(todo), keep):
                self._count("no_room", len(todo))
                return
            try:
                failure = self._write_and_publish(pool, size, todo, stored, keep)
            finally:
                with self._mutex:
                    self._reserved -= len(todo) * size
        finally:
            self._remove_spares()
        if failure is not None:
            raise failure
        if self._writes.succeeded():
            logger.info("storage %s: writing works again", self._root)

    def _write_and_publish(
        self, pool: RegisteredPool, size: int, jobs: list[_Job], stored: list[bool], keep: set[bytes]
    ) -> OSError | None:
        """Write pages and give them their names; where the disk is full, once more after eviction. Return a failure."""
        written: dict[int, str | OSError] = {}
        begun: list[str] = []
        try:
            with self._directory.locked(exclusive=False):
                self._write_all(pool, jobs, written, begun)
                full = sum(isinstance(result, OSError) and result.errno in _FULL for result in written.values())
                if not full:
                    return self._publish(pool, size, jobs, written, stored)
            self._make_room_on_disk(size, full, keep)
            with self._directory.locked(exclusive=False):
                self._write_all(pool, jobs, written, begun)
                return self._publish(pool, size, jobs, written, stored)
        except BaseException:
            for path in begun:  # those that are published have another name
                remove_file(path)
            raise

    def _write_all(
        self, pool: RegisteredPool, jobs: list[_Job], written: dict[int, str | OSError], begun: list[str]
    ) -> None:
        """Write what is not written yet under temporary names; a path or an error for each position."""
        left = [job for job in jobs if not isinstance(written.get(job.position), str)]
        worth = pool.page_bytes if pool.page_bytes >= _SPREAD_WRITES else 0
        results = self._threads.map(lambda job: self._write(pool, job, begun), left, worth, waits=True)
        for job, result in zip(left, results, strict=True):
            if isinstance(result, OSError) and result.errno in _NOT_OF_THE_FILE:
                result = self._write(pool, job, begun)  # alone it may get what several at once did not
            written[job.position] = result

    def _remove_spares(self) -> None:
        with self._mutex:
            left, self._spares = self._spares, []
        for spare in left:
            remove_file(spare)

    def _without_present(self, pool: RegisteredPool, size: int, jobs: list[_Job], stored: list[bool]) -> list[_Job]:
        part = self._part(pool)
        todo = []
        with self._mutex:
            for job in jobs:
                if job.parent is not None:
                    self._index.touch(job.parent, job.tick + 1)
        for job in jobs:
            if not self._is_there(pool, job.page):
                todo.append(job)
                continue
            stored[job.position] = True
            with self._mutex:
                self._counts["present"] += 1
                self._index.add(job.page, part, size, job.parent, job.tick)
        return todo

    def _without_orphans(self, jobs: list[_Job]) -> list[_Job]:
        """Refuse pages whose parent is not stored before room is made for them."""
        known = {job.page for job in jobs}
        kept = [job for job in jobs if job.parent is None or job.parent in known or self._is_stored(job.parent)]
        self._count("orphans", len(jobs) - len(kept))
        return kept

    def _write(self, pool: RegisteredPool, job: _Job, begun: list[str]) -> str | OSError:
        with self._mutex:
            spare = self._spares.pop() if self._spares else None
        path = self._directory.temporary_path(self._path(pool, job.page)) if spare is None else spare
        begun.append(path)
        parent = None if job.parent is None else job.parent[: -len(self._model)]
        views = _page_memory(pool, job.host_page)
        try:
            # Its time is the page's place in the order of use, not the moment a busy disk was done with it.
            write_page(
                path,
                views,
                key=job.key,
                parent=parent,
                fingerprint=pool.digest,
                touched=job.tick,
                over=spare is not None,
            )
        except OSError as error:
            return error
        return path

    def _publish(
        self,
        pool: RegisteredPool,
        size: int,
        jobs: list[_Job],
        written: dict[int, str | OSError],
        stored: list[bool],
    ) -> OSError | None:
        """Give written pages their names in order, so that no page is visible before its head; return a failure."""
        part = self._part(pool)
        failure: OSError | None = None
        published: set[bytes] = set()
        for job in jobs:
            result = written[job.position]
            if isinstance(result, OSError):
                failure = failure or result
                continue
            if job.parent is not None and job.parent not in published and not self._is_stored(job.parent):
                self._count("orphans")
                remove_file(result)
                continue
            path = self._directory.page_path(job.page, part)
            try:
                os.rename(result, path)
            except OSError as error:
                remove_file(result)
                if is_blocked(path):  # of this page alone
                    self._count("write_errors")
                    _warn_once(f"storage {self._root}: {path} is not a file, so its page cannot be stored; remove it")
                else:
                    failure = failure or error
                continue
            published.add(job.page)
            stored[job.position] = True
            with self._mutex:
                self._index.add(job.page, part, size, job.parent, job.tick)
                self._unseen += size
                self._counts["stored"] += 1
                self._counts["bytes_written"] += pool.page_bytes
        return failure

    def _is_stored(self, page: bytes) -> bool:
        """Whether any part of a page is on disk, from this process or another; true until the lock is given back."""
        with self._mutex:
            entry = self._index.get(page)
            parts = [] if entry is None else [part for part, _ in entry.parts]
        parts += [self._part(pool) for pool in self._pools.values()]
        return any(file_size(self._directory.page_path(page, part)) is not None for part in parts)

    # Room

    def _reserve(self, size: int, count: int, keep: set[bytes]) -> bool:
        """Reserve files, evicting what is in the way but not ``keep``; return whether there is room."""
        need = size * count
        if self._capacity is None:
            with self._mutex:
                self._reserved += need
            return True
        presence = self._directory.presence()
        share = self._share(self._capacity, presence[0])
        limit = self._capacity - presence[0] * share
        with self._mutex:
            crowded = presence != self._presence or (presence[0] > 0 and self._unseen + need > share)
            if not crowded and self._index.total_bytes + self._reserved + need <= limit:
                self._reserved += need
                return True
        with self._directory.locked(exclusive=True):
            if presence[0] > 0 or presence != self._presence:
                self._scan()
                share = self._share(self._capacity, self._presence[0])
                limit = self._capacity - self._presence[0] * share
            if need > limit:
                return False
            spare = share if self._presence[0] > 0 else 0  # so that the next look at the others is not at once
            with self._mutex:
                if self._index.total_bytes + self._reserved + need > limit:
                    self._evict(limit - need - self._reserved - spare, keep, size, count)
                if self._index.total_bytes + self._reserved + need > limit:
                    return False
                self._reserved += need
                return True

    def _make_room_on_disk(self, size: int, count: int, keep: set[bytes]) -> None:
        """Evict as much as ``count`` files take that the disk had no room for, but not ``keep``."""
        _warn_once(f"storage {self._root}: the disk or this user's quota is full; pages are evicted to store others")
        presence = self._directory.presence()
        with self._directory.locked(exclusive=True):
            if presence[0] > 0 or presence != self._presence:
                self._scan()
            with self._mutex:
                target = self._index.total_bytes - size * count
                if target >= 0:  # less than that would not be enough
                    self._evict(target, keep, size, count)

    @staticmethod
    def _share(capacity: int, others: int) -> int:
        """Bytes that each of ``others`` writers, and this one, may write unseen by the rest: together about half."""
        return capacity // max(_SHARE, 2 * others)

    def _evict(self, target: int, keep: set[bytes], size: int, count: int) -> None:
        """Remove leaves until at most ``target`` bytes are left; lock and mutex are held.

        Of their files up to ``count`` that take ``size`` bytes become spares, which new pages are written over.
        """
        part_path = self._directory.page_path
        while self._index.total_bytes > target:
            entry = self._index.oldest_leaf(keep)
            if entry is None:
                return
            touched = max((last_use(part_path(entry.key, part)) for part, _ in entry.parts), default=0)
            if touched > entry.tick:  # another process has used it since
                self._index.touch(entry.key, touched)
                continue
            left = []
            for part, part_size in entry.parts:
                path = part_path(entry.key, part)
                if part_size != size or len(self._spares) >= count or file_size(path) is None:
                    left.append(part)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    self._spares.append(self._renamed(path, self._directory.temporary_path(path)))
            self._unlink(entry, left)
            self._counts["evicted"] += 1

    @staticmethod
    def _renamed(path: str, to: str) -> str:
        os.rename(path, to)
        return to

    def _unlink(self, entry: PageEntry, parts: Sequence[str]) -> None:
        """Remove a page, of whose files only those of ``parts`` are there still; lock and mutex are held."""
        for part in parts:
            remove_page(self._directory.page_path(entry.key, part))
        self._index.remove(entry.key)
        for part, _ in entry.parts:
            self._note_part_removed(entry.key, part)

    def _forget_if_gone(self, page: bytes, part: str) -> None:
        """Note what another process has removed; mutex held."""
        entry = self._index.get(page)
        if entry is None or entry.part_bytes(part) is None:
            return
        if file_size(self._directory.page_path(page, part)) is None:
            self._index.remove_part(page, part)
            self._note_part_removed(page, part)

    def _note_part_removed(self, page: bytes, part: str) -> None:
        """Note a part that is gone, if it is one of this model and of a pool as it is registered here."""
        pool = self._pools.get(part.rpartition("-")[0])
        if pool is not None and self._part(pool) == part and page.endswith(self._model):
            self.note_removed((page[: -len(self._model)],), pool.name)

    def _scan(self) -> None:
        """Make the index agree with the directory: read what is new, drop what is gone."""
        self._directory.remove_dead()
        presence = self._directory.presence()
        with self._mutex:
            gone = {(entry.key, part) for entry in self._index for part, _ in entry.parts}
        found = []
        for path, page, part in self._directory.names():
            if (page, part) in gone:
                gone.discard((page, part))
            else:
                found.append((path, self._directory.look(path, page, part)))
        with self._mutex:
            for page, part in gone:
                self._forget_if_gone(page, part)
            for path, item in found:
                if item is None:
                    continue
                if item.version is not None and item.version < VERSION:
                    remove_file(path)
                    self._counts["old_format"] += 1
                else:
                    self._index.add(item.page, item.part, item.size, item.parent, item.touched)
            self._unseen = 0
            self._presence = presence

    # Faults

    def _reopen_if_lost(self) -> None:
        """Come back to a directory that was removed or replaced."""
        with self._reopening:
            if not self._lost:
                return
            fresh = StorageDirectory(self._root)
            old, self._directory = self._directory, fresh
            old.close()
            with self._mutex:
                known = [(entry.key, part) for entry in self._index for part, _ in entry.parts]
                self._index.clear()
            self._scan()
            with self._mutex:
                for page, part in known:
                    entry = self._index.get(page)
                    if entry is None or entry.part_bytes(part) is None:
                        self._note_part_removed(page, part)
            self._lost = False

    def _failed(self, backoff: Backoff, counter: str | None, what: str, error: OSError) -> None:
        if counter is not None:
            self._count(counter)
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
            self._lost = True
        if backoff.failed():
            logger.warning("storage %s: cannot %s (%s); going on without it and trying again", self._root, what, error)

    def _count(self, counter: str, by: int = 1) -> None:
        with self._mutex:
            self._counts[counter] += by

    def _ticks(self, count: int) -> range:
        """Return falling times in nanoseconds, all later than any before, comparable with the files' times; mutex held.

        The head of a batch gets the latest, so that it outlives the tail even where no parents are known.
        """
        before = self._tick
        self._tick = max(before, time.time_ns()) + count
        return range(self._tick, self._tick - count, -1)


@functools.lru_cache(maxsize=1024)
def _warn_once(message: str) -> None:
    logger.warning(message)


def _page_memory(pool: RegisteredPool, page: int) -> Sequence[memoryview]:
    return pool.pool.page_memory(page) if pool.page_bytes else ()
