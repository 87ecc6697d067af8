"""Sets of rows as engines' calls name them, by caches or by tables of addresses, and their checks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .checks import check_tensor
from .pointer_tables import Layers, remembered_layers
from .rows import RowSpace
from .validation import whole

MAX_ROWS = 1 << 31
"""Row numbers are below this, as the modules count in 32 bits; for a foreign table nothing else bounds them."""
INDEX_DTYPES = (torch.int32, torch.int64)
TABLE_DTYPES = (torch.uint64, torch.int64)


@dataclass(frozen=True, eq=False)
class RowSet:
    """Rows of one component over some layers: row ``i`` starts ``i * stride`` bytes after the first of its layer.

    Attributes
    ----------
    name
        The argument they came in as, for messages.
    row_bytes, stride
        Bytes of a row, and between rows.
    layer_count
        Number of layers.
    layers
        The tensors they lie in, starting at row 0; None for a foreign table.
    table
        Addresses of row 0, one a layer; None where the caller gave the cache itself.
    layer_stride
        Bytes between the layers of a cache, whose one tensor holds them all.
    """

    name: str
    row_bytes: int
    stride: int
    layer_count: int
    layers: Layers | None
    table: torch.Tensor | None = None
    layer_stride: int = 0

    @property
    def slots(self) -> int | None:
        """Rows that every layer has; None for a foreign table."""
        if self.layers is None:
            return None
        span = self.layers.span_bytes - (self.layer_count - 1) * self.layer_stride
        return max(0, (span - self.row_bytes) // self.stride + 1)

    @property
    def alignment(self) -> int:
        """Largest number that divides the address of every row.

        A foreign table's addresses are not read: they are taken to be as aligned as the rows they name.
        """
        return math.gcd(self.row_bytes, self.stride, self.layer_stride, self.layers.alignment if self.layers else 0)

    @property
    def device(self) -> torch.device:
        """Where the rows lie; for a foreign table, where the table does."""
        if self.layers is not None:
            return self.layers.tensors[0].device
        if self.table is None:
            raise ValueError(f"{self.name} has neither tensors nor a table")
        return self.table.device

    def space(self, table: torch.Tensor | None) -> RowSpace:
        """Describe where kernels find the rows; ``table`` is the table of addresses where they read it."""
        if table is not None:
            return RowSpace(table.data_ptr(), 0, 1, self.stride, 0)
        if self.layers is None:
            raise ValueError(f"{self.name} has neither tensors nor a table")
        return RowSpace(0, self.layers.kernel_address(self.name, 0), 1, self.stride, 0)

    def view(self, layer: int) -> torch.Tensor:
        """Bytes of a layer's rows, uint8 ``[slots, row_bytes]`` over the tensor's storage; not for foreign tables."""
        if self.layers is None or self.slots is None:
            raise ValueError(f"{self.name} is a foreign pointer table; its tensors are not known")
        tensor = self.layers.tensors[layer if self.table is not None else 0]
        start = tensor.storage_offset() * tensor.element_size()
        if self.table is None:
            start += layer * self.layer_stride
        storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        return storage.as_strided((self.slots, self.row_bytes), (self.stride, 1), start)


def cache_rows(caches: Mapping[str, torch.Tensor], element_dim: int | None) -> tuple[RowSet, ...]:
    """Rows of one layer's caches, each viewed as ``[slots, element_dim]``.

    Raises
    ------
    TypeError, ValueError
        Where a cache is no tensor, has no such view, or its rows are not dense.
    """
    rows = []
    for name, cache in caches.items():
        check_tensor(name, cache)
        if cache.dim() < 1:
            raise ValueError(f"{name} is a scalar; it must have at least one dimension")
        dim = cache.shape[-1] if element_dim is None else element_dim
        dim = whole("element_dim", dim)
        try:
            view = cache.view(-1, dim) if cache.numel() else cache.reshape(0, dim)
        except RuntimeError as error:
            raise ValueError(
                f"{name} of shape {tuple(cache.shape)} and strides {cache.stride()} is not [slots, {dim}]"
            ) from error
        if dim > 1 and view.stride(1) != 1:
            raise ValueError(f"{name} has stride {view.stride(1)} within a row; the elements of a row must be dense")
        item = view.element_size()
        stride = view.stride(0) * item if view.shape[0] > 1 else dim * item
        rows.append(RowSet(name, dim * item, stride, 1, Layers.of([view])))
    return tuple(rows)


def table_rows(tables: Mapping[str, torch.Tensor], stride: int, row_bytes: int) -> tuple[RowSet, ...]:
    """Rows named by tables of layer addresses, ``stride`` bytes apart.

    Raises
    ------
    ValueError, TypeError
        Where a table is not one-dimensional or not of 64-bit integers, or a size is not positive.
    """
    for name, value in (("element_size", row_bytes), ("stride", stride)):
        whole(name, value)
    rows = []
    for name, table in tables.items():
        check_tensor(name, table, "a torch.Tensor of addresses")
        if table.dtype not in TABLE_DTYPES:
            raise TypeError(f"{name} has dtype {table.dtype}; a table of addresses is uint64 or int64")
        if table.dim() != 1 or not table.numel():
            raise ValueError(f"{name} has shape {tuple(table.shape)}; a table of addresses has one entry a layer")
        rows.append(RowSet(name, row_bytes, stride, table.numel(), remembered_layers(name, table), table))
    return tuple(rows)


def page_first_rows(buffers: Mapping[str, torch.Tensor], like: RowSet) -> tuple[RowSet, ...]:
    """Rows of checked buffers ``[slots, layers, ...]``, whose elements are rows of the size and layers of ``like``."""
    return tuple(
        RowSet(
            name,
            like.row_bytes,
            buffer.stride(0) * buffer.element_size(),
            like.layer_count,
            Layers.of([buffer]),
            layer_stride=buffer.stride(1) * buffer.element_size(),
        )
        for name, buffer in buffers.items()
    )


def check_pair(destination: Sequence[RowSet], source: Sequence[RowSet], alignment: int) -> None:
    """Check that rows of both sides can be copied one to one.

    Raises
    ------
    ValueError
        Naming the tensor that does not fit.
    """
    first = destination[0]
    for side in (destination, source):
        for rows in side:
            if rows.row_bytes != first.row_bytes:
                raise ValueError(f"{rows.name} has rows of {rows.row_bytes} bytes, {first.name} of {first.row_bytes}")
            if rows.layer_count != first.layer_count:
                raise ValueError(f"{rows.name} has {rows.layer_count} layers, {first.name} {first.layer_count}")
            if rows.row_bytes % alignment:
                raise ValueError(
                    f"{rows.name} has rows of {rows.row_bytes} bytes; they must be a multiple of {alignment}"
                )
            for what, step in (("rows", rows.stride), ("layers", rows.layer_stride)):
                if step < rows.row_bytes and (what == "rows" or (rows.layer_stride and rows.layer_count > 1)):
                    raise ValueError(
                        f"{rows.name} has {what} {step} bytes apart; they must be at least the {rows.row_bytes} bytes "
                        "of a row apart"
                    )
            if rows.alignment % alignment:
                raise ValueError(
                    f"{rows.name} has rows {rows.stride} bytes apart from address "
                    f"{rows.layers.tensors[0].data_ptr() if rows.layers else 'unknown'}; every row must start at a "
                    f"multiple of {alignment} bytes"
                )
            if rows.device != side[0].device:
                raise ValueError(f"{rows.name} lies on {rows.device}, {side[0].name} on {side[0].device}")


def check_row_numbers(name: str, indices: torch.Tensor, side: Sequence[RowSet], page_size: int) -> None:
    """Check row numbers: form always, range where they lie on the CPU or ``HICACHE_KERNELS_CHECK`` is 1.

    Raises
    ------
    TypeError, ValueError
        Naming the indices.
    IndexError
        Where a row does not exist.
    """
    check_tensor(name, indices, "a torch.Tensor of int32 or int64")
    if indices.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} has dtype {indices.dtype}; indices are int32 or int64")
    if indices.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(indices.shape)}; indices have one dimension")
    page_size = whole("page_size", page_size)
    if indices.numel() % page_size:
        raise ValueError(f"{name} has {indices.numel()} entries, no multiple of page_size {page_size}")
    if not indices.numel() or (indices.device.type != "cpu" and os.environ.get("HICACHE_KERNELS_CHECK") != "1"):
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    limit = min([MAX_ROWS, *(rows.slots for rows in side if rows.slots is not None)])
    if low < 0 or high >= limit:
        wrong = low if low < 0 else high
        raise IndexError(f"{name} contains {wrong}; rows of {side[0].name} are from 0 to {limit - 1}")


def check_pages(name: str, indices: torch.Tensor, page_size: int) -> None:
    """Check that CPU indices name whole pages: aligned, each page's slots in order.

    Raises
    ------
    ValueError
        Naming the indices.
    """
    pages = indices.view(-1, page_size)
    expected = pages[:, :1] + torch.arange(page_size, dtype=indices.dtype, device="cpu")
    if not torch.equal(pages, expected) or bool((pages[:, 0] % page_size != 0).any()):
        raise ValueError(f"{name} must name whole pages of {page_size} slots, each aligned and in order")


def check_page_first(name: str, buffer: torch.Tensor, rows: RowSet, size: int) -> None:
    """Check that ``buffer`` is ``[slots, layers, ...]`` with dense elements of ``size`` bytes.

    Raises
    ------
    ValueError
        Naming the buffer.
    """
    if buffer.dim() < 3 or buffer.shape[1] != rows.layer_count:
        raise ValueError(
            f"{name} has shape {tuple(buffer.shape)}; it must be [slots, layers, ...] with the "
            f"{rows.layer_count} layers of {rows.name}"
        )
    element = buffer[0, 0] if buffer.shape[0] else buffer.new_empty(buffer.shape[2:])
    if element.numel() * element.element_size() != size:
        raise ValueError(
            f"{name} has elements of {element.numel() * element.element_size()} bytes; element_size is {size}"
        )
    if not element.is_contiguous():
        raise ValueError(f"{name} has strides {buffer.stride()}; an element must be dense")
