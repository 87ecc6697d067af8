"""Brings an operation's indices where its path reads them: checked, whole pages found, uploaded once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .checks import check_forms, check_indices, device_checks_enabled

ScanFunction = Callable[..., int]


@functools.cache
def _nothing() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(0, dtype=torch.int64), torch.empty((0, 0), dtype=torch.int64)


def _content(indices: torch.Tensor) -> torch.Tensor | None:
    return indices.clone() if indices.device.type == "cpu" else None


def _same(kept: torch.Tensor | None, given: torch.Tensor) -> bool:
    return kept is None or torch.equal(kept, given if given.dtype is kept.dtype else given.to(kept.dtype))


@dataclass(frozen=True, eq=False)
class OperationIndices:
    """Indices of one operation, valid for work on one stream.

    Attributes
    ----------
    host, device
        As given.
    contents
        What those on the CPU held: one written to since, by whatever means, is read anew. None for one on the device,
        whose values no caller's thread reads.
    stream
        The caller's stream; None on CPU.
    pages
        Host pages in order, int64 on CPU; None where the host indices lie on the device.
    page_count, runs
        Pages, and runs of neighbouring host pages (as many as pages where they are not known).
    host_slots, device_slots
        Where kernels read them, of one dtype; None where not uploaded yet.
    """

    host: torch.Tensor
    device: torch.Tensor
    contents: tuple[torch.Tensor | None, torch.Tensor | None]
    stream: torch.cuda.Stream | None
    pages: torch.Tensor | None
    page_count: int
    runs: int
    host_slots: torch.Tensor | None
    device_slots: torch.Tensor

    def serve(self, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream | None) -> bool:
        """Whether these are still the indices of a call with the given tensors."""
        if self.host is not host or self.device is not device or self.stream != stream:
            return False
        kept_host, kept_device = self.contents
        return _same(kept_host, host) and _same(kept_device, device)


class IndexReader:
    """Reads the indices of one pool's operations.

    Layers loaded one by one come with the same tensors, so the last operation's indices are kept and reused.

    Parameters
    ----------
    page_size, host_slots, device_slots, device
        Geometry of the pool.
    scan
        ``scan_indices`` of a compiled module, or None: NumPy then does the same, in several passes.
    """

    def __init__(
        self, *, page_size: int, host_slots: int, device_slots: int, device: torch.device, scan: ScanFunction | None
    ) -> None:
        self._page_size = page_size
        self._host_slots = host_slots
        self._device_slots = device_slots
        self._device = device
        self._scan = scan
        self._last: OperationIndices | None = None

    def read(self, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream | None) -> OperationIndices:
        """Check, and upload what lies on the CPU.

        The uploads belong to the allocators' books: neither end is reused before the work queued on ``stream`` is done.

        Raises
        ------
        TypeError, ValueError, IndexError
            Naming the tensor, its value and what is accepted.
        """
        last = self._last
        capturing = stream is not None and torch.cuda.is_current_stream_capturing()
        # A graph would read what was uploaded for an earlier call long after that is gone.
        if not capturing and last is not None and last.serve(host, device, stream) and not device_checks_enabled():
            return last
        if not self._plain(host, device):
            check_forms(host, device, page_size=self._page_size, device=self._device)
        if capturing:
            for name, indices in (("host_indices", host), ("device_indices", device)):
                if indices.device.type == "cpu":
                    raise ValueError(f"{name} is on the CPU; under graph capture it must be on {self._device}")
        if self._scan is None or host.device.type != "cpu" or device_checks_enabled():
            read = self._read_checked(host, device, stream)
        else:
            read = self._read_scanned(self._scan, host, device, stream)
        if stream is not None and not capturing:
            for indices in (host, device):
                if indices.device.type != "cpu":
                    indices.record_stream(stream)
        self._last = read
        return read

    def _plain(self, host: torch.Tensor, device: torch.Tensor) -> bool:
        """Whether the forms are right at a glance: two dense lists of int64 on the CPU."""
        return (
            type(host) is type(device) is torch.Tensor
            and host.dtype is device.dtype is torch.int64
            and host.shape == device.shape
            and host.dim() == 1
            and not (host.is_cuda or device.is_cuda)
            and host.stride() == device.stride() == (1,)
            and host.shape[0] % self._page_size == 0
        )

    def host_slots(self, indices: OperationIndices) -> torch.Tensor:
        """Host slots where kernels read them, of the device slots' dtype."""
        if indices.host_slots is not None:
            return indices.host_slots
        host = indices.host.to(indices.device_slots.dtype)
        return host if indices.stream is None else self._uploaded(host)

    def _uploaded(self, indices: torch.Tensor) -> torch.Tensor:
        if indices.device.type != "cpu":
            return indices
        return indices.pin_memory().to(self._device, non_blocking=True)

    def _read_scanned(
        self, scan: ScanFunction, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> OperationIndices:
        no_indices, no_rows = _nothing()
        count = host.numel()
        pages = torch.empty(count // self._page_size, dtype=torch.int64)
        upload = stream is not None and device.device.type == "cpu"
        packed = torch.empty((2, count), dtype=torch.int64, pin_memory=True) if upload and count else no_rows
        runs = scan(
            host,
            device if device.device.type == "cpu" else no_indices,
            pages,
            packed,
            self._page_size,
            self._host_slots,
            self._device_slots,
        )
        if runs < 0:
            return self._read_checked(host, device, stream)  # finds the fault and raises
        host_slots, device_slots = None, device
        contents: tuple[torch.Tensor | None, torch.Tensor | None]
        if upload and count:
            host_slots, device_slots = packed.to(self._device, non_blocking=True).unbind()
            contents = packed[0], packed[1]
        elif self._page_size == 1:
            contents = pages, _content(device)
        else:
            contents = _content(host), _content(device)
        return OperationIndices(
            host,
            device,
            contents,
            stream,
            pages,
            pages.numel(),
            runs,
            host_slots,
            device_slots,
        )

    def _read_checked(
        self, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> OperationIndices:
        checked = check_indices(
            host,
            device,
            page_size=self._page_size,
            host_slots=self._host_slots,
            device_slots=self._device_slots,
            device=self._device,
        )
        return OperationIndices(
            host,
            device,
            (_content(host), _content(device)),
            stream,
            checked.pages,
            checked.page_count,
            checked.runs,
            None,
            device if stream is None else self._uploaded(device),
        )
