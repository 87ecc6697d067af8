"""NullPoolHost: slots without bytes, for bookkeeping and for anchors that keep nothing themselves."""

from __future__ import annotations

import torch

from hicache_kernels import Capabilities, Compute, HostLayout, TransferResult
from hicache_kernels.validation import one_of, whole

from ..device_pools import DevicePool
from ..extent_index import MAX_PAGES
from .base import HostPool
from .geometry import PoolGeometry

_NOTHING = TransferResult("none", "a pool for bookkeeping has no bytes", 0, 0)


class NullPoolHost(HostPool):
    """A pool of slots whose transfers move nothing and are done at once.

    Parameters
    ----------
    pages, page_size
        Number of pages, and slots a page.
    layout
        What it says its layout is.
    """

    def __init__(self, pages: int, page_size: int, layout: HostLayout | str = HostLayout.PAGE_FIRST) -> None:
        pages = whole("pages", pages, most=MAX_PAGES)
        page_size = whole("page_size", page_size, most=MAX_PAGES)
        self.layout = one_of("layout", layout, HostLayout)
        self.geometry = PoolGeometry(self.layout, page_size, page_size, 0, ())
        self._set_up_slots(pages)
        self._components = {}
        self._strides = ()
        self._host_buffer = None
        self._transfer = None
        self.packed_draft_device_pools = ()
        self.dtype = torch.uint8
        self.can_use_jit = False
        self.can_use_write_back_jit = False
        self.staging_page_capacity = 0
        self.staging_token_capacity = 0

    def backup_from_device_all_layer(
        self,
        device_pool: DevicePool | None,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str = "kernel",
        *,
        block_quota: int | None = None,
        compute: Compute | str | None = None,
    ) -> TransferResult:
        """Move nothing."""
        self._gate.check_open()
        return _NOTHING

    def load_to_device_per_layer(
        self,
        device_pool: DevicePool | None,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str = "kernel",
        *,
        is_draft: bool = False,
        block_quota: int | None = None,
        compute: Compute | str | None = None,
    ) -> TransferResult:
        """Move nothing."""
        self._gate.check_open()
        return _NOTHING

    def load_to_device_all_layer(
        self,
        device_pool: DevicePool | None,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str = "kernel",
        *,
        layer_events: bool = False,
        block_quota: int | None = None,
        compute: Compute | str | None = None,
    ) -> TransferResult:
        """Move nothing."""
        self._gate.check_open()
        return _NOTHING

    def capabilities(self) -> Capabilities:
        """No path, as there is nothing to move."""
        return Capabilities("none", "none", False, False, _NOTHING.reason)

    def page_memory(self, page: int) -> tuple[memoryview, ...]:
        """Memory of no bytes: no parts."""
        self.page_parts(page)
        return ()

    def read_page(self, page: int) -> torch.Tensor:
        """Copy a page of no bytes out."""
        self.page_parts(page)
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def write_page(self, page: int, data: torch.Tensor) -> None:
        """Copy a page of no bytes in."""
        self.page_parts(page)

    def destroy(self) -> None:
        """Close the pool; a second call does nothing."""
        self._gate.close()
