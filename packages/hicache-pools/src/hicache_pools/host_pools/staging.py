"""What staging memory a pool's transfers have, and which policy is left where it, or a compiled path, is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from hicache_kernels import Capabilities, PlaneTransfer, TransferPolicy
from hicache_kernels.staging import Direction


class PoolStaging(NamedTuple):
    """Staging of one pool.

    Attributes
    ----------
    capabilities
        The transfer's, with ``staged`` False where the device had no memory for the staging buffers.
    pages
        Pages one staging buffer of a write-back takes; 0 where nothing is staged.
    out_of_memory
        Whether the path is there and its memory is not.
    """

    capabilities: Capabilities
    pages: int
    out_of_memory: bool


def staging_of(transfer: PlaneTransfer) -> PoolStaging:
    """Have the ring make the staging buffers of both directions now, so that no transfer finds the memory gone."""
    capabilities = transfer.capabilities()
    if not capabilities.staged:
        return PoolStaging(capabilities, 0, False)
    try:
        load = transfer.ring.lane(Direction.LOAD)
        with load.lock:
            load.chunk_pages(transfer.page_bytes // transfer.layers)
        write_back = transfer.ring.lane(Direction.WRITE_BACK)
        with write_back.lock:
            pages = write_back.chunk_pages(transfer.page_bytes)
    except torch.OutOfMemoryError as error:
        path = "direct" if capabilities.direct else "reference"
        reason = f"staged: no memory for staging on {transfer.device}: {error}"
        without = replace(capabilities, path_write_back=path, path_load=path, staged=False, reason=reason)
        return PoolStaging(without, 0, True)
    return PoolStaging(capabilities, pages, False)


def policy_with(policy: TransferPolicy, capabilities: Capabilities, *, out_of_memory: bool) -> TransferPolicy:
    """Policy to ask for: the wanted one, or ``auto`` where its path is missing; never staged without its memory."""
    if out_of_memory and policy is not TransferPolicy.DIRECT:
        return TransferPolicy.DIRECT if capabilities.direct else TransferPolicy.REFERENCE
    missing = {
        TransferPolicy.STAGED: not capabilities.staged,
        TransferPolicy.DIRECT: not capabilities.direct,
    }.get(policy, False)
    return TransferPolicy.AUTO if missing else policy
