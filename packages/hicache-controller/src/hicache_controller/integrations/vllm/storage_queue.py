"""StorageQueue: what the scheduler asks of the workers' storages, and what came of it; no bytes, and no vLLM."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .host_blocks import BlockState, HostBlocks

MAX_ANSWERS = 1 << 18
"""Answers of storage that are remembered: a few tens of MB."""

ABSENT_SECONDS = 5.0
"""How long a block that storage does not have is not asked for again: another engine may store it meanwhile."""

BACKUP_SHARE = 0.25
"""Part of the host's pages that may wait for storage at once; what is stored beyond that stays on the host alone."""

SALT_BYTES = 8


class Task(StrEnum):
    """What a worker's storage is to do."""

    FIND = "find"
    """Say which blocks are there."""
    FETCH = "fetch"
    """Fill host pages."""
    BACKUP = "backup"
    """Store host pages."""


@dataclass(frozen=True, slots=True)
class StorageJob:
    """One call to each worker's storage.

    Attributes
    ----------
    number
        Of the job; its reports carry it.
    task
        What to do.
    keys
        Of the blocks, as storage has them.
    pages
        A host page for each, none to find.
    """

    number: int
    task: Task
    keys: tuple[bytes, ...]
    pages: tuple[int, ...] = ()


@dataclass(slots=True)
class _Running:
    """A job that not all workers have reported; ``found`` is what all of those that have say."""

    task: Task
    keys: list[bytes]
    found: list[bool]
    missing: int
    started: float
    stale: bool = False


