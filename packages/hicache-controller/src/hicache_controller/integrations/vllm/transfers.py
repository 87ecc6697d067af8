"""BlockTransfers: moves whole blocks between a worker's tensors and its host memory; needs no vLLM."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hicache_kernels.validation import whole
from hicache_pools import BlockPool, BlockPoolHost

from ... import L2Transfer, L2TransferEngine

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""How long closing waits for transfers."""


class Finished(NamedTuple):
    """A transfer that is over.

    Attributes
    ----------
    number
        Of its job.
    is_load
        Whether it filled blocks.
    blocks, pages
        What it moved.
    nbytes, seconds
        How much, and how long that took since it was submitted.
    error
        Why it failed; None where it did not.
    """

    number: int
    is_load: bool
    blocks: torch.Tensor
    pages: torch.Tensor
    nbytes: int
    seconds: float
    error: BaseException | None


class _Transfer(NamedTuple):
    """A transfer in flight; ``handle`` is what the transfer engine returned."""

    is_load: bool
    blocks: torch.Tensor
    pages: torch.Tensor
    started: float
    handle: Any


@dataclass(frozen=True, eq=False)
class NamedPool:
    """Host pages of the tensors whose blocks have one size; ``name`` is the pool's in transfers and storage."""

    name: str
    host: BlockPoolHost


class BlockTransfers:
    """Stores and loads of one worker, ordered against its compute.

    A block is a row of every tensor, whichever layers and groups use it, so a block and a page are one number each.

    Parameters
    ----------
    tensors
        Each ``[blocks, bytes]`` of one byte a value, on one device. Blocks may be padded.
    pages
        Pages of the host.
    pin_memory
        Whether to pin them for a GPU.

    Attributes
    ----------
    pools
        One for each size of rows.
    block_bytes
        Bytes of one block over all tensors.

    Raises
    ------
    TypeError, ValueError
        If the tensors are not such, or lie over each other so that a block is not one row of each.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pages: int, *, pin_memory: bool = True) -> None:
        whole("pages", pages)
        alike = _by_shape(tensors)
        self.device = tensors[0].device
        self.pools: list[NamedPool] = []
        try:
            for number, rows in enumerate(alike):
                pool = BlockPool.from_buffers(blocks=rows)
                host = BlockPoolHost(pool, 0, 0, layout="page_first_direct", pin_memory=pin_memory, pages=pages)
                self.pools.append(NamedPool(f"kv{number or ''}", host))
        except BaseException:
            self._destroy()
            raise
        self.block_bytes = sum(pool.host.page_bytes for pool in self.pools)
        self._engine = L2TransferEngine(self.device)
        self._running: dict[int, _Transfer] = {}

    def store(self, number: int, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy blocks to pages, after the work that the current stream holds now.

        Parameters
        ----------
        number
            Of the job, not in use.
        blocks, pages
            int64 ``[n]`` on CPU.
        """
        self._start(number, blocks, pages, is_load=False)

    def load(self, number: int, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy pages to blocks, after the work that the current stream holds now; otherwise as :meth:`store`."""
        self._start(number, blocks, pages, is_load=True)

    def order_after(self, numbers: Iterable[int]) -> None:
        """Let what is queued on the current stream from now on follow those transfers that use blocks.

        On a GPU the stream waits, not the calling thread; on CPU, where the caller computes itself, the caller waits.
        """
        for number in numbers:
            transfer = self._running.get(number)
            if transfer is not None:
                transfer.handle.device_released.wait()

    def finished(self) -> list[Finished]:
        """Return what is over since the last call."""
        ended = [number for number, transfer in self._running.items() if transfer.handle.done]
        return [self._end(number) for number in ended]

    def close(self) -> None:
        """Wait for transfers, and give the host memory back; a second call does nothing."""
        if not self.pools:
            return
        if not (self._engine.drain(CLOSE_SECONDS) and self._engine.close(CLOSE_SECONDS)):
            logger.error("transfers have not ended within %d seconds; their host memory stays", CLOSE_SECONDS)
            return
        self._destroy()

    def _start(self, number: int, blocks: torch.Tensor, pages: torch.Tensor, *, is_load: bool) -> None:
        if number in self._running:
            raise ValueError(f"number is {number}; a transfer of that number is running")
        layers = max(pool.host.layer_num for pool in self.pools)
        transfers = [
            L2Transfer(pool.name, pool.host, pool.host.device_pool, pages, blocks, _layer_map(pool.host, layers))
            for pool in self.pools
        ]
        started = time.monotonic()
        if is_load:
            handle = self._engine.submit_host_to_device(transfers, layers=layers)
        else:
            handle = self._engine.submit_device_to_host(transfers)
        self._running[number] = _Transfer(is_load, blocks, pages, started, handle)

    def _end(self, number: int) -> Finished:
        is_load, blocks, pages, started, handle = self._running.pop(number)
        self._engine.release(handle)
        taken = time.monotonic() - started
        return Finished(number, is_load, blocks, pages, len(pages) * self.block_bytes, taken, handle.error)

    def _destroy(self) -> None:
        for pool in self.pools:
            pool.host.destroy()
        self.pools = []


def _layer_map(host: BlockPoolHost, layers: int) -> tuple[int | None, ...]:
    return tuple(layer if layer < host.layer_num else None for layer in range(layers))


def _by_shape(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Check the tensors, and return them by the size and distance of their rows."""
    if not tensors:
        raise ValueError("tensors is empty; at least one is needed")
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.shape[0] != first.shape[0]:
            raise ValueError(
                f"tensors[{number}] is {tensor.dtype} of shape {tuple(tensor.shape)}; accepted is [blocks, bytes] with "
                f"one byte a value and {first.shape[0]} blocks"
            )
    _check_rows(tensors)
    alike: dict[tuple[int, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.shape[1], tensor.stride(0)), []).append(tensor)
    return list(alike.values())


def _check_rows(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError where a byte belongs to several tensors; the rows of a block may lie one after the other."""
    start = stride = end = reach = 0
    for tensor in sorted(tensors, key=torch.Tensor.data_ptr):
        base, (blocks, width) = tensor.data_ptr(), tensor.shape
        if base >= reach:  # nothing lies around it
            start, stride, end = base, tensor.stride(0), 0
        offset = base - start
        if tensor.stride(0) != stride or not end <= offset <= stride - width:
            raise ValueError(
                f"tensors lie over each other: rows of {width} bytes, {tensor.stride(0)} apart, start {offset} bytes "
                f"into rows that are {stride} apart and taken up to byte {end}; every block must have memory of its own"
            )
        end = offset + width
        reach = max(reach, base + stride * (blocks - 1) + width)
