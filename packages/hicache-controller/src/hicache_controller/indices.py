"""Checks of slot indices at the controller's boundary."""

from __future__ import annotations

import torch

from hicache_pools.device_pools.base import DevicePool
from hicache_pools.group import PoolEntry


def device_slot_count(entry: PoolEntry) -> int | None:
    """Slots that device indices of a pool may name; None where that is not known."""
    return entry.device_pool.index_size if isinstance(entry.device_pool, DevicePool) else None


def own_indices(indices: torch.Tensor) -> torch.Tensor:
    """Copy indices that are on the CPU, so that the caller may use its tensor again at once.

    Those on a device are returned as they are: a copy would be ordered behind the caller's current stream, and a
    transfer behind the caller's event alone.
    """
    # numpy, for the same reason as below.
    return torch.from_numpy(indices.numpy().copy()) if indices.device.type == "cpu" else indices


def check_indices(name: str, indices: torch.Tensor, page_size: int, slots: int | None) -> None:
    """Raise ValueError unless these are whole pages in range, as far as can be told without waiting for a device."""
    if indices.ndim != 1 or indices.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} has shape {tuple(indices.shape)} and dtype {indices.dtype}; accepted is [n] of int64 or int32"
        )
    count = indices.numel()
    if not count or count % page_size:
        raise ValueError(f"{name} has {count} slots; accepted is a positive multiple of the page size {page_size}")
    if indices.device.type == "cpu":
        # numpy: the call is short, and torch would wake a thread pool for it.
        slots_array = indices.numpy()
        low, high = int(slots_array.min()), int(slots_array.max())
        if low < 0 or (slots is not None and high >= slots):
            raise ValueError(f"{name} runs from {low} to {high}; accepted is 0..{'' if slots is None else slots - 1}")