class StorageQueue:
    """Blocks in storage, as the scheduler knows them.

    A block counts as there when every worker has its part of it. Nothing here waits: what is not known yet is pending,
    and missing once a request has waited long enough.

    Parameters
    ----------
    blocks
        The blocks of the host.
    workers
        Number of workers that report each job.
    wait_seconds
        How long a request waits for storage.
    clock
        Seconds that grow; for tests.

    Attributes
    ----------
    counts
        ``found``, ``fetched``, ``fetch_failed``, ``stored``, ``store_failed``, ``not_stored`` (for lack of room among
        the pages that may wait) and ``late`` blocks since the last :meth:`take_counts`.
    """

    def __init__(
        self,
        blocks: HostBlocks,
        *,
        workers: int = 1,
        wait_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks, self._workers, self._wait, self._clock = blocks, workers, wait_seconds, clock
        self._salt = b""
        self._number = 0
        self._running: dict[int, _Running] = {}
        self._waiting: dict[bytes, float] = {}  # blocks that are looked for or fetched, and since when
        self._there: OrderedDict[bytes, float | None] = OrderedDict()  # for blocks that are not: when that was said
        self._to_find: dict[bytes, None] = {}
        self._to_fetch: dict[bytes, int] = {}
        self._to_store: dict[bytes, int] = {}
        self._held: dict[str, dict[bytes, None]] = {}
        self.counts: Counter[str] = Counter()

    def state(self, key: bytes, request: str) -> BlockState:
        """Return whether the host has a block or may soon have it, and start what brings it from storage.

        Parameters
        ----------
        key
            Of the block.
        request
            Who asks. What is fetched stays on the host until the request loads it or ends.
        """
        state = self._blocks.state(key)
        if state is BlockState.READY:
            return state
        now = self._clock()
        since = self._waiting.get(key)
        if since is not None:
            return self._waited(key, state, now - since)
        if state is BlockState.PENDING:
            return state
        said = self._there.get(key, 0.0)
        if said is None:
            return self._fetch(key, request, now)
        if said and now - said < ABSENT_SECONDS:
            return BlockState.MISSING
        self._to_find[key] = None
        self._waiting[key] = now
        return BlockState.ASKED

    def backup(self, keys: Iterable[bytes]) -> None:
        """Have ready blocks stored, as long as not too many wait."""
        room = int(self._blocks.pages * BACKUP_SHARE) - len(self._to_store)
        room -= sum(len(job.keys) for job in self._running.values() if job.task is Task.BACKUP)
        for key in keys:
            if self._there.get(key, 0.0) is None or key in self._to_store:
                continue
            if room <= 0:
                self.counts["not_stored"] += 1
                continue
            room -= 1
            (self._to_store[key],) = self._blocks.pin([key], is_use=False)

    def release(self, request: str) -> None:
        """Let what was fetched for a request leave the host again, once it is loaded or no longer needed."""
        self._blocks.unpin(self._held.pop(request, ()))

    def take_jobs(self) -> list[StorageJob]:
        """Return what the workers are to do next."""
        jobs = []
        wanted = (
            (Task.FIND, dict.fromkeys(self._to_find, -1)),
            (Task.FETCH, self._to_fetch),
            (Task.BACKUP, self._to_store),
        )
        for task, pages in wanted:
            if pages:
                jobs.append(self._job(task, pages))
        self._to_find, self._to_fetch, self._to_store = {}, {}, {}
        return jobs

    def report(self, reports: Mapping[int, Sequence[Sequence[bool]]]) -> list[bytes]:
        """Note what workers answered, for each job an answer a worker; return blocks that are on the host now."""
        ready: list[bytes] = []
        for number, answers in reports.items():
            job = self._running.get(number)
            if job is None:
                continue
            for answer in answers:
                job.found = [all(pair) for pair in zip(job.found, answer, strict=True)]
                job.missing -= 1
            if job.missing <= 0:
                del self._running[number]
                ready += self._end(job)
        return ready

    @property
    def busy(self) -> bool:
        """Whether answers are expected that a request may still wait for, or jobs have not been taken."""
        if self._to_find or self._to_fetch or self._to_store:
            return True
        now = self._clock()
        return any(now - job.started <= self._wait for job in self._running.values())

    def reset(self) -> None:
        """Forget everything, with the blocks of the host; blocks stored before are not found again.

        The engine resets its cache when its weights change, which no fingerprint shows.
        """
        self._salt = os.urandom(SALT_BYTES)
        moving = [key for job in self._running.values() if job.task is not Task.FIND for key in job.keys]
        self._blocks.reset(keep=moving)
        for job in self._running.values():
            job.stale = True
        self._waiting = {key: self._waiting[key] for key in moving if key in self._waiting}
        self._there.clear()
        self._to_find, self._to_fetch, self._to_store, self._held = {}, {}, {}, {}

    def take_counts(self) -> Counter[str]:
        """Return the counts, and start them again."""
        counts, self.counts = self.counts, Counter()
        return counts

    def _waited(self, key: bytes, state: BlockState, seconds: float) -> BlockState:
        """Return the state of a block that storage was asked for, which is missing once that has taken too long."""
        if seconds <= self._wait:
            return state if state is BlockState.PENDING else BlockState.ASKED
        if seconds < math.inf:
            self.counts["late"] += 1
            self._waiting[key] = -math.inf
        return BlockState.MISSING

    def _fetch(self, key: bytes, request: str, now: float) -> BlockState:
        taken = self._blocks.take([key], pinned=True)
        if taken is None:
            return BlockState.MISSING
        (self._to_fetch[key],) = taken.pages
        self._waiting[key] = now
        self._held.setdefault(request, {})[key] = None
        return BlockState.PENDING

    def _job(self, task: Task, pages: Mapping[bytes, int]) -> StorageJob:
        self._number += 1
        keys = list(pages)
        self._running[self._number] = _Running(task, keys, [True] * len(keys), self._workers, self._clock())
        named = tuple(self._salt + key for key in keys)
        return StorageJob(self._number, task, named, () if task is Task.FIND else tuple(pages.values()))

    def _end(self, job: _Running) -> list[bytes]:
        good = [key for key, found in zip(job.keys, job.found, strict=True) if found]
        bad = [key for key, found in zip(job.keys, job.found, strict=True) if not found]
        ready: list[bytes] = []
        if job.task is Task.BACKUP:
            self._blocks.unpin(job.keys)
            self.counts.update(stored=len(good), store_failed=len(bad))
            bad = []
        else:
            for key in job.keys:
                self._waiting.pop(key, None)
        if job.task is Task.FETCH:
            ready = self._blocks.finish(good)
            self._blocks.finish(bad, success=False)
            self.counts.update(fetched=len(ready), fetch_failed=len(bad))
            self._drop_held(set(job.keys).difference(ready))
        elif job.task is Task.FIND:
            self.counts["found"] += len(good)
        if not job.stale:
            self._remember(good, None)
            self._remember(bad, self._clock())
        return ready

    def _drop_held(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for held in self._held.values():
                held.pop(key, None)

    def _remember(self, keys: Iterable[bytes], absent_since: float | None) -> None:
        for key in keys:
            self._there[key] = absent_since
            self._there.move_to_end(key)
        while len(self._there) > MAX_ANSWERS:
            self._there.popitem(last=False)
