"""A controller over pools on the GPU, with device-side spins to hold the windows of the hazards open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hicache_controller.controller import HiCacheController
from hicache_controller.storage_settings import StorageSettings
from hicache_kernels.staging import Direction
from hicache_pools.device_pools import MHATokenToKVPool
from hicache_pools.extents import ExtentAllocator
from hicache_pools.group import HostPoolGroup, PoolEntry
from hicache_pools.host_pools import MHATokenToKVPoolHost

LAYERS = 4
PAGE_SIZE = 16
SPIN_CYCLES = 300_000_000


class GpuStack:
    """One MHA pool on the GPU with random rows, its pinned host pool, an allocator on CPU, and a controller."""

    def __init__(
        self,
        *,
        device_pages: int = 64,
        host_pages: int = 64,
        layout: str = "page_first",
        policy: str = "auto",
        pin: bool = True,
        dim: int = 64,
        controller: type[HiCacheController] = HiCacheController,
        **options: Any,
    ) -> None:
        slots = device_pages * PAGE_SIZE
        self.k, self.v = (
            [torch.randint(0, 256, (slots, 2, dim), dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
            for _ in range(2)
        )
        self.device_pool = MHATokenToKVPool.from_buffers(k=self.k, v=self.v, page_size=PAGE_SIZE)
        self.host_pool = MHATokenToKVPoolHost(
            self.device_pool, 0, 0, PAGE_SIZE, layout, pin, transfer_policy=policy, pages=host_pages
        )
        self.host_pool.buffer.random_(0, 256)
        self.allocator = ExtentAllocator(device_pages, PAGE_SIZE)
        self.entry = PoolEntry(
            "kv",
            self.host_pool,
            self.device_pool,
            lambda layer: layer,
            device_alloc_fn=self.allocator.alloc,
            device_free_fn=self.allocator.free,
        )
        self.group = HostPoolGroup([self.entry])
        self.controller = controller(
            self.group, storage=StorageSettings(retry_seconds=0, max_wait_seconds=30.0), **options
        )
        self.warm_up()

    def warm_up(self) -> None:
        """Build modules and calibrate before anything is held open."""
        host, _ = self.written(2)
        self.loaded(host)
        self.controller.evict_host(host)
        self.host_pool.buffer.random_(0, 256)
        torch.cuda.synchronize()

    @property
    def device_to_host_stream(self) -> torch.cuda.Stream:
        return self.controller.engine._workers[Direction.WRITE_BACK].device.stream

    @property
    def host_to_device_stream(self) -> torch.cuda.Stream:
        return self.controller.engine._workers[Direction.LOAD].device.stream

    def spin(self, stream: torch.cuda.Stream | None = None) -> None:
        """Keep a stream (default: the current one) busy."""
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SPIN_CYCLES)

    def alloc(self, pages: int) -> torch.Tensor:
        slots = self.allocator.alloc(pages * PAGE_SIZE)
        if slots is None:
            raise RuntimeError("the test needs more device pages")
        return slots

    def random_rows(self, count: int) -> list[torch.Tensor]:
        shape = (count, *self.k[0].shape[1:])
        return [torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda") for _ in range(2 * LAYERS)]

    def put(self, slots: torch.Tensor, rows: list[torch.Tensor]) -> None:
        """Queue the writing of rows on the current stream; ``slots`` on the GPU, so that nothing waits."""
        for buffer, row in zip((*self.k, *self.v), rows, strict=True):
            buffer.index_copy_(0, slots, row)

    def rows(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Queue the reading of rows on the current stream; ``slots`` on the GPU."""
        return [buffer.index_select(0, slots) for buffer in (*self.k, *self.v)]

    def written(self, pages: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        device = self.alloc(pages)
        rows = self.random_rows(len(device))
        self.put(device.cuda(), rows)
        host = self.controller.write(device, node_id=0)
        self.controller.start_writing()
        (ack,) = self.controller.poll_writes(wait=True)
        if ack.error is not None:
            raise ack.error
        self.controller.evict_device(device)
        return host, rows

    def loaded(self, host: torch.Tensor) -> list[torch.Tensor]:
        device = self.controller.load(host, node_id=0)
        self.controller.start_loading()
        (ack,) = self.controller.poll_loads(wait=True)
        if ack.error is not None:
            raise ack.error
        rows = self.rows(device.cuda())
        self.controller.evict_device(device)
        return rows

    @staticmethod
    def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        torch.cuda.synchronize()
        return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

    def used(self) -> tuple[int, int]:
        return (
            self.allocator.page_num - self.allocator.available_pages,
            self.host_pool.page_num - self.host_pool.available_size() // PAGE_SIZE,
        )


@pytest.fixture
def make_stack(gpu: torch.device) -> Iterator[Callable[..., GpuStack]]:
    """Make stacks; at the end every controller is shut down, its state is checked and the memory is freed."""
    made: list[GpuStack] = []

    def make(**options: Any) -> GpuStack:
        made.append(GpuStack(**options))
        return made[-1]

    yield make
    for stack in made:
        torch.cuda.synchronize()
        assert stack.controller.shutdown(60)
        stack.controller.check_integrity()
        stack.group.destroy()
