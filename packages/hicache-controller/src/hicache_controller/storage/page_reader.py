"""Reads the pages of many files in one compiled call, or one by one in Python while there is none."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hicache_kernels.files import FileRead, read_files
from hicache_kernels.probe import load_outcome_so_far, warn_once

from .io_threads import IoThreads
from .page_file import FOOTER_BYTES, UNCHECKED_BYTES, Outcome, PageId, PageRead, opened, read_page
from .xxh3 import digest_of, xxh3_checksum

_CACHESTAT = 451  # the number of the system call on every architecture; Linux has it since 6.5
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Too short a call to give the GIL up for.
_libc = ctypes.PyDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")]


class PageRequest(NamedTuple):
    """A page to read: its file, what gives the memory that its payload goes to, and what it must be."""

    path: str
    memory: Callable[[], Sequence[memoryview]]
    page: PageId


def compiled_reads() -> bool:
    """Return whether pages are read in one compiled call; the first call starts to load that, in the background."""
    outcome = load_outcome_so_far("files", "cpu")
    if outcome is None:
        return False
    missing = outcome.reason
    if missing is None and xxh3_checksum() is None:
        missing = "this build of xxhash does not show its C functions"
    if missing is not None:
        warn_once(f"pages of files are read one by one in Python, which is slower: {missing}")
    return missing is None


def read_pages(threads: IoThreads, requests: Sequence[PageRequest]) -> list[PageRead | OSError]:
    """Read pages and check them, as :func:`read_page` does.

    Parameters
    ----------
    threads
        What reads.
    requests
        At least one, all of one size. Their files must belong to this user.

    Returns
    -------
    list of PageRead or OSError
        One a request, in order; the error where :func:`read_page` would raise it.
    """
    item_bytes = requests[0].page.size + 4096
    # Pages that are read together were mostly written together.
    waits = not all(is_cached(path) for path in {requests[0].path, requests[-1].path})
    if not compiled_reads():
        return threads.map(_read_one, requests, item_bytes, waits=waits)
    footers = memoryview(bytearray(FOOTER_BYTES * len(requests)))
    ends = [footers[end - FOOTER_BYTES : end] for end in range(FOOTER_BYTES, len(footers) + 1, FOOTER_BYTES)]
    held: list[memoryview] = []

    def views() -> Iterator[tuple[memoryview, ...]]:
        # Not as a list: a page may have hundreds of views, and Python looks through all that are alive for cycles.
        for request, end in zip(requests, ends, strict=True):
            memory = request.memory()
            # Compiled code knows addresses only; one view a page keeps its memory from being unmapped meanwhile.
            held.extend(memory[:1])
            yield (*memory, end)

    found = read_files(
        [request.path for request in requests],
        views(),
        threads=threads.worth(len(requests), item_bytes, waits=waits, compiled=True),
        checksum=xxh3_checksum(),
        unchecked=UNCHECKED_BYTES,
    )
    results: list[PageRead | OSError] = []
    for request, file, footer in zip(requests, found, ends, strict=True):
        if file.error == errno.ENOENT:
            results.append(PageRead(Outcome.MISSING))
        elif file.error:
            results.append(OSError(file.error, os.strerror(file.error), request.path))
        elif _is_hit(request, file, bytes(footer)):
            results.append(PageRead(Outcome.HIT, file.changed_ns))
        else:  # rare, and it takes a second look to tell what it is
            results.append(_read_one(request))
    return results


def _is_hit(request: PageRequest, file: FileRead, footer: bytes) -> bool:
    # Of what was not read in full, the footer is zeros.
    outcome = request.page.outcome(footer, digest_of(file.low, file.high))
    return outcome is Outcome.HIT and file.owner == os.geteuid()


def _read_one(request: PageRequest) -> PageRead | OSError:
    try:
        return read_page(request.path, request.memory(), request.page)
    except OSError as error:
        return error


def is_cached(path: str) -> bool:
    """Return whether all of a file is in the page cache; False where there is no file, or the kernel does not say."""
    whole, found = _Range(0, 0), _Statistics()
    try:
        with opened(path) as file:
            pages = -(-os.fstat(file).st_size // _PAGE)
            failed = _libc.syscall(_CACHESTAT, file, ctypes.byref(whole), ctypes.byref(found), 0)
    except OSError:
        return False
    return not failed and found.cached >= pages
