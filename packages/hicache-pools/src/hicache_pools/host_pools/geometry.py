"""Where a page of a host pool lies: sizes from shapes alone, and the parts storage reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from hicache_kernels import HostLayout, HostStrides

from ..device_pools import DeviceComponent, DevicePool


class PagePart(NamedTuple):
    """A contiguous piece of a page: ``size`` bytes from byte ``offset`` of the pool's buffer."""

    offset: int
    size: int


@dataclass(frozen=True)
class ComponentGeometry:
    """One component of a host pool.

    Attributes
    ----------
    name
        The component's.
    element_bytes
        Bytes one layer keeps for one row number.
    dtype
        Name of its type, such as ``bfloat16``.
    element_shape
        Shape of those bytes in that type, such as ``(heads, dim)``.
    """

    name: str
    element_bytes: int
    dtype: str
    element_shape: tuple[int, ...]


@dataclass(frozen=True)
class PoolGeometry:
    """All that decides what the bytes of a page mean, and nothing of how many pages there are.

    Attributes
    ----------
    layout
        A :class:`hicache_kernels.HostLayout`.
    page_size
        Token slots a page.
    rows_per_page
        Rows a page has in each layer: ``page_size``, or less where a row covers several slots.
    layers
        Layers, those of packed drafts included.
    components
        In the order of the buffer.
    """

    layout: HostLayout
    page_size: int
    rows_per_page: int
    layers: int
    components: tuple[ComponentGeometry, ...]

    @cached_property
    def element_bytes(self) -> tuple[int, ...]:
        """Of each component."""
        return tuple(component.element_bytes for component in self.components)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page, all layers and components."""
        return sum(self.element_bytes) * self.layers * self.rows_per_page


def pool_geometry(
    components: Sequence[DeviceComponent], layout: HostLayout, page_size: int, layers: int
) -> PoolGeometry:
    """Geometry of a host pool for device components; none at all make a pool without bytes.

    Raises
    ------
    ValueError
        If the components differ in slots a row, or ``page_size`` is not a multiple of it.
    """
    slots_per_row = {component.slots_per_row for component in components} or {1}
    if len(slots_per_row) > 1:
        raise ValueError(
            f"components have { ({c.name: c.slots_per_row for c in components}) } slots a row; the components of one "
            "host pool must agree, make one pool for each"
        )
    (slots,) = slots_per_row
    if page_size < 1 or page_size % slots:
        raise ValueError(f"page_size is {page_size}; it must be a positive multiple of the {slots} slots of a row")
    described = tuple(
        ComponentGeometry(c.name, c.element_bytes, dtype_name(c.dtype), tuple(c.element_shape)) for c in components
    )
    return PoolGeometry(layout, page_size, page_size // slots, layers, described)


def page_count(device_pool: DevicePool, geometry: PoolGeometry, host_to_device_ratio: float, host_size: float) -> int:
    """Pages that ``host_size`` GB hold where it is positive, else ``host_to_device_ratio`` times the device's slots.

    Raises
    ------
    TypeError, ValueError
        Where one of them is not a finite number from 0 on, or there is not even one page.
    """
    if host_size > 0:
        pages = int(host_size * 1e9 // geometry.page_bytes)
        if pages < 1:
            raise ValueError(f"host_size is {host_size} GB; a page alone has {geometry.page_bytes} bytes")
        return pages
    pages = int(device_pool.size * host_to_device_ratio // geometry.page_size)
    if pages < 1:
        raise ValueError(
            f"host_to_device_ratio is {host_to_device_ratio} for {device_pool.size} device slots and host_size is "
            f"{host_size}; that is less than one page of {geometry.page_size} slots"
        )
    return pages


def dtype_name(dtype: torch.dtype) -> str:
    """Name without the module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def page_parts(geometry: PoolGeometry, strides: Sequence[HostStrides], page: int) -> tuple[PagePart, ...]:
    """Contiguous pieces of a page, in the order component, layer; one piece where the layout keeps a page together."""
    if not geometry.components:
        return ()
    if geometry.layout is not HostLayout.LAYER_FIRST:
        return (PagePart(page * geometry.page_bytes, geometry.page_bytes),)
    return tuple(
        PagePart(s.offset + page * s.page + layer * s.layer, geometry.rows_per_page * c.element_bytes)
        for c, s in zip(geometry.components, strides, strict=True)
        for layer in range(geometry.layers)
    )


def typed_view(
    buffer: torch.Tensor,
    component: DeviceComponent,
    geometry: PoolGeometry,
    strides: HostStrides,
    pages: int,
) -> torch.Tensor:
    """View of one component of a flat uint8 buffer, in its own type and with the axes of the layout.

    Returns
    -------
    torch.Tensor
        ``layer_first``: ``[layers, rows, *element]``; ``page_first``: ``[rows, layers, *element]``;
        ``page_first_direct``: ``[pages, layers, rows_per_page, *element]``. ``rows`` is ``pages * rows_per_page``.

    Raises
    ------
    ValueError
        If the strides are no multiple of the type's size (components of different types interleave).
    """
    item = component.dtype.itemsize
    rows = pages * geometry.rows_per_page
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    if geometry.layout is HostLayout.LAYER_FIRST:
        shape, steps = (geometry.layers, rows), (strides.layer, strides.slot)
    elif geometry.layout is HostLayout.PAGE_FIRST:
        shape, steps = (rows, geometry.layers), (strides.slot, strides.layer)
    else:
        shape = (pages, geometry.layers, geometry.rows_per_page)
        steps = (strides.page, strides.layer, strides.slot)
    if any(step % item for step in (*steps, strides.offset)):
        raise ValueError(
            f"{component.name} is {dtype_name(component.dtype)}, but its elements lie {steps} bytes apart from byte "
            f"{strides.offset} on: there is no view in that type; use page_memory or read_page"
        )
    usable = buffer[: buffer.numel() // item * item].view(component.dtype)
    inner = [1]
    for extent in reversed(component.element_shape[1:]):
        inner.append(inner[-1] * extent)
    inner_steps = reversed(inner) if component.element_shape else ()
    return usable.as_strided(
        (*shape, *component.element_shape),
        (*(step // item for step in steps), *inner_steps),
        usable.storage_offset() + strides.offset // item,
    )
