"""HostSlots: gives host slots back, but never while something in flight still uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hicache_pools.group import HostPoolGroup, PoolEntry

from .in_flight import Access, Granules, Place, Side, Use, page_granules
from .indices import check_form, check_range
from .metrics import Metrics
from .transfer_handle import Guards


class HostSlots:
    """Frees of host slots, deferred where they are in flight.

    Parameters
    ----------
    group
        The pools.
    busy, any_in_flight
        Tell for each page of a use whether something uses it, and whether anything uses any page.
    guards
        ``refill_follows_read`` off frees at once.
    metrics
        Where to count.

    Invariant: a page that waits is allocated, in flight when it began to wait, and waits once.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        busy: Callable[[Use], npt.NDArray[np.bool_]],
        any_in_flight: Callable[[], bool],
        *,
        guards: Guards,
        metrics: Metrics,
    ) -> None:
        self._group = group
        self._busy = busy
        self._any_in_flight = any_in_flight
        self._guards = guards
        self._metrics = metrics
        self._waiting: dict[str, Granules] = {}
        metrics.gauge("deferred_host_pages", lambda: sum(map(len, self._waiting.values())))

    def alloc(self, slots: int) -> torch.Tensor | None:
        """Take host slots of the anchor, after freeing what has waited long enough if that is needed."""
        indices = self._group.alloc(slots)
        if indices is None and self.reap():
            indices = self._group.alloc(slots)
        return indices

    def check(
        self, entry: PoolEntry, host_indices: torch.Tensor, pages: int | None = None, *, shared: bool = False
    ) -> None:
        """Raise ValueError unless these are pages of the pool that somebody owns, each whole and once, and as many.

        Pages of a pool that shares another's slots (``shared``) are owned in that one.
        """
        page_size = int(entry.host_pool.page_size)
        check_form("host_indices", host_indices, page_size)
        if host_indices.device.type != "cpu":
            raise ValueError(f"host_indices is on {host_indices.device}; host slots are named on cpu")
        if pages is not None and host_indices.numel() != pages * page_size:
            raise ValueError(
                f"host_indices has {host_indices.numel()} slots for {pages} keys; "
                f"{pages * page_size} are expected, {page_size} a page"
            )
        if shared:
            _whole_pages(entry, host_indices)
            check_range(f"host_indices of pool {entry.name!s}", host_indices, int(entry.host_pool.size))
            return
        try:
            owned = entry.host_pool.owned_pages(host_indices)
        except ValueError as error:
            check_range("host_indices", host_indices, int(entry.host_pool.size))
            raise ValueError(f"host_indices are not pages that are owned in pool {entry.name!s}: {error}") from None
        self._check_not_waiting(entry, owned)

    def _check_not_waiting(self, entry: PoolEntry, pages: Granules) -> None:
        """Raise ValueError where pages were given back and only wait to be freed."""
        waiting = self._waiting.get(str(entry.name))
        if waiting is None:
            return
        gone = np.isin(pages, waiting)
        if gone.any():
            raise ValueError(f"host_indices has page {pages[gone][0]} of pool {entry.name!s}, which was given back")

    def evict(self, entry: PoolEntry, host_indices: torch.Tensor) -> int:
        """Free slots of whole pages, or let them wait; returns how many are free now."""
        if not self._waiting and not self._any_in_flight():
            return int(entry.host_pool.free(host_indices))
        pages = _whole_pages(entry, host_indices)
        self._check_not_waiting(entry, pages)
        busy = self._busy_pages(entry, pages)
        if not busy.any():
            return int(entry.host_pool.free(host_indices))
        waiting = pages[busy]
        if len(np.unique(pages)) != len(pages):
            raise ValueError(f"host_indices has {len(pages)} pages of pool {entry.name!s}, some of them twice")
        freed = int(entry.host_pool.free(_slots(entry, pages[~busy]))) if not busy.all() else 0
        self._defer(entry, waiting)
        return freed

    def give_back(self, entry: PoolEntry, host_indices: torch.Tensor) -> None:
        """Free slots that the caller may have given back already, as for an operation that failed."""
        pages = _whole_pages(entry, host_indices)
        waiting = self._waiting.get(str(entry.name))
        if waiting is not None:
            pages = pages[~np.isin(pages, waiting)]
        busy = self._busy_pages(entry, pages)
        if not busy.all():
            entry.host_pool.free(_slots(entry, pages[~busy]))
        if busy.any():
            self._defer(entry, pages[busy])

    def reap(self) -> int:
        """Free what has waited and is in flight no more; returns how many slots."""
        freed = 0
        for name, pages in list(self._waiting.items()):
            entry = self._group.get_entry(name)
            busy = self._busy_pages(entry, pages)
            if busy.all():
                continue
            freed += int(entry.host_pool.free(_slots(entry, pages[~busy])))
            if busy.any():
                self._waiting[name] = pages[busy]
            else:
                del self._waiting[name]
        return freed

    def forget(self) -> None:
        """Let nothing wait any more, as its pools are about to be cleared."""
        self._waiting.clear()

    def check_integrity(self) -> None:
        """Check the invariant as far as it can be seen; RuntimeError names the pool."""
        for name, pages in self._waiting.items():
            if not len(pages) or len(np.unique(pages)) != len(pages):
                raise RuntimeError(f"pages of pool {name} wait twice, or none does")

    def _busy_pages(self, entry: PoolEntry, pages: Granules) -> npt.NDArray[np.bool_]:
        if not self._guards.refill_follows_read:
            return np.zeros(len(pages), dtype=np.bool_)
        return self._busy(Use(Place(str(entry.name), Side.HOST), Access.WRITE, pages))

    def _defer(self, entry: PoolEntry, pages: Granules) -> None:
        name = str(entry.name)
        waiting = self._waiting.get(name)
        self._waiting[name] = pages if waiting is None else np.concatenate((waiting, pages))
        self._metrics.count("deferred_frees", len(pages))


def _whole_pages(entry: PoolEntry, host_indices: torch.Tensor) -> Granules:
    page_size = int(entry.host_pool.page_size)
    pages = page_granules(host_indices, page_size)
    if pages is None:
        raise ValueError(f"host_indices is on {host_indices.device}; host slots are named on cpu")
    if len(pages) * page_size != host_indices.numel():
        raise ValueError(
            f"host_indices has {host_indices.numel()} slots of {len(pages)} pages of pool {entry.name!s}; accepted are "
            f"whole pages of {page_size}, each once, with their slots in order"
        )
    return pages


def _slots(entry: PoolEntry, pages: Granules) -> torch.Tensor:
    page_size = int(entry.host_pool.page_size)
    slots: Any = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return torch.from_numpy(slots)
