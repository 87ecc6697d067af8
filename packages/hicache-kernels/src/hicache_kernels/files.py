"""Reads many files into memory in one call that leaves the GIL free: a storage's pages, straight into host memory."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .probe import load_module, unavailable_reason

_MODULE, _DEVICE_TYPE = "files", "cpu"


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
    """

    error: int
    bytes: int
    mode: int
    owner: int
    size: int
    changed_ns: int


def read_files(paths: Sequence[str], views: Sequence[Sequence[memoryview]]) -> list[FileRead]:
    """Read whole files, one after the other, into memory; the GIL is free until all are read.

    A file is read only if it is a regular one, no symbolic link, and as long as its views together; of any other the
    result tells what it is, and nothing was read. What is read of a file that changes meanwhile is undefined.

    Parameters
    ----------
    paths
        Names of the files.
    views
        For each file where its bytes go, one view behind the other: writable and contiguous, in CPU memory. They must
        stay valid, and nobody may rely on their bytes, until the call returns.

    Returns
    -------
    list of FileRead
        One a file, in order. What the system says about a file is told here and never raised.

    Raises
    ------
    ValueError
        Where the counts differ, or a path contains a zero; nothing was read.
    TypeError
        Where a view is not writable or not contiguous; nothing was read.
    RuntimeError
        Where the module cannot be had (:func:`hicache_kernels.probe.unavailable_reason` of ``"files"`` says why).
    """
    if len(paths) != len(views):
        raise ValueError(f"views has {len(views)} entries for {len(paths)} paths")
    pieces: list[int] = []
    for file, places in enumerate(views):
        for place in places:
            if place.nbytes:
                pieces += (file, ctypes.addressof(ctypes.c_char.from_buffer(place)), place.nbytes)
    found = np.empty((len(paths), len(FileRead._fields)), dtype=np.int64)
    names = b"".join([os.fsencode(path) + b"\0" for path in paths])
    _function()(names, np.array(pieces, dtype=np.int64).reshape(-1, 3), found)
    return [FileRead._make(row) for row in found.tolist()]


@functools.cache
def _function() -> Any:
    module = load_module(_MODULE, _DEVICE_TYPE)
    if module is None:
        raise RuntimeError(f"files cannot be read: {unavailable_reason(_MODULE, _DEVICE_TYPE)}")
    function = module["read_files"]
    function.release_gil = True  # whatever the environment says: a disk may take its time
    return function
