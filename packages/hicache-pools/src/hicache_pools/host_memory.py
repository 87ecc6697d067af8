"""Host buffers for pools: mapped, placed, touched in parallel, pinned in chunks, and given back in order."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from hicache_kernels.host_ranges import HostRange, remove_host_ranges
from hicache_kernels.validation import one_of, whole

from .gpu_runtime import GpuRuntime
from .memory_budget import HostMemoryBudget
from .numa import numa_node_of, prefer_node
from .registration import (
    HostRuntime,
    Segment,
    register_chunks,
    registration_boundaries,
    unregister_chunks,
)
from .shared_memory import SharedFile, create_shared_file, open_shared_file

logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 << 30
"""Default of the largest piece of memory registered at once."""

MAX_THREADS = 1024
"""Most threads that touch a buffer, or read and write files, at once."""
MAX_NUMA_NODE = 1023
"""Linux has no more nodes."""

_MAP_HUGETLB = 0x40000
_TOUCH_BYTES = 64 << 20
"""Bytes one thread touches before it takes the next piece."""


class AllocatorType(StrEnum):
    """Where a host buffer's memory comes from."""

    DEFAULT = "default"
    """An anonymous mapping of this process."""
    SHARED = "shared"
    """A mapping that other processes attach to with :func:`attach_host_buffer`."""


class HugePages(StrEnum):
    """Size of the OS pages under a host buffer."""

    OFF = "off"
    TRANSPARENT = "transparent"
    """Ask for huge pages where the kernel has them; fewer pages are touched and pinned sooner."""
    RESERVED = "reserved"
    """Take them from those the administrator has set aside; an error where there are too few."""


@dataclass(eq=False)
class _Memory:
    """The memory of a buffer. Outlives it while tensors still show the memory."""

    mapping: mmap.mmap
    address: int
    nbytes: int
    shared: SharedFile | None = None
    runtime: HostRuntime | None = None
    registered: tuple[HostRange, ...] = ()
    device: torch.device | None = None
    drain: Callable[[], None] | None = None
    process: int = field(default_factory=os.getpid)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork: then the memory is pinned for its parent, which still uses it."""
        return self.process != os.getpid()

    def wait(self) -> None:
        """Return once no transfer can be using the memory. A fork has none, and the memory is its parent's to drain."""
        if self.forked:
            return
        if self.drain is not None:
            self.drain()
        # Also what was queued past the drain, as pages must never go from under a copy.
        if self.registered and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.device)

    def unpin_and_free(self) -> None:
        """Unregister, then free; views that are still alive then read zeros, they never fault."""
        if self.runtime is not None and not self.forked:
            unregister_chunks(self.runtime, self.registered)
        remove_host_ranges(self.registered)
        self.registered = ()
        if self.shared is None:
            # Unmapping has to wait for the last view, the memory itself does not.
            with contextlib.suppress(OSError, ValueError):
                self.mapping.madvise(mmap.MADV_DONTNEED)
        else:
            os.close(self.shared.descriptor)
        with contextlib.suppress(BufferError):
            self.mapping.close()

    def finish(self) -> None:
        """Last resort, when every view is gone or the interpreter ends: like close, but never raises."""
        if self.forked:
            remove_host_ranges(self.registered)
            return
        try:
            self.wait()
        except Exception:
            # Pages under a running transfer must not be reused: rather leak them.
            logger.exception("transfers of a host buffer of %d bytes could not be drained; it is leaked", self.nbytes)
            _leaked.append(self)
            return
        self.unpin_and_free()


_leaked: list[_Memory] = []


