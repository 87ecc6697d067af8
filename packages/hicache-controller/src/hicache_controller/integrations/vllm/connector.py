"""HiCacheConnector: vLLM's offloading connector with hicache's manager, transfers and storage."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from .surface import VERSION, check_hooks  # first: it says what is missing

# ruff: isort: split
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import OffloadingConfig

from .identity import fingerprint_of
from .offloading import HiCacheManager, HiCacheSpec, HiCacheWorker
from .storage_queue import StorageJob

logger = logging.getLogger("vllm.hicache")  # whose handlers vLLM sets up

check_hooks(
    {
        OffloadingConnector: (
            "bind_connector_metadata", "build_connector_meta", "build_connector_worker_meta", "build_prom_metrics",
            "get_block_ids_with_load_errors", "get_finished", "get_num_new_matched_tokens",
            "handle_preemptions", "has_pending_push_work",
            "register_kv_caches", "reset_cache", "shutdown", "start_load_kv", "update_connector_output",
        ),
        OffloadingConnectorScheduler: ("build_connector_meta", "update_connector_output"),
        OffloadingConnectorWorker: ("get_finished", "handle_preemptions", "start_kv_transfers"),
        OffloadingConnectorMetadata: ("load_jobs", "store_jobs", "jobs_to_flush"),
        OffloadingWorkerMetadata: ("aggregate", "completed_jobs", "transfer_stats"),
        OffloadingConfig: (
            "cache", "enable_kv_cache_events", "extra_config", "groups", "parallel", "worker_kv_bytes_per_block",
        ),
        TransferJob: ("req_id", "src_spec", "dst_spec"),
        base.BlockIDsLoadStoreSpec: ("__init__",),
        base.CanonicalKVCaches: ("tensors",),
        base.LookupResult: ("HIT", "HIT_PENDING", "MISS", "RETRY"),
        base.OffloadingManager: ("complete_load", "complete_store", "lookup", "prepare_load", "prepare_store", "touch"),
        base.OffloadingSpec: ("get_manager", "get_worker"),
        base.OffloadingWorker: ("get_finished", "submit_load", "submit_store", "wait"),
    }
)  # fmt: skip


@dataclass
class HiCacheMetadata(OffloadingConnectorMetadata):
    """What the scheduler sends the workers in a step."""

    storage_jobs: list[StorageJob] = field(default_factory=list)


@dataclass
class HiCacheWorkerMetadata(OffloadingWorkerMetadata):
    """What workers report after a step: for each job of storage the answers of those that have ended it."""

    answers: dict[int, list[list[bool]]] = field(default_factory=dict)
    failed_pages: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> HiCacheWorkerMetadata:
        """Add what another worker reports."""
        merged = super().aggregate(other)
        answers = {number: list(found) for number, found in self.answers.items()}
        for number, found in other.answers.items():
            answers.setdefault(number, []).extend(found)
        failed = self.failed_pages | other.failed_pages
        return HiCacheWorkerMetadata(merged.completed_jobs, merged.transfer_stats, answers, failed)


class HiCacheConnector(OffloadingConnector):
    """The connector that ``kv_connector`` names; vLLM makes one in the scheduler and one in each worker.

    Parameters
    ----------
    vllm_config, role, kv_cache_config
        As vLLM gives them.

    Raises
    ------
    TypeError, ValueError
        Where a setting is wrong, or a feature of vLLM in use does not go with this connector.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        _name_spec(vllm_config)
        if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
            raise ValueError("HiSparse is on, whose blocks lie in several pools; HiCacheConnector needs one pool")
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._cache_config = vllm_config, kv_cache_config
        self._requests: dict[int, str] = {}
        self._failed_requests: set[str] = set()
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        if role == KVConnectorRole.SCHEDULER and policy != "recompute":
            logger.warning(
                "kv_load_failure_policy is %r: a block that cannot be loaded fails its request; with 'recompute' it is "
                "computed",
                policy,
            )

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens more can be loaded, none where computing them takes less time."""
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        tokens = found[0]
        if not tokens or tokens >= self._manager.min_load_tokens:
            return found
        smallest = min(group.kv_cache_spec.block_size for group in self._cache_config.kv_cache_groups)
        self._manager.decline(request.request_id, tokens, smallest)
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> HiCacheMetadata:
        """Add what storage is to do to what vLLM sends."""
        meta = super().build_connector_meta(scheduler_output)
        return HiCacheMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, self._manager.take_jobs())

    def update_connector_output(self, connector_output: Any) -> None:
        """Note what the workers report."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, HiCacheWorkerMetadata):
            self._manager.apply(meta.answers, meta.failed_pages)
        super().update_connector_output(connector_output)

    @property
    def _manager(self) -> HiCacheManager:
        assert self.connector_scheduler is not None
        manager: HiCacheManager = self.connector_scheduler.manager
        return manager

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make host pools and storage for the tensors of this worker."""
        self._identify(kv_caches)
        super().register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        """Likewise, where vLLM 0.26 keeps all layers of a block together."""
        self._identify({"all layers": kv_cache})
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Start the storage jobs of a step."""
        super().bind_connector_metadata(connector_metadata)
        worker = self._worker
        for job in connector_metadata.storage_jobs:
            if worker is not None and worker.storage is not None:
                worker.storage.submit(job)
        self._requests |= {number: job.req_id for number, job in connector_metadata.load_jobs.items()}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests whose loads are over."""
        finished: tuple[set[str], set[str]] = super().get_finished(finished_req_ids)
        worker = self._worker
        if worker is not None:
            self._failed_requests |= {self._requests[number] for number in worker.failed_loads}
            worker.failed_loads.clear()
        self._requests = {number: request for number, request in self._requests.items() if request not in finished[1]}
        return finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Name the requests whose loads failed, where blocks cannot be named (vLLM 0.32, several groups)."""
        results = super().get_transfer_results(finished_req_ids)
        if self._several_groups:
            results.failed_recving |= self._failed_requests
            self._failed_requests = set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were to be filled and are not."""
        worker = self._worker
        if worker is None:
            return set()
        failed, worker.failed_blocks = worker.failed_blocks, set()
        if not self._several_groups:
            self._failed_requests = set()
            return failed
        if self._failed_requests:
            raise RuntimeError(
                f"blocks of requests {sorted(self._failed_requests)} could not be loaded, and vLLM {VERSION} "
                "cannot compute them anew for a model with several kinds of layers; a newer vLLM can"
            )
        return set()

    def build_connector_worker_meta(self) -> HiCacheWorkerMetadata | None:
        """Return what this worker reports."""
        meta = super().build_connector_worker_meta()
        worker = self._worker
        if worker is None:
            return None
        answers = {} if worker.storage is None else worker.storage.answers()
        failed, worker.failed_pages = worker.failed_pages, set()
        if meta is None and not answers and not failed:
            return None
        meta = meta or OffloadingWorkerMetadata()
        reported = {number: [answer] for number, answer in answers.items()}
        return HiCacheWorkerMetadata(meta.completed_jobs, meta.transfer_stats, reported, failed)

    @property
    def _worker(self) -> HiCacheWorker | None:
        if self.connector_worker is None:
            return None
        worker: HiCacheWorker | None = self.connector_worker.worker
        return worker

    def _identify(self, views: dict[str, Any]) -> None:
        assert self.connector_worker is not None
        spec: HiCacheSpec = self.connector_worker.spec
        if spec.settings.storage is not None:
            spec.fingerprint = fingerprint_of(
                self._config, spec.settings, views, blocks=self._cache_config.num_blocks, version=VERSION
            )

    # In the front end

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *arguments: Any) -> Any:
        """Make what shows the counters in ``/metrics``."""
        _name_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *arguments)


def _name_spec(vllm_config: Any) -> None:
    """Have vLLM make our sides of the offloading."""
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra_config["spec_name"] = HiCacheSpec.__name__
    extra_config["spec_module_path"] = HiCacheSpec.__module__
