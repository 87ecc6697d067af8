"""Reads many files into memory in one call that leaves the GIL free: a storage's pages, straight into host memory."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .probe import load_module, unavailable_reason

_MODULE, _DEVICE_TYPE = "files", "cpu"


class Checksum(NamedTuple):
    """Addresses of the C functions of a streaming checksum of 128 bits, such as XXH3's in libxxhash.

    Attributes
    ----------
    create, release
        ``void *create(void)``, a state or null; ``int release(void *state)``.
    reset, update
        ``int reset(void *state)``; ``int update(void *state, const void *data, size_t bytes)``.
    digest
        ``struct { uint64_t low, high; } digest(const void *state)``.
    """

    create: int
    reset: int
    update: int
    digest: int
    release: int


class FileRead(NamedTuple):
    """What became of one file.

    Attributes
    ----------
    error
        ``errno`` of the system call that failed; 0 where none did.
    bytes
        Bytes read; those of the views only where all of them are filled.
    mode, owner, size, changed_ns
        The file's type and permissions, user id, bytes, and time of the last change in nanoseconds since the epoch; 0
        where the file could not be opened.
    low, high
        Halves of the checksum as signed numbers; 0 without one. Undefined unless all bytes were read.
    """

    error: int
    bytes: int
    mode: int
    owner: int
    size: int
    changed_ns: int
    low: int
    high: int


_NO_CHECKSUM = Checksum(0, 0, 0, 0, 0)


def read_files(
    paths: Sequence[str],
    views: Iterable[Sequence[memoryview]],
    *,
    threads: int = 1,
    checksum: Checksum | None = None,
    unchecked: int = 0,
) -> list[FileRead]:
    """Read whole files into memory; the GIL is free until all are read.

    A file is read only if it is a regular one, no symbolic link, and as long as its views together; of any other the
    result tells what it is, and nothing was read. What is read of a file that changes meanwhile is undefined.

    Parameters
    ----------
    paths
        Names of the files.
    views
        For each file where its bytes go, one view after the other: writable and contiguous, in CPU memory. That
        memory must stay, and its bytes are undefined, until the call returns. Views made one by one are not kept.
    threads
        Most files read at once, each in a thread that ends with the call, a single one in the caller's.
    checksum
        Summed up while the bytes are still in the CPU's cache; None for nothing.
    unchecked
        Bytes at the end of each file that the checksum leaves out.

    Returns
    -------
    list of FileRead
        One a file, in order. What the system says about a file is reported here and never raised.

    Raises
    ------
    ValueError
        Where the counts differ, a path contains a zero, or a number is out of range; nothing was read.
    TypeError
        Where a view is not writable or not contiguous; nothing was read.
    RuntimeError
        Where the module cannot be had (:func:`hicache_kernels.probe.unavailable_reason` of ``"files"`` says why).
    """
    pieces: list[int] = []
    file = -1
    for file, places in enumerate(views):
        for place in places:
            size = place.nbytes
            if size:
                pieces += (file, ctypes.addressof(ctypes.c_char.from_buffer(place)), size)
    if file + 1 != len(paths):
        raise ValueError(f"views has {file + 1} entries for {len(paths)} paths")
    found = np.empty((len(paths), len(FileRead._fields)), dtype=np.int64)
    _function()(
        b"".join([os.fsencode(path) + b"\0" for path in paths]),
        np.array(pieces, dtype=np.int64).reshape(-1, 3),
        np.array(checksum or _NO_CHECKSUM, dtype=np.int64),
        unchecked,
        threads,
        found,
    )
    return [FileRead._make(row) for row in found.tolist()]


@functools.cache
def _function() -> Any:
    module = load_module(_MODULE, _DEVICE_TYPE)
    if module is None:
        raise RuntimeError(f"files cannot be read: {unavailable_reason(_MODULE, _DEVICE_TYPE)}")
    function = module["read_files"]
    function.release_gil = True  # whatever the environment says: a disk may take its time
    return function
