"""DeviceSlots: gives device slots back behind the transfers that still use them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hicache_pools.group import PoolEntry

from .in_flight import Access, Place, Side, Use, page_granules
from .operation_queue import OperationQueue
from .transfer_engine import L2TransferEngine


class DeviceSlots:
    """Frees of device slots, and what they have to follow.

    Parameters
    ----------
    engine
        Knows what is in flight.
    writes, loads
        Know what waits to be started.
    start_writing
        Starts the writes that wait.
    """

    def __init__(
        self,
        engine: L2TransferEngine,
        writes: OperationQueue,
        loads: OperationQueue,
        start_writing: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._writes = writes
        self._loads = loads
        self._start_writing = start_writing

    def check_not_loading(self, entry: PoolEntry, device_indices: torch.Tensor) -> None:
        """Raise RuntimeError where slots are those of a load that was not started: their bytes are nobody's yet."""
        if not self._loads.waiting:
            return
        users = self._loads.waiting_uses.users(_use(entry, device_indices), (Access.WRITE,))
        if users:
            raise RuntimeError(
                f"device_indices are those of a load of node {users[0].node_ids[0]} that was not started; "
                "call start_loading or cancel_load first"
            )

    def evict(self, entry: PoolEntry, device_indices: torch.Tensor) -> int:
        """Free slots behind whatever uses them; returns how many."""
        if entry.device_free_fn is None:
            raise ValueError(f"entry {entry.name!s} has no device_free_fn, which giving device slots back needs")
        if self._engine.in_flight or self._writes.waiting or self._loads.waiting:
            self.check_not_loading(entry, device_indices)
            use = _use(entry, device_indices)
            if self._writes.waiting and self._writes.waiting_uses.users(use, (Access.READ,)):
                self._start_writing()
            for event in self._engine.events_of_users([(use, (Access.READ, Access.WRITE))]):
                event.wait()
        entry.device_free_fn(device_indices)
        return device_indices.numel()


def _use(entry: PoolEntry, device_indices: torch.Tensor) -> Use:
    granules = page_granules(device_indices, int(entry.host_pool.page_size))
    return Use(Place(str(entry.name), Side.DEVICE), Access.WRITE, granules)
