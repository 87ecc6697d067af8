"""Takes slots of several pools, all or nothing, and asks the pools that are short to reclaim."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from .pool_entry import PoolEntry

logger = logging.getLogger(__name__)

Side = Literal["host", "device"]


class SlotRequest(NamedTuple):
    """Slots wanted of one pool, and whom to ask in place of the entry's callback where it is short."""

    entry: PoolEntry
    slots: int
    reclaim: Callable[[int], object] | None = None


class SlotTaker:
    """Takes slots for a list of requests, in its order.

    Nothing stays taken, and no lock is held, while a reclaim callback runs: it sees all free slots, and may call back,
    wait for other threads that do, raise, or free too little. Each pool is asked once for each call of :meth:`take`.

    Attributes
    ----------
    lock
        Guards the group: its entries, the takings of host slots, and which transfers it has filled in.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards a group: its entries, takings of host slots, and filled transfers
        self._thread = threading.local()

    def take(self, requests: Sequence[SlotRequest], side: Side) -> list[torch.Tensor] | None:
        """Take slots for every request, or None with nothing taken; what a pool raises is passed on likewise."""
        asked: set[str] = set()
        while True:
            outcome = self._try_take(requests, side)
            if isinstance(outcome, list):
                return outcome
            if outcome.name in asked:
                return None
            asked.add(outcome.name)
            if not self._reclaim([request for request in requests if request.entry is outcome], side):
                return None

    def _try_take(self, requests: Sequence[SlotRequest], side: Side) -> list[torch.Tensor] | PoolEntry:
        if side == "device":
            return _take_each(requests, side)
        # Two operations that would each get half and fail take turns instead. Host pools never call back.
        with self.lock:
            return _take_each(requests, side)

    def _reclaim(self, requests: Sequence[SlotRequest], side: Side) -> bool:
        """Call one pool's callback; False where there is none, or where this thread is inside it already."""
        entry, reclaim = requests[0].entry, requests[0].reclaim
        needed = sum(request.slots for request in requests)
        callback = reclaim or (entry.host_evict_fn if side == "host" else entry.device_evict_fn)
        running: set[tuple[str, Side]] = self._thread.__dict__.setdefault("running", set())
        key = (str(entry.name), side)
        if callback is None or key in running:
            return False
        if side == "host" and reclaim is None:
            needed = max(needed - int(entry.host_pool.available_size()), int(entry.host_pool.page_size))
        running.add(key)
        try:
            callback(needed)
        except Exception:
            # It may have freed enough before it raised, and the caller asked for slots, not for the tree's trouble.
            logger.exception("reclaiming %d %s slots of pool %s failed", needed, side, entry.name)
        finally:
            running.discard(key)
        return True


def give_slots(entry: PoolEntry, indices: torch.Tensor, side: Side) -> None:
    """Give slots back to the pool, or to the engine's allocator."""
    if side == "host":
        entry.host_pool.free(indices)
    elif entry.device_free_fn is not None:
        entry.device_free_fn(indices)


def _take_slots(entry: PoolEntry, slots: int, side: Side) -> torch.Tensor | None:
    indices: torch.Tensor | None = None
    if side == "host":
        indices = entry.host_pool.alloc(slots)
    elif entry.device_alloc_fn is not None:
        indices = entry.device_alloc_fn(slots)
    return indices


def _take_each(requests: Sequence[SlotRequest], side: Side) -> list[torch.Tensor] | PoolEntry:
    """Take all slots, or give back those taken and return the entry that was short (or raise what it raised)."""
    taken: list[torch.Tensor] = []
    try:
        for request in requests:
            indices = _take_slots(request.entry, request.slots, side)
            if indices is None:
                _give_back(requests, taken, side)
                return request.entry
            taken.append(indices)
    except BaseException:
        _give_back(requests, taken, side)
        raise
    return taken


def _give_back(requests: Sequence[SlotRequest], taken: list[torch.Tensor], side: Side) -> None:
    """Undo, last first; one pool's refusal must not keep the others' slots."""
    while taken:
        entry = requests[len(taken) - 1].entry
        try:
            give_slots(entry, taken.pop(), side)
        except Exception:
            logger.exception("giving %s slots of pool %s back failed", side, entry.name)
