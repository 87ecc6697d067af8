"""DevicePool: what every description of an engine's device memory has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch

from hicache_kernels.checks import check_tensor
from hicache_kernels.validation import whole

from .components import DeviceComponent


class DevicePoolOptions(TypedDict, total=False):
    """Keyword arguments that every device pool takes beyond its shape; :class:`DevicePool` says what they mean."""

    index_translation: torch.Tensor | None


class DevicePool:
    """Components over tensors an engine owns; describes and keeps them alive, copies nothing.

    Attributes
    ----------
    components
        One a buffer family, all with the same layers and device.
    page_size
        Slots a page.
    size
        Token slots the tensors hold.
    layer_num
        Layers, counted from the first layer of this pool.
    device
        Where the tensors are.
    dtype
        Type of the first component.
    index_translation
        int64 or int32 ``[virtual slots]`` on any device: the slot to use for each index a transfer is given; None
        where indices are slots. Read when a transfer is queued, on its stream, so the table may change in between.
    """

    components: tuple[DeviceComponent, ...]
    page_size: int
    size: int
    layer_num: int
    device: torch.device
    dtype: torch.dtype
    index_translation: torch.Tensor | None

    def describe(
        self,
        components: Sequence[DeviceComponent],
        page_size: int,
        index_translation: torch.Tensor | None = None,
    ) -> None:
        """Set the pool up; what makes a pool calls it once.

        Parameters
        ----------
        components
            At least one, in the order the host keeps them.
        page_size
            Slots a page.
        index_translation
            As the attribute.

        Raises
        ------
        TypeError, ValueError
            If components share a name, differ in layers, slots or device, or pages do not hold whole rows.
        """
        if not components:
            raise ValueError("components is empty; a device pool has at least one")
        for number, component in enumerate(components):
            if not isinstance(component, DeviceComponent):
                raise TypeError(f"components[{number}] is a {type(component).__name__}; it must be a DeviceComponent")
        first = components[0]
        names = [component.name for component in components]
        if len(set(names)) < len(names):
            raise ValueError(f"components are called {names}; names are unique within a pool")
        page_size = whole("page_size", page_size)
        for component in components:
            for what, value, wanted in (
                ("layers", component.layers, first.layers),
                ("slots", component.slots, first.slots),
                ("device", component.rows.device, first.rows.device),
            ):
                if value != wanted:
                    raise ValueError(f"{component.name} has {what} {value}; {first.name} has {wanted}: they must agree")
            if page_size % component.slots_per_row:
                raise ValueError(
                    f"page_size is {page_size}; a row of {component.name} covers {component.slots_per_row} slots, "
                    "so the page size must be a multiple of that"
                )
        if index_translation is not None:
            check_index_translation(index_translation)
        self.components = tuple(components)
        self.page_size = page_size
        self.size = first.slots
        self.layer_num = first.layers
        self.device = first.rows.device
        self.dtype = first.dtype
        self.index_translation = index_translation

    @property
    def index_size(self) -> int:
        """Number of indices a transfer may name: virtual slots where there is a translation, slots otherwise."""
        return self.size if self.index_translation is None else self.index_translation.numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements of all slots and layers."""
        return sum(c.element_bytes * c.rows.slots * c.layers for c in self.components)

    def component(self, name: str) -> DeviceComponent:
        """Return one component.

        Raises
        ------
        ValueError
            If there is none of that name.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise ValueError(
            f"component {name!r} is not in this {type(self).__name__}: {[c.name for c in self.components]}"
        )


def check_index_translation(table: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless the table is a one-dimensional tensor of int64 or int32."""
    check_tensor("index_translation", table, "a tensor of int64 or int32")
    if table.dim() != 1 or table.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"index_translation has shape {tuple(table.shape)} and dtype {table.dtype}; it must be [virtual slots] of "
            "int64 or int32"
        )
