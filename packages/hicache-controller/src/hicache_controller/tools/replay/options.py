"""What to replay against, and every reason why it cannot work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hicache_pools.memory_budget import HostMemoryBudget

from ...mooncake_module import import_mooncake
from ...policies import EVICTION_STRATEGIES, PrefetchPolicy, WritePolicy
from ...storage_names import storage_path
from ..trace import TraceRequest
from .plans import Geometry, PoolPlan, model_pools

STORAGES = ("file", "memory", "mooncake")
"""Backends that a replay knows the options of."""

_MAX_VALUES = {
    "block_tokens": 1 << 20,
    "l1_pages": (1 << 31) - 1,
    "l2_pages": (1 << 31) - 1,
    "checkpoint_blocks": 1 << 30,
}
_MAX_CHECKPOINTS = 1 << 24
_MAX_BYTES = 1 << 60
_MAX_TOKENS = 1 << 26
"""Of one request: all of them are hashed at once."""

_MIN_WINDOWS = 4
"""Windows a pool must hold: the match's, the next checkpoint's, and as many that are still being written."""


class ReplayError(ValueError):
    """An option that cannot work, in one line."""


@dataclass(frozen=True)
class ReplayOptions:
    """What to replay against.

    Attributes
    ----------
    device
        ``cpu`` or ``cuda``.
    pool
        One of :data:`POOLS`: the pools of the model.
    layers, row_bytes, page_size
        Geometry: layers of the model, which several pools share out; ``row_bytes`` is one component of one layer of one
        token (states have 8 to 16 times as many); ``page_size`` in tokens.
    window_tokens
        Tokens a sliding window sees.
    block_tokens
        Tokens of a block of the trace; a multiple of ``page_size``.
    checkpoint_blocks
        After how many blocks of a request its windows and states are kept, in addition to its end; a prefix can be
        continued where they were.
    l1_pages, l2_pages
        Pages of the device and the host pool of attention.
    l1_checkpoints, l2_checkpoints
        Checkpoints for which device and host have room in the pools of windows and states; None for as many as the
        pages of attention can have.
    l3_bytes
        Capacity of the storage; 0 for none, None for no limit. Without data it counts what the pages would have.
    l3_dir
        Directory of the storage; None for a temporary one.
    write_policy
        One of :class:`hicache_controller.radix.WritePolicy`.
    data
        False: bookkeeping only, no bytes, and a storage of keys in memory.
    storage
        One of :data:`STORAGES` (the pages of ``memory`` end with the process), another name that
        :class:`~hicache_controller.storage.StorageBackendFactory` knows, or ``module:Class``.
    storage_options
        What the constructor of a backend that is not in :data:`STORAGES` is called with, as well as ``fingerprint``
        where it takes one.
    mooncake_master
        Address of the master of a Mooncake store, which machines share.
    mooncake_segment_bytes
        Memory that this process adds to the store, for as long as it lives; 0 where others give it.
    prefetch_policy
        How long a request waits for its pages from storage.
    eviction
        Name of the strategy that says what leaves a tier first, as of the tree.
    """

    device: str = "cpu"
    pool: str = "mha"
    layers: int = 4
    row_bytes: int = 64
    page_size: int = 64
    block_tokens: int = 512
    l1_pages: int = 1024
    l2_pages: int = 4096
    l3_bytes: int | None = None
    l3_dir: Path | None = None
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    data: bool = True
    storage: str = "file"
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    mooncake_master: str = "127.0.0.1:50051"
    mooncake_segment_bytes: int = 1 << 30
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE
    window_tokens: int = 128
    checkpoint_blocks: int = 1
    l1_checkpoints: int | None = None
    l2_checkpoints: int | None = None
    eviction: str = "lru"

    def check(self, requests: Sequence[TraceRequest]) -> None:
        """Raise ReplayError for the first option that cannot work with these requests on this machine."""
        self.check_sizes(requests)
        if self.device != "cpu":
            import torch

            if not torch.cuda.is_available():
                raise ReplayError(f"device is {self.device}, and torch finds no such device on this machine")
        self._check_memory(device_pages=self.device == "cpu")

    def check_sizes(self, requests: Sequence[TraceRequest]) -> None:
        """Raise ReplayError for the first option that can work on no device, and do not import torch for that."""
        try:
            plans = self.plans
        except ValueError as error:
            raise ReplayError(str(error)) from None
        self._check_numbers()
        self._check_storage()
        if self.eviction not in EVICTION_STRATEGIES:
            raise ReplayError(f"eviction is {self.eviction!r}; one of {', '.join(EVICTION_STRATEGIES)} is expected")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ReplayError(f"device is {self.device!r}; cpu or cuda is expected")
        self._check_room(requests, plans)
        self._check_memory(device_pages=False)
        if self.uses_mooncake:
            try:
                import_mooncake()
            except ImportError as error:
                raise ReplayError(str(error)) from None

    def _check_storage(self) -> None:
        try:
            storage_path(self.storage)
        except ValueError as error:
            raise ReplayError(str(error)) from None
        if self.storage_options and self.storage in STORAGES:
            raise ReplayError(
                f"storage_options has {next(iter(self.storage_options))!r} for storage {self.storage!r}; they are for "
                f"other backends than {', '.join(STORAGES)}"
            )

    @property
    def uses_mooncake(self) -> bool:
        """Return whether pages go to a Mooncake store."""
        return self.data and self.storage == "mooncake" and self.l3_bytes != 0

    def _check_numbers(self) -> None:
        for name in _MAX_VALUES:
            value = getattr(self, name)
            if not 0 < value <= _MAX_VALUES[name]:
                raise ReplayError(f"{name} is {value}; accepted is 1 to {_MAX_VALUES[name]}")
        for name in ("l1_checkpoints", "l2_checkpoints"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _MAX_CHECKPOINTS:
                raise ReplayError(f"{name} is {value}; accepted is 1 to {_MAX_CHECKPOINTS}")
        if self.row_bytes % 4:
            raise ReplayError(f"row_bytes is {self.row_bytes}; a multiple of 4 is expected")
        if self.block_tokens % self.page_size:
            raise ReplayError(f"block_tokens is {self.block_tokens}, no multiple of page_size {self.page_size}")
        for name in ("l3_bytes", "mooncake_segment_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _MAX_BYTES:
                raise ReplayError(f"{name} is {value}; accepted is 0 (none) to {_MAX_BYTES}")
        if self.uses_mooncake and ":" not in self.mooncake_master:
            raise ReplayError(f"mooncake_master is {self.mooncake_master!r}; host:port is expected")

    def _check_memory(self, *, device_pages: bool) -> None:
        if not self.data:
            return
        total = self.mooncake_segment_bytes if self.uses_mooncake else 0
        for plan in self.plans:
            device, host = self.pool_pages(plan)
            total += plan.page_bytes * (host + (device if device_pages else 0))
        try:
            HostMemoryBudget().check(total)
        except MemoryError as error:
            raise ReplayError(str(error)) from None

    def _check_room(self, requests: Sequence[TraceRequest], plans: Sequence[PoolPlan]) -> None:
        blocks = max(len(request.blocks) for request in requests)
        if blocks * self.block_tokens > _MAX_TOKENS:
            raise ReplayError(
                f"block_tokens is {self.block_tokens}; the largest request of the trace has {blocks} blocks, and at "
                f"most {_MAX_TOKENS} tokens are accepted"
            )
        largest = blocks * self.pages_per_block
        for name, tier in (("l1_pages", "device"), ("l2_pages", "host")):
            if getattr(self, name) < largest:
                raise ReplayError(
                    f"{name} is {getattr(self, name)}; the largest request of the trace needs {largest} {tier} pages"
                )
        for plan in plans:
            least = _MIN_WINDOWS * (plan.window_pages or 0)
            for name, pages in zip(("l1_checkpoints", "l2_checkpoints"), self.pool_pages(plan), strict=True):
                if pages < least:
                    raise ReplayError(
                        f"{name} is {getattr(self, name)}, which gives {plan.name} {pages} pages; it needs {least}"
                    )

    @property
    def plans(self) -> tuple[PoolPlan, ...]:
        """The device pools of the model; ValueError where there can be no such model."""
        return model_pools(self.pool, Geometry(self.layers, self.row_bytes, self.page_size, self.window_tokens))

    def pool_pages(self, plan: PoolPlan) -> tuple[int, int]:
        """Pages of a pool on the device and on the host."""
        if plan.window_pages is None:
            return self.l1_pages, self.l2_pages
        # Windows that are longer than the distance between checkpoints share pages.
        between = self.checkpoint_blocks * self.pages_per_block
        each = min(plan.window_pages, between)

        def pages(checkpoints: int | None, attention_pages: int) -> int:
            if checkpoints is None:
                return max(-(-attention_pages // between) * each, _MIN_WINDOWS * (plan.window_pages or 0))
            return checkpoints * each

        return pages(self.l1_checkpoints, self.l1_pages), pages(self.l2_checkpoints, self.l2_pages)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of attention and of what shares its slots, all layers and components."""
        return sum(plan.page_bytes for plan in self.plans if plan.window_pages is None)

    @property
    def pages_per_block(self) -> int:
        """Pages of a trace block."""
        return self.block_tokens // self.page_size

    @property
    def components(self) -> int:
        """Rows that a layer of the first pool keeps for a token."""
        return len(self.plans[0].buffers)
