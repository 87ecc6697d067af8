"""Replay: runs the requests of a trace through the real controller, tree and storage."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hicache_pools import HostPool, PoolName

from ...controller import HiCacheController
from ...hashing import page_hashes
from ...hybrid import HybridCacheController
from ...metrics import MetricsSnapshot
from ...policies import PrefetchPolicy
from ...radix import Match, Pages, UnifiedRadixCache
from ...storage import FileStorage, Fingerprint, HiCacheStorage, MemoryStorage, StorageBackendFactory
from ...storage.mooncake import MooncakeStorage
from ...storage_settings import StorageSettings
from ..trace import TraceRequest
from .key_storage import KeyStorage
from .model import ReplayModel, build_model
from .options import ReplayError, ReplayOptions
from .results import PathCounts, PoolCounts, ReplayReport

_SCHEDULER_STEP_SECONDS = 0.001
_MOONCAKE_SECONDS = 10.0
_STORAGE_SECONDS = 30.0


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
        self._offsets = np.arange(options.block_tokens, dtype=np.int64)
        self._exit = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self._exit.close()
            raise

    def _open(self) -> None:
        options = self.options
        # Storage first: an unusable directory must not cost the allocation of the pools.
        self.storage = self._open_storage()
        if self.storage is not None:
            self._exit.callback(self.storage.close)
        self.model = build_model(options)
        self._exit.callback(self.model.group.destroy)
        if self.storage is not None:
            self._exit.callback(self.storage.close)  # once more, as it has to precede the memory it moves
        self.report = ReplayReport(
            paths={name: PathCounts() for name in ("L1 to L2", "L2 to L1", "L2 to L3", "L3 to L2")},
            pools={str(entry.name): PoolCounts() for entry in self.model.group.entries},
        )
        self.rows = self.model.rows
        self.controller = _controller(self.model, options)
        self._exit.callback(self.controller.shutdown)
        if self.storage is not None:
            self.controller.attach_storage_backend(self.storage)
        self.cache = UnifiedRadixCache(
            self.controller,
            self.model.allocator,
            page_size=self.model.slots_per_page,
            write_policy=options.write_policy,
            eviction=options.eviction,
            components=self.model.windows,
        )

    @property
    def host_pool(self) -> HostPool:
        """The host pool of the anchor."""
        return self.model.anchor

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
        nothing_to_load = match.on_device
        match = cache.load_back(match)
        if not nothing_to_load:
            self._verify(match, keys, on_device)
        self._count(request, on_device, in_tree, found, match.pages)
        missing = len(keys) - match.pages
        pages = cache.alloc_device(missing)
        if pages is None:
            raise ReplayError(f"no room for {missing} device pages although nothing else is in use")
        if self.rows is not None:
            self.rows.fill(keys[match.pages :], pages)
        cache.release(self._insert(match, keys, pages))

    def _prefetch(self, match: Match) -> Match:
        """Bring pages from storage for as long as the policy allows, as a scheduler with nothing else to run would."""
        if self.options.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
            return self.cache.prefetch(match)
        started = self.cache.start_prefetch(match)
        while not self.cache.prefetch_ready(started):
            time.sleep(_SCHEDULER_STEP_SECONDS)
        return self.cache.finish_prefetch(started)

    def _verify(self, match: Match, keys: Sequence[bytes], on_device: int) -> None:
        """Check what was loaded: pages after those that were on the device, and the windows at the end."""
        if self.rows is None:
            return
        cache, report = self.cache, self.report
        checked = self.rows.verify(keys[on_device : match.pages], cache.device_page_numbers(match)[on_device:])
        for window in self.model.windows:
            pages = cache.window_page_numbers(match, window.name)
            checked += self.rows.verify(keys[match.pages - len(pages) : match.pages], pages, window.name)
        for name, count in checked.items():
            report.pools[name].rows_verified += count
        report.rows_verified += checked.total()

    def _insert(self, match: Match, keys: Sequence[bytes], pages: Pages) -> Match:
        """Publish computed pages, with windows and states wherever a checkpoint falls."""
        cache, begin = self.cache, match.pages
        if not self.model.windows:
            return cache.insert(match, pages).match
        for end in self._checkpoints(begin, len(keys)):
            windows: dict[str, Pages] = {}
            for window in self.model.windows:
                last = keys[max(match.pages, end - window.window_pages) : end]
                mine = cache.alloc_window(window.name, len(last))
                if mine is None:
                    raise ReplayError(f"no room for {len(last)} more device pages of {window.name}")
                if self.rows is not None:
                    self.rows.fill(last, mine, window.name)
                windows[str(window.name)] = mine
            match = cache.insert(match, pages[match.pages - begin : end - begin], windows=windows).match
        return match

    def _checkpoints(self, begin: int, end: int) -> Iterator[int]:
        """Yield where computed pages get windows and states: every so many blocks of the request, and its end."""
        every = self.options.checkpoint_blocks * self.options.pages_per_block
        yield from range((begin // every + 1) * every, end, every)
        if end > begin:
            yield end

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
        self._exit.close()

    def _open_storage(self) -> HiCacheStorage | None:
        options = self.options
        if options.l3_bytes == 0:
            return None
        if not options.data:
            sizes = {str(PoolName.KV): options.page_bytes}
            sizes |= {str(plan.name): plan.page_bytes for plan in options.plans if plan.window_pages is not None}
            return KeyStorage(sizes, options.l3_bytes)
        if options.storage == "memory":
            return MemoryStorage(options.l3_bytes)
        # The rows are a function of token ids, position and component, whatever the trace: one "model" for all.
        fingerprint = Fingerprint("hicache-replay", revision="1")
        if options.storage == "mooncake":
            try:
                store = MooncakeStorage(
                    fingerprint=fingerprint,
                    master=options.mooncake_master,
                    segment_bytes=options.mooncake_segment_bytes,
                )
            except ValueError as error:
                raise ReplayError(f"mooncake_master is {options.mooncake_master!r}: {error}") from None
            if not store.wait_ready(_MOONCAKE_SECONDS):
                store.close()
                raise ReplayError(f"mooncake_master is {options.mooncake_master}, and no master answers there")
            return store
        if options.storage != "file":
            return _other_storage(options, fingerprint)
        directory = options.l3_dir
        if directory is None:
            directory = Path(tempfile.mkdtemp(prefix="hicache-replay-"))
            self._exit.callback(shutil.rmtree, directory, ignore_errors=True)
        return FileStorage(directory, capacity_bytes=options.l3_bytes, fingerprint=fingerprint)

    def _count_paths(self) -> None:
        """Take what each path and pool moved from the counters of controller and storage."""
        metrics = self.controller.metrics.snapshot()
        report = self.report
        for name, direction in (("L1 to L2", "write_back"), ("L2 to L1", "load")):
            path = report.paths[name]
            path.bytes = int(metrics.total("transfer_bytes", direction=direction))
            path.runs = int(metrics.total("transfer_runs", direction=direction))
            path.seconds = _seconds(metrics, "transfer_seconds", direction=direction)
        for entry in self.model.group.entries:
            name = str(entry.name)
            pool, page_bytes = report.pools[name], max(entry.host_pool.page_bytes, 1)
            pool.written_back, pool.loaded_back = (
                int(metrics.total("transfer_bytes", direction=direction, pool=name)) // page_bytes
                for direction in ("write_back", "load")
            )
            pool.stored, pool.fetched = (
                int(metrics.total("storage_pages", operation=operation, pool=name))
                for operation in ("backup", "prefetch")
            )
        report.paths["L1 to L2"].pages = sum(pool.written_back for pool in report.pools.values())
        report.paths["L2 to L1"].pages = sum(pool.loaded_back for pool in report.pools.values())
        if self.storage is None or not self.options.data:
            return
        stats = self.storage.stats()
        for name, count, operation in (
            ("L2 to L3", stats.bytes_written, "backup"),
            ("L3 to L2", stats.bytes_read, "prefetch"),
        ):
            path = report.paths[name]
            path.bytes = count
            path.seconds = _seconds(metrics, "storage_seconds", operation=operation)


def _other_storage(options: ReplayOptions, fingerprint: Fingerprint) -> HiCacheStorage:
    """Make a backend that is not ours."""
    try:
        taken = inspect.signature(StorageBackendFactory.load(options.storage)).parameters
        given = {"fingerprint": fingerprint} if "fingerprint" in taken else {}
        return StorageBackendFactory.create(options.storage, **given | dict(options.storage_options))
    except (ImportError, TypeError, ValueError) as error:
        raise ReplayError(str(error)) from None


def _controller(model: ReplayModel, options: ReplayOptions) -> HiCacheController:
    # No model computes between two requests, so the replay waits for storage where an engine's pages would have come.
    storage = StorageSettings(prefetch_policy=options.prefetch_policy, max_wait_seconds=_STORAGE_SECONDS)
    if len(model.group.entries) == 1:
        return HiCacheController(model.group, synchronous=not options.data, storage=storage)
    return HybridCacheController(model.group, sidecars=model.sidecars, synchronous=not options.data, storage=storage)


def _seconds(metrics: MetricsSnapshot, name: str, **labels: str) -> float:
    """Sum of a histogram of times over everything that has these labels."""
    wanted = set(labels.items())
    return sum(found.sum for have, found in metrics.histograms.get(name, {}).items() if wanted <= set(have))
