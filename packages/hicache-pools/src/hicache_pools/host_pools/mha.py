"""MHATokenToKVPoolHost: host pages of keys and values, sliding-window ones too."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..device_pools import DevicePool, MHATokenToKVPool
from .base import HostPool


class MHATokenToKVPoolHost(HostPool):
    """Host pages of a :class:`MHATokenToKVPool`; parameters as in :class:`HostPool`.

    A sliding-window (SWA) pool is one of these over the window's device pool, with slots of its own.
    Shapes of the views, for K (for V with its head dimension): ``layer_first`` ``[layers, slots, heads, dim]``,
    ``page_first`` ``[slots, layers, heads, dim]``, ``page_first_direct`` ``[pages, layers, page_size, heads, dim]``.
    """

    device_pool_type: ClassVar[type[DevicePool]] = MHATokenToKVPool
    component_names: ClassVar[tuple[str, ...] | None] = ("k", "v")

    @property
    def k_buffer(self) -> torch.Tensor:
        """View of the keys."""
        return self.component_view("k")

    @property
    def v_buffer(self) -> torch.Tensor:
        """View of the values."""
        return self.component_view("v")

    @property
    def k_data_refs(self) -> list[torch.Tensor]:
        """Keys, one view a layer."""
        return self.component_layers("k")

    @property
    def v_data_refs(self) -> list[torch.Tensor]:
        """Values, one view a layer."""
        return self.component_layers("v")
