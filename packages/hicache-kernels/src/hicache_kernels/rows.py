"""Groups of rows as the compiled row mover takes them: two strided spaces and how to walk them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .host_ranges import kernel_address
from .layout import HostStrides
from .plane import Plane
from .streams import own_stream

GROUP_FIELDS = 14
VECTOR_WIDTHS = (16, 8, 4)
DIRECT_ALIGNMENT = 4
"""Addresses, strides and sizes of rows that the main module moves are multiples of this many bytes."""
STAGED_ALIGNMENT = 16
"""Those of rows that the staged module moves are multiples of this many bytes."""


@dataclass(frozen=True, slots=True)
class RowSpace:
    """Row ``r`` of slot ``s`` starts at ``base + bases[r] + (s // block) * block_stride + (s % block) * slot_stride``.

    Attributes
    ----------
    bases
        Address of the table of row bases (int64, where the kernels read), or 0 where the only row is at ``base``.
    base
        Address, or 0 where the table holds addresses.
    block, block_stride, slot_stride
        Slots of a block; bytes between blocks, and between the slots of one.
    """

    bases: int
    base: int
    block: int
    block_stride: int
    slot_stride: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one size and one pair of spaces.

    Attributes
    ----------
    source, destination
        The spaces.
    rows
        Entries of the tables.
    row_bytes
        A multiple of ``vector_bytes``.
    inner
        Slots that are neighbours in the walk: 1 walks slot by slot, a page size page by page and row by row inside, 0
        row by row.
    vector_bytes
        4, 8 or 16: width of the loads and stores; divides every address and stride.
    """

    source: RowSpace
    destination: RowSpace
    rows: int
    row_bytes: int
    inner: int
    vector_bytes: int


def describe(groups: Sequence[RowGroup]) -> torch.Tensor:
    """Write groups down as int64 ``[groups, GROUP_FIELDS]`` on CPU, as csrc/include/hicache/rows.h reads them."""
    table = []
    for group in groups:
        row: list[int] = []
        for space in (group.source, group.destination):
            row += [space.bases, space.base, space.block, space.block_stride, space.slot_stride]
        table.append([*row, group.rows, group.row_bytes, group.inner, group.vector_bytes])
    return torch.tensor(table, dtype=torch.int64, device="cpu").reshape(-1, GROUP_FIELDS)


def widest_vector(values: Sequence[int]) -> int:
    """Widest load, 16, 8 or 4 bytes, that divides all of the addresses, strides and sizes; 0 where not even 4 does."""
    common = math.gcd(16, *values)
    return common if common in VECTOR_WIDTHS else 0


def copy_strides(planes: Sequence[Plane]) -> tuple[HostStrides, ...]:
    """Where copies find the planes' rows in host memory: strides whose offsets are addresses."""
    return tuple(_from(plane, plane.host.buffer.data_ptr() + plane.host.strides.offset) for plane in planes)


def kernel_strides(planes: Sequence[Plane]) -> tuple[HostStrides, ...]:
    """Where kernels find the planes' rows in host memory: strides whose offsets are addresses.

    Raises
    ------
    ValueError
        Where a plane spans registrations whose device addresses lie at unequal distances from their host addresses.
    """
    found = []
    for plane in planes:
        start, end = plane.host.strides.offset, plane.host_end
        name = f"the host buffer of plane {plane.name}"
        found.append(_from(plane, kernel_address(name, plane.host.buffer[start:end], end - start)))
    return tuple(found)


def _from(plane: Plane, address: int) -> HostStrides:
    strides = plane.host.strides
    return HostStrides(address, strides.page, strides.layer, strides.slot)


@dataclass(frozen=True)
class RowTables:
    """Groups of a pool's planes against one other side, with the tables they point into.

    Attributes
    ----------
    device
        Spaces of the device side, one a group, for layer 0; layer ``l`` starts ``l * rows_per_layer`` entries later.
    other
        Spaces of the other side.
    rows_per_layer
        Entries of a layer in the tables, one a group.
    layered
        Whether the other side's tables go through all layers too, or serve every layer alike.
    tables
        int64, where the kernels read; kept alive here.
    """

    device: tuple[RowSpace, ...]
    other: tuple[RowSpace, ...]
    rows_per_layer: tuple[int, ...]
    row_bytes: tuple[int, ...]
    inner: tuple[int, ...]
    vector_bytes: tuple[int, ...]
    layers: int
    layered: bool
    tables: torch.Tensor

    def groups(self, *, to_device: bool, layer: int | None, layers: int = 1) -> torch.Tensor:
        """Describe the move of ``layers`` layers from ``layer`` on, or of all with None, in one direction."""
        described = []
        for index, count in enumerate(self.rows_per_layer):
            skipped = 0 if layer is None else layer * count * 8
            device = _skip(self.device[index], skipped)
            other = _skip(self.other[index], skipped if self.layered else 0)
            source, destination = (other, device) if to_device else (device, other)
            rows = count * (self.layers if layer is None else layers)
            described.append(
                RowGroup(source, destination, rows, self.row_bytes[index], self.inner[index], self.vector_bytes[index])
            )
        return describe(described)


def _skip(space: RowSpace, entries_bytes: int) -> RowSpace:
    return RowSpace(space.bases + entries_bytes, space.base, space.block, space.block_stride, space.slot_stride)


def walk(side: HostStrides, page_size: int) -> int:
    """Choose the walk (:attr:`RowGroup.inner`) in which the other side is touched in rising order."""
    if side.slot >= side.layer > 0:
        return 1
    return 0 if side.page == page_size * side.slot else page_size


def _upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device, for kernels of any stream, without waiting for what the current stream holds."""
    if device.type == "cpu":
        return table
    stream = own_stream(device, "row tables")
    with torch.cuda.stream(stream):
        uploaded = table.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return uploaded


def build_tables(
    planes: Sequence[Plane], sides: Sequence[HostStrides], *, layered: bool, inner: int | None = None
) -> RowTables:
    """Group planes by row size and strides, and upload the row bases of both sides.

    Parameters
    ----------
    planes, sides
        The planes, and where each one's rows lie on the other side: in host memory, or in a staging buffer, from whose
        start offsets then count.
    layered
        Whether the other side has all layers, or one (a staging buffer of a load).
    inner
        The walk; None chooses it by :func:`walk`.

    Raises
    ------
    ValueError
        Where rows, strides or addresses of a plane are not multiples of 4 bytes.
    """
    page_size = planes[0].host.page_size
    layers = planes[0].device.layers
    members: dict[tuple[int, ...], list[int]] = {}
    for index, (plane, side) in enumerate(zip(planes, sides, strict=True)):
        rows = plane.device
        key = (plane.row_bytes, rows.block_slots, rows.block_stride, rows.slot_stride, side.page, side.slot)
        members.setdefault((*key, walk(side, page_size) if inner is None else inner), []).append(index)
    table: list[int] = []
    starts: list[tuple[int, int]] = []
    vectors: list[int] = []
    counts: list[int] = []
    for group, indices in members.items():
        device_bases: list[int] = []
        other_bases: list[int] = []
        for layer in range(layers):
            for index in indices:
                plane, side = planes[index], sides[index]
                per_layer = plane.device.rows_per_layer
                device_bases += plane.device.bases[layer * per_layer : (layer + 1) * per_layer]
                if layered or layer == 0:
                    start = side.offset + layer * side.layer
                    other_bases += [start + row * plane.row_bytes for row in range(per_layer)]
        width = widest_vector([group[0], *group[2:6], *device_bases, *other_bases])
        if width == 0:
            names = ", ".join(planes[index].name for index in indices)
            raise ValueError(
                f"planes {names}: rows of {group[0]} bytes, their strides or addresses are not multiples of 4 bytes"
            )
        vectors.append(width)
        counts.append(len(device_bases) // layers)
        starts.append((len(table), len(table) + len(device_bases)))
        table += device_bases + other_bases
    uploaded = _upload(torch.tensor(table, dtype=torch.int64, device="cpu"), planes[0].device.device)
    address = uploaded.data_ptr()
    keys = list(members)
    return RowTables(
        device=tuple(RowSpace(address + 8 * at[0], 0, k[1], k[2], k[3]) for k, at in zip(keys, starts, strict=True)),
        other=tuple(
            RowSpace(address + 8 * at[1], 0, page_size, k[4], k[5]) for k, at in zip(keys, starts, strict=True)
        ),
        rows_per_layer=tuple(counts),
        row_bytes=tuple(k[0] for k in keys),
        inner=tuple(k[6] for k in keys),
        vector_bytes=tuple(vectors),
        layers=layers,
        layered=layered,
        tables=uploaded,
    )
