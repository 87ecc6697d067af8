"""Replay of a request trace against the real cache, every loaded byte checked."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hicache_pools import (
    ExtentAllocator,
    HostPool,
    HostPoolGroup,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    NullPoolHost,
    PoolEntry,
    PoolName,
)
from hicache_pools.memory_budget import HostMemoryBudget

from . import payload
from .controller import HiCacheController
from .hashing import page_hashes
from .metrics import MetricsSnapshot
from .radix import Match, Pages, UnifiedRadixCache, WritePolicy
from .storage import Fingerprint, HiCacheStorage, MemoryStorage
from .storage.file import FileStorage
from .storage.mooncake import MooncakeStorage
from .storage_link import StorageSettings
from .storage_worker import PrefetchPolicy
from .trace import TraceRequest

POOLS = ("mha", "mla")
STORAGES = ("file", "memory", "mooncake")

_SCHEDULER_STEP_SECONDS = 0.001
_MOONCAKE_SECONDS = 10.0

_LARGEST = {
    "layers": 4096,
    "row_bytes": 1 << 20,
    "page_size": 1 << 20,
    "block_tokens": 1 << 30,
    "l1_pages": (1 << 31) - 1,
    "l2_pages": (1 << 31) - 1,
}

# Bytes of rows made at a time on a CPU: what stays in its caches.
_CPU_CHUNK_BYTES = 256 << 10
_GPU_CHUNK_BYTES = 64 << 20


class ReplayError(ValueError):
    """An option that cannot work, in one line."""


class VerificationError(RuntimeError):
    """A loaded row that does not hold what it must; the message says where."""


@dataclass(frozen=True)
class ReplayOptions:
    """What to replay against.

    Attributes
    ----------
    device
        ``cpu`` or ``cuda``.
    pool
        One of :data:`POOLS`.
    layers, row_bytes, page_size
        Geometry: ``row_bytes`` is one component of one layer of one token; ``page_size`` in tokens.
    block_tokens
        Tokens a block of the trace stands for; a multiple of ``page_size``.
    l1_pages, l2_pages
        Pages of the device and the host pool.
    l3_bytes
        Capacity of the storage; 0 for none, None for no limit.
    l3_dir
        Directory of the storage; None for a temporary one.
    write_policy
        One of :class:`hicache_controller.radix.WritePolicy`.
    data
        False: bookkeeping only, no bytes, and a storage of keys in memory.
    storage
        ``file``, ``memory`` for one that ends with the process, or ``mooncake``.
    mooncake_master
        Address of the master of a Mooncake store, which machines share.
    prefetch_policy
        How long a request waits for its pages from storage.
    """

    device: str = "cpu"
    pool: str = "mha"
    layers: int = 4
    row_bytes: int = 64
    page_size: int = 64
    block_tokens: int = 512
    l1_pages: int = 1024
    l2_pages: int = 4096
    l3_bytes: int | None = None
    l3_dir: Path | None = None
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    data: bool = True
    storage: str = "file"
    mooncake_master: str = "127.0.0.1:50051"
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE

    def check(self, requests: Sequence[TraceRequest]) -> None:
        """Raise ReplayError for the first option that cannot work with these requests."""
        for name in _LARGEST:
            value = getattr(self, name)
            if not 0 < value <= _LARGEST[name]:
                raise ReplayError(f"{name} is {value}; accepted is 1 to {_LARGEST[name]}")
        for name, accepted in (("pool", POOLS), ("storage", STORAGES)):
            if getattr(self, name) not in accepted:
                raise ReplayError(f"{name} is {getattr(self, name)!r}; one of {', '.join(accepted)} is expected")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ReplayError(f"device is {self.device!r}; cpu or cuda is expected")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise ReplayError(f"device is {self.device}, and torch finds no such device on this machine")
        if self.row_bytes % 4:
            raise ReplayError(f"row_bytes is {self.row_bytes}; a multiple of 4 is expected")
        if self.block_tokens % self.page_size:
            raise ReplayError(f"block_tokens is {self.block_tokens}, no multiple of page_size {self.page_size}")
        if self.l3_bytes is not None and self.l3_bytes < 0:
            raise ReplayError(f"l3_bytes is {self.l3_bytes}; 0 (no storage) or more is expected")
        if self.data:
            pages = self.l2_pages + (self.l1_pages if self.device == "cpu" else 0)
            try:
                HostMemoryBudget().check(pages * self.page_bytes)
            except MemoryError as error:
                raise ReplayError(str(error)) from None
        largest = max(len(request.blocks) for request in requests) * self.pages_per_block
        for name, tier in (("l1_pages", "device"), ("l2_pages", "host")):
            if getattr(self, name) < largest:
                raise ReplayError(
                    f"{name} is {getattr(self, name)}; the largest request of the trace needs {largest} {tier} pages"
                )

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers and components."""
        return self.page_size * self.row_bytes * self.layers * self.components

    @property
    def pages_per_block(self) -> int:
        """Pages of a trace block."""
        return self.block_tokens // self.page_size

    @property
    def components(self) -> int:
        """Rows a layer keeps for a token."""
        return 1 if self.pool == "mla" else 2


