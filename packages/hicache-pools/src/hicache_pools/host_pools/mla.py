"""MLATokenToKVPoolHost: host pages of MLA latents."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..device_pools import DevicePool, MLATokenToKVPool
from .base import HostPool


class MLATokenToKVPoolHost(HostPool):
    """Host pages of a :class:`MLATokenToKVPool` (or the latent of a DSA pool); parameters as in :class:`HostPool`.

    Shapes of the view: ``layer_first`` ``[layers, slots, 1, dim]``, ``page_first`` ``[slots, layers, 1, dim]``,
    ``page_first_direct`` ``[pages, layers, page_size, 1, dim]``.
    """

    device_pool_type: ClassVar[type[DevicePool]] = MLATokenToKVPool
    component_names: ClassVar[tuple[str, ...] | None] = ("kv",)

    @property
    def kv_buffer(self) -> torch.Tensor:
        """View of the latents."""
        return self.component_view("kv")

    @property
    def data_refs(self) -> list[torch.Tensor]:
        """Latents, one view a layer."""
        return self.component_layers("kv")
