"""Registered host memory has two addresses: copies and CPU code take the host's, kernels the device's.

They are equal on most CUDA systems and differ on some AMD ones, where each registration has a distance of its own. So
whatever hands an address of host memory to a kernel gets it from :func:`kernel_address`; everything else takes
``data_ptr()``.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .probe import load_module
from .spec import TRANSFER_MODULES, module_device_type

ALIGNMENT = 16
"""Both addresses of a range lie alike to multiples of this, the widest load and store of a kernel."""


class HostRange(NamedTuple):
    """Host memory that was registered with the device at once.

    Attributes
    ----------
    address, nbytes
        Where it lies for the CPU and the copy engine, and its size.
    device_address
        Where its first byte lies for kernels.
    """

    address: int
    nbytes: int
    device_address: int


# Invariant: ascending, and no two overlap. Replaced whole, so that readers need no lock.
_ranges: tuple[HostRange, ...] = ()
_lock = threading.Lock()  # guards the change of _ranges from its old value to the new one


def add_host_ranges(ranges: Iterable[HostRange]) -> None:
    """Remember ranges, until :func:`remove_host_ranges`, for all transfers of this process.

    A runtime registers memory once, so known ranges that overlap them were of memory that is gone, and are forgotten.

    Raises
    ------
    ValueError
        Where the two addresses of a range do not lie alike; nothing is remembered then.
    """
    global _ranges
    added = tuple(ranges)
    for each in added:
        if (each.device_address - each.address) % ALIGNMENT:
            raise ValueError(f"{each} has addresses whose distance is not a multiple of {ALIGNMENT} bytes")
    with _lock:
        kept = (old for old in _ranges if not any(_overlap(old, new) for new in added))
        _ranges = tuple(sorted((*kept, *added)))


def _overlap(one: HostRange, other: HostRange) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes


def remove_host_ranges(ranges: Iterable[HostRange]) -> None:
    """Forget ranges, before their memory is given back; those that are not there are passed over."""
    global _ranges
    gone = set(ranges)
    with _lock:
        _ranges = tuple(each for each in _ranges if each not in gone)


def kernel_address(name: str, tensor: torch.Tensor, nbytes: int) -> int:
    """Address at which kernels find the first element of a tensor.

    It is the tensor's own for device memory and for host memory that is not pinned, the one given to
    :func:`add_host_ranges` inside such a range, and what the runtime says for memory that was pinned by other code.

    Parameters
    ----------
    name
        What the memory is called in an error.
    tensor, nbytes
        Where it starts, and the bytes from there on that a kernel may touch.

    Raises
    ------
    ValueError
        Where kernels cannot reach all of it from one address: it spans registrations at unequal distances, or is only
        partly registered.
    """
    address = tensor.data_ptr()
    if tensor.device.type != "cpu" or not nbytes:
        return address
    known = _ranges
    first = max(bisect.bisect_right(known, address, key=lambda each: each.address) - 1, 0)
    end = address + nbytes
    inside = [each for each in known[first:] if each.address < end and address < each.address + each.nbytes]
    if not inside:
        return _address_of_runtime(name, address, nbytes) if tensor.is_pinned() else address
    covered = sum(min(r.address + r.nbytes, end) - max(r.address, address) for r in inside)
    distances = {each.device_address - each.address for each in inside}
    if covered < nbytes or len(distances) > 1:
        raise ValueError(
            f"{name}: {covered} of its {nbytes} bytes are registered with the device, in {len(inside)} ranges at "
            f"{len(distances)} distances from the host addresses; kernels need all of it at one (chunk_bytes of the "
            "allocation sets how much is registered at once)"
        )
    return address + distances.pop()


def _address_of_runtime(name: str, address: int, nbytes: int) -> int:
    """Ask the GPU runtime of torch; without a compiled module no kernel runs that could use the answer."""
    device_type = module_device_type(torch.device("cuda"))
    modules = (load_module(module, device_type) for module in TRANSFER_MODULES)
    module = next((each for each in modules if each is not None), None)
    if module is None:
        return address
    try:
        first, last = (int(module["device_address"](each)) for each in (address, address + nbytes - 1))
    except RuntimeError as error:
        raise ValueError(f"{name}: {error}") from error
    if last - first != nbytes - 1 or (first - address) % ALIGNMENT:
        raise ValueError(
            f"{name}: its first byte has device address {first:#x} and its last of {nbytes} bytes {last:#x}, for the "
            f"host {address:#x}; kernels need all of it at one distance, a multiple of {ALIGNMENT} bytes"
        )
    return first
