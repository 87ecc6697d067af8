"""The two sides of vLLM's offloading over hicache: blocks and storage in the scheduler, bytes in each worker."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload import base

from ...storage import Fingerprint, StorageBackendFactory
from ..storage_address import storage_address
from .host_blocks import BlockState, HostBlocks
from .settings import VllmSettings
from .shortest_load import GroupBytes, shortest_load
from .storage_queue import StorageJob, StorageQueue
from .transfers import BlockTransfers, Finished
from .worker_storage import WorkerStorage

logger = logging.getLogger("vllm.hicache")  # whose handlers vLLM sets up

CLOSE_SECONDS = 10.0
"""How long shutting down waits for the storage."""

METRICS = {
    "found": "Blocks that storage was asked for and has.",
    "fetched": "Blocks loaded from storage to the host.",
    "fetch_failed": "Blocks that storage was to load and did not.",
    "stored": "Blocks stored.",
    "store_failed": "Blocks that storage did not take.",
    "not_stored": "Blocks not stored because too many waited.",
    "late": "Blocks that storage had not answered for when a request stopped waiting.",
    "evicted": "Blocks that left the host to make room.",
    "refused": "Blocks not kept because nothing could leave the host.",
    "too_short": "Blocks of hits that were computed because a load would have taken longer.",
    "failed": "Blocks that are no longer kept because a transfer of them failed.",
}
"""What is counted, as ``vllm:hicache_NAME_blocks``."""


ANSWERS = {
    BlockState.MISSING: base.LookupResult.MISS,
    BlockState.ASKED: base.LookupResult.RETRY,
    BlockState.PENDING: base.LookupResult.HIT_PENDING,
    BlockState.READY: base.LookupResult.HIT,
}


def _metric(name: str) -> str:
    return f"vllm:hicache_{name}_blocks"


class HostPages(base.BlockIDsLoadStoreSpec):
    """Pages of the host, one for each block of the other side."""


class HiCacheManager(base.OffloadingManager):
    """The scheduler's side: decides which blocks the host keeps and what storage is asked; moves nothing.

    Parameters
    ----------
    blocks
        Blocks of the host.
    storage
        None without storage.
    min_load_tokens
        Tokens that a hit must at least have to be loaded.
    events
        Whether to note what comes and goes, for :meth:`take_events`.
    """

    def __init__(
        self, blocks: HostBlocks, storage: StorageQueue | None, *, min_load_tokens: int = 1, events: bool = False
    ) -> None:
        self.blocks, self.storage, self.min_load_tokens = blocks, storage, min_load_tokens
        self._events: list[base.OffloadingEvent] | None = [] if events else None
        self._counts: dict[str, int] = {}
        medium = getattr(base, "Medium", None)
        self._medium = "CPU" if medium is None else medium.CPU

    def lookup(self, key: bytes, req_context: Any) -> base.LookupResult:
        """Say whether a block can be loaded, now or soon."""
        if self.storage is None:
            return ANSWERS[self.blocks.state(key)]
        return ANSWERS[self.storage.state(key, req_context.req_id)]

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> HostPages:
        """Pin blocks and return their pages."""
        pages = self.blocks.pin(keys)
        if self.storage is not None:
            self.storage.release(req_context.req_id)
        return HostPages(pages)

    def decline(self, request: str, tokens: int, tokens_per_block: int) -> None:
        """Note that a hit is computed, not loaded, and let go of what was fetched for it."""
        self._count("too_short", tokens // tokens_per_block)
        if self.storage is not None:
            self.storage.release(request)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Note that blocks of a request are in use."""
        self.blocks.touch(list(keys))

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        """Unpin blocks."""
        self.blocks.unpin(keys)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> base.PrepareStoreOutput | None:
        """Take pages for the blocks that are new; None where there is no room."""
        taken = self.blocks.take(list(keys))
        if taken is None:
            self._count("refused", len(keys))
            return None
        self._count("evicted", len(taken.evicted))
        self._note(taken.evicted, removed=True)
        return base.PrepareStoreOutput(taken.keys, HostPages(taken.pages), taken.evicted)

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        """Let blocks be loaded from now on, and have them stored."""
        ready = self.blocks.finish(keys, success=success)
        self._note(ready, removed=False)
        if self.storage is not None:
            self.storage.backup(ready)

    def on_new_request(self, req_context: Any) -> base.RequestOffloadingContext:
        """Return the usual terms: each block is kept once."""
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Let go of what was fetched for a request and not loaded."""
        if self.storage is not None:
            self.storage.release(req_context.req_id)

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        """Name the tier a block is loaded from."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.HOST

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """Return what came and went."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def has_pending_work(self) -> bool:
        """Say whether storage is to answer something, which only a step of the engine brings here."""
        return self.storage is not None and self.storage.busy

    def reset_cache(self) -> None:
        """Forget every block."""
        if self.storage is None:
            self.blocks.reset()
        else:
            self.storage.reset()
            logger.info("the cache was reset: blocks that storage has from before are not used by this engine again")

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call."""
        counts, self._counts = self._counts, {}
        if self.storage is not None:
            counts |= self.storage.take_counts()
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            if count:
                stats.increase_counter(_metric(name), count)
        return None if stats.is_empty() else stats

    def take_jobs(self) -> list[StorageJob]:
        """Return what the workers' storages are to do."""
        return [] if self.storage is None else self.storage.take_jobs()

    def apply(self, answers: dict[int, list[list[bool]]], failed_pages: Collection[int]) -> None:
        """Note what the workers report, before the scheduler hears which transfers are over."""
        if failed_pages:
            gone = self.blocks.discard_pages(failed_pages)
            self._count("failed", len(gone))
            self._note(gone, removed=True)
        if self.storage is not None:
            self._note(self.storage.report(answers), removed=False)

    def _note(self, keys: Sequence[bytes], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(base.OffloadingEvent(keys=list(keys), medium=self._medium, removed=removed))

    def _count(self, name: str, blocks: int) -> None:
        self._counts[name] = self._counts.get(name, 0) + blocks


class HiCacheWorker(base.OffloadingWorker):
    """A worker's side: moves blocks, and runs the jobs of its storage.

    A transfer that fails is reported to vLLM as one that is over, since it knows no failed ones; which pages and blocks
    are not to be trusted is read here.

    Attributes
    ----------
    failed_pages, failed_blocks
        Of transfers that failed, until :meth:`take_failures`.
    failed_loads
        Numbers of the jobs that should have filled blocks.
    """

    def __init__(self, transfers: BlockTransfers, storage: WorkerStorage | None) -> None:
        self.transfers, self.storage = transfers, storage
        self.failed_pages: set[int] = set()
        self.failed_blocks: set[int] = set()
        self.failed_loads: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start copying blocks to the host."""
        self.transfers.store(job_id, _numbers(src_spec), _numbers(dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start copying pages to the device."""
        self.transfers.load(job_id, _numbers(dst_spec), _numbers(src_spec))
        return True

    def get_finished(self) -> list[base.TransferResult]:
        """Return what is over."""
        finished = self.transfers.finished()
        for each in finished:
            if each.error is not None:
                self._note_failure(each)
        return [base.TransferResult(each.number, True, each.nbytes, each.seconds) for each in finished]

    def wait(self, job_ids: set[int]) -> None:
        """Let the compute that follows come after these transfers."""
        self.transfers.order_after(job_ids)

    def shutdown(self) -> None:
        """End transfers and storage, and give the host memory back."""
        if self.storage is None or self.storage.close(CLOSE_SECONDS):
            self.transfers.close()

    def _note_failure(self, transfer: Finished) -> None:
        what = "load" if transfer.is_load else "store"
        logger.error("a %s of %d blocks failed: %s", what, len(transfer.blocks), transfer.error)
        self.failed_pages.update(transfer.pages.tolist())
        if transfer.is_load:
            self.failed_blocks.update(transfer.blocks.tolist())
            self.failed_loads.add(transfer.number)


class HiCacheSpec(base.OffloadingSpec):
    """Makes both sides from vLLM's configuration.

    Attributes
    ----------
    fingerprint
        Identity of the blocks of this worker; set before the worker is made, where there is a storage.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, base.OffloadingMetricMetadata]:
        """Describe the counters for ``/metrics``."""
        return {_metric(name): base.OffloadingCounterMetadata(documentation=text) for name, text in METRICS.items()}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings = VllmSettings.of(config.extra_config)
        self.offload_prompt_only = self.settings.offload_prompt_only
        if config.cache.blocks_per_chunk != 1:
            raise ValueError(
                f"blocks_per_chunk is {config.cache.blocks_per_chunk}; the connector moves single blocks: 1"
            )
        parallel = config.parallel
        if parallel.pp_size > 1 and self.settings.l2_blocks is None:
            raise ValueError(
                f"pipeline_parallel_size is {parallel.pp_size}: workers have blocks of different sizes, so l2_blocks "
                "is needed in place of l2_gb"
            )
        block_bytes = max(1, config.worker_kv_bytes_per_block) * parallel.world_size
        self.pages = self.settings.blocks(block_bytes)
        self.min_load_tokens = self._min_load_tokens(config)
        self.fingerprint: Fingerprint | None = None
        self._manager: HiCacheManager | None = None
        self._worker: HiCacheWorker | None = None

    def get_manager(self) -> HiCacheManager:
        """Make the scheduler's side."""
        if self._manager is None:
            blocks = HostBlocks(self.pages, self.settings.eviction)
            storage = None
            if self.settings.storage is not None:
                wait = self.settings.storage_wait_seconds
                storage = StorageQueue(blocks, workers=self.config.parallel.world_size, wait_seconds=wait)
            self._manager = HiCacheManager(
                blocks, storage, min_load_tokens=self.min_load_tokens, events=self.config.enable_kv_cache_events
            )
            logger.info("hits of fewer than %d tokens are computed, not loaded", self.min_load_tokens)
        return self._manager

    def get_worker(self, kv_caches: Any) -> HiCacheWorker:
        """Make a worker's side over its tensors."""
        if self._worker is None:
            tensors = [each.tensor.view(torch.uint8) for each in kv_caches.tensors]
            transfers = BlockTransfers(tensors, self.pages, pin_memory=self.settings.pin_memory)
            for pool in transfers.pools:
                found = pool.host.capabilities()
                logger.info(
                    "host pool %s: %d blocks of %d bytes; a long run of blocks is moved %s (%s)",
                    pool.name, self.pages, pool.host.page_bytes,
                    "by the copy engine" if found.staged else "directly" if found.direct else "in plain torch",
                    found.reason,
                )  # fmt: skip
            self._worker = HiCacheWorker(transfers, self._storage(transfers))
        return self._worker

    def _min_load_tokens(self, config: Any) -> int:
        if self.settings.min_load_tokens is not None:
            return self.settings.min_load_tokens
        block_bytes = max(1, config.worker_kv_bytes_per_block)
        groups = [GroupBytes(group.tokens_per_block, block_bytes) for group in config.groups]
        return shortest_load(groups, self.settings.prefill_tokens_per_second)

    def _storage(self, transfers: BlockTransfers) -> WorkerStorage | None:
        if self.settings.storage is None:
            return None
        assert self.fingerprint is not None
        backend, options = storage_address(self.settings.storage)
        options |= dict(self.settings.storage_options)
        storage = StorageBackendFactory.create(backend, fingerprint=self.fingerprint, **options)
        logger.info("storage %s keeps blocks beyond this process", self.settings.storage)
        return WorkerStorage(storage, transfers.pools)


def _numbers(spec: Any) -> torch.Tensor:
    return torch.from_numpy(spec.block_ids.astype("int64"))
