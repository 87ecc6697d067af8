"""HostPool: everything a host pool does, once; a concrete pool names its components and what it accepts."""

from __future__ import annotations

import logging
from typing import ClassVar, Unpack

import numpy as np
import numpy.typing as npt
import torch

from hicache_kernels import (
    Capabilities,
    Compute,
    HostLayout,
    HostRows,
    Plane,
    PlaneTransfer,
    StagingRing,
    TransferPolicy,
    TransferResult,
    host_strides,
)
from hicache_kernels.checks import check_tensor
from hicache_kernels.validation import finite, one_of, whole

from ..device_pools import DeviceComponent, DevicePool
from ..extent_index import MAX_PAGES
from ..extents import ExtentAllocator
from ..host_memory import HostBuffer
from ..memory_budget import HostMemoryBudget
from ..packed_draft import append_draft_layers, check_draft, unwrap_draft_pool
from ..simulation import ReferenceTransfer, simulation_is_active
from .geometry import PagePart, page_count, page_parts, pool_geometry, typed_view
from .indices import IndexRows, RowNumbers
from .memory_options import HostMemoryOptions, allocate_pool_buffer
from .settings import HostPoolOptions, HostPoolSettings
from .staging import pool_staging
from .transfer_gate import TransferGate

logger = logging.getLogger(__name__)

IO_BACKENDS = ("kernel", "direct")


