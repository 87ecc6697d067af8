"""WorkerStorage: runs the storage jobs of one worker on threads of their own; needs no vLLM."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence

import torch

from ...storage import HiCacheStorage
from .storage_queue import StorageJob, Task
from .transfers import NamedPool

logger = logging.getLogger(__name__)


class WorkerStorage:
    """One storage with the host pools of one worker.

    What a storage raises is logged, and answered as blocks that are not there. The threads end with the process, also
    where a storage hangs.

    Parameters
    ----------
    storage
        Used and closed by this object.
    pools
        Its host pools; every block has a page of the same number in each.
    """

    def __init__(self, storage: HiCacheStorage, pools: Sequence[NamedPool]) -> None:
        self._storage = storage
        self._names = [pool.name for pool in pools]
        for pool in pools:
            storage.register_mem_pool_host(pool.host, pool.name)
        self._answers: queue.SimpleQueue[tuple[int, list[bool]]] = queue.SimpleQueue()
        # Blocks to store must not delay those that requests wait for.
        self._reads: queue.SimpleQueue[StorageJob | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[StorageJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"hicache-vllm-{what}", daemon=True)
            for what, jobs in (("storage-reads", self._reads), ("storage-writes", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: StorageJob) -> None:
        """Run a job on its thread."""
        (self._writes if job.task is Task.BACKUP else self._reads).put(job)

    def answers(self) -> dict[int, list[bool]]:
        """Return for each job that has ended since the last call whether each block is there."""
        found: dict[int, list[bool]] = {}
        while True:
            try:
                number, answer = self._answers.get_nowait()
            except queue.Empty:
                return found
            found[number] = answer

    def close(self, timeout: float) -> bool:
        """End after the running jobs, and close the storage; return whether that took less than ``timeout`` seconds.

        Where it did not, the storage still uses the pools.
        """
        for jobs in (self._reads, self._writes):
            jobs.put(None)
        for thread in self._threads:
            thread.join(timeout)
        if any(thread.is_alive() for thread in self._threads):
            logger.error("the storage has not answered within %g seconds; it is left as it is", timeout)
            return False
        self._storage.close()
        return True

    def _work(self, jobs: queue.SimpleQueue[StorageJob | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                answer = self._run(job)
            except Exception:
                logger.exception("storage: %s of %d blocks failed", job.task.value, len(job.keys))
                answer = [False] * len(job.keys)
            self._answers.put((job.number, answer))

    def _run(self, job: StorageJob) -> list[bool]:
        keys, pages = list(job.keys), torch.tensor(job.pages, dtype=torch.int64)
        calls: dict[Task, Callable[[str], list[bool]]] = {
            Task.FIND: lambda name: self._storage.batch_exists_each(keys, name=name),
            Task.FETCH: lambda name: self._storage.batch_get(keys, pages, name=name),
            Task.BACKUP: lambda name: self._storage.batch_set(keys, pages, name=name),
        }
        answers = [calls[job.task](name) for name in self._names]
        return [all(parts) for parts in zip(*answers, strict=True)]
