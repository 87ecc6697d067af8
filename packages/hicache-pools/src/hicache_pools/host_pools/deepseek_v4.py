"""Host pools of DeepSeek-V4: compressed KV with its indexer, and compressor states."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..device_pools import DeepSeekV4PagedPool, DeepSeekV4StatePool, DevicePool
from .base import HostPool
from .state import StateHostPool


class DeepSeekV4PagedHostPool(HostPool):
    """Host pages of a :class:`DeepSeekV4PagedPool`; parameters as in :class:`HostPool`.

    One pool for each compression ratio (C4, C128), with the indexer of its layers inside or as a pool of its own.
    Slots and ``page_size`` count tokens, as in the anchor: a page has ``page_size / compression_ratio`` rows, or one
    where a device row is a whole page. Shapes of the views: ``layer_first`` ``[layers, rows, *row]``, ``page_first``
    ``[rows, layers, *row]``, ``page_first_direct`` ``[pages, layers, rows a page, *row]``.
    """

    device_pool_type: ClassVar[type[DevicePool]] = DeepSeekV4PagedPool

    @property
    def kv_buffer(self) -> torch.Tensor:
        """View of the compressed entries."""
        return self.component_view("kv")

    @property
    def data_refs(self) -> list[torch.Tensor]:
        """Compressed entries, one view a layer."""
        return self.component_layers("kv")

    @property
    def indexer_buffer(self) -> torch.Tensor:
        """View of the indexer's entries; ValueError where the pool has none."""
        return self.component_view("indexer")

    @property
    def indexer_data_refs(self) -> list[torch.Tensor]:
        """Entries of the indexer, one view a layer."""
        return self.component_layers("indexer")


class DeepSeekV4StateHostPool(StateHostPool):
    """Host slots of a :class:`DeepSeekV4StatePool`; parameters as in :class:`HostPool`, with ``page_size`` 1.

    Shapes of the views: ``page_first`` ``[slots, layers, *state]``, ``page_first_direct``
    ``[slots, layers, 1, *state]``.
    """

    device_pool_type: ClassVar[type[DevicePool]] = DeepSeekV4StatePool

    @property
    def state_buffer(self) -> dict[str, torch.Tensor]:
        """Views of the states by name."""
        return {name: self.component_view(name) for name in self._components}
