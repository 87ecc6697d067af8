"""Finds what is contiguous in the host pages of some planes, and lays staging memory out to match: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .layout import HostStrides
from .plane import Plane

PIECE_FIELDS = 12


@dataclass(frozen=True, slots=True)
class Axis:
    """``count`` steps of ``stride`` bytes."""

    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a page that lie together on the host, repeated along axes that do not.

    Attributes
    ----------
    address
        Of the first byte in page 0.
    width
        Contiguous bytes.
    slots, layers
        Axes that did not melt into the width; a count of 1 where they did.
    page_stride, layer_stride
        Bytes from one page, or layer, to the next.
    members
        ``(plane, offset)``: index of a plane inside, and where its first byte lies in the width.
    memory
        Identity of the buffer; pieces of different buffers never join.
    """

    address: int
    width: int
    slots: Axis
    layers: Axis
    page_stride: int
    layer_stride: int
    members: tuple[tuple[int, int], ...]
    memory: int

    @property
    def page_bytes(self) -> int:
        """Bytes of the piece in one page."""
        return self.width * self.slots.count * self.layers.count

    def continued_by(self, other: Piece) -> bool:
        """Whether ``other`` starts where this piece ends, everywhere."""
        same = (self.slots, self.layers, self.page_stride, self.layer_stride, self.memory)
        return self.address + self.width == other.address and same == (
            other.slots,
            other.layers,
            other.page_stride,
            other.layer_stride,
            other.memory,
        )


def describe_piece(piece: Piece, start: int, page: int, steps: tuple[int, int]) -> list[int]:
    """Write a piece down as csrc/staged/copies.h reads it.

    Parameters
    ----------
    piece
        Where its bytes lie on the host.
    start, page, steps
        Where they lie in staging memory: the first byte, and the bytes between pages, slots and layers.
    """
    row = [piece.address, piece.page_stride, piece.layer_stride, piece.width, start, page]
    for axis, step in zip((piece.slots, piece.layers), steps, strict=True):
        row += [axis.count, axis.stride, step]
    return row


@dataclass(frozen=True)
class StagingLayout:
    """Pieces with their place in a staging buffer of ``chunk_pages`` pages.

    Attributes
    ----------
    pieces
        int64 ``[pieces, PIECE_FIELDS]`` on CPU, as csrc/staged/copies.h reads them.
    planes
        Strides of each plane inside the buffer; offsets count from its start.
    bytes
        Size of a buffer.
    """

    pieces: torch.Tensor
    planes: tuple[HostStrides, ...]
    bytes: int


def find_pieces(planes: Sequence[Plane], *, layers: int) -> tuple[Piece, ...]:
    """Join the planes' rows into the fewest contiguous pieces.

    Parameters
    ----------
    planes
        Planes of one pool.
    layers
        How many layers, from layer 0 on, a piece covers: all for whole pages, 1 for one layer's share.
    """
    pieces = [
        Piece(
            address=plane.host.buffer.data_ptr() + plane.host.strides.offset,
            width=plane.element_bytes,
            slots=Axis(plane.host.page_size, plane.host.strides.slot),
            layers=Axis(layers, plane.host.strides.layer),
            page_stride=plane.host.strides.page,
            layer_stride=plane.host.strides.layer,
            members=((index, 0),),
            memory=plane.host.buffer.untyped_storage().data_ptr(),
        )
        for index, plane in enumerate(planes)
    ]
    while True:
        joined = _join([_melt(piece) for piece in pieces])
        if joined == pieces:
            return tuple(pieces)
        pieces = joined


def _melt(piece: Piece) -> Piece:
    slots = Axis(1, 0) if piece.slots.count == 1 else piece.slots
    layers = Axis(1, 0) if piece.layers.count == 1 else piece.layers
    width = piece.width
    if slots.count > 1 and slots.stride == width:
        slots, width = Axis(1, 0), width * slots.count
    elif layers.count > 1 and layers.stride == width:
        layers, width = Axis(1, 0), width * layers.count
    return Piece(
        piece.address, width, slots, layers, piece.page_stride, piece.layer_stride, piece.members, piece.memory
    )


def _join(pieces: list[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.address):
        if joined and joined[-1].continued_by(piece):
            before = joined[-1]
            members = before.members + tuple((plane, before.width + offset) for plane, offset in piece.members)
            joined[-1] = Piece(
                before.address,
                before.width + piece.width,
                before.slots,
                before.layers,
                before.page_stride,
                before.layer_stride,
                members,
                before.memory,
            )
        else:
            joined.append(piece)
    return joined


def staging_layout(planes: Sequence[Plane], *, layers: int, chunk_pages: int) -> StagingLayout:
    """Lay out a staging buffer so that a run of neighbouring host pages is as few copies as its pieces allow.

    A piece that continues from page to page on the host (``layer_first``) keeps its pages together in staging memory
    too; any other piece keeps a page together.
    """
    strides: dict[int, HostStrides] = {}
    table: list[list[int]] = []
    start = 0
    for piece in find_pieces(planes, layers=layers):
        axes = {"slots": piece.slots, "layers": piece.layers}
        order = sorted((name for name in axes if axes[name].count > 1), key=lambda name: axes[name].stride)
        pages_together = piece.page_stride == piece.width and bool(order)
        step = piece.width * chunk_pages if pages_together else piece.width
        placed = {"slots": 0, "layers": 0}
        for name in order:
            placed[name] = step
            step *= axes[name].count
        page = piece.width if pages_together else step
        table.append(describe_piece(piece, start, page, (placed["slots"], placed["layers"])))
        for index, offset in piece.members:
            host = planes[index].host.strides
            # An axis inside the width has the host's stride in staging memory, as the bytes are the same.
            strides[index] = HostStrides(
                start + offset,
                page,
                placed["layers"] if piece.layers.count > 1 else host.layer if layers > 1 else 0,
                placed["slots"] if piece.slots.count > 1 else host.slot,
            )
        start += piece.page_bytes * chunk_pages
    pieces = torch.tensor(table, dtype=torch.int64, device="cpu").reshape(-1, PIECE_FIELDS)
    return StagingLayout(pieces, tuple(strides[index] for index in range(len(planes))), start)
