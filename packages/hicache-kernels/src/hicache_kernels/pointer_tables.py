"""Tables of layer addresses that remember the tensors behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True, eq=False)
class Layers:
    """Tensors behind a table, one a layer, and what all of them have in common.

    Attributes
    ----------
    tensors
        In the order of the layers; row 0 of a layer starts at its tensor's first element.
    span_bytes
        Bytes from the first to the last element of the shortest.
    alignment
        Largest number that divides every address.
    """

    tensors: tuple[torch.Tensor, ...]
    span_bytes: int
    alignment: int

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Layers:
        """Measure the tensors."""
        return cls(tuple(tensors), min(map(_span_bytes, tensors)), math.gcd(*(t.data_ptr() for t in tensors)))


def _span_bytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


# Keyed by storage, not by tensor: a slice of a table shares its storage, in inference mode too, and torch keeps the
# Python object of a storage alive as long as the storage.
_LAYERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
        uint64 ``[len(tensors)]``. Slices of it (some of the layers) remember their tensors too; the table is not to be
        written to.

    Raises
    ------
    ValueError
        Where ``tensors`` is empty or spans devices.
    """
    if not tensors:
        raise ValueError("tensors is empty; a pointer table needs at least one layer")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors lie on {sorted(map(str, devices))}; a pointer table takes tensors of one device")
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64, device="cpu")
    table = addresses.to(tensors[0].device if device is None else device)
    _LAYERS[table.untyped_storage()] = Layers.of(tensors)
    return table


def remembered_layers(table: torch.Tensor) -> Layers | None:
    """Layers of a table of :func:`pointer_table`, or of a slice of one, in its order; None for a foreign table."""
    storage = table.untyped_storage()
    if storage not in _LAYERS:
        return None
    layers: Layers = _LAYERS[storage]
    first, step = table.storage_offset(), table.stride(0)
    if table.numel() == len(layers.tensors) and step == 1:
        return layers
    return Layers.of([layers.tensors[first + step * i] for i in range(table.numel())])
