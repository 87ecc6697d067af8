"""Checks of tensors, and of an operation's indices: once, and before anything is queued."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

CHECK_VARIABLE = "HICACHE_KERNELS_CHECK"
INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, eq=False)
class CheckedIndices:
    """Indices that passed.

    Attributes
    ----------
    pages
        Host pages in order, int64 ``[pages]`` on CPU; None where the host indices lie on the device.
    page_count
        Number of pages.
    runs
        Runs of neighbouring host pages; the number of pages where they are not known.
    """

    pages: torch.Tensor | None
    page_count: int
    runs: int


def check_tensor(name: str, tensor: object, kind: str = "a torch.Tensor") -> None:
    """Check that an argument is a tensor with memory, which meta, sparse and fake tensors have none of.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be {kind}")
    if tensor.is_meta:
        raise ValueError(f"{name} lies on meta, where it has no memory; it must be {kind} on the CPU or a GPU")
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        raise ValueError(f"{name} has layout {tensor.layout} and no memory of its own; it must be {kind}") from error


def checked_tensors(name: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return layers as a tuple once each is seen to be a tensor with memory; one tensor is not a sequence of layers.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, or the layer.
    """
    if isinstance(tensors, torch.Tensor):
        raise TypeError(f"{name} is one tensor; pass a sequence with one tensor a layer, such as {name}.unbind(0)")
    if isinstance(tensors, Iterator):
        raise TypeError(f"{name} is a {type(tensors).__name__}, which can be read once; pass a list or a tuple")
    if not isinstance(tensors, Iterable) or isinstance(tensors, (str, bytes, Mapping)):
        raise TypeError(f"{name} is a {type(tensors).__name__}; pass a list or a tuple with one tensor a layer")
    layers = tuple(tensors)
    for number, tensor in enumerate(layers):
        check_tensor(f"{name}[{number}]", tensor)
    return layers


def _check_form(name: str, indices: torch.Tensor, page_size: int) -> None:
    check_tensor(name, indices, "a torch.Tensor of int64 or int32")
    if indices.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} has dtype {indices.dtype}; it must be torch.int64 or torch.int32")
    if indices.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(indices.shape)}; it must have one dimension")
    if not indices.is_contiguous():
        raise ValueError(f"{name} has stride {indices.stride(0)}; it must be contiguous")
    if indices.numel() % page_size:
        raise ValueError(f"{name} has {indices.numel()} slots; it must be whole pages of {page_size}")


def _check_range(name: str, indices: torch.Tensor, slots: int) -> None:
    if indices.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(indices))
    if low < 0 or high >= slots:
        raise IndexError(f"{name} contains slot {low if low < 0 else high}; slots go from 0 to {slots - 1}")


def _host_pages(indices: torch.Tensor, page_size: int) -> np.ndarray:
    slots: np.ndarray = indices.numpy()
    if page_size == 1:
        return slots.astype(np.int64, copy=False)
    table = slots.reshape(-1, page_size)
    first = table[:, 0]
    wrong = (table - first[:, None] != np.arange(page_size, dtype=slots.dtype)).any(axis=1) | (first % page_size != 0)
    if wrong.any():
        page = int(wrong.argmax())
        shown = table[page, : min(4, page_size)].tolist()
        raise ValueError(
            f"host_indices[{page * page_size}:{(page + 1) * page_size}] starts with {shown} and is not one page: "
            f"its {page_size} slots must be neighbours, the first a multiple of {page_size}"
        )
    return (first // page_size).astype(np.int64, copy=False)


def device_checks_enabled() -> bool:
    """Whether indices on the device are checked too, which waits for the device (``HICACHE_KERNELS_CHECK=1``)."""
    return os.environ.get(CHECK_VARIABLE, "") == "1"


def check_forms(
    host_indices: torch.Tensor, device_indices: torch.Tensor, *, page_size: int, device: torch.device
) -> None:
    """Check all but the values of both index tensors; parameters and errors of :func:`check_indices`."""
    for name, indices in (("host_indices", host_indices), ("device_indices", device_indices)):
        _check_form(name, indices, page_size)
        if indices.device.type != "cpu" and indices.device != device:
            raise ValueError(f"{name} lies on {indices.device}; it must be on the CPU or on {device}")
    if host_indices.numel() != device_indices.numel():
        raise ValueError(
            f"host_indices has {host_indices.numel()} slots and device_indices {device_indices.numel()}; "
            "they must have the same number"
        )


def check_indices(
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    *,
    page_size: int,
    host_slots: int,
    device_slots: int,
    device: torch.device,
) -> CheckedIndices:
    """Check both index tensors of an operation.

    Parameters
    ----------
    host_indices, device_indices
        int64 or int32 ``[slots]``, on CPU or ``device``.
    page_size, host_slots, device_slots, device
        Geometry of the pool.

    Raises
    ------
    TypeError, ValueError, IndexError
        Naming the tensor, its value and what is accepted.
    """
    check_forms(host_indices, device_indices, page_size=page_size, device=device)
    check_all = device_checks_enabled()
    if device_indices.device.type == "cpu" or check_all:
        _check_range("device_indices", device_indices, device_slots)
    if host_indices.device.type == "cpu" or check_all:
        _check_range("host_indices", host_indices, host_slots)
    if host_indices.device.type != "cpu":
        if check_all:
            _host_pages(host_indices.cpu(), page_size)
        pages = host_indices.numel() // page_size
        return CheckedIndices(None, pages, pages)
    host_pages = _host_pages(host_indices, page_size)
    runs = int(np.count_nonzero(host_pages[1:] - host_pages[:-1] != 1)) + 1 if len(host_pages) else 0
    return CheckedIndices(torch.from_numpy(host_pages), len(host_pages), runs)
