"""Packed drafts: layers of draft models appended to an owner's host pool, so that one transfer moves both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from hicache_kernels import DeviceRows

from .device_pools import DeviceComponent, DevicePool

MAX_WRAPPERS = 8
"""How deep a draft pool may be wrapped; a wrapper of itself is deeper."""


@runtime_checkable
class WrapsDevicePool(Protocol):
    """Anything that keeps a device pool as ``device_pool``, such as a ``PoolEntry``."""

    @property
    def device_pool(self) -> object:
        """The pool, or another wrapper."""
        ...


@runtime_checkable
class WrapsFullAttentionPool(Protocol):
    """A hybrid model's pool that keeps its attention layers as ``full_kv_pool``."""

    @property
    def full_kv_pool(self) -> object:
        """The pool, or another wrapper."""
        ...


def unwrap_draft_pool(draft: object) -> DevicePool:
    """Return the device pool of a draft pool, bare or wrapped (also twice).

    Raises
    ------
    TypeError
        If there is none.
    """
    found = draft
    for _ in range(MAX_WRAPPERS):
        if isinstance(found, DevicePool):
            return found
        if isinstance(found, WrapsFullAttentionPool):
            found = found.full_kv_pool
        elif isinstance(found, WrapsDevicePool):
            found = found.device_pool
    raise TypeError(
        f"packed_draft_device_pools holds a {type(draft).__name__}; accepted are a DevicePool and objects with one as "
        "device_pool or full_kv_pool"
    )


def check_draft(owner: DevicePool, draft: DevicePool, number: int) -> None:
    """Raise ValueError where the indices of the owner would mean something else to draft ``number``."""
    if draft.page_size != owner.page_size:
        raise ValueError(
            f"packed_draft_device_pools[{number}] has page_size {draft.page_size}; the owner has {owner.page_size}, "
            "and a packed draft shares its pages"
        )
    if draft.index_translation is not None and draft.index_translation is not owner.index_translation:
        raise ValueError(
            f"packed_draft_device_pools[{number}] has an index_translation of its own; a packed draft has the owner's "
            "or none"
        )


def append_draft_layers(owner: DeviceComponent, drafts: Sequence[DeviceComponent]) -> DeviceComponent:
    """Append the layers of drafts after the owner's; the slots and strides are the owner's.

    Raises
    ------
    ValueError
        If a draft's rows differ from the owner's in anything but their place and number of layers.
    """
    for number, draft in enumerate(drafts):
        for what, value, wanted in (
            ("element shape", draft.element_shape, owner.element_shape),
            ("dtype", draft.dtype, owner.dtype),
            ("device", draft.rows.device, owner.rows.device),
            ("slots a row", draft.slots_per_row, owner.slots_per_row),
            ("rows", draft.rows.slots, owner.rows.slots),
            ("rows a layer", draft.rows.rows_per_layer, owner.rows.rows_per_layer),
            ("strides", _strides(draft.rows), _strides(owner.rows)),
        ):
            if value != wanted:
                raise ValueError(
                    f"packed_draft_device_pools[{number}]: {draft.name} has {what} {value}; the owner's layers have "
                    f"{wanted}, and a packed draft must have the same"
                )
    parts = (owner, *drafts)
    tensors = tuple(tensor for part in parts for tensor in part.tensors)
    bases = tuple(base for part in parts for base in part.rows.bases)
    return replace(owner, tensors=tensors, rows=replace(owner.rows, tensors=tensors, bases=bases))


def _strides(rows: DeviceRows) -> tuple[int, int, int]:
    return rows.slot_stride, rows.block_slots, rows.block_stride
