"""DSAIndexerPoolHost: host pages of the index keys of sparse attention."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..device_pools import DevicePool, DSATokenToKVPool
from .base import HostPool


class DSAIndexerPoolHost(HostPool):
    """Host pages of the index keys and scales of a :class:`DSATokenToKVPool`; parameters as in :class:`HostPool`.

    Its partner is the :class:`MLATokenToKVPoolHost` of the same device pool, with the same slots and pages. A page
    has ``page_size / index_page_size`` rows. Shapes of the view, in the type of the device buffer, ``row`` being the
    shape after its dim 0: ``layer_first`` ``[layers, rows, *row]``, ``page_first`` ``[rows, layers, *row]``,
    ``page_first_direct`` ``[pages, layers, rows a page, *row]``.
    """

    device_pool_type: ClassVar[type[DevicePool]] = DSATokenToKVPool
    component_names: ClassVar[tuple[str, ...] | None] = ("index_k",)

    @property
    def indexer_page_stride_size(self) -> int:
        """Bytes of the index keys and scales of one page and layer."""
        return self.geometry.components[0].element_bytes * self.geometry.rows_per_page

    @property
    def index_k_with_scale_buffer(self) -> torch.Tensor:
        """View of the index keys and scales."""
        return self.component_view("index_k")

    @property
    def index_k_data_refs(self) -> list[torch.Tensor]:
        """Index keys and scales, one view a layer."""
        return self.component_layers("index_k")
