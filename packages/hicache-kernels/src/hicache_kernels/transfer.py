"""PlaneTransfer: every way between the device rows and the host pages of one pool, behind two calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from . import reference
from .plane import Plane


class TransferPolicy(StrEnum):
    """Which path an operation may take."""

    AUTO = "auto"
    """The planner decides, operation by operation."""
    STAGED = "staged"
    """Staging memory and the copy engine."""
    DIRECT = "direct"
    """The main module: rows moved by the SMs (on CPU: by the caller's thread)."""
    REFERENCE = "reference"
    """Plain torch."""


@dataclass(frozen=True)
class Capabilities:
    """What a pool's transfers can do, and why not more.

    Attributes
    ----------
    path_write_back, path_load
        ``"staged"``, ``"direct"`` or ``"reference"``: the path ``auto`` takes for one long run of pages.
    staged, direct
        Whether that path is available at all.
    reason
        One sentence: why this path, or why a better one is missing.
    build_error
        The error of a failed build, or None.
    """

    path_write_back: str
    path_load: str
    staged: bool
    direct: bool
    reason: str
    build_error: str | None = None


@dataclass(frozen=True)
class TransferResult:
    """What an operation did.

    Attributes
    ----------
    path, reason
        The path taken, and why.
    bytes, runs
        Bytes moved, and copies (runs of neighbouring host pages).
    device_released
        Recorded once the device rows have been read (write-back) or filled (load); None where the call was synchronous.
    host_ready
        Recorded once the host bytes are there (write-back) or are no longer read (load); None where synchronous.
    """

    path: str
    reason: str
    bytes: int
    runs: int
    device_released: torch.cuda.Event | None = None
    host_ready: torch.cuda.Event | None = None


class PlaneTransfer:
    """Transfers of one pool: its planes, its share of the staging ring, its policy.

    Parameters
    ----------
    planes
        At least one; all with the same layers, page size, pages and device.
    policy
        Default policy of the operations.
    boundaries
        Byte offsets in the host buffer at which a pinned registration ends; no copy spans one.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        *,
        policy: TransferPolicy | str = TransferPolicy.AUTO,
        boundaries: Sequence[int] = (),
    ) -> None:
        self.planes = tuple(planes)
        self.policy = TransferPolicy(policy)
        self.boundaries = tuple(boundaries)

    def write_back(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        policy: TransferPolicy | str | None = None,
        block_quota: int | None = None,
    ) -> TransferResult:
        """Queue the copy of all layers of ``device_indices`` to ``host_indices`` behind the current stream's work.

        Parameters
        ----------
        host_indices, device_indices
            int64 or int32 slot indices ``[n]``, whole pages in order (``n % page_size == 0``; the slots of a page
            neighbours and aligned on the host side); host indices on CPU, device indices on CPU or the device.
        policy, block_quota
            Override the pool's policy; cap the CTAs a direct transfer may hold.
        """
        reference.write_back(self.planes, host_indices, device_indices)
        return TransferResult("reference", "only the reference is built", 0, 0)

    def load(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        *,
        layer: int | None = None,
        policy: TransferPolicy | str | None = None,
        block_quota: int | None = None,
    ) -> TransferResult:
        """Queue the copy of one layer (or all, with None) of ``host_indices`` to ``device_indices``.

        Work queued on the current stream afterwards sees the filled rows.
        """
        reference.load(self.planes, host_indices, device_indices, layer)
        return TransferResult("reference", "only the reference is built", 0, 0)

    def capabilities(self) -> Capabilities:
        """Paths, reasons and build errors."""
        return Capabilities("reference", "reference", False, False, "only the reference is built")
