"""Page-locking host memory for a GPU, in chunks that end on page boundaries, all of them or none."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hicache_kernels.host_ranges import HostRange, add_host_ranges, remove_host_ranges

logger = logging.getLogger(__name__)


class Segment(NamedTuple):
    """A stretch of a buffer, and the size of the pieces that no copy may see cut.

    A page-first pool is one segment whose pieces are its pages; a layer-first pool has one for each component.
    """

    nbytes: int
    page_bytes: int


class HostRuntime(Protocol):
    """The part of a GPU runtime that pins memory."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin; returns the runtime's error code, 0 for success."""

    def unregister(self, address: int) -> int:
        """Unpin what was registered at ``address``; returns the runtime's error code."""

    def device_address(self, address: int) -> tuple[int, int]:
        """Error code, and where kernels find what was registered at ``address``, often at the same address."""

    def clear_error(self) -> None:
        """Forget the pending error, which the next unrelated call would otherwise report."""

    def describe(self, code: int) -> str:
        """Name and meaning of an error code."""


class HostRegistrationError(RuntimeError):
    """The runtime refused to pin a chunk; nothing is pinned.

    Attributes
    ----------
    code
        The runtime's error code.
    chunk, chunks
        Which chunk, from 0, of how many.
    """

    def __init__(self, message: str, *, code: int, chunk: int, chunks: int) -> None:
        super().__init__(message)
        self.code = code
        self.chunk = chunk
        self.chunks = chunks


def registration_boundaries(segments: Sequence[Segment], *, chunk_bytes: int, alignment: int) -> tuple[int, ...]:
    """Where a buffer is cut for registration: as few chunks as the limit allows.

    Parameters
    ----------
    segments
        The buffer from its start; together its size.
    chunk_bytes
        Bytes of a chunk at most.
    alignment
        Bytes of an OS page: two registrations cannot share one.

    Returns
    -------
    tuple of int
        Byte offsets of the cuts, ascending, without 0 and the end; each is a multiple of ``alignment`` and lies between
        two pieces of its segment.

    Raises
    ------
    ValueError
        A size is not positive, or no cut is possible within ``chunk_bytes``.
    """
    for number, segment in enumerate(segments):
        if segment.nbytes <= 0 or segment.page_bytes <= 0:
            raise ValueError(f"segments[{number}] is {segment}; nbytes and page_bytes must be positive")
    if chunk_bytes <= 0 or alignment <= 0:
        raise ValueError(f"chunk_bytes is {chunk_bytes} and alignment {alignment}; both must be positive")
    total = sum(segment.nbytes for segment in segments)
    boundaries: list[int] = []
    start = 0
    while total - start > chunk_bytes:
        cut = _last_cut(segments, start, start + chunk_bytes, alignment)
        if cut is None:
            raise ValueError(
                f"chunk_bytes is {chunk_bytes}, but from byte {start} on no page boundary is also a multiple of the OS "
                f"page of {alignment} bytes within that; accepted are larger chunks, or pages whose bytes share a "
                f"larger power of two with {alignment} (segments: {list(segments)})"
            )
        boundaries.append(cut)
        start = cut
    return tuple(boundaries)


def _last_cut(segments: Sequence[Segment], low: int, high: int, alignment: int) -> int | None:
    """Largest allowed cut in (low, high]."""
    best = None
    start = 0
    for nbytes, page_bytes in segments:
        # Pieces repeat their place within an OS page after this many.
        period = alignment // math.gcd(alignment, page_bytes)
        last = (min(high - start, nbytes)) // page_bytes
        for piece in range(last, max(last - period, -1), -1):
            cut = start + piece * page_bytes
            if cut <= low:
                break
            if cut % alignment == 0:
                best = cut
                break
        start += nbytes
        if start > high:
            break
    return best


def register_chunks(
    runtime: HostRuntime, address: int, nbytes: int, boundaries: Sequence[int]
) -> tuple[HostRange, ...]:
    """Pin ``nbytes`` bytes at ``address``, cut at ``boundaries``, and have transfers know the chunks' device addresses.

    Returns
    -------
    tuple of HostRange
        The chunks, for :func:`unregister_chunks`.

    Raises
    ------
    HostRegistrationError
        A chunk was refused, or has no device address. Nothing stays pinned, and the pending error is cleared.
    """
    starts = (0, *boundaries)
    ends = (*boundaries, nbytes)
    registered: list[HostRange] = []
    try:
        for chunk, (start, end) in enumerate(zip(starts, ends, strict=True)):
            code = runtime.register(address + start, end - start)
            device_address = address + start
            if not code:
                registered.append(HostRange(address + start, end - start, device_address))
                code, device_address = runtime.device_address(address + start)
            if code:
                runtime.clear_error()
                raise HostRegistrationError(
                    f"pinning bytes {start} to {end} of {nbytes} (chunk {chunk + 1} of {len(starts)}) failed with "
                    f"{runtime.describe(code)}; nothing is pinned",
                    code=code,
                    chunk=chunk,
                    chunks=len(starts),
                )
            registered[-1] = HostRange(address + start, end - start, device_address)
        add_host_ranges(registered)
    except BaseException:
        unregister_chunks(runtime, registered)
        raise
    return tuple(registered)


def unregister_chunks(runtime: HostRuntime, chunks: Sequence[HostRange]) -> None:
    """Unpin, last first; a refusal is logged, leaves no pending error, and does not stop the others."""
    remove_host_ranges(chunks)
    for chunk in reversed(chunks):
        code = runtime.unregister(chunk.address)
        if code:
            runtime.clear_error()
            logger.warning("unpinning the host memory at %#x failed with %s", chunk.address, runtime.describe(code))
