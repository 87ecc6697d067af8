"""Tables of layer addresses that remember their tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .checks import checked_tensors
from .host_ranges import kernel_address

Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Layers:
    """Tensors of a cache, one a layer, as they were when a call or a table got them.

    Attributes
    ----------
    tensors
        In the order of the layers; row 0 of a layer starts at its tensor's first element.
    pointers
        Where each started.
    spans
        Bytes from the first to the last element of each.
    addresses
        What their table holds, the addresses that kernels take; empty without a table.
    """

    tensors: tuple[torch.Tensor, ...]
    pointers: tuple[int, ...]
    spans: tuple[int, ...]
    addresses: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layers:
        """Measure the tensors."""
        return cls(tuple(tensors), tuple(t.data_ptr() for t in tensors), tuple(map(_span_bytes, tensors)))

    def pick(self, numbers: Sequence[int]) -> Layers:
        """Return some of the layers of a table, in that order, as they were measured."""
        return Layers(
            _pick(self.tensors, numbers),
            _pick(self.pointers, numbers),
            _pick(self.spans, numbers),
            _pick(self.addresses, numbers),
        )

    @functools.cached_property
    def span_bytes(self) -> int:
        """Bytes of the shortest."""
        return min(self.spans)

    @functools.cached_property
    def alignment(self) -> int:
        """Largest number that divides every address. Up to 16, it divides kernels' addresses too."""
        return math.gcd(*self.pointers)

    def kernel_address(self, name: str, layer: int) -> int:
        """Where kernels find the first element of a layer; errors as of :func:`kernel_address`."""
        return kernel_address(name, self.tensors[layer], self.spans[layer])

    def check_in_place(self, name: str) -> None:
        """Raise ValueError where the memory of a tensor is no longer what was measured."""
        for layer, (tensor, pointer, span) in enumerate(zip(self.tensors, self.pointers, self.spans, strict=True)):
            if tensor.data_ptr() != pointer or _bytes_from(tensor) < span:
                raise ValueError(
                    f"{name}[{layer}] was made from a tensor of {span} bytes at {pointer:#x}, which now has "
                    f"{_bytes_from(tensor)} bytes at {tensor.data_ptr():#x}: it was resized or replaced; make the "
                    "table again"
                )
        # Memory is registered for all layers of a cache or for none.
        if self.addresses and self.kernel_address(name, 0) != self.addresses[0]:
            raise ValueError(f"{name} was made before its tensors' memory was registered; make the table again")


class _Known(NamedTuple):
    """Layers that a table names, and the table's version, which writing to it changes."""

    layers: Layers
    version: int | None


def _pick(values: Sequence[Value], numbers: Sequence[int]) -> tuple[Value, ...]:
    return tuple(values[number] for number in numbers)


def _span_bytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _bytes_from(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * tensor.element_size()


def _version(table: torch.Tensor) -> int | None:
    return None if table.is_inference() else table._version


# Keyed by storage, not by tensor: a slice of a table shares its storage, in inference mode too, and torch keeps the
# Python object of a storage alive as long as the storage.
_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def pointer_table(tensors: Sequence[torch.Tensor], *, device: torch.device | str | None = None) -> torch.Tensor:
    """Make the table of addresses that the all-layer and staged transfers take.

    Parameters
    ----------
    tensors
        One for each layer, on one device; row 0 of a layer starts at the tensor's first element, and the tensor spans
        all its rows. Views will do. They stay alive as long as the table does.
    device
        Where the table lies; the tensors' device by default. Tables of pinned host tensors belong on the GPU.

    Returns
    -------
    torch.Tensor
        uint64 ``[len(tensors)]``: the addresses that kernels take, which for pinned host memory need not be the host's.
        Slices of it (some of the layers) remember their tensors too; the table is not to be written to, nor the tensors
        to be resized.

    Raises
    ------
    TypeError
        Where ``tensors`` holds something else than tensors with memory of their own.
    ValueError
        Where ``tensors`` is empty or spans devices, or pinned memory has no one device address.
    """
    tensors = checked_tensors("tensors", tensors)
    if not tensors:
        raise ValueError("tensors is empty; a pointer table needs at least one layer")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors lie on {sorted(map(str, devices))}; a pointer table takes tensors of one device")
    place = tensors[0].device if device is None else torch.device(device)
    layers = Layers.of(tensors)
    with torch.cuda.device(place) if place.type == "cuda" else contextlib.nullcontext():
        addresses = tuple(layers.kernel_address(f"tensors[{number}]", number) for number in range(len(tensors)))
        table = torch.tensor(addresses, dtype=torch.uint64, device="cpu").to(place)
    _KNOWN[table.untyped_storage()] = _Known(replace(layers, addresses=addresses), _version(table))
    return table


def remembered_layers(name: str, table: torch.Tensor) -> Layers | None:
    """Layers of a table of :func:`pointer_table`, or of a slice of one, in its order; None for a foreign table.

    Raises
    ------
    ValueError
        Where the table was written to, or the memory it names is no longer what it was made from.
    """
    storage = table.untyped_storage()
    if storage not in _KNOWN:
        return None
    known: _Known = _KNOWN[storage]
    layers = known.layers
    first, step = int(table.storage_offset()), table.stride(0)
    if table.numel() and (table.numel() != len(layers.tensors) or step != 1):
        layers = layers.pick([first + step * i for i in range(table.numel())])
    on_cpu = table.device.type == "cpu"
    if tuple(table.tolist()) != layers.addresses if on_cpu else _version(table) != known.version:
        raise ValueError(f"{name} was written to after it was made, so its entries are unknown; make another table")
    layers.check_in_place(name)
    return layers