class HostPool:
    """Host memory for the pages of one device pool.

    Parameters
    ----------
    device_pool
        What is mirrored; see :mod:`hicache_pools.device_pools`.
    host_to_device_ratio
        Host slots for each device slot, where ``host_size`` is 0.
    host_size
        Size in GB (10**9 bytes), where positive.
    page_size
        Slots a page; None takes the device pool's.
    layout
        A :class:`hicache_kernels.HostLayout`; never rewritten.
    pin_memory
        Whether to register the memory with the device, where the pool's device needs that.
    device
        ``"cpu"``: where the host memory is.
    allocator_type
        ``"default"``, or another name :func:`hicache_pools.host_memory.allocate_host_buffer` knows.
    transfer_policy
        ``"auto"`` (the planner decides), ``"staged"`` or ``"direct"``; a path that is missing is as with ``"auto"``,
        and the results say so.
    pages
        Exact number of pages, instead of ``host_to_device_ratio`` and ``host_size``.
    packed_draft_device_pools
        Device pools of draft models, bare or wrapped, whose layers follow the owner's in every slot.
    memory_options
        How to allocate and pin; the defaults with None.
    staging_ring
        Staging memory to use; the device's shared ring with None. Its buffers are made when a pool first uses it.

    Attributes
    ----------
    device_pool, packed_draft_device_pools
        As given, drafts unwrapped.
    layout, page_size, page_num, size
        ``size`` in slots.
    layer_num
        Layers, drafts included.
    geometry
        What decides the meaning of a page's bytes.
    page_bytes
        Bytes of a page.
    dtype
        Of the first component.
    device
        ``"cpu"``.
    can_use_jit
        Whether the direct path is compiled.
    can_use_write_back_jit
        Whether there is a staged write-back; ``capabilities().reason`` says why not.
    staging_page_capacity, staging_token_capacity
        Pages and slots one staging buffer of a write-back takes; 0 without a staged write-back.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what was given and what is accepted; nothing is allocated then.
    """

    device_pool_type: ClassVar[type[DevicePool]] = DevicePool
    """What ``device_pool`` must be."""
    component_names: ClassVar[tuple[str, ...] | None] = None
    """Components of the device pool that this pool keeps; all with None."""
    layouts: ClassVar[tuple[HostLayout, ...]] = tuple(HostLayout)
    """Layouts it accepts."""
    fixed_page_size: ClassVar[int | None] = None
    """The one page size it accepts, or None for any."""

    def __init__(
        self,
        device_pool: DevicePool,
        host_to_device_ratio: float,
        host_size: float,
        page_size: int | None = None,
        layout: HostLayout | str = HostLayout.PAGE_FIRST,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        **options: Unpack[HostPoolOptions],
    ) -> None:
        settings = HostPoolSettings(**options)
        self._check_devices(device_pool, device)
        self._policy = settings.policy
        self.layout = one_of("layout", layout, self.layouts)
        for name, size in (("host_to_device_ratio", host_to_device_ratio), ("host_size", host_size)):
            finite(name, size)
        page_size = device_pool.page_size if page_size is None else whole("page_size", page_size)
        if self.fixed_page_size is not None and page_size != self.fixed_page_size:
            raise ValueError(f"page_size is {page_size}; {type(self).__name__} has pages of {self.fixed_page_size}")

        self.device_pool = device_pool
        self._wrapped_drafts = tuple(settings.packed_draft_device_pools)
        self.packed_draft_device_pools = tuple(unwrap_draft_pool(draft) for draft in self._wrapped_drafts)
        self._components = self._components_with_drafts()
        components = tuple(self._components.values())
        self.dtype = device_pool.dtype
        self.geometry = pool_geometry(components, self.layout, page_size, components[0].layers)
        pages = settings.pages
        if pages is None:
            pages = page_count(device_pool, self.geometry, host_to_device_ratio, host_size)
        pages = whole("pages", pages, most=MAX_PAGES)
        memory = settings.memory_options or HostMemoryOptions()
        # Before the slots, whose bookkeeping grows with the pages.
        (memory.budget or HostMemoryBudget()).check(pages * self.geometry.page_bytes)
        self._set_up_slots(pages)
        self._allocate(pin_memory, allocator_type, memory, settings.staging_ring)

    def _allocate(
        self, pin_memory: bool, allocator_type: str, memory: HostMemoryOptions, staging_ring: StagingRing | None
    ) -> None:
        """Make the buffer and the transfer over it; no buffer is left where that fails."""
        rows_per_page = self.geometry.rows_per_page
        self._strides = host_strides(
            self.layout,
            self.geometry.element_bytes,
            layers=self.geometry.layers,
            pages=self.page_num,
            page_size=rows_per_page,
        )
        self._host_buffer: HostBuffer | None = allocate_pool_buffer(
            self.geometry,
            self.page_num,
            pin=pin_memory,
            allocator_type=allocator_type,
            device=self.device_pool.device,
            options=memory,
            drain=self._gate.drain,
        )
        self._index_rows = IndexRows(self.device_pool, size=self.size, slots_per_row=self.page_size // rows_per_page)
        try:
            self._transfer: PlaneTransfer | None = self._make_transfer(self._host_buffer, staging_ring)
            self._init_write_back_staging_buffers()
        except BaseException:
            self._host_buffer.close()
            raise

    def _check_devices(self, device_pool: DevicePool, device: object) -> None:
        if not isinstance(device_pool, self.device_pool_type):
            raise TypeError(
                f"device_pool is a {type(device_pool).__name__}; {type(self).__name__} takes a "
                f"{self.device_pool_type.__name__}"
            )
        if str(device) != "cpu":
            raise ValueError(f"device is {device!r}; host memory is on 'cpu'")
        if simulation_is_active() and device_pool.device.type != "cpu":
            raise ValueError(f"device_pool is on {device_pool.device}; inside cpu_simulation it must be on the CPU")

    def _make_transfer(self, host_buffer: HostBuffer, staging_ring: StagingRing | None) -> PlaneTransfer:
        planes = [
            Plane(
                c.name, c.row_bytes, c.rows, HostRows(host_buffer.tensor, s, self.page_num, self.geometry.rows_per_page)
            )
            for c, s in zip(self._components.values(), self._strides, strict=True)
        ]
        transfer_type = ReferenceTransfer if simulation_is_active() else PlaneTransfer
        return transfer_type(planes, boundaries=host_buffer.boundaries, ring=staging_ring)

    def _components_with_drafts(self) -> dict[str, DeviceComponent]:
        drafts = self.packed_draft_device_pools
        for number, draft in enumerate(drafts):
            check_draft(self.device_pool, draft, number)
        return {
            name: append_draft_layers(self.device_pool.component(name), [draft.component(name) for draft in drafts])
            for name in self._component_names(self.device_pool)
        }

    @classmethod
    def _component_names(cls, device_pool: DevicePool) -> tuple[str, ...]:
        if cls.component_names is not None:
            return cls.component_names
        return tuple(component.name for component in device_pool.components)

    def _set_up_slots(self, pages: int) -> None:
        self.page_size = self.geometry.page_size
        self.page_num = pages
        self.size = pages * self.page_size
        self.layer_num = self.geometry.layers
        self.page_bytes = self.geometry.page_bytes
        self.device = "cpu"
        self.allocator = ExtentAllocator(pages, self.page_size)
        self._gate = TransferGate(type(self).__name__)

    # -- slots

    def alloc(self, n: int) -> torch.Tensor | None:
        """Take ``n`` slots, a multiple of ``page_size``: owned int64 CPU indices ``[n]``, or None without room."""
        self._gate.check_open()
        return self.allocator.alloc(n)

    def alloc_pages(self, n: int) -> npt.NDArray[np.int64] | None:
        """Take ``n`` pages: their numbers, int64 ``[n]``, or None without room."""
        self._gate.check_open()
        return self.allocator.alloc_pages(n)

    def free(self, indices: torch.Tensor) -> int:
        """Give slots back, whole pages in any order; returns how many. A bad index raises and changes nothing."""
        return self.allocator.free(indices)

    def free_pages(self, pages: npt.ArrayLike) -> int:
        """Give pages back; returns how many. A bad page raises and changes nothing."""
        return self.allocator.free_pages(pages)

    def owned_pages(self, indices: torch.Tensor) -> npt.NDArray[np.int64]:
        """Return the pages of slots; ValueError unless they are whole pages, each once, that are owned."""
        return self.allocator.owned_pages(indices)

    def available_size(self) -> int:
        """Return the free slots."""
        return self.allocator.available_size()

    def clear(self) -> None:
        """Free every slot; the bytes stay until they are overwritten."""
        self.allocator.clear()

    # -- transfers

    @property
    def transfer(self) -> PlaneTransfer:
        """The planes and the ways to move them; RuntimeError once destroyed."""
        transfer = self._transfer
        self._gate.check_open()
        if transfer is None:
            raise RuntimeError(f"a {type(self).__name__} has no bytes, so it has no transfer")
        return transfer

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
        """Queue the copy of all layers of device slots to host slots, drafts included.

        Parameters
        ----------
        device_pool
            The pool this one was made for, or None.
        host_indices, device_indices
            int64 or int32 ``[n]`` on CPU or the pool's device, whole pages in order, no destination twice. The same
            tensors passed again are only read again where torch has seen them change: after writing to them through
            numpy or a kernel of your own, pass other tensor objects (views will do).
        io_backend
            ``"kernel"`` (the planner decides) or ``"direct"`` (copies only, no rows moved by the SMs).
        block_quota
            Most CTAs that may hold SMs while bytes cross the bus; 0 forbids it, as ``"direct"`` does, and None takes
            the measured trade of bandwidth and SMs. A ``transfer_policy`` of ``"direct"`` gives way to 0.
        compute
            What the model computes meanwhile, where it is known: ``"prefill"``, ``"decode"``, ``"idle"``. What each way
            would take from it counts as its cost.

        Returns
        -------
        TransferResult
            The path, the reason, and the two events: device rows read, host bytes there.
        """
        self._check_owner(device_pool)
        policy, quota = self._terms(io_backend, block_quota)
        with self._gate:
            rows = self._rows(host_indices, device_indices)
            result = self.transfer.write_back(rows.host, rows.device, policy=policy, block_quota=quota, compute=compute)
            return self._gate.track(result)

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
        """Queue the copy of one layer of host slots to device slots.

        Parameters
        ----------
        device_pool
            The pool this one was made for, or None. With ``is_draft``, one of the drafts to count from its first layer.
        host_indices, device_indices
            As in :meth:`backup_from_device_all_layer`.
        layer_id
            Layer of the device pool, from 0; with ``is_draft``, layer of the drafts, from the first draft's first.
        io_backend, block_quota, compute
            As in :meth:`backup_from_device_all_layer`.
        is_draft
            Whether the layer is a packed draft's.
        """
        layer = self._draft_layer(device_pool, layer_id) if is_draft else self._owner_layer(device_pool, layer_id)
        policy, quota = self._terms(io_backend, block_quota)
        with self._gate:
            rows = self._rows(host_indices, device_indices)
            result = self.transfer.load(
                rows.host, rows.device, layer=layer, policy=policy, block_quota=quota, compute=compute
            )
            return self._gate.track(result)

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
        """Queue the copy of all layers of host slots to device slots, drafts included.

        With ``layer_events`` the result has an event for each layer, recorded once its device rows are filled. Other
        parameters are those of :meth:`backup_from_device_all_layer`.
        """
        self._check_owner(device_pool)
        policy, quota = self._terms(io_backend, block_quota)
        with self._gate:
            rows = self._rows(host_indices, device_indices)
            result = self.transfer.load(
                rows.host, rows.device, layer_events=layer_events, policy=policy, block_quota=quota, compute=compute
            )
            return self._gate.track(result)

    def capabilities(self) -> Capabilities:
        """Return the paths one long run of pages takes, what is available, and why not more."""
        self._gate.check_open()
        return self._staging.capabilities

    def _init_write_back_staging_buffers(self) -> None:
        """Take what the device's staging ring offers this pool, and set the flags to what there is."""
        self._staging = pool_staging(self.transfer, self._policy)
        self._usual_terms = (self._staging.policy, None)
        self.staging_page_capacity = self._staging.pages
        self.staging_token_capacity = self._staging.pages * self.page_size
        self.can_use_jit = self._staging.capabilities.direct
        self.can_use_write_back_jit = self._staging.capabilities.staged
        if not (self.can_use_jit and self.can_use_write_back_jit):
            logger.info("%s: %s", type(self).__name__, self._staging.capabilities.reason)

    def _rows(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> RowNumbers:
        for component in self._components.values():
            component.check_in_place()
        return self._index_rows.rows(host_indices, device_indices)

    def _terms(self, io_backend: str, block_quota: int | None) -> tuple[TransferPolicy, int | None]:
        if io_backend == "kernel" and block_quota is None:
            return self._usual_terms
        quota = None if block_quota is None else whole("block_quota", block_quota, least=0)
        if one_of("io_backend", io_backend, IO_BACKENDS) == "direct" or quota == 0:
            # A quota of no blocks leaves the planner the copy engines alone.
            return self._staging.copies_policy, 0
        return self._staging.policy, quota

    def _check_owner(self, device_pool: object) -> None:
        if device_pool is not None and device_pool is not self.device_pool:
            raise ValueError(
                f"device_pool is another {type(device_pool).__name__} than the one this {type(self).__name__} was made "
                "for; pass that one, or None"
            )

    def _owner_layer(self, device_pool: object, layer_id: int) -> int:
        self._check_owner(device_pool)
        return _checked_layer(layer_id, self.device_pool.layer_num, "the pool")

    def _draft_layer(self, device_pool: object, layer_id: int) -> int:
        first = self.device_pool.layer_num
        for given, draft in zip(self._wrapped_drafts, self.packed_draft_device_pools, strict=True):
            if device_pool is given or device_pool is draft:
                return first + _checked_layer(layer_id, draft.layer_num, "the draft")
            first += draft.layer_num
        self._check_owner(device_pool)
        owner_layers = self.device_pool.layer_num
        return owner_layers + _checked_layer(layer_id, self.layer_num - owner_layers, "all drafts together")

    # -- bytes

    @property
    def buffer(self) -> torch.Tensor:
        """All pages, flat uint8 on CPU; RuntimeError once destroyed."""
        self._gate.check_open()
        return self.host_buffer.tensor

    @property
    def host_buffer(self) -> HostBuffer:
        """The memory of ``buffer``: whether it is pinned, its NUMA node, its name where it is shared."""
        host_buffer = self._host_buffer
        self._gate.check_open()
        if host_buffer is None:
            raise RuntimeError(f"a {type(self).__name__} has no bytes, so it has no buffer")
        return host_buffer

    def component_view(self, name: str) -> torch.Tensor:
        """View of a component in its own type, with the axes of the layout; the class says the shapes."""
        number = self._component_number(name)
        return typed_view(self.buffer, self._components[name], self.geometry, self._strides[number], self.page_num)

    def component_layers(self, name: str) -> list[torch.Tensor]:
        """One view a layer: ``[rows, *element]``, or ``[pages, rows_per_page, *element]`` in ``page_first_direct``."""
        return list(self.component_view(name).unbind(0 if self.layout is HostLayout.LAYER_FIRST else 1))

    def page_parts(self, page: int) -> tuple[PagePart, ...]:
        """Offsets in ``buffer`` and sizes of the contiguous pieces of a page; one piece except in ``layer_first``."""
        page = whole("page", page, least=0, most=self.page_num - 1)
        return page_parts(self.geometry, self._strides, page)

    def page_memory(self, page: int) -> tuple[memoryview, ...]:
        """Writable memory of a page, one piece a part, without a copy; not to be used once the pool is destroyed."""
        memory = memoryview(self.buffer.numpy())  # type: ignore[arg-type]
        return tuple(memory[offset : offset + size] for offset, size in self.page_parts(page))

    def read_page(self, page: int) -> torch.Tensor:
        """Copy a page out: uint8 ``[page_bytes]``, its parts one after the other."""
        return torch.cat([self.buffer[offset : offset + size] for offset, size in self.page_parts(page)])

    def write_page(self, page: int, data: torch.Tensor) -> None:
        """Copy a page in: uint8 ``[page_bytes]``, as :meth:`read_page` gave it."""
        check_tensor("data", data, f"a tensor, uint8 [{self.page_bytes}]")
        if data.dtype is not torch.uint8 or data.shape != (self.page_bytes,):
            raise ValueError(
                f"data has shape {tuple(data.shape)} and dtype {data.dtype}; a page is uint8 [{self.page_bytes}]"
            )
        start = 0
        for offset, size in self.page_parts(page):
            self.buffer[offset : offset + size].copy_(data[start : start + size])
            start += size

    def destroy(self) -> None:
        """Wait for the transfers in flight, then give the memory back; a second call does nothing."""
        self._gate.close()
        self._index_rows.forget()
        # Closing drains through the gate. Several threads may come here: each waits for it.
        host_buffer = self._host_buffer
        if host_buffer is not None:
            host_buffer.close()
        self._host_buffer = self._transfer = None

    def _component_number(self, name: str) -> int:
        names = list(self._components)
        if name not in names:
            raise ValueError(f"component {name!r} is not in this {type(self).__name__}: {names}")
        return names.index(name)


def _checked_layer(layer_id: int, layers: int, whose: str) -> int:
    layer_id = whole("layer_id", layer_id, least=0)
    if not 0 <= layer_id < layers:
        raise ValueError(f"layer_id is {layer_id}; layers of {whose}: {layers}, from 0")
    return layer_id
