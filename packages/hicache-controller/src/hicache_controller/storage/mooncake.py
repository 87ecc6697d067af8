"""Storage shared by machines: pages as objects of a Mooncake Store, moved between registered host memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hicache_kernels.validation import seconds, whole

from .backoff import Backoff
from .base import HiCacheStorage, RegisteredPool, StoragePool, StorageStats
from .fingerprint import Fingerprint
from .mooncake_client import MooncakeClient, MooncakeDownError
from .page_file import FOOTER_BYTES, UNCHECKED_BYTES, Outcome, PageId, checksum_of

logger = logging.getLogger(__name__)

MAGIC = b"HICACHEM"
"""What follows a page's bytes is the footer of :mod:`.page_file` with this magic."""

_CHUNK_BYTES = 64 << 20
_CHUNK_PAGES = 256
_LOCAL_BUFFER_BYTES = 1 << 20  # for Mooncake's own copies, which whole pages in registered memory do without
_LANES = 8  # chunks that move at once, each with memory for its footers

_NO_MEMORY = memoryview(b"")

# Codes of Mooncake Store.
_DOWN = range(-999, -899)  # the request failed, or had no answer in time
_NO_ROOM = (-101, -200)  # no segment, no memory in the segments
_WRONG_SIZE = -600
_ABSENT = (-703, -704, -707, -710, -712)  # not whole yet, not there, gone while it was read


@dataclass(slots=True)
class _Job:
    """One page to move: its key, host page, parent's key, and name of the object; and what is known of it.

    While it moves, ``views`` are its parts in the pool, and ``footer`` is where its footer is.
    """

    key: bytes
    page: int
    parent: bytes | None
    name: str
    exists: bool = False
    loaded: bool = False
    views: Sequence[memoryview] = ()
    footer: memoryview = _NO_MEMORY


