"""Reads an operation's indices: checked, whole pages found, and brought where its path reads them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .checks import check_forms, check_indices, device_checks_enabled
from .uploads import Upload, UploadPool, upload_pool

ScanFunction = Callable[..., int]
UploadFunction = Callable[..., None]


NO_INDICES = torch.empty(0, dtype=torch.int64, device="cpu")


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
        self.host_slots = host if pool is None or not host.is_cpu else None
        self.device_slots = device if pool is None or not device.is_cpu else None
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
        # A call that still works with these indices holds them, and records the events before it drops them.
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
        if keep:
            known = self._known(host, device, stream)
            if known is not None:
                return known
        indices: OperationIndices | None = None
        plain = type(host) is type(device) is torch.Tensor and host.is_cpu and (device.is_cpu or device.is_cuda)
        if self._scan is not None and plain and host.layout is device.layout is torch.strided:
            size = self._page_size
            page_count = host.shape[0] // size if host.dim() == 1 else 0
            # Pages of one slot are the indices themselves.
            itself = size == 1 and host.dtype is torch.int64
            pages = host if itself else torch.empty(page_count, dtype=torch.int64, device="cpu")
            handle = 0 if stream is None else stream.cuda_stream
            runs = self._scan(
                host,
                device,
                NO_INDICES if itself else pages,
                size,
                self._host_slots,
                self._device_slots,
                self._device_id,
                handle,
            )
            if runs >= 0:
                pool = None if stream is None else self._pool
                indices = OperationIndices(host, device, pages, page_count, runs, pool)
        if indices is None:
            indices = self._read_checked(host, device, stream)  # finds the fault and raises
        if keep and not indices.captured:
            indices.keep()
            self._last = indices, stream
        return indices

    def _known(
        self, host: torch.Tensor, device: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> OperationIndices | None:
        """Return the indices of the last load of a layer where these are the same and unchanged."""
        last = self._last
        if last is None or last[1] != stream or device_checks_enabled():
            return None
        # A graph would read what was uploaded for an earlier call long after that is gone.
        if stream is not None and torch.cuda.is_current_stream_capturing():
            return None
        return last[0] if last[0].serve(host, device) else None

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

    def on_device(
        self, indices: OperationIndices, stream: torch.cuda.Stream | None, *, both: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Host and device slots where kernels on ``stream`` read them; :meth:`done` follows.

        With ``both`` they are of one dtype; without it only the device slots have to be there.
        """
        host, device = indices.host_slots, indices.device_slots
        missing = [indices.host] if both and host is None else []
        if device is None:
            missing.append(indices.device)
        if missing:
            # Upload as many slots as the operation has, once or twice, widened to int64.
            if stream is None or self._upload is None:
                brought = [slots.long().to(self._device) for slots in missing]
            else:
                count = indices.host.numel()
                upload = self._pool.take(count * len(missing))
                indices.uploads.append(upload)
                second = missing[1] if len(missing) == 2 else NO_INDICES
                self._upload(missing[0], second, upload.pinned, upload.on_device, stream.cuda_stream)
                brought = [upload.on_device.narrow(0, count * place, count) for place in range(len(missing))]
            if device is None:
                device = indices.device_slots = brought.pop()
            if brought:
                host = indices.host_slots = brought.pop()
        if host is None or device is None:
            return indices.host, indices.device if device is None else device
        if both and host.dtype is not device.dtype:
            # Not kept: what the caller writes into a list on the device has to be seen by the next call.
            return host.long(), device.long()
        return host, device

    def done(self, indices: OperationIndices, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the indices until ``stream`` has done what is queued now; call once all readers are."""
        for upload in indices.uploads:
            upload.event.record(stream)
        if not indices.captured:
            for given in (indices.host, indices.device):
                if given.device.type != "cpu":
                    given.record_stream(stream)