class HostBuffer:
    """Bytes of host memory, pinned where there is a GPU. Made by :func:`allocate_host_buffer`.

    The memory is freed by :meth:`close`, or when the buffer and every tensor made from it are gone, or at exit; each
    time in the same order: wait for transfers, unpin, free. Usable as a context manager.

    Attributes
    ----------
    nbytes
        Size.
    boundaries
        Byte offsets at which one registration ends and the next begins; no copy may span one.
    ranges
        Host address, bytes and device address of each registration; none where the memory is not pinned. Transfers know
        them: kernels reach the memory through the one address, copies and the CPU through the other.
    pinned, reason
        Whether the memory is page-locked for a GPU, and why, or why not.
    numa_node
        Node the memory was asked from, or None.
    shared_name
        What :func:`attach_host_buffer` takes in another process; None for memory that is not shared.
    """

    def __init__(
        self,
        memory: _Memory,
        array: npt.NDArray[np.uint8],
        *,
        boundaries: tuple[int, ...],
        reason: str,
        numa_node: int | None,
    ) -> None:
        self.nbytes = memory.nbytes
        self.boundaries = boundaries
        self.ranges = memory.registered
        self.pinned = bool(memory.registered)
        self.reason = reason
        self.numa_node = numa_node
        self.shared_name = None if memory.shared is None else memory.shared.name
        self._memory = memory
        self._tensor: torch.Tensor | None = torch.from_numpy(array)
        # Every tensor of the buffer holds the array, so it goes last.
        self._finalizer = weakref.finalize(array, memory.finish)
        self._lock = threading.Lock()  # guards closing: a second caller returns once the memory is given back

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, uint8 ``[nbytes]``; RuntimeError after :meth:`close`."""
        if self._tensor is None:
            raise RuntimeError("the host buffer is closed; its tensor can no longer be had")
        return self._tensor

    @property
    def closed(self) -> bool:
        """Whether the memory has been given back."""
        return self._tensor is None

    def set_drain(self, drain: Callable[[], None] | None) -> None:
        """Set what returns once no transfer uses the buffer; the GPU of a pinned one is synchronised as well.

        A ``drain`` that refers to the buffer or its tensors keeps them alive until :meth:`close` or exit.
        """
        self._memory.drain = drain

    def close(self) -> None:
        """Wait for transfers, unpin and free; a second call does nothing.

        Tensors that still show the memory read zeros afterwards (shared memory keeps its contents for the others).
        Where waiting raises, the error is passed on and the buffer is as it was.
        """
        with self._lock:
            if self._tensor is None:
                return
            self._memory.wait()
            self._finalizer.detach()
            self._tensor = None
            self.pinned = False
            self.ranges = ()
            self.reason = "closed"
            self._memory.unpin_and_free()

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def allocate_host_buffer(
    nbytes: int,
    *,
    pin: bool = True,
    page_bytes: int | Sequence[Segment],
    allocator_type: AllocatorType | str = AllocatorType.DEFAULT,
    device: torch.device | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    huge_pages: HugePages | str = HugePages.TRANSPARENT,
    numa_node: int | Literal["auto"] | None = "auto",
    threads: int | None = None,
    budget: HostMemoryBudget | None = None,
    drain: Callable[[], None] | None = None,
    runtime: HostRuntime | None = None,
) -> HostBuffer:
    """Allocate zeroed host memory for a pool.

    Parameters
    ----------
    nbytes
        Size.
    pin
        Page-lock the memory for the GPUs. On a machine without one it stays unpinned, and ``reason`` says so.
    page_bytes
        Bytes of a pool page: registrations end on multiples of it. For buffers whose pages are not one piece,
        the :class:`Segment` s of it.
    allocator_type
        ``"default"`` or ``"shared"``.
    device
        GPU whose transfers use the buffer, the current one with None: pinned through its context, placed on its node.
        On ``cpu`` the memory stays unpinned.
    chunk_bytes
        Bytes registered at once, at most.
    huge_pages
        ``"transparent"`` (only for memory that is pinned), ``"reserved"`` or ``"off"``.
    numa_node
        Node to take the memory from; ``"auto"`` is the GPU's, where sysfs tells it; None leaves it to the kernel.
    threads
        Threads that touch the memory before it is pinned; None takes one a core, at most 16.
    budget
        Limit on host memory; None is ``HostMemoryBudget()``.
    drain
        See :meth:`HostBuffer.set_drain`.
    runtime
        What pins; None is the CUDA or HIP runtime of this process.

    Returns
    -------
    HostBuffer
        Its ``tensor`` is uint8 ``[nbytes]`` on CPU.

    Raises
    ------
    ValueError
        An argument is out of range, or ``chunk_bytes`` leaves no place to cut.
    HostMemoryBudgetError
        The budget has less.
    HostRegistrationError
        The runtime refused to pin. Nothing stays pinned or allocated, and no error is pending.
    OSError
        The kernel refused the mapping, e.g. for lack of reserved huge pages.
    """
    allocator_type = one_of("allocator_type", allocator_type, AllocatorType)
    huge_pages = one_of("huge_pages", huge_pages, HugePages)
    nbytes = whole("nbytes", nbytes)
    check_memory_numbers(chunk_bytes, numa_node, threads)
    # First, as finding the boundaries takes the longer the more there are.
    (budget or HostMemoryBudget()).check(nbytes)
    boundaries = _boundaries(nbytes, page_bytes, chunk_bytes)
    runtime, reason = _runtime(pin, device, runtime)
    memory = _map(nbytes, allocator_type, huge_pages)
    return _finish(memory, boundaries, runtime, reason, device, huge_pages, numa_node, threads or _threads(), drain)


def check_memory_numbers(chunk_bytes: int, numa_node: int | Literal["auto"] | None, threads: int | None) -> None:
    """Check what :func:`allocate_host_buffer` accepts under these names; TypeError or ValueError."""
    whole("chunk_bytes", chunk_bytes)
    if numa_node is not None and numa_node != "auto":
        whole("numa_node", numa_node, least=0, most=MAX_NUMA_NODE)
    if threads is not None:
        whole("threads", threads, most=MAX_THREADS)


def attach_host_buffer(
    name: str,
    *,
    pin: bool = True,
    page_bytes: int | Sequence[Segment],
    device: torch.device | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    drain: Callable[[], None] | None = None,
    runtime: HostRuntime | None = None,
) -> HostBuffer:
    """Attach to shared host memory that another process allocated, and pin it for this process.

    Parameters
    ----------
    name
        The ``shared_name`` of the other process's buffer.
    pin, page_bytes, device, chunk_bytes, drain, runtime
        As in :func:`allocate_host_buffer`.

    Raises
    ------
    ValueError, FileNotFoundError, PermissionError
        As in :func:`hicache_pools.shared_memory.open_shared_file`.
    HostRegistrationError
        The runtime refused to pin.
    """
    whole("chunk_bytes", chunk_bytes)
    shared = open_shared_file(name)
    try:
        boundaries = _boundaries(shared.nbytes, page_bytes, chunk_bytes)
        runtime, reason = _runtime(pin, device, runtime)
        mapping = mmap.mmap(shared.descriptor, shared.nbytes, flags=mmap.MAP_SHARED)
    except BaseException:
        os.close(shared.descriptor)
        raise
    memory = _Memory(mapping, 0, shared.nbytes, shared)
    return _finish(memory, boundaries, runtime, reason, device, HugePages.OFF, None, 0, drain)


def _boundaries(nbytes: int, page_bytes: int | Sequence[Segment], chunk_bytes: int) -> tuple[int, ...]:
    if isinstance(page_bytes, Sequence) and not isinstance(page_bytes, str):
        segments = tuple(page_bytes)
    else:
        segments = (Segment(nbytes, whole("page_bytes", page_bytes)),)
    covered = sum(segment.nbytes for segment in segments)
    if covered != nbytes:
        raise ValueError(f"page_bytes describes {covered} bytes, but the buffer has {nbytes}; they must be the same")
    return registration_boundaries(segments, chunk_bytes=chunk_bytes, alignment=mmap.PAGESIZE)


def _runtime(pin: bool, device: torch.device | None, runtime: HostRuntime | None) -> tuple[HostRuntime | None, str]:
    """Return what pins, or None and why the memory is not pinned."""
    if not pin:
        return None, "pin is False"
    if runtime is not None:
        return runtime, ""
    if device is not None and device.type != "cuda":
        return None, f"transfers run on {device}, which needs no pinned memory"
    if not torch.cuda.is_available():
        return None, "torch finds no CUDA or ROCm device on this machine"
    return GpuRuntime(), ""


def _map(nbytes: int, allocator_type: AllocatorType, huge_pages: HugePages) -> _Memory:
    reserved = huge_pages is HugePages.RESERVED
    size = _round_up(nbytes, _huge_page_bytes()) if reserved else nbytes
    shared = None
    try:
        if allocator_type is AllocatorType.SHARED:
            shared = create_shared_file(size, huge_pages=reserved)
            mapping = mmap.mmap(shared.descriptor, size, flags=mmap.MAP_SHARED)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_HUGETLB if reserved else 0)
            mapping = mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        if shared is not None:
            os.close(shared.descriptor)
        hint = "; huge_pages='reserved' needs that much in vm.nr_hugepages" if reserved else ""
        code = error.errno or errno.ENOMEM
        raise OSError(code, f"mapping {size} bytes of host memory failed: {os.strerror(code)}{hint}") from error
    return _Memory(mapping, 0, nbytes, shared)


def _finish(
    memory: _Memory,
    boundaries: tuple[int, ...],
    runtime: HostRuntime | None,
    reason: str,
    device: torch.device | None,
    huge_pages: HugePages,
    numa_node: int | Literal["auto"] | None,
    threads: int,
    drain: Callable[[], None] | None,
) -> HostBuffer:
    """Place, touch and pin a fresh mapping; undo all of it when a step fails. No threads: its contents are kept."""
    array: npt.NDArray[np.uint8] = np.frombuffer(memory.mapping, dtype=np.uint8, count=memory.nbytes)
    memory.address = int(array.ctypes.data)
    memory.drain = drain
    gpu = device if device is not None and device.type == "cuda" and torch.cuda.is_available() else None
    try:
        node = numa_node
        if node == "auto":
            node = None if runtime is None else _gpu_node(gpu)
        if node is not None:
            refusal = prefer_node(memory.address, len(memory.mapping), node)
            if refusal is not None:
                logger.info("host memory stays where the kernel puts it: %s", refusal)
                node = None
        if runtime is not None:
            if huge_pages is HugePages.TRANSPARENT:
                # Kernels without transparent huge pages say no; ordinary pages do.
                with contextlib.suppress(OSError):
                    memory.mapping.madvise(mmap.MADV_HUGEPAGE)
            if threads:
                _touch(array, threads)
            with torch.cuda.device(gpu) if gpu is not None else contextlib.nullcontext():
                memory.registered = register_chunks(runtime, memory.address, memory.nbytes, boundaries)
                memory.runtime = runtime
                memory.device = gpu
            reason = (
                f"registered in {len(memory.registered)} chunks of at most {_largest(boundaries, memory.nbytes)} bytes"
            )
    except BaseException:
        del array
        memory.unpin_and_free()
        raise
    if runtime is None:
        boundaries = ()
    return HostBuffer(memory, array, boundaries=boundaries, reason=reason, numa_node=node)


def _gpu_node(gpu: torch.device | None) -> int | None:
    if not torch.cuda.is_available():
        return None
    index = torch.cuda.current_device() if gpu is None or gpu.index is None else gpu.index
    return numa_node_of(GpuRuntime().pci_address(index))


def _touch(array: npt.NDArray[np.uint8], threads: int) -> None:
    """Write to every OS page, so that the kernel finds memory for all of it from many cores at once."""

    def touch(start: int) -> None:
        array[start : start + _TOUCH_BYTES : mmap.PAGESIZE] = 0

    starts = range(0, array.size, _TOUCH_BYTES)
    with ThreadPoolExecutor(min(threads, len(starts)), thread_name_prefix="hicache-touch") as pool:
        for _ in pool.map(touch, starts):
            pass


def _threads() -> int:
    return min(16, len(os.sched_getaffinity(0)))


def _largest(boundaries: Sequence[int], nbytes: int) -> int:
    return max(end - start for start, end in zip((0, *boundaries), (*boundaries, nbytes), strict=True))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _huge_page_bytes() -> int:
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("Hugepagesize:"):
                return int(line.split()[1]) * 1024
    raise OSError(errno.ENOSYS, "this kernel has no huge pages; huge_pages accepts 'off' and 'transparent'")
