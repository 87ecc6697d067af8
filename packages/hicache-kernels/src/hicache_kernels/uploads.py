"""Memory through which indices get to the device, kept from one operation to the next: allocating it takes longer."""

from __future__ import annotations

import functools
from collections import deque

import torch

MIN_COUNT = 4096
"""Indices that an upload has room for at least."""
MAX_LOOKS = 4
"""Uploads looked at before another one is made: a long operation must not make every short one bring its own."""


class Upload:
    """Room for the indices of one operation at a time.

    Attributes
    ----------
    pinned
        int64 ``[count]`` in pinned memory.
    on_device
        int64 ``[count]`` on the device.
    event
        Recorded after the last reader.
    """

    __slots__ = ("event", "on_device", "pinned")

    def __init__(self, count: int, device: torch.device) -> None:
        self.pinned = torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)
        self.on_device = torch.empty(count, dtype=torch.int64, device=device)
        self.event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]


class UploadPool:
    """Uploads of one device, by any thread and for any stream.

    Invariant: what lies in the pool has its event after its last reader, and is taken, or dropped, only once that has
    come. So there are as many uploads as there were operations under way at once. A pool outlives every transfer
    (:func:`upload_pool`): so nothing frees what an operation under way still reads.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: deque[Upload] = deque()

    def take(self, count: int) -> Upload:
        """Room for ``count`` indices that nothing reads any more; call with the stream current that will read it."""
        for _ in range(min(len(self._spare), MAX_LOOKS)):
            try:
                upload = self._spare.popleft()
            except IndexError:  # other threads took them
                break
            if not upload.event.query():  # type: ignore[no-untyped-call]
                self._spare.append(upload)
            elif upload.pinned.numel() >= count:
                return upload
        return Upload(max(MIN_COUNT, 1 << (count - 1).bit_length()), self._device)

    def give_back(self, upload: Upload) -> None:
        """Take an upload back whose event is recorded."""
        self._spare.append(upload)


@functools.cache
def upload_pool(device: torch.device) -> UploadPool:
    """Pool that all transfers of a device share."""
    return UploadPool(device)
