"""The device rows of a replay: filled as a forward pass would, and checked after a load."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from hicache_pools import PoolName

from ...radix import Pages
from . import payload
from .plans import BufferPlan, PoolPlan, Tensors
from .results import VerificationError

# Bytes of rows made at a time: on a CPU what stays in its caches.
_CPU_CHUNK_BYTES = 256 << 10
_GPU_CHUNK_BYTES = 64 << 20


class _Part(NamedTuple):
    """Rows of some pages in one layer of one buffer.

    Attributes
    ----------
    begin
        Position of the first page among those asked for.
    rows
        Row numbers, int64 ``[rows]``.
    buffer
        uint8 ``[all rows, row bytes]``, the device's.
    expected
        uint8 ``[rows, row bytes]``.
    """

    begin: int
    rows: torch.Tensor
    buffer: torch.Tensor
    expected: torch.Tensor
    rows_per_page: int
    host_pool: str
    layer: int
    component: int


class _Buffer(NamedTuple):
    """A buffer family as bytes, one view a layer, and the numbers its bytes follow from."""

    layers: list[torch.Tensor]
    rows_per_page: int
    host_pool: str
    component: int
    stream: int

    @property
    def row_bytes(self) -> int:
        return self.layers[0].shape[1]


class Rows:
    """Device tensors of a model, as rows of bytes that are a function of page key, position, layer, pool and component.

    Parameters
    ----------
    plans
        The pools.
    tensors
        Those of each pool by buffer family, contiguous, one a layer; the layers of packed drafts come last.
    device
        Where they are.
    """

    def __init__(self, plans: Sequence[PoolPlan], tensors: Mapping[str, Tensors], device: torch.device) -> None:
        self._device = device
        self._several = len(plans) > 1 or any(buffer.host_pool for plan in plans for buffer in plan.buffers)
        self._anchored = tuple(str(plan.name) for plan in plans if plan.window_pages is None)
        self._buffers = {str(plan.name): list(_buffers(plan, tensors[plan.name])) for plan in plans}
        self._chunk_bytes = _CPU_CHUNK_BYTES if device.type == "cpu" else _GPU_CHUNK_BYTES

    def fill(self, keys: Sequence[bytes], pages: Pages, window: str | None = None) -> None:
        """Write the rows of these pages: those of a windowed pool, or of the anchor and all pools on its slots."""
        for part in self._parts(keys, pages, window):
            part.buffer[part.rows] = part.expected

    def verify(self, keys: Sequence[bytes], pages: Pages, window: str | None = None) -> Counter[str]:
        """Check the rows of these pages bit for bit; returns how many were checked of each host pool.

        Raises
        ------
        VerificationError
            Naming page, pool, key, position, layer, component and byte of the first difference.
        """
        checked: Counter[str] = Counter()
        for part in self._parts(keys, pages, window):
            wrong = payload.first_mismatch(part.expected, part.buffer[part.rows], part.rows_per_page)
            if wrong is not None:
                page = part.begin + wrong.page
                pool = f"pool {part.host_pool}, " if self._several else ""
                raise VerificationError(
                    f"page {page} of the request ({pool}key {keys[page].hex()}, device page {pages[page]}), position "
                    f"{wrong.position}, layer {part.layer}, component {part.component}, byte {wrong.byte}: "
                    f"{wrong.found:#04x} where {wrong.expected:#04x} was stored"
                )
            checked[part.host_pool] += len(part.rows)
        return checked

    def _parts(self, keys: Sequence[bytes], pages: Pages, window: str | None) -> Iterator[_Part]:
        for name in self._anchored if window is None else (window,):
            buffers = self._buffers[name]
            chunk = max(1, self._chunk_bytes // max(b.rows_per_page * b.row_bytes for b in buffers))
            for begin in range(0, len(pages), chunk):
                seeds = payload.page_seeds(keys[begin : begin + chunk], self._device)
                numbers = torch.from_numpy(pages[begin : begin + chunk]).to(self._device)
                yield from self._parts_of_chunk(begin, seeds, numbers, buffers)

    def _parts_of_chunk(
        self, begin: int, seeds: torch.Tensor, numbers: torch.Tensor, buffers: Sequence[_Buffer]
    ) -> Iterator[_Part]:
        rows: dict[int, torch.Tensor] = {}
        for buffer in buffers:
            size = buffer.rows_per_page
            if size not in rows:
                rows[size] = (numbers[:, None] * size + torch.arange(size, device=self._device)).reshape(-1)
            for layer, view in enumerate(buffer.layers):
                expected = payload.rows(
                    seeds, page_size=size, layer=layer, component=buffer.stream, row_bytes=buffer.row_bytes
                )
                yield _Part(begin, rows[size], view, expected, size, buffer.host_pool, layer, buffer.component)


def _buffers(plan: PoolPlan, tensors: Tensors) -> Iterator[_Buffer]:
    components: Counter[str] = Counter()
    for buffer in plan.buffers:
        host_pool = _host_pool(plan, buffer)
        component = components[host_pool]
        components[host_pool] += 1
        views = [tensor.view(tensor.shape[0], -1).view(torch.uint8) for tensor in tensors[buffer.name]]
        rows_per_page = plan.page_size // buffer.slots_per_row
        yield _Buffer(views, rows_per_page, host_pool, component, _stream(host_pool, component))


def _host_pool(plan: PoolPlan, buffer: BufferPlan) -> str:
    return str(plan.name if buffer.host_pool is None else buffer.host_pool)


def _stream(host_pool: str, component: int) -> int:
    """Return a component's number among those of all pools; it follows from names, as pages outlive the process."""
    return component if host_pool == PoolName.KV else (zlib.crc32(host_pool.encode()) >> 8) << 8 | component