@dataclass
class PathCounts:
    """One way between two tiers: bytes, the seconds it was busy, pages and runs of neighbouring host pages."""

    bytes: int = 0
    seconds: float = 0.0
    pages: int = 0
    runs: int = 0

    @property
    def gb_per_second(self) -> float:
        """Bandwidth in 10**9 bytes a second, 0.0 where nothing moved."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def mean_run(self) -> float:
        """Pages a copy, 0.0 where nothing moved."""
        return self.pages / self.runs if self.runs else 0.0


@dataclass
class ReplayReport:
    """What a replay saw; blocks are complete trace blocks, each counted at the slowest tier it came from."""

    requests: int = 0
    tokens: int = 0
    blocks: int = 0
    l1_hits: int = 0
    l2_hits: int = 0
    l3_hits: int = 0
    rows_verified: int = 0
    seconds: float = 0.0
    paths: dict[str, PathCounts] = field(default_factory=dict)
    history: list[tuple[int, int, int, int]] = field(default_factory=list)
    """For each request: blocks from L1, L2, L3, and missed."""

    @property
    def hits(self) -> int:
        """Blocks found in any tier."""
        return self.l1_hits + self.l2_hits + self.l3_hits

    @property
    def misses(self) -> int:
        """Blocks computed."""
        return self.blocks - self.hits

    def as_json(self) -> dict[str, Any]:
        """Plain data, without the history."""
        data = asdict(self)
        del data["history"]
        for name, path in self.paths.items():
            data["paths"][name] |= {"gb_per_second": path.gb_per_second, "mean_run": path.mean_run}
        return data | {"hits": self.hits, "misses": self.misses}


class Rows:
    """The device rows of a replay: fills them as a forward pass would and checks them after a load."""

    def __init__(self, options: ReplayOptions) -> None:
        self._options = options
        self.device = torch.device(options.device)
        shape = (options.l1_pages * options.page_size, 1, options.row_bytes)
        self.buffers = [
            [torch.zeros(shape, dtype=torch.uint8, device=self.device) for _ in range(options.layers)]
            for _ in range(options.components)
        ]
        limit = _CPU_CHUNK_BYTES if self.device.type == "cpu" else _GPU_CHUNK_BYTES
        self._chunk = max(1, limit // (options.page_size * options.row_bytes))

    def fill(self, keys: Sequence[bytes], pages: Pages) -> None:
        """Write the rows of these pages."""
        for _, slots, layer, component, expected in self._parts(keys, pages):
            self.buffers[component][layer][slots, 0] = expected

    def verify(self, keys: Sequence[bytes], pages: Pages) -> int:
        """Check the rows of these pages bit for bit; returns how many rows were checked.

        Raises
        ------
        VerificationError
            Naming page, key, position, layer, component and byte of the first difference.
        """
        options = self._options
        for begin, slots, layer, component, expected in self._parts(keys, pages):
            found = self.buffers[component][layer][slots, 0]
            wrong = payload.first_mismatch(expected, found, options.page_size)
            if wrong is not None:
                page = begin + wrong.page
                raise VerificationError(
                    f"page {page} of the request (key {keys[page].hex()}, device page {pages[page]}), position "
                    f"{wrong.position}, layer {layer}, component {component}, byte {wrong.byte}: "
                    f"{wrong.found:#04x} where {wrong.expected:#04x} was stored"
                )
        return len(pages) * options.page_size * options.layers * options.components

    def _parts(self, keys: Sequence[bytes], pages: Pages) -> Iterator[tuple[int, torch.Tensor, int, int, torch.Tensor]]:
        options = self._options
        offsets = torch.arange(options.page_size, device=self.device)
        for begin in range(0, len(pages), self._chunk):
            seeds = payload.page_seeds(keys[begin : begin + self._chunk], self.device)
            numbers = torch.from_numpy(pages[begin : begin + self._chunk]).to(self.device)
            slots = (numbers[:, None] * options.page_size + offsets).reshape(-1)
            for layer in range(options.layers):
                for component in range(options.components):
                    expected = payload.rows(
                        seeds,
                        page_size=options.page_size,
                        layer=layer,
                        component=component,
                        row_bytes=options.row_bytes,
                    )
                    yield begin, slots, layer, component, expected


class Replay:
    """A cache of the given size and a trace to run through it.

    Use as a context manager: leaving it drains the transfers and closes the storage.

    Raises
    ------
    ReplayError
        For an option that cannot work.
    OSError
        Where the storage directory cannot be used.
    """

    def __init__(self, requests: Sequence[TraceRequest], options: ReplayOptions) -> None:
        options.check(requests)
        self.requests = requests
        self.options = options
        self.report = ReplayReport(
            paths={name: PathCounts() for name in ("L1 to L2", "L2 to L1", "L2 to L3", "L3 to L2")}
        )
        self._offsets = np.arange(options.block_tokens, dtype=np.int64)
        # Without rows a page's tokens need no slots of their own; one slot stands for the page.
        self._slots_per_page = options.page_size if options.data else 1
        self._own_directory: Path | None = None
        # Storage first: an unusable directory must not cost the allocation of the pools.
        self.storage = self._open_storage()
        try:
            self.rows = Rows(options) if options.data else None
        except RuntimeError as error:  # the device has no memory for them
            self._close_storage()
            raise ReplayError(f"l1_pages is {options.l1_pages}: {str(error).splitlines()[0]}") from None
        device_allocator = ExtentAllocator(options.l1_pages, self._slots_per_page)
        device_pool = self._describe_device_pool()
        self.host_pool = self._make_host_pool(device_pool)
        entry = PoolEntry(
            name=PoolName.KV,
            host_pool=self.host_pool,
            device_pool=device_pool,
            layer_mapper=lambda layer: layer,
            is_primary_index_anchor=True,
            device_alloc_fn=device_allocator.alloc,
            device_free_fn=device_allocator.free,
        )
        self.controller = HiCacheController(
            HostPoolGroup([entry]),
            synchronous=not options.data,
            storage=StorageSettings(prefetch_policy=options.prefetch_policy),
        )
        if self.storage is not None:
            self.controller.attach_storage_backend(self.storage)
        self.cache = UnifiedRadixCache(
            self.controller, device_allocator, page_size=self._slots_per_page, write_policy=options.write_policy
        )

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, on_request: Callable[[], None] = lambda: None) -> ReplayReport:
        """Replay all requests; ``on_request`` is called after each."""
        start = time.perf_counter()
        try:
            self.serve(self.requests, on_request)
            self.cache.drain()
        finally:
            self.report.seconds += time.perf_counter() - start
            self._count_paths()
        return self.report

    def serve(self, requests: Sequence[TraceRequest], on_request: Callable[[], None] = lambda: None) -> None:
        """Serve some requests, leaving transfers in flight."""
        for request in requests:
            self.step(request)
            on_request()

    def step(self, request: TraceRequest) -> None:
        """Serve one request: match, prefetch, load back and check, compute the rest, insert; a failure ends the replay.

        Raises
        ------
        VerificationError
            Where a loaded row is wrong.
        """
        cache = self.cache
        keys = self._keys(request)
        cache.poll()
        match = cache.match_prefix(keys)
        on_device, in_tree = match.device_pages, match.pages
        match = self._prefetch(match)
        found = match.pages
        match = cache.load_back(match)
        if self.rows is not None and match.pages > on_device:
            loaded = cache.device_page_numbers(match)[on_device:]
            self.report.rows_verified += self.rows.verify(keys[on_device : match.pages], loaded)
        self._count(request, on_device, in_tree, found, match.pages)
        missing = len(keys) - match.pages
        pages = cache.alloc_device(missing)
        if pages is None:
            raise ReplayError(f"no room for {missing} device pages although nothing else is in use")
        if self.rows is not None:
            self.rows.fill(keys[match.pages :], pages)
        match = cache.insert(match, pages).match
        cache.release(match)

    def _prefetch(self, match: Match) -> Match:
        """Bring pages from storage for as long as the policy allows, as a scheduler with nothing else to run would."""
        if self.options.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
            return self.cache.prefetch(match)
        started = self.cache.start_prefetch(match)
        while not self.cache.prefetch_ready(started):
            time.sleep(_SCHEDULER_STEP_SECONDS)
        return self.cache.finish_prefetch(started)

    def _keys(self, request: TraceRequest) -> list[bytes]:
        """Page keys of the request's complete blocks; a block's tokens are numbered from its id."""
        size = self.options.block_tokens
        tokens = (np.array(request.blocks, dtype=np.int64)[:, None] * size + self._offsets).reshape(-1)
        return page_hashes(tokens, self.options.page_size)

    def _count(self, request: TraceRequest, on_device: int, in_tree: int, found: int, loaded: int) -> None:
        per_block = self.options.pages_per_block
        blocks = len(request.blocks)
        up_to_l1, up_to_l2, up_to_l3 = (min(pages, loaded) // per_block for pages in (on_device, in_tree, found))
        by_tier = (up_to_l1, up_to_l2 - up_to_l1, up_to_l3 - up_to_l2, blocks - up_to_l3)
        report = self.report
        report.requests += 1
        report.tokens += blocks * self.options.block_tokens
        report.blocks += blocks
        report.l1_hits += by_tier[0]
        report.l2_hits += by_tier[1]
        report.l3_hits += by_tier[2]
        report.history.append(by_tier)

    def close(self) -> None:
        """Drain the transfers, close the storage, free the pools; idempotent."""
        self.controller.shutdown()
        self._close_storage()
        self.host_pool.destroy()

    def _close_storage(self) -> None:
        if self.storage is not None:
            self.storage.close()
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)

    def _open_storage(self) -> HiCacheStorage | None:
        options = self.options
        if options.l3_bytes == 0:
            return None
        if not options.data or options.storage == "memory":
            return MemoryStorage(options.l3_bytes)
        # The rows are a function of token ids, position, layer and component, whatever the trace: one "model" for all.
        fingerprint = Fingerprint("hicache-replay", revision="1")
        if options.storage == "mooncake":
            store = MooncakeStorage(fingerprint=fingerprint, master=options.mooncake_master)
            if not store.wait_ready(_MOONCAKE_SECONDS):
                store.close()
                raise ReplayError(f"mooncake_master is {options.mooncake_master}, and no master answers there")
            return store
        directory = options.l3_dir
        if directory is None:
            directory = self._own_directory = Path(tempfile.mkdtemp(prefix="hicache-replay-"))
        return FileStorage(directory, capacity_bytes=options.l3_bytes, fingerprint=fingerprint)

    def _describe_device_pool(self) -> MHATokenToKVPool | MLATokenToKVPool | None:
        if self.rows is None:
            return None
        if self.options.pool == "mla":
            return MLATokenToKVPool.from_buffers(kv=self.rows.buffers[0], page_size=self.options.page_size)
        k, v = self.rows.buffers
        return MHATokenToKVPool.from_buffers(k=k, v=v, page_size=self.options.page_size)

    def _make_host_pool(self, device_pool: MHATokenToKVPool | MLATokenToKVPool | None) -> HostPool:
        options = self.options
        if device_pool is None:
            return NullPoolHost(options.l2_pages, self._slots_per_page)
        kind = MLATokenToKVPoolHost if options.pool == "mla" else MHATokenToKVPoolHost
        return kind(device_pool, 0, 0, options.page_size, pages=options.l2_pages)

    def _count_paths(self) -> None:
        """Take the bytes, seconds and runs of each path from the counters of controller and storage."""
        metrics = self.controller.metrics.snapshot()
        page_bytes = max(self.host_pool.page_bytes, 1)
        for name, direction in (("L1 to L2", "write_back"), ("L2 to L1", "load")):
            path = self.report.paths[name]
            path.bytes = int(metrics.total("transfer_bytes", direction=direction))
            path.runs = int(metrics.total("transfer_runs", direction=direction))
            path.pages = path.bytes // page_bytes
            path.seconds = _seconds(metrics, "transfer_seconds", direction=direction)
        if self.storage is None:
            return
        stats = self.storage.stats()
        for name, count, operation in (
            ("L2 to L3", stats.bytes_written, "backup"),
            ("L3 to L2", stats.bytes_read, "prefetch"),
        ):
            path = self.report.paths[name]
            path.bytes = count
            path.seconds = _seconds(metrics, "storage_seconds", operation=operation)


def _seconds(metrics: MetricsSnapshot, name: str, **labels: str) -> float:
    """Sum of a histogram of times over everything that has these labels."""
    wanted = set(labels.items())
    return sum(found.sum for have, found in metrics.histograms.get(name, {}).items() if wanted <= set(have))
