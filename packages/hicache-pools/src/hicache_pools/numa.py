"""NUMA placement of host memory: which node a GPU hangs on, and asking the kernel for pages from there."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from pathlib import Path

_MBIND = {"x86_64": 237, "aarch64": 235}
"""System call numbers; glibc has no wrapper, and libnuma is not installed everywhere."""
_MPOL_PREFERRED = 1

MbindCall = Callable[[int, int, int, "ctypes.Array[ctypes.c_ulong]", int], int]
"""``(address, nbytes, mode, node mask, bits of the mask) -> errno``, 0 for success."""


def numa_node_of(address: str, *, sysfs_root: str | os.PathLike[str] = "/sys") -> int | None:
    """Return the NUMA node of the PCI device at ``address``, or None where sysfs does not tell.

    Parameters
    ----------
    address
        PCI address, e.g. ``0000:9a:00.0``; upper case is accepted.
    sysfs_root
        Where sysfs is mounted.
    """
    file = Path(sysfs_root) / "bus" / "pci" / "devices" / address.lower() / "numa_node"
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    # The kernel says -1 for a machine of one node, or firmware that does not tell.
    return node if node >= 0 else None


def prefer_node(address: int, nbytes: int, node: int, *, mbind: MbindCall | None = None) -> str | None:
    """Ask for the pages of a mapping, not touched yet, from ``node``; others serve where it is full.

    Parameters
    ----------
    address, nbytes
        A mapping, from a page boundary.
    node
        NUMA node, from 0.
    mbind
        Stands in for the system call.

    Returns
    -------
    str or None
        Why the kernel refused (containers often forbid the call), None when it agreed.
    """
    if node < 0:
        raise ValueError(f"node is {node}; NUMA nodes count from 0")
    bits_per_word = 8 * ctypes.sizeof(ctypes.c_ulong)
    words = node // bits_per_word + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // bits_per_word] = 1 << (node % bits_per_word)
    # The kernel reads one bit less than it is given.
    code = (mbind or _mbind)(address, nbytes, _MPOL_PREFERRED, mask, words * bits_per_word + 1)
    return None if code == 0 else f"mbind to NUMA node {node} failed: {os.strerror(code)}"


def _mbind(address: int, nbytes: int, mode: int, mask: ctypes.Array[ctypes.c_ulong], bits: int) -> int:
    number = _MBIND.get(platform.machine())
    if number is None:
        return 38  # ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(mode),
        mask,
        ctypes.c_ulong(bits),
        ctypes.c_uint(0),
    )
    return 0 if result == 0 else ctypes.get_errno()
