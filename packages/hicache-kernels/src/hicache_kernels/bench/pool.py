"""Pools of the benchmark: planes laid over two large buffers that all cases share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..constants import DeviceConstants
from ..layout import host_strides
from ..plane import DeviceRows, HostRows, Plane
from ..staging import StagingRing
from ..transfer import PlaneTransfer
from .cases import Case, Pattern

RUN_PAGES = {Pattern.RUNS_OF_16: 16, Pattern.RUNS_OF_80: 80}


@dataclass(frozen=True, eq=False)
class Buffers:
    """Memory of the benchmark: allocating it anew for each case would take longer than measuring.

    Attributes
    ----------
    host
        uint8 on the CPU, pinned where the device is a GPU.
    rows
        uint8 on the device, as large.
    """

    host: torch.Tensor
    rows: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Device of the rows."""
        return self.rows.device

    @property
    def size(self) -> int:
        """Bytes of each buffer."""
        return self.rows.numel()

    def halves(self) -> tuple[Buffers, Buffers]:
        """Split into two, for transfers that run at once."""
        half = self.size // 2 // 256 * 256
        return (
            Buffers(self.host[:half], self.rows[:half]),
            Buffers(self.host[half : 2 * half], self.rows[half : 2 * half]),
        )

    @classmethod
    def allocate(cls, size: int, device: torch.device | str) -> Buffers:
        """Allocate both buffers, filled with bytes that are not all alike."""
        device = torch.device(device)
        rows = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
        host.copy_(rows)
        return cls(host, rows)


@dataclass(frozen=True, eq=False)
class BenchPool:
    """A pool that fills the buffers, and the indices of one operation over all of it.

    Attributes
    ----------
    transfer
        Its transfers.
    host_indices
        int64 slot indices on the CPU, in the pattern of the case.
    device_indices
        int64 slot indices on the device: pages in random order.
    bytes
        Bytes that the operation moves.
    """

    transfer: PlaneTransfer
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    bytes: int

    @classmethod
    def build(
        cls,
        case: Case,
        buffers: Buffers,
        *,
        constants: DeviceConstants | None = None,
        ring: StagingRing | None = None,
    ) -> BenchPool:
        """Lay the pool of a case over the buffers.

        Raises
        ------
        ValueError
            Where the buffers do not hold a page.
        """
        pages = buffers.size // case.page_bytes
        if pages < 1:
            raise ValueError(f"buffers of {buffers.size} bytes do not hold a page of {case.page_bytes}")
        shape, slots = case.shape, pages * case.page_size
        strides = host_strides(
            case.layout, [shape.row_bytes] * shape.planes, layers=shape.layers, pages=pages, page_size=case.page_size
        )
        rows = buffers.rows[: pages * case.page_bytes].view(shape.planes, shape.layers, slots, shape.row_bytes)
        planes = [
            Plane(
                f"plane {index}",
                shape.row_bytes,
                DeviceRows.slot_major(list(rows[index])),
                HostRows(buffers.host, strides[index], pages, case.page_size),
            )
            for index in range(shape.planes)
        ]
        return cls(
            PlaneTransfer(planes, constants=constants, ring=ring),
            _slots(host_pages(case.pattern, pages), case.page_size),
            _slots(torch.randperm(pages), case.page_size).to(buffers.device),
            pages * case.page_bytes,
        )

    def one_page(self, page_size: int) -> BenchPool:
        """Return the same pool with an operation over its first page alone."""
        slots = self.host_indices.numel()
        indices = self.host_indices[:page_size].clone(), self.device_indices[:page_size].clone()
        return BenchPool(self.transfer, *indices, self.bytes * page_size // slots)


def host_pages(pattern: Pattern, pages: int) -> torch.Tensor:
    """Order of ``pages`` host pages in a pattern, int64."""
    if pattern is Pattern.RUN:
        return torch.arange(pages)
    length = RUN_PAGES.get(pattern)
    if length is not None:
        runs = torch.randperm(pages // length)
        rest = torch.arange(pages // length * length, pages)
        return torch.cat([(runs[:, None] * length + torch.arange(length)).reshape(-1), rest])
    # Random, with every even page ahead of every odd one: none is followed by its neighbour.
    even, odd = torch.arange(0, pages, 2), torch.arange(1, pages, 2)
    return torch.cat([even[torch.randperm(even.numel())], odd[torch.randperm(odd.numel())]])


def _slots(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    return (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)
