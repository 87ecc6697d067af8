"""Turns the slot indices of a transfer into rows: checked, translated, and on the side they are read on."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hicache_kernels.checks import check_tensor

from ..device_pools import DevicePool


class RowNumbers(NamedTuple):
    """What :class:`hicache_kernels.PlaneTransfer` takes: host rows on CPU, device rows on CPU or the device."""

    host: torch.Tensor
    device: torch.Tensor


class _Answer(NamedTuple):
    """Rows, and what they were made from: those tensors unchanged, on that stream, give the same rows again."""

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    stream: object
    rows: RowNumbers

    def answers(self, tensors: Sequence[torch.Tensor], stream: object) -> bool:
        """Whether the tensors are the same objects and unchanged."""
        return (
            all(known() is tensor for known, tensor in zip(self.tensors, tensors, strict=True))
            and all(tensor._version == version for tensor, version in zip(tensors, self.versions, strict=True))
            and stream == self.stream
        )


class IndexRows:
    """Rows of one host pool's transfers. The last answer is kept, so that a load layer by layer makes it once.

    Only what the kernels cannot see is checked here: virtual indices, and slots that share a row.

    Parameters
    ----------
    device_pool
        Its index range and translation.
    size, slots_per_row
        Of the host pool, in slots.
    """

    def __init__(self, device_pool: DevicePool, *, size: int, slots_per_row: int) -> None:
        self._pool = device_pool
        self._device = device_pool.components[0].rows.device
        self._size = size
        self._slots_per_row = slots_per_row
        self._last: _Answer | None = None

    def rows(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> RowNumbers:
        """Return the rows of both sides.

        Parameters
        ----------
        host_indices, device_indices
            int64 or int32 ``[n]`` on CPU or the pool's device, whole pages in order. Host pages have all their slots in
            order; device slots of a page may lie anywhere, except that those of a row stay together.

        Raises
        ------
        TypeError, ValueError, IndexError
            Naming the argument. Indices on a device other than CPU are not read.
        """
        translated = self._slots_per_row > 1 or self._pool.index_translation is not None
        if not translated and _ready(host_indices) and _ready(device_indices, self._device):
            return RowNumbers(host_indices, device_indices)
        tensors = (host_indices, device_indices)
        stream = current_stream(self._device)
        last = self._last
        if last is not None and last.answers(tensors, stream):
            return last.rows
        for name, indices in zip(("host_indices", "device_indices"), tensors, strict=True):
            _check_form(name, indices, self._device)
        rows = RowNumbers(
            self._one_a_row("host_indices", _on_cpu(host_indices), self._size),
            self._one_a_row("device_indices", *self._slots(device_indices)),
        )
        # A table is there to be changed, also by kernels, where torch does not see it; a tensor made in inference mode
        # has no version that shows a change.
        if self._pool.index_translation is None and not any(indices.is_inference() for indices in tensors):
            versions = tuple(indices._version for indices in tensors)
            self._last = _Answer(tuple(weakref.ref(indices) for indices in tensors), versions, stream, rows)
        return rows

    def forget(self) -> None:
        """Drop the kept answer."""
        self._last = None

    def _slots(self, indices: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Device slots, translated where the pool does, and how many there are."""
        table = self._pool.index_translation
        if table is None:
            return indices.contiguous(), self._pool.size
        if indices.device.type == "cpu":
            _check_range("device_indices", indices, table.numel())
        return table.to(self._device)[indices.to(self._device)], self._pool.size

    def _one_a_row(self, name: str, indices: torch.Tensor, size: int) -> torch.Tensor:
        slots = self._slots_per_row
        if slots == 1:
            return indices
        if len(indices) % slots:
            raise ValueError(f"{name} has {len(indices)} slots; it must be a multiple of the {slots} slots of a row")
        if indices.device.type == "cpu":
            _check_range(name, indices, size)
            groups = indices.view(-1, slots)
            first = groups[:, :1]
            wrong = (first % slots != 0) | (groups != first + torch.arange(slots, device="cpu")).any(
                dim=1, keepdim=True
            )
            if bool(wrong.any()):
                number = int(wrong.flatten().nonzero()[0])
                raise ValueError(
                    f"{name}[{number * slots}:{(number + 1) * slots}] starts with {groups[number, :4].tolist()} and is "
                    f"not one row: its {slots} slots must be neighbours, the first a multiple of {slots}"
                )
        return indices[::slots] // slots


def _ready(indices: torch.Tensor, device: torch.device | None = None) -> bool:
    """Whether the kernels can take indices as they are: dense, on the CPU or ``device``. They check all else."""
    if type(indices) is not torch.Tensor or indices.layout is not torch.strided:
        return False
    return (indices.is_cpu or (indices.is_cuda and indices.device == device)) and indices.is_contiguous()


def _on_cpu(indices: torch.Tensor) -> torch.Tensor:
    """Copy to CPU, which waits for the device; not while a graph is captured, where only the device may be read."""
    if indices.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return indices
    return indices.cpu().contiguous()


def _check_form(name: str, indices: torch.Tensor, device: torch.device) -> None:
    check_tensor(name, indices, "a tensor of torch.int64 or torch.int32")
    if indices.device.type not in ("cpu", device.type):
        raise ValueError(f"{name} lies on {indices.device}; it must be on the CPU or on {device}")
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} has dtype {indices.dtype}; it must be torch.int64 or torch.int32")
    if indices.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(indices.shape)}; it must have one dimension")


def _check_range(name: str, indices: torch.Tensor, size: int) -> None:
    if len(indices) == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= size:
        raise IndexError(f"{name} contains slot {low if low < 0 else high}; slots go from 0 to {size - 1}")


def current_stream(device: torch.device) -> object:
    """Stream a transfer of this device would be queued on; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
