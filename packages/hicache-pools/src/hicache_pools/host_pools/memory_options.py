"""HostMemoryOptions: what a host pool passes on to the allocation of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from hicache_kernels import HostLayout
from hicache_kernels.validation import one_of

from ..host_memory import CHUNK_BYTES, HostBuffer, HugePages, allocate_host_buffer, check_memory_numbers
from ..memory_budget import HostMemoryBudget
from ..registration import HostRuntime, Segment
from .geometry import PoolGeometry


@dataclass(frozen=True)
class HostMemoryOptions:
    """Keywords of :func:`hicache_pools.host_memory.allocate_host_buffer` that seldom differ from pool to pool.

    Attributes
    ----------
    chunk_bytes
        Bytes registered at once, at most.
    huge_pages
        ``"transparent"``, ``"reserved"`` or ``"off"``.
    numa_node
        Node to take the memory from; ``"auto"`` is the GPU's; None leaves it to the kernel.
    threads
        Threads that touch the memory before it is pinned; None takes one a core, at most 16.
    budget
        Limit on host memory; None is ``HostMemoryBudget()``.
    runtime
        What pins; None is the CUDA or HIP runtime of this process.
    """

    chunk_bytes: int = CHUNK_BYTES
    huge_pages: HugePages | str = HugePages.TRANSPARENT
    numa_node: int | Literal["auto"] | None = "auto"
    threads: int | None = None
    budget: HostMemoryBudget | None = None
    runtime: HostRuntime | None = None

    def __post_init__(self) -> None:
        one_of("huge_pages", self.huge_pages, HugePages)
        check_memory_numbers(self.chunk_bytes, self.numa_node, self.threads)


def allocate_pool_buffer(
    geometry: PoolGeometry,
    pages: int,
    *,
    pin: bool,
    allocator_type: str,
    device: torch.device,
    options: HostMemoryOptions,
    drain: Callable[[], None],
) -> HostBuffer:
    """Allocate the buffer of a pool so that no registration ends inside a contiguous piece of a page."""
    return allocate_host_buffer(
        pages * geometry.page_bytes,
        # Host memory of a pool in CPU memory has no device to be pinned for.
        pin=pin and (device.type != "cpu" or options.runtime is not None),
        page_bytes=pieces(geometry, pages),
        allocator_type=allocator_type,
        device=device,
        chunk_bytes=options.chunk_bytes,
        huge_pages=options.huge_pages,
        numa_node=options.numa_node,
        threads=options.threads,
        budget=options.budget,
        drain=drain,
        runtime=options.runtime,
    )


def pieces(geometry: PoolGeometry, pages: int) -> int | tuple[Segment, ...]:
    """Where a registration may end: between pages, or in ``layer_first`` between pages of a component."""
    if geometry.layout is not HostLayout.LAYER_FIRST:
        return geometry.page_bytes
    rows = geometry.rows_per_page
    return tuple(
        Segment(component.element_bytes * rows * pages * geometry.layers, component.element_bytes * rows)
        for component in geometry.components
    )
