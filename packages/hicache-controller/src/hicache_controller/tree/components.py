"""WindowComponent: a pool of which a prefix needs only its last pages; WindowPool: the tree's access to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from hicache_kernels.validation import whole
from hicache_pools.group import PoolEntry
from hicache_pools.pool_transfer import PoolHitPolicy, PoolName, PoolTransfer

from .node import Pages, WindowPart
from .queue import EvictionQueue


@dataclass(frozen=True)
class WindowComponent:
    """A pool with slots of its own that a prefix needs for its last pages alone.

    A sliding window needs as many pages as the window touches; a recurrent state needs the one that was saved at the
    very end (``window_pages=1``), as a page of its pool is a state. Full attention is the tree's anchor, and sidecars,
    which share the slots of another pool, move with that pool; neither is a component.

    Parameters
    ----------
    name
        Its entry in the group, with ``device_alloc_fn`` and ``device_free_fn``.
    window_pages
        Pages of the anchor that are needed at the end of a prefix; all of a shorter one.
    """

    name: PoolName | str
    window_pages: int

    def __post_init__(self) -> None:
        whole("window_pages", self.window_pages)

    @classmethod
    def sliding_window(cls, name: PoolName | str, *, window_tokens: int, page_size: int) -> WindowComponent:
        """Return the component of a sliding window: as many pages as its tokens may touch at the end of a prefix."""
        return cls(name, -(-whole("window_tokens", window_tokens) // whole("page_size", page_size)))

    @classmethod
    def recurrent_state(cls, name: PoolName | str = PoolName.MAMBA) -> WindowComponent:
        """Return the component of a recurrent state, which is needed at the end of a prefix."""
        return cls(name, 1)


class SlotPages:
    """Converts page numbers of a pool to slot indices and back."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._offsets = np.arange(page_size, dtype=np.int64)

    def slots(self, pages: Pages) -> torch.Tensor:
        """Slot indices of whole pages, int64 ``[pages * page_size]`` on CPU."""
        if self.page_size == 1:
            return torch.from_numpy(pages)
        return torch.from_numpy(np.add.outer(pages * self.page_size, self._offsets).reshape(-1))

    def pages(self, slots: torch.Tensor) -> Pages:
        """Page numbers of whole pages of slots, int64 on CPU."""
        table: Pages = slots.numpy()
        return table if self.page_size == 1 else table[:: self.page_size] // self.page_size


class WindowPool:
    """A component with its entry, and queues of its parts that may be evicted."""

    def __init__(self, component: WindowComponent, entry: PoolEntry) -> None:
        if entry.device_alloc_fn is None or entry.device_free_fn is None:
            raise ValueError(
                f"entry {entry.name!s} has no device_alloc_fn or no device_free_fn; a component of the tree needs both"
            )
        self.name = str(component.name)
        self.window_pages = component.window_pages
        self.entry = entry
        self.converter = SlotPages(int(entry.host_pool.page_size))
        self.device_queue: EvictionQueue[WindowPart] = EvictionQueue(1, window_rank, partial(_may_leave, device=True))
        self.host_queue: EvictionQueue[WindowPart] = EvictionQueue(2, window_rank, partial(_may_leave, device=False))

    def alloc_device(self, pages: int) -> Pages | None:
        """Allocate device pages; None if too few are free."""
        if self.entry.device_alloc_fn is None:
            return None
        slots = self.entry.device_alloc_fn(pages * self.converter.page_size)
        return None if slots is None else self.converter.pages(slots.cpu())


def _may_leave(part: WindowPart, *, device: bool) -> bool:
    return part.part(device=device) is not None and not (part.pins and part.pin_count(device=device))


def window_rank(part: WindowPart) -> tuple[float, ...]:
    """Return the rank of a part among those that may be evicted."""
    return part.node.priority, part.last_access


def trailing(
    pool: str, slots: torch.Tensor | None = None, *, on_device: bool = False, keys: Sequence[bytes] | None = None
) -> PoolTransfer:
    """Return the transfer of slots of a windowed pool, whose pages are the last ones of a prefix."""
    host, device = (None, slots) if on_device else (slots, None)
    policy = PoolHitPolicy.TRAILING_PAGES
    return PoolTransfer(pool, host_indices=host, device_indices=device, keys=keys, hit_policy=policy)
