"""Row copies between any two sets of rows: checked, then done by a compiled module, or by plain torch without one."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping, Sequence

import torch
import tvm_ffi

from . import row_launch
from .checks import check_tensor
from .probe import load_module, unavailable_reason
from .row_sets import (
    RowSet,
    check_page_first,
    check_pages,
    check_pair,
    check_row_numbers,
    page_first_rows,
    table_rows,
)
from .rows import DIRECT_ALIGNMENT, STAGED_ALIGNMENT
from .spec import module_device_type
from .validation import MAX_BLOCKS, whole

_plain_torch = contextvars.ContextVar("plain_torch", default=False)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Make the copies of this thread run in plain torch, whatever modules there are."""
    token = _plain_torch.set(True)
    try:
        yield
    finally:
        _plain_torch.reset(token)


def _module(name: str, device: torch.device) -> tvm_ffi.Module | None:
    return None if _plain_torch.get() else load_module(name, module_device_type(device))


def _check_remembered(name: str, device: torch.device, *sides: Sequence[RowSet]) -> None:
    for side in sides:
        for rows in side:
            if rows.layers is None:
                reason = "asked for" if _plain_torch.get() else unavailable_reason(name, module_device_type(device))
                raise RuntimeError(
                    f"{rows.name} is a foreign pointer table, which only a compiled build can follow; this copy runs "
                    f"in plain torch ({reason}); make the table with hicache_kernels.pointer_table()"
                )


def _operation_device(*tensors: torch.Tensor | None) -> torch.device:
    devices = {t.device for t in tensors if t is not None and t.device.type != "cpu"}
    if len(devices) > 1:
        raise ValueError(f"the tensors lie on {sorted(map(str, devices))}; one copy works with one device")
    return devices.pop() if devices else torch.device("cpu")


