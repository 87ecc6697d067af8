"""Where a page's bytes lie on the host: the three layouts as strides, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from .validation import whole


class HostLayout(StrEnum):
    """Order of the axes of a host pool, outermost first."""

    LAYER_FIRST = "layer_first"
    """(component, layer, slot, element): each component and layer is one array."""
    PAGE_FIRST = "page_first"
    """(slot, layer, component, element): a slot is one piece, so a page is one piece."""
    PAGE_FIRST_DIRECT = "page_first_direct"
    """(page, layer, component, slot, element): a layer's share of a page is one piece, and so is the page."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(f"layout is {value!r}; it must be one of {', '.join(cls)}")


@dataclass(frozen=True, slots=True)
class HostStrides:
    """Byte strides of one component: element at ``offset + page * page + layer * layer + slot * slot`` of the buffer.

    ``slot`` counts within the page.
    """

    offset: int
    page: int
    layer: int
    slot: int


def host_strides(
    layout: HostLayout | str, element_bytes: Sequence[int], *, layers: int, pages: int, page_size: int
) -> tuple[HostStrides, ...]:
    """Strides of every component of a pool that shares one host buffer.

    Parameters
    ----------
    layout
        One of :class:`HostLayout`.
    element_bytes
        Per component, the bytes one layer keeps for one slot.
    layers, pages, page_size
        Geometry of the pool; ``page_size`` in slots.

    Returns
    -------
    tuple of HostStrides
        One for each component, in the order given. The buffer they address has :func:`host_bytes` bytes.

    Raises
    ------
    ValueError
        Where a size is not positive or the layout is unknown.
    """
    layout = HostLayout(layout)
    sizes = [("layers", layers), ("pages", pages), ("page_size", page_size)]
    sizes += [(f"element_bytes[{i}]", e) for i, e in enumerate(element_bytes)]
    for name, value in sizes:
        whole(name, value)
    total = sum(element_bytes)
    before = [sum(element_bytes[:i]) for i in range(len(element_bytes))]
    if layout is HostLayout.LAYER_FIRST:
        slots = pages * page_size
        return tuple(
            HostStrides(b * layers * slots, page_size * e, slots * e, e)
            for b, e in zip(before, element_bytes, strict=True)
        )
    if layout is HostLayout.PAGE_FIRST:
        return tuple(HostStrides(b, page_size * layers * total, total, layers * total) for b in before)
    return tuple(
        HostStrides(b * page_size, layers * page_size * total, page_size * total, e)
        for b, e in zip(before, element_bytes, strict=True)
    )


def host_bytes(element_bytes: Sequence[int], *, layers: int, pages: int, page_size: int) -> int:
    """Bytes of the host buffer of a pool, the same in every layout; parameters and errors of :func:`host_strides`."""
    host_strides(HostLayout.PAGE_FIRST, element_bytes, layers=layers, pages=pages, page_size=page_size)
    return sum(element_bytes) * layers * pages * page_size