class MooncakeStorage(HiCacheStorage):
    """Pages as objects of a Mooncake Store, whose memory lies in its clients; any number of machines share it.

    Neither a master that is down, when this is made or later, nor a full store is an error: nothing is found, nothing
    is stored, and everything picks up again once the master answers. What holds of the other backends and not of this
    one: Mooncake evicts objects without regard to parents, and forgets all of them when its master ends. Nor does it
    report what it evicts: a removal listener hears of pages that ``batch_get`` asked for and did not find, or found
    damaged and removed, and nothing of ``clear``.

    Parameters
    ----------
    fingerprint
        Model and rank. Others may share the store.
    master
        ``host:port`` of ``mooncake_master``, or what Mooncake accepts instead, such as ``etcd://...``.
    local_hostname
        Name or address under which the other machines reach this one.
    metadata_server
        ``P2PHANDSHAKE``, or the metadata server of Mooncake's transfer engine.
    protocol
        ``tcp``, ``rdma``, or another that the installed wheel knows.
    devices
        RDMA devices, comma-separated; empty leaves the choice to Mooncake.
    segment_bytes
        Memory that this process adds to the store; 0 for none, where others do. It leaves with the process, and the
        pages in it.
    deadline_seconds
        How long the constructor, a look-up and a removal wait for the master, and ``close`` for calls that run.
    clock
        Seconds that grow; for tests.

    Raises
    ------
    ImportError
        Where Mooncake or a library it needs is not installed.
    ValueError
        Where a number is out of range, or the master is not an address.
    """

    def __init__(
        self,
        *,
        fingerprint: Fingerprint,
        master: str = "127.0.0.1:50051",
        local_hostname: str = "127.0.0.1",
        metadata_server: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        segment_bytes: int = 1 << 30,
        deadline_seconds: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if "://" not in master and not re.fullmatch(r".+:[0-9]{1,5}", master):
            raise ValueError(f"master is {master!r}; accepted are 'host:port' and an address with a scheme")
        whole("segment_bytes", segment_bytes, least=0)
        seconds("deadline_seconds", deadline_seconds, above=True)
        self._fingerprint = fingerprint
        self._model = fingerprint.digest().hex()
        self._address = master
        self._deadline = deadline_seconds
        self._reads, self._writes = Backoff(clock), Backoff(clock)
        setup = (local_hostname, metadata_server, segment_bytes, _LOCAL_BUFFER_BYTES, protocol, devices, master)
        self._client = MooncakeClient(master, setup, deadline_seconds=deadline_seconds, clock=clock)
        self._footers = memoryview(mmap.mmap(-1, _LANES * _CHUNK_PAGES * FOOTER_BYTES))
        self._lanes: queue.SimpleQueue[int] = queue.SimpleQueue()
        for start in range(0, len(self._footers), _CHUNK_PAGES * FOOTER_BYTES):
            self._lanes.put(start)
        self._client.register(_address(self._footers), self._footers.nbytes)
        self._client.wait_ready(deadline_seconds)

    def register_mem_pool_host(self, pool: StoragePool, name: str = "kv") -> None:
        """Make a host pool known and register its ``buffer`` with Mooncake; close the storage before the pool.

        Raises
        ------
        ValueError, TypeError
            As :meth:`HiCacheStorage.register_mem_pool_host`; also where a pool with bytes has no ``buffer``.
        """
        self.check_open()
        buffer = _buffer(pool)
        super().register_mem_pool_host(pool, name)
        if buffer is not None:
            self._client.register(buffer.data_ptr(), buffer.nbytes)

    def object_name(self, key: bytes, name: str = "kv") -> str:
        """Name of the Mooncake object that keeps a key's page of pool ``name``, whether it exists or not."""
        return self._name(self._pool(name), self._keys([key])[0])

    def wait_ready(self, seconds: float) -> bool:
        """Wait for an attempt to reach the master, at most ``seconds``; return whether it can be used.

        While the storage pauses between attempts, the answer comes at once.
        """
        self.check_open()
        return self._client.wait_ready(seconds)

    def clear(self) -> None:
        """Remove every page of this fingerprint; those of other models and ranks stay."""
        self.check_open()
        if self._client.ready():
            with self._noting_loss("write_errors"):
                self._ask("remove_by_regex", f"^hicache/{self._model}/.*", True)

    def stats(self) -> StorageStats:
        """Return counters since the storage was opened; ``pages`` and ``bytes`` of a store that is shared are 0."""
        with self._lock:
            backing_off = self._client.failing or self._reads.active or self._writes.active
            return StorageStats(backing_off=backing_off, compiled_reads=False, **self._counts)

    def close(self) -> None:
        """Leave the store, once no call is inside it. Idempotent."""
        if not self._closed:
            super().close()
            self._client.close()

    def format_digest(self, pool: StoragePool) -> bytes:
        """Return the fingerprint's digest of the pool's format."""
        return self._fingerprint.pool_digest(pool.geometry)

    def _name(self, pool: RegisteredPool, key: bytes) -> str:
        return f"hicache/{self._model}/{key.hex()}/{pool.name}-{pool.digest.hex()}"

    # Reading

    def find_pages(self, pool: RegisteredPool, keys: list[bytes], *, leading: bool) -> list[bool]:
        """Return for each key whether its page is there."""
        if self._usable(self._reads, len(keys)):
            with self._noting_loss("read_errors"):
                return self._exist([self._name(pool, key) for key in keys])
        return [False] * len(keys)

    def load_pages(self, pool: RegisteredPool, keys: list[bytes], pages: list[int]) -> list[bool]:
        """Fill pages from objects; remove objects that are not the pages they should be."""
        if not self._usable(self._reads, len(keys)):
            return [False] * len(keys)
        jobs = self._jobs(pool, keys, pages, [None] * len(keys))
        with self._noting_loss("read_errors"):
            self._look_up(jobs)
            self.note_removed((job.key for job in jobs if not job.exists), pool.name)
            for chunk in _chunks(pool, [job for job in jobs if job.exists]):
                if self._reads.active:
                    break
                self._load_chunk(pool, chunk)
        loaded = [job.loaded for job in jobs]
        hits = sum(loaded)
        self._count(hits=hits, misses=len(keys) - hits, bytes_read=hits * pool.page_bytes)
        return loaded

    def _load_chunk(self, pool: RegisteredPool, jobs: list[_Job]) -> None:
        bad = []
        with self._lane(pool, jobs):
            for job, code in zip(jobs, self._move("batch_get_into_multi_buffers", jobs), strict=True):
                outcome = self._outcome(pool, job, code)
                job.loaded = outcome is Outcome.HIT
                if outcome not in (Outcome.HIT, Outcome.MISSING):
                    self._count(**{outcome.value: 1})
                    bad.append(job.name)
                    self.note_removed((job.key,), pool.name)
                elif code in _ABSENT:
                    self.note_removed((job.key,), pool.name)
        if bad:
            logger.debug("Mooncake at %s: objects %s are not the pages they should be and removed", self._address, bad)
            self._ask("batch_remove", bad, True)
        if any(job.loaded for job in jobs) and self._reads.succeeded():
            logger.info("Mooncake at %s: reading works again", self._address)

    def _outcome(self, pool: RegisteredPool, job: _Job, code: int) -> Outcome:
        expected = pool.page_bytes + FOOTER_BYTES
        if code == expected:
            footer = bytes(job.footer)
            return _id(pool, job).outcome(footer, checksum_of(job.views, footer[:-UNCHECKED_BYTES]))
        if code in _ABSENT:
            return Outcome.MISSING
        if code >= 0 or code == _WRONG_SIZE or self._ask("get_size", job.name) not in (expected, *_ABSENT):
            return Outcome.DAMAGED
        self._count(read_errors=1)
        self._failed(self._reads, "read", code)
        return Outcome.MISSING

    # Writing

    def store_pages(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: list[bytes | None]
    ) -> list[bool]:
        """Store pages; return for each key whether its page is stored."""
        if not self._usable(self._writes, len(keys)):
            return [False] * len(keys)
        jobs = self._jobs(pool, keys, pages, parents)
        with self._noting_loss("write_errors"):
            heads = self._look_up_with_parents(jobs)
            todo = [job for job in jobs if not job.exists]
            self._count(present=len(jobs) - len(todo))
            chunks = list(_chunks(pool, todo))
            for chunk in chunks:
                if self._writes.active:
                    self._count(skipped=len(chunk))
                else:
                    self._store_chunk(pool, chunk, heads)
            # What came later may have replaced the first. Not after every call, as the master keeps for some seconds
            # what it was asked for.
            if len(chunks) > 1 or not all(job.exists for job in jobs):
                self._look_up([job for job in jobs if job.exists])
            return [job.exists for job in jobs]
        return [False] * len(keys)

    def _look_up_with_parents(self, jobs: list[_Job]) -> set[bytes | None]:
        """Find out which pages are there, and return the keys after which a page may follow, None for no page."""
        own = {None, *(job.key for job in jobs)}
        pools = list(self._pools.values())
        parents = [
            _Job(parent, 0, None, self._name(pool, parent))
            for parent in dict.fromkeys(job.parent for job in jobs)
            if parent is not None and parent not in own
            for pool in pools
        ]
        self._look_up([*jobs, *parents])
        return {None, *(job.key for job in (*jobs, *parents) if job.exists)}

    def _store_chunk(self, pool: RegisteredPool, jobs: list[_Job], heads: set[bytes | None]) -> None:
        """Store pages of one chunk, and add their keys to ``heads``."""
        coming = set(heads)
        todo = []
        for job in jobs:
            if job.parent in coming:
                coming.add(job.key)
                todo.append(job)
        self._count(orphans=len(jobs) - len(todo))
        if not todo:
            return
        with self._lane(pool, todo):
            for job in todo:
                head = _id(pool, job).footer_head(job.parent)
                job.footer[:] = head + checksum_of(job.views, head)
            codes = self._move("batch_put_from_multi_buffers", todo)
        headless = []
        for job, code in zip(todo, codes, strict=True):
            if code != 0:
                self._count(**{"no_room" if code in _NO_ROOM else "write_errors": 1})
            elif job.parent in heads:
                heads.add(job.key)
                job.exists = True
                self._count(stored=1, bytes_written=pool.page_bytes)
            else:
                headless.append(job.name)
        failures = [code for code in codes if code != 0]
        if failures:
            self._failed(self._writes, "store", failures[0])
        elif self._writes.succeeded():
            logger.info("Mooncake at %s: storing works again", self._address)
        if headless:
            self._count(orphans=len(headless))
            self._ask("batch_remove", headless, True)

    # Moving

    def _jobs(
        self, pool: RegisteredPool, keys: list[bytes], pages: list[int], parents: Sequence[bytes | None]
    ) -> list[_Job]:
        items = zip(keys, pages, parents, strict=True)
        return [_Job(key, page, parent, self._name(pool, key)) for key, page, parent in items]

    @contextlib.contextmanager
    def _lane(self, pool: RegisteredPool, jobs: list[_Job]) -> Iterator[None]:
        """Give jobs the memory of their pages, and memory for their footers."""
        try:
            lane = self._lanes.get(timeout=self._deadline)
        except queue.Empty:
            raise MooncakeDownError(f"{_LANES} transfers hang") from None
        try:
            for job, start in zip(jobs, range(lane, len(self._footers), FOOTER_BYTES), strict=False):
                job.views, job.footer = pool.memory(job.page), self._footers[start : start + FOOTER_BYTES]
            yield
        finally:
            self._lanes.put(lane)

    def _move(self, method: str, jobs: list[_Job]) -> list[int]:
        """Move pages and footers; a code for each: bytes read, 0 where written, or why not."""
        pieces = [[*job.views, job.footer] for job in jobs]
        codes: list[int] = self._client.call(
            method,
            [job.name for job in jobs],
            [[_address(piece) for piece in page] for page in pieces],
            [[piece.nbytes for piece in page] for page in pieces],
        )
        _raise_if_down(codes)
        return codes

    # Master

    def _usable(self, backoff: Backoff, pages: int) -> bool:
        if self._client.ready() and not backoff.active:
            return True
        self._count(skipped=pages)
        return False

    def _look_up(self, jobs: list[_Job]) -> None:
        """Find out which pages are there."""
        for job, exists in zip(jobs, self._exist([job.name for job in jobs]), strict=True):
            job.exists = exists

    def _exist(self, names: list[str]) -> list[bool]:
        if not names:
            return []
        codes: list[int] = self._ask("batch_is_exist", names)
        if any(code < 0 for code in codes):
            raise MooncakeDownError(f"code {min(codes)}")
        return [code == 1 for code in codes]

    def _ask(self, method: str, *arguments: Any) -> Any:
        answer = self._client.call_in_time(method, *arguments)
        _raise_if_down(answer if isinstance(answer, list) else [answer])
        return answer

    @contextlib.contextmanager
    def _noting_loss(self, counter: str) -> Iterator[None]:
        """End a ``with`` block where the connection is lost, and note that."""
        try:
            yield
        except MooncakeDownError as error:
            self._count(**{counter: 1})
            self._client.lost(error)

    def _failed(self, backoff: Backoff, what: str, code: int) -> None:
        if backoff.failed():
            why = "no room" if code in _NO_ROOM else f"code {code}"
            logger.warning("Mooncake at %s: cannot %s (%s); going on and trying again", self._address, what, why)


def _raise_if_down(codes: Sequence[int]) -> None:
    down = [code for code in codes if code in _DOWN]
    if down:
        raise MooncakeDownError(f"code {down[0]}")


def _id(pool: RegisteredPool, job: _Job) -> PageId:
    return PageId(job.key, pool.digest, pool.page_bytes, MAGIC)


def _chunks(pool: RegisteredPool, jobs: list[_Job]) -> Iterator[list[_Job]]:
    step = max(1, min(_CHUNK_PAGES, _CHUNK_BYTES // (pool.page_bytes + FOOTER_BYTES)))
    for start in range(0, len(jobs), step):
        yield jobs[start : start + step]


def _address(memory: memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


def _buffer(pool: Any) -> torch.Tensor | None:
    """Memory of a pool; None for one without bytes."""
    if not getattr(pool, "page_bytes", 0):
        return None
    buffer = getattr(pool, "buffer", None)
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"pool is {type(pool).__name__}; it lacks buffer, a tensor of the memory to register")
    return buffer