def _check_capture(device: torch.device, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Refuse tensors on the CPU while a graph is captured: a graph has no memory of what they hold."""
    if device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device.type == "cpu":
            raise ValueError(f"{name} is on the CPU; under graph capture it must be on {device}")


def _anchors(side: Sequence[RowSet]) -> list[torch.Tensor | None]:
    return [t for rows in side for t in (rows.table, rows.layers.tensors[0] if rows.layers else None)]


def copy_rows(
    destination: Sequence[RowSet],
    destination_indices: torch.Tensor,
    source: Sequence[RowSet],
    source_indices: torch.Tensor,
    *,
    block_quota: int | None = None,
    page_size: int | None = None,
    destination_name: str = "indices_dst",
    source_name: str = "indices_src",
) -> None:
    """Copy row ``source_indices[i]`` of every component and layer to row ``destination_indices[i]``.

    Raises
    ------
    TypeError, ValueError, IndexError
        Before anything is copied, naming what does not fit.
    RuntimeError
        For a foreign table where no compiled module is to be had.
    """
    if block_quota is not None:
        whole("block_quota", block_quota, most=MAX_BLOCKS)
    check_pair(destination, source, DIRECT_ALIGNMENT)
    pages_of = 1 if page_size is None else page_size
    check_row_numbers(destination_name, destination_indices, destination, pages_of)
    check_row_numbers(source_name, source_indices, source, pages_of)
    if destination_indices.numel() != source_indices.numel():
        raise ValueError(
            f"{destination_name} has {destination_indices.numel()} entries, {source_name} {source_indices.numel()}"
        )
    device = _operation_device(destination_indices, source_indices, *_anchors(destination), *_anchors(source))
    if not destination_indices.numel():
        return
    indices = {destination_name: destination_indices, source_name: source_indices}
    _check_capture(device, indices | {rows.name: rows.table for rows in (*destination, *source)})
    module = _module("main", device)
    if module is None:
        _check_remembered("main", device, destination, source)
        copy_rows_in_torch(destination, destination_indices, source, source_indices, device)
        return
    row_launch.move_rows(
        module, destination, destination_indices, source, source_indices, device, block_quota=block_quota
    )


def copy_rows_in_torch(
    destination: Sequence[RowSet],
    destination_indices: torch.Tensor,
    source: Sequence[RowSet],
    source_indices: torch.Tensor,
    device: torch.device,
) -> None:
    """Copy rows as :func:`copy_rows` does, in plain torch: its oracle and last fallback, done when it returns."""
    views = [
        (to.view(layer), of.view(layer))
        for to, of in zip(destination, source, strict=True)
        for layer in range(to.layer_count)
    ]
    # Plain torch touches host memory from this thread, so what the stream still has to write there must have landed.
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    for to, of in views:
        rows = of[source_indices.to(of.device).long()]
        to[destination_indices.to(to.device).long()] = rows.to(to.device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def stage_pages(
    tables: Mapping[str, torch.Tensor],
    source_indices: torch.Tensor,
    destination_indices: torch.Tensor,
    staging: Mapping[str, torch.Tensor],
    destination: Mapping[str, torch.Tensor],
    *,
    page_size: int,
    element_size: int | None = None,
    block_quota: int | None = None,
) -> None:
    """Write pages of layer-first rows to page-first buffers through staging memory, in chunks of what it holds.

    Raises
    ------
    TypeError, ValueError, IndexError
        Before anything is copied, naming what does not fit.
    RuntimeError
        For a foreign table where no compiled module is to be had.
    """
    page_size = whole("page_size", page_size)
    if element_size is not None:
        whole("element_size", element_size)
    if block_quota is not None:
        whole("block_quota", block_quota, most=MAX_BLOCKS)
    source = _checked_staging(tables, staging, destination, page_size, element_size)
    targets = page_first_rows(destination, source[0])
    check_pair(targets, source, STAGED_ALIGNMENT)
    _check_staged_indices(source_indices, source, destination_indices, targets, page_size)
    device = _operation_device(source_indices, *_anchors(source), *staging.values())
    if device.type != "cpu" and torch.cuda.is_current_stream_capturing():
        raise ValueError("staged copies are planned from dst_indices on the CPU; they cannot be captured in a graph")
    for name, buffer in staging.items():
        if buffer.device != device:
            raise ValueError(f"{name} lies on {buffer.device}; staging memory must lie with the rows, on {device}")
    for name, buffer in destination.items():
        if buffer.device.type != "cpu":
            raise ValueError(f"{name} lies on {buffer.device}; a staged destination is CPU memory")
    if not source_indices.numel():
        return
    module = _module("staged", device)
    if module is None:
        _check_remembered("staged", device, source)
        copy_rows_in_torch(targets, destination_indices, source, source_indices, device)
        return
    row_launch.stage_pages(
        module,
        targets,
        destination_indices,
        source,
        source_indices,
        tuple(staging.values()),
        device,
        page_size=page_size,
        block_quota=block_quota,
    )


def _checked_staging(
    tables: Mapping[str, torch.Tensor],
    staging: Mapping[str, torch.Tensor],
    destination: Mapping[str, torch.Tensor],
    page_size: int,
    element_size: int | None,
) -> tuple[RowSet, ...]:
    """Check the buffers of a staged copy against its tables; returns the rows that the tables name."""
    buffers = {**staging, **destination}
    for name, buffer in buffers.items():
        check_tensor(name, buffer)
    first_name, first = next(iter(buffers.items()))
    if first.dim() < 3:
        raise ValueError(f"{first_name} has shape {tuple(first.shape)}; it must be [slots, layers, ...]")
    size = element_size or first[0, 0].numel() * first.element_size() if first.numel() else element_size or 0
    source = table_rows(tables, size, size)
    for name, buffer in buffers.items():
        check_page_first(name, buffer, source[0], size)
    for name, buffer in staging.items():
        if buffer.shape[0] < page_size:
            raise ValueError(f"{name} holds {buffer.shape[0]} slots, less than a page of {page_size}")
        if buffer.stride(1) * buffer.element_size() != size or not buffer.is_contiguous():
            raise ValueError(f"{name} has strides {buffer.stride()}; staging memory must be contiguous")
    return source


def _check_staged_indices(
    source_indices: torch.Tensor,
    source: Sequence[RowSet],
    destination_indices: torch.Tensor,
    targets: Sequence[RowSet],
    page_size: int,
) -> None:
    check_tensor("dst_indices", destination_indices, "a torch.Tensor of int64")
    check_tensor("src_indices", source_indices, "a torch.Tensor of int32 or int64")
    if destination_indices.dtype != torch.int64 or destination_indices.device.type != "cpu":
        raise TypeError(
            f"dst_indices is {destination_indices.dtype} on {destination_indices.device}; it must be int64 on the CPU"
        )
    check_row_numbers("dst_indices", destination_indices, targets, page_size)
    check_row_numbers("src_indices", source_indices, source, page_size)
    if source_indices.numel() != destination_indices.numel():
        raise ValueError(f"src_indices has {source_indices.numel()} entries, dst_indices {destination_indices.numel()}")
    check_pages("dst_indices", destination_indices, page_size)
    if source_indices.device.type == "cpu":
        check_pages("src_indices", source_indices, page_size)
