"""What staging memory a pool's transfers have, and which policy is left where it, or a compiled path, is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from hicache_kernels import Capabilities, Direction, PlaneTransfer, TransferPolicy


class PoolStaging(NamedTuple):
    """Staging of one pool.

    Attributes
    ----------
    capabilities
        The transfer's, with ``staged`` False where the device had no memory for the staging buffers.
    pages
        Pages one staging buffer of a write-back takes; 0 where nothing is staged.
    policy
        Policy of the operations.
    copies_policy
        Policy of operations that may only copy (``io_backend="direct"``).
    """

    capabilities: Capabilities
    pages: int
    policy: TransferPolicy
    copies_policy: TransferPolicy


def pool_staging(transfer: PlaneTransfer, policy: TransferPolicy) -> PoolStaging:
    """Settle what a pool's transfers do.

    Has the ring make the staging buffers of both directions now, so that no transfer finds the memory gone. A policy
    whose path is missing becomes ``auto``; without memory for staging the direct path is left, or the reference.
    """
    capabilities = transfer.capabilities()
    if not capabilities.staged:
        return _settled(capabilities, 0, policy)
    try:
        load = transfer.ring.lane(Direction.LOAD)
        with load.lock:
            load.chunk_pages(transfer.page_bytes // transfer.layers)
        write_back = transfer.ring.lane(Direction.WRITE_BACK)
        with write_back.lock:
            pages = write_back.chunk_pages(transfer.page_bytes)
    except torch.OutOfMemoryError as error:
        left = TransferPolicy.DIRECT if capabilities.direct else TransferPolicy.REFERENCE
        reason = f"staged: no memory for staging on {transfer.device}: {error}"
        without = replace(capabilities, path_write_back=str(left), path_load=str(left), staged=False, reason=reason)
        return PoolStaging(without, 0, left, TransferPolicy.REFERENCE)
    return _settled(capabilities, pages, policy)


def _settled(capabilities: Capabilities, pages: int, policy: TransferPolicy) -> PoolStaging:
    there = {TransferPolicy.STAGED: capabilities.staged, TransferPolicy.DIRECT: capabilities.direct}
    if not there.get(policy, False):
        return PoolStaging(capabilities, pages, TransferPolicy.AUTO, TransferPolicy.AUTO)
    path = str(policy)
    capabilities = replace(capabilities, path_write_back=path, path_load=path)
    return PoolStaging(capabilities, pages, policy, TransferPolicy.AUTO)
