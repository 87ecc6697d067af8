"""Staging memory: a ring of buffers for each device and direction, shared by pools, and the events that order them."""

from __future__ import annotations

import logging
import threading
from enum import StrEnum

import torch
import tvm_ffi

from .streams import own_stream
from .validation import whole

logger = logging.getLogger(__name__)

DEFAULT_BUDGET_BYTES = 128 << 20
"""Staging memory of a device, both directions together."""
ALIGNMENT = 256


class Direction(StrEnum):
    """Which way an operation moves bytes."""

    WRITE_BACK = "write_back"
    LOAD = "load"


DEFAULT_CHUNK_BYTES = {
    ("cpu", Direction.WRITE_BACK): 1 << 20,
    ("cpu", Direction.LOAD): 1 << 20,
    ("cuda", Direction.WRITE_BACK): 32 << 20,
    ("cuda", Direction.LOAD): 21 << 20,
}
"""Largest staging buffer: what is copied while the one before is laid out, or emptied. Every copy costs the engine some
microseconds on top of its bytes, so few large ones are best."""


class StagingLane:
    """The buffers of one direction.

    Invariant: a buffer is written only after its ``drained`` event, and read only after its ``staged`` event. Work on
    the buffers is queued with :attr:`lock` held, so operations of any streams and threads may follow each other.

    Attributes
    ----------
    lock
        Guards all the other attributes, and the order in which operations queue their work.
    stream, stream_handle, fence
        Stream of the copies, its handle, and the handle of an event that makes it wait for another stream; None and 0
        on CPU, and before :meth:`begin`.
    table
        int64 ``[buffers, 3]`` on CPU, as the module reads it: address, staged event, drained event.
    cursor
        Buffer that the next operation fills first.
    buffer_bytes
        Bytes of a buffer.
    """

    def __init__(
        self, device: torch.device, direction: Direction, lane_bytes: int, chunk_bytes: int, pages: int | None
    ) -> None:
        self.device = device
        self._direction = direction
        self.lock = threading.Lock()  # guards the buffers of one direction: one operation is queued at a time
        self.cursor = 0
        self.stream: torch.cuda.Stream | None = None
        self.stream_handle = 0
        self.fence = 0
        self.buffer_bytes = 0
        self.table = tvm_ffi.from_dlpack(torch.empty((0, 3), dtype=torch.int64, device="cpu"))
        self._buffers = 0
        self._lane_bytes = lane_bytes
        self._chunk_bytes = min(chunk_bytes, max(ALIGNMENT, lane_bytes // 2))
        self._pages = pages
        self._memory: torch.Tensor | None = None
        self._events: list[torch.cuda.Event] = []
        self._fence_event: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Make the stream and the fence, which copies need that go without staging; call with :attr:`lock` held."""
        if self.stream is None and self.device.type == "cuda":
            self.stream = own_stream(self.device, f"copies of a {self._direction}")
            self.stream_handle = self.stream.cuda_stream
            self._fence_event = self.stream.record_event()
            self.fence = self._fence_event.cuda_event

    def chunk_pages(self, page_bytes: int) -> int:
        """Pages of ``page_bytes`` staging bytes that one buffer takes; grows the buffers where not even one fits.

        Call with :attr:`lock` held; the table of buffers (address, staged event, drained event) is valid afterwards.
        """
        if self._pages is not None:
            if self.buffer_bytes < self._pages * page_bytes:
                self._allocate(self._pages * page_bytes, 2)
            return self._pages
        if self._memory is None:
            size = max(self._chunk_bytes, page_bytes)
            self._allocate(size, max(2, self._lane_bytes // size))
        elif self.buffer_bytes < page_bytes:
            self._allocate(page_bytes, max(2, self._lane_bytes // page_bytes))
        return self.buffer_bytes // page_bytes

    def filled(self, buffers: int, stream: torch.cuda.Stream | None, tables: torch.Tensor) -> None:
        """Move on by the buffers that an operation has filled.

        The buffers, and the tables that queued kernels read, are not reused before ``stream`` gets there.
        """
        if self._buffers:
            self.cursor = (self.cursor + buffers) % self._buffers
        if stream is not None and self._memory is not None:
            self._memory.record_stream(stream)
            tables.record_stream(stream)

    def copies_done(self) -> torch.cuda.Event | None:
        """Record an event after all copies queued so far; None on CPU."""
        return None if self.stream is None else self.stream.record_event()

    def _allocate(self, buffer_bytes: int, count: int) -> None:
        buffer_bytes = -(-buffer_bytes // ALIGNMENT) * ALIGNMENT
        if self._memory is not None:
            logger.info("staging buffers of %s grow from %d to %d bytes", self.device, self.buffer_bytes, buffer_bytes)
        if buffer_bytes * count > self._lane_bytes and self._pages is None:
            logger.info("pages of %d bytes exceed the staging budget of %d", buffer_bytes, self._lane_bytes)
        for event in self._events:
            event.synchronize()
        self._memory = torch.empty(buffer_bytes * count + ALIGNMENT, dtype=torch.uint8, device=self.device)
        start = -(-self._memory.data_ptr() // ALIGNMENT) * ALIGNMENT
        table = [[start + index * buffer_bytes, 0, 0] for index in range(count)]
        self.begin()
        if self.stream is not None:
            with torch.cuda.device(self.device):
                # The allocator may hand out memory that work on the current stream still uses.
                self.stream.wait_stream(torch.cuda.current_stream(self.device))
                self._memory.record_stream(self.stream)
                self._events = [self.stream.record_event() for _ in range(2 * count)]
            for index, row in enumerate(table):
                row[1:] = [event.cuda_event for event in self._events[2 * index : 2 * index + 2]]
        self.buffer_bytes = buffer_bytes
        self._buffers = count
        self.table = tvm_ffi.from_dlpack(torch.tensor(table, dtype=torch.int64, device="cpu"))
        self.cursor = 0


class StagingRing:
    """Staging memory of a device.

    Parameters
    ----------
    device
        Device of the rows.
    budget_bytes
        Memory of both directions together; allocated when a direction is first used. A page larger than half a
        direction's share makes it grow to two pages.
    pages
        Instead of a budget: pages a buffer holds, whatever their size.
    chunk_bytes
        Largest buffer; smaller ones overlap re-layout and copies better, larger ones need fewer launches.

    Raises
    ------
    ValueError
        For a size below the least, or a device without kernels.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        pages: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        budget_bytes = whole("budget_bytes", budget_bytes, least=4 * ALIGNMENT)
        pages = None if pages is None else whole("pages", pages)
        chunk_bytes = None if chunk_bytes is None else whole("chunk_bytes", chunk_bytes)
        self.device = canonical_device(device)
        if (self.device.type, Direction.LOAD) not in DEFAULT_CHUNK_BYTES:
            raise ValueError(f"device is {device}; staging memory lies on cuda (ROCm too) or cpu")
        self.budget_bytes = budget_bytes
        self._lanes = {
            direction: StagingLane(
                self.device,
                direction,
                budget_bytes // 2,
                DEFAULT_CHUNK_BYTES[self.device.type, direction] if chunk_bytes is None else chunk_bytes,
                pages,
            )
            for direction in Direction
        }

    def lane(self, direction: Direction) -> StagingLane:
        """Buffers of one direction."""
        return self._lanes[direction]


def canonical_device(device: torch.device | str) -> torch.device:
    """Fill the index of a device in, so that ``cuda`` and ``cuda:0`` are one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


_rings: dict[torch.device, StagingRing] = {}


def default_ring(device: torch.device | str) -> StagingRing:
    """Return the ring that all transfers of a device share unless they are given one."""
    device = canonical_device(device)
    ring = _rings.get(device)
    # A ring has no memory before its first use, so of two that are made at once one can be dropped.
    return _rings.setdefault(device, StagingRing(device)) if ring is None else ring
