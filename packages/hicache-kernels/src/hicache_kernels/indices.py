"""Reads an operation's indices: checked, whole pages found, and brought where its path reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from .checks import check_forms, check_indices, device_checks_enabled
from .uploads import Upload, UploadPool, upload_pool

ScanFunction = Callable[..., int]
UploadFunction = Callable[..., None]


@functools.cache
def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device="cpu")


def _content(indices: torch.Tensor) -> torch.Tensor | None:
    return indices.clone() if indices.device.type == "cpu" else None


def _same(kept: torch.Tensor | None, given: torch.Tensor) -> bool:
    return kept is None or torch.equal(kept, given)


class OperationIndices:
    """Indices of one operation, valid for work on one stream.

    Attributes
    ----------
    host, device
        As given.
    pages
        Host pages in order, int64 on CPU; None where the host indices lie on the device. May be the host indices
        themselves, so it is for the call that they were handed to.
    page_count, runs
        Pages, and runs of neighbouring host pages (as many as pages where they are not known).
    captured
        Whether the operation becomes part of a graph.
    host_slots, device_slots
        Where kernels read them; None where they have not been brought there.
    """

    __slots__ = (
        "_contents", "_pool", "captured", "device", "device_slots", "host", "host_slots", "page_count", "pages", "runs",
        "uploads",
    )  # fmt: skip

    def __init__(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        pages: torch.Tensor | None,
        page_count: int,
        runs: int,
        pool: UploadPool | None,
        *,
        captured: bool = False,
    ) -> None:
        self.host = host
        self.device = device
        self.pages = pages
        self.page_count = page_count
        self.runs = runs
        self.captured = captured
        self.host_slots = host if pool is None or host.device.type != "cpu" else None
        self.device_slots = device if pool is None or device.device.type != "cpu" else None
        self.uploads: list[Upload] = []
        self._pool = pool
        self._contents: tuple[torch.Tensor | None, torch.Tensor | None] | None = None

    def keep(self) -> None:
        """Remember what the indices on the CPU hold: those written to since, by whatever means, are read anew."""
        self._contents = _content(self.host), _content(self.device)
        if self.pages is self.host:
            self.pages = self._contents[0]

    def serve(self, host: torch.Tensor, device: torch.Tensor) -> bool:
        """Whether these are still the indices of a call with the given tensors."""
        if self._contents is None or self.host is not host or self.device is not device:
            return False
        return _same(self._contents[0], host) and _same(self._contents[1], device)

    def __del__(self) -> None:
        # Whoever still works with these indices holds them, and has the events recorded before letting go.
        if self._pool is not None:
            for upload in self.uploads:
                self._pool.give_back(upload)


class IndexReader:
    """Reads the indices of one pool's operations.

    Layers loaded one by one come with the same tensors, so the indices of the last such load are kept and reused.

    Parameters
    ----------
    page_size, host_slots, device_slots, device
        Geometry of the pool.
    scan, upload
        ``scan_indices`` and ``upload_indices`` of a compiled module, or None: NumPy and torch then do the same, in
        several passes.
    """

    def __init__(
        self,
        *,
        page_size: int,
        host_slots: int,
        device_slots: int,
        device: torch.device,
        scan: ScanFunction | None,
        upload: UploadFunction | None,
    ) -> None:
        self._page_size = page_size
        self._host_slots = host_slots
        self._device_slots = device_slots
        self._device = device
        self._device_id = device.index or 0
        self._scan = scan
        self._upload = upload
        self._pool = upload_pool(device)
        self._last: tuple[OperationIndices, torch.cuda.Stream | None] | None = None

    def read(
        self, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream | None, *, keep: bool = False
    ) -> OperationIndices:
        """Check; ``keep`` where more calls with the same tensors will follow.

        Raises
        ------
        TypeError, ValueError, IndexError
            Naming the tensor, its value and what is accepted.
        """
        if not keep:
            return self._read(host, device, stream)
        last = self._last
        capturing = stream is not None and torch.cuda.is_current_stream_capturing()
        # A graph would read what was uploaded for an earlier call long after that is gone.
        known = last is not None and not capturing and last[1] == stream and not device_checks_enabled()
        if known and last is not None and last[0].serve(host, device):
            return last[0]
        read = self._read(host, device, stream)
        if not read.captured:
            read.keep()
            self._last = read, stream
        return read

    def _read(self, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream | None) -> OperationIndices:
        plain = type(host) is type(device) is torch.Tensor and host.is_cpu and (device.is_cpu or device.is_cuda)
        if self._scan is not None and plain and host.layout is device.layout is torch.strided:
            page_count = host.shape[0] // self._page_size if host.dim() == 1 else 0
            itself = self._page_size == 1 and host.dtype is torch.int64
            pages = host if itself else torch.empty(page_count, dtype=torch.int64, device="cpu")
            runs = self._scan(
                host,
                device,
                _nothing() if itself else pages,
                self._page_size,
                self._host_slots,
                self._device_slots,
                self._device_id,
                0 if stream is None else stream.cuda_stream,
            )
            if runs >= 0:
                return OperationIndices(host, device, pages, page_count, runs, None if stream is None else self._pool)
        return self._read_checked(host, device, stream)  # finds the fault and raises

    def _read_checked(
        self, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> OperationIndices:
        check_forms(host, device, page_size=self._page_size, device=self._device)
        captured = stream is not None and torch.cuda.is_current_stream_capturing()
        if captured:
            for name, indices in (("host_indices", host), ("device_indices", device)):
                if indices.device.type == "cpu":
                    raise ValueError(f"{name} is on the CPU; under graph capture it must be on {self._device}")
        checked = check_indices(
            host,
            device,
            page_size=self._page_size,
            host_slots=self._host_slots,
            device_slots=self._device_slots,
            device=self._device,
        )
        pool = None if stream is None else self._pool
        return OperationIndices(host, device, checked.pages, checked.page_count, checked.runs, pool, captured=captured)

    # ---- where kernels read them

    def device_slots(self, indices: OperationIndices, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Device slots where kernels on ``stream`` read them; :meth:`done` follows."""
        if indices.device_slots is None:
            (indices.device_slots,) = self._uploaded(indices, (indices.device,), stream)
        return indices.device_slots

    def both_slots(
        self, indices: OperationIndices, stream: torch.cuda.Stream | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and device slots where kernels on ``stream`` read them, of one dtype; :meth:`done` follows."""
        host, device = indices.host_slots, indices.device_slots
        if host is None and device is None:
            host, device = self._uploaded(indices, (indices.host, indices.device), stream)
        elif host is None:
            (host,) = self._uploaded(indices, (indices.host,), stream)
        elif device is None:
            (device,) = self._uploaded(indices, (indices.device,), stream)
        indices.host_slots, indices.device_slots = host, device
        if device is None or host.dtype is not device.dtype:
            # Not kept: what the caller writes into a list on the device has to be seen by the next call.
            return host.long(), self.device_slots(indices, stream).long()
        return host, device

    def _uploaded(
        self, indices: OperationIndices, lists: Sequence[torch.Tensor], stream: torch.cuda.Stream | None
    ) -> list[torch.Tensor]:
        """Queue the upload of as many slots as the operation has, once or twice, widened to int64."""
        if stream is None or self._upload is None:
            return [slots.long().to(self._device) for slots in lists]
        count = indices.host.numel()
        upload = self._pool.take(count * len(lists))
        indices.uploads.append(upload)
        second = lists[1] if len(lists) == 2 else _nothing()
        self._upload(lists[0], second, upload.pinned, upload.on_device, stream.cuda_stream)
        return [upload.on_device.narrow(0, count * place, count) for place in range(len(lists))]

    def done(self, indices: OperationIndices, stream: torch.cuda.Stream | None) -> None:
        """Tell that everything which reads the indices is queued on ``stream``: their memory is kept until then."""
        if stream is None:
            return
        for upload in indices.uploads:
            upload.event.record(stream)
        if not indices.captured:
            for given in (indices.host, indices.device):
                if given.device.type != "cpu":
                    given.record_stream(stream)
