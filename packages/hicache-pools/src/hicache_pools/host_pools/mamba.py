"""MambaPoolHost: host slots of recurrent states."""

from __future__ import annotations

from typing import ClassVar

import torch

from ..device_pools import DevicePool, MambaPool
from .state import StateHostPool


class MambaPoolHost(StateHostPool):
    """Host slots of a :class:`MambaPool`; parameters as in :class:`HostPool`, with ``page_size`` 1.

    All states of a slot are one piece. Shapes of the views: ``page_first`` ``[slots, layers, *state]``,
    ``page_first_direct`` ``[slots, layers, 1, *state]``.
    """

    device_pool_type: ClassVar[type[DevicePool]] = MambaPool

    @classmethod
    def _component_names(cls, device_pool: DevicePool) -> tuple[str, ...]:
        # Wider types first, so that states of different types lie at multiples of their sizes.
        ordered = sorted(device_pool.components, key=lambda component: -component.dtype.itemsize)
        return tuple(component.name for component in ordered)

    @property
    def conv_buffer(self) -> list[torch.Tensor]:
        """Views of the convolution states."""
        return [self.component_view(name) for name in self._components if name.startswith("conv[")]

    @property
    def temporal_buffer(self) -> torch.Tensor:
        """View of the temporal state."""
        return self.component_view("temporal")

    @property
    def side_buffer(self) -> dict[str, torch.Tensor]:
        """Views of the side states by name."""
        return {
            name.removeprefix("side[").removesuffix("]"): self.component_view(name)
            for name in self._components
            if name.startswith("side[")
        }
