"""Turns the slot indices of a transfer into rows: checked, translated, and on the side they are read on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..device_pools import DevicePool


class Rows(NamedTuple):
    """Row numbers for :class:`hicache_kernels.PlaneTransfer`: host rows on CPU, device rows on CPU or the device."""

    host: torch.Tensor
    device: torch.Tensor


class _Answer(NamedTuple):
    """Rows, and what they were made from: those tensors unchanged, on that stream, give the same rows again."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    stream: object
    rows: Rows

    def answers(self, tensors: Sequence[torch.Tensor], stream: object) -> bool:
        """Whether the tensors are the same objects and unchanged."""
        return (
            len(tensors) == len(self.tensors)
            and all(known() is tensor for known, tensor in zip(self.tensors, tensors, strict=True))
            and all(tensor._version == version for tensor, version in zip(tensors, self.versions, strict=True))
            and stream == self.stream
        )


class IndexRows:
    """Rows of one host pool's transfers. The last answer is kept, so that a load layer by layer makes it once.

    Parameters
    ----------
    device_pool
        Its index range and translation.
    size, page_size, slots_per_row
        Of the host pool.
    """

    def __init__(self, device_pool: DevicePool, *, size: int, page_size: int, slots_per_row: int) -> None:
        self._pool = device_pool
        self._size = size
        self._page_size = page_size
        self._slots_per_row = slots_per_row
        self._last: _Answer | None = None

    def rows(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> Rows:
        """Check both sides and return their rows.

        Parameters
        ----------
        host_indices, device_indices
            int64 or int32 ``[n]`` on any device, whole pages in order. Host pages have all their slots in order;
            device slots of a page may lie anywhere, except that those of a row stay together.

        Raises
        ------
        ValueError
            Naming the argument. Device indices are checked for range where they are on CPU.
        """
        tensors = [host_indices, device_indices]
        if self._pool.index_translation is not None:
            tensors.append(self._pool.index_translation)
        stream = current_stream(self._pool.components[0].rows.device)
        keep = not any(tensor.is_inference() for tensor in tensors)
        last = self._last
        if keep and last is not None and last.answers(tensors, stream):
            return last.rows
        for name, indices in (("host_indices", host_indices), ("device_indices", device_indices)):
            if indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    f"{name} has shape {tuple(indices.shape)} and dtype {indices.dtype}; it must be [n] of int64 or "
                    "int32"
                )
        if len(host_indices) != len(device_indices) or len(host_indices) % self._page_size:
            raise ValueError(
                f"host_indices has {len(host_indices)} and device_indices {len(device_indices)} slots; they must be as "
                f"many, and a multiple of page_size {self._page_size}"
            )
        rows = Rows(self._host_rows(host_indices.cpu()), self._device_rows(device_indices))
        if keep:
            versions = tuple(tensor._version for tensor in tensors)
            self._last = _Answer(tuple(weakref.ref(tensor) for tensor in tensors), versions, stream, rows)
        return rows

    def forget(self) -> None:
        """Drop the kept answer."""
        self._last = None

    def _host_rows(self, indices: torch.Tensor) -> torch.Tensor:
        pages = indices.view(-1, self._page_size)
        first = pages[:, :1]
        wrong = (first < 0) | (first >= self._size) | (first % self._page_size != 0)
        if self._page_size > 1:
            wrong = wrong | (pages != first + torch.arange(self._page_size)).any(dim=1, keepdim=True)
        if bool(wrong.any()):
            position = int(wrong.flatten().nonzero()[0])
            raise ValueError(
                f"host_indices[{position * self._page_size}] starts with {pages[position, :4].tolist()}; a page is the "
                f"{self._page_size} slots from a multiple of page_size on, in order and below {self._size}"
            )
        return self._one_a_row(indices)

    def _device_rows(self, indices: torch.Tensor) -> torch.Tensor:
        if indices.device.type == "cpu":
            _check_range("device_indices", indices, self._pool.index_size)
        table = self._pool.index_translation
        if table is not None:
            device = self._pool.components[0].rows.device
            indices = table.to(device)[indices.to(device)]
            if indices.device.type == "cpu":
                _check_range("index_translation[device_indices]", indices, self._pool.size)
        if indices.device.type == "cpu" and self._slots_per_row > 1:
            groups = indices.view(-1, self._slots_per_row)
            first = groups[:, :1]
            wrong = (first % self._slots_per_row != 0) | (groups != first + torch.arange(self._slots_per_row)).any(
                dim=1, keepdim=True
            )
            if bool(wrong.any()):
                position = int(wrong.flatten().nonzero()[0])
                raise ValueError(
                    f"device_indices[{position * self._slots_per_row}] starts with {groups[position, :4].tolist()}; "
                    f"the {self._slots_per_row} slots of a row must stay together and in order"
                )
        return self._one_a_row(indices)

    def _one_a_row(self, indices: torch.Tensor) -> torch.Tensor:
        return indices if self._slots_per_row == 1 else indices[:: self._slots_per_row] // self._slots_per_row


def _check_range(name: str, indices: torch.Tensor, size: int) -> None:
    if len(indices) == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= size:
        raise ValueError(f"{name} has {low if low < 0 else high}; it must be from 0 to {size - 1}")


def current_stream(device: torch.device) -> object:
    """Stream a transfer of this device would be queued on; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
