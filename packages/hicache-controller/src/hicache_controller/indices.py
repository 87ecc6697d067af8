"""Checks of slot indices at the controller's boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_kernels.staging import Direction
from hicache_pools.device_pools.base import DevicePool
from hicache_pools.group import PoolEntry
from hicache_pools.group_slots import Side
from hicache_pools.host_pools.base import HostPool

from .in_flight import Access, PageUse, PoolSide, aligned_blocks, pages_of

if TYPE_CHECKING:
    from .transfer_handle import L2Transfer


def device_slot_count(entry: PoolEntry) -> int | None:
    """Slots that device indices of a pool may name; None where that is not known."""
    return entry.device_pool.index_size if isinstance(entry.device_pool, DevicePool) else None


def page_use(pool: PoolEntry | L2Transfer, side: Side, access: Access, indices: torch.Tensor) -> PageUse:
    """Return what an operation does with pages of one side of a pool, unknown ones where they are not on the CPU."""
    device = pool.device_pool
    known = side == "host" or not isinstance(device, DevicePool) or device.index_translation is None
    pages = pages_of(indices, int(pool.host_pool.page_size)) if known else None
    return PageUse(PoolSide(str(pool.name), side), access, pages)


def transfer_uses(
    pool: PoolEntry | L2Transfer, direction: Direction, host_indices: torch.Tensor, device_indices: torch.Tensor
) -> list[PageUse]:
    """Return what a write-back or a load does with pages of both sides of a pool."""
    is_load = direction is Direction.LOAD
    return [
        page_use(pool, "device", Access.WRITE if is_load else Access.READ, device_indices),
        page_use(pool, "host", Access.READ if is_load else Access.WRITE, host_indices),
    ]


def own_indices(indices: torch.Tensor) -> torch.Tensor:
    """Copy indices that are on the CPU, so that the caller may use its tensor again at once.

    Those on a device are returned as they are: a copy would follow the caller's current stream, while a transfer
    follows the caller's event alone.
    """
    # numpy, for the same reason as below.
    return torch.from_numpy(indices.numpy().copy()) if indices.is_cpu else indices


def check_form(name: str, indices: torch.Tensor, page_size: int) -> None:
    """Raise ValueError unless these are integers, and as many as whole pages have."""
    if indices.ndim != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} has shape {tuple(indices.shape)} and dtype {indices.dtype}; accepted is [n] of int64 or int32"
        )
    count = indices.numel()
    if not count or count % page_size:
        raise ValueError(f"{name} has {count} slots; accepted is a positive multiple of the page size {page_size}")


def check_range(name: str, indices: torch.Tensor, slots: int | None) -> None:
    """Raise ValueError where indices on the CPU are out of range; others are not read."""
    if not indices.is_cpu:
        return
    # numpy: the call is short, and torch would wake a thread pool for it.
    array = indices.numpy()
    low, high = int(array.min()), int(array.max())
    if low < 0 or (slots is not None and high >= slots):
        raise ValueError(f"{name} runs from {low} to {high}; accepted is 0..{'' if slots is None else slots - 1}")


def check_device_indices(name: str, indices: torch.Tensor, entry: PoolEntry) -> None:
    """Raise ValueError unless these are device slots of a pool, each once, as far as is known without waiting.

    The slots of a page may lie anywhere on the device, except that those of one row are neighbours.
    """
    page_size = int(entry.host_pool.page_size)
    check_form(name, indices, page_size)
    if not indices.is_cpu:
        return
    slots, known = indices.numpy(), device_slot_count(entry)
    blocks = aligned_blocks(slots, page_size)
    numbers, size = (slots, 1) if blocks is None else (blocks, page_size)
    ascending = len(numbers) == 1 or (numbers[1:] > numbers[:-1]).all()
    if not ascending or slots[0] < 0 or (known is not None and slots[-1] >= known):
        check_range(name, indices, known)
    if not ascending:
        ordered = np.sort(numbers)
        twice = ordered[1:] == ordered[:-1]
        if twice.any():
            raise ValueError(f"{name} has slot {ordered[np.argmax(twice)] * size} twice; accepted is each slot once")
    row = _slots_a_row(entry)
    if blocks is None and aligned_blocks(slots, row) is None:
        raise ValueError(f"{name} are not whole rows; accepted are {row} neighbours each, the first a multiple of that")


def _slots_a_row(entry: PoolEntry) -> int:
    """Slots that share a device row; 1 where that is not known, or the pool translates indices."""
    host, device = entry.host_pool, entry.device_pool
    if not isinstance(host, HostPool) or (isinstance(device, DevicePool) and device.index_translation is not None):
        return 1
    return host.geometry.page_size // host.geometry.rows_per_page
