"""What callers ask of a transfer and get back: policy, capabilities, result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch


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


def transfer_policy(policy: TransferPolicy | str) -> TransferPolicy:
    """Policy of a name.

    Raises
    ------
    ValueError
        Where there is none of that name.
    """
    try:
        return TransferPolicy(policy)
    except ValueError:
        raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(TransferPolicy)}") from None


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
        Bytes moved, and runs of neighbouring host pages.
    device_released
        Recorded once the device rows have been read (write-back) or filled (load); None where the call was synchronous.
    host_ready
        Recorded once the host bytes are there (write-back) or are no longer read (load); None where synchronous.
    copies
        Copies handed to the copy engine (on CPU: from or to the staging buffer); 0 on the other paths.
    layer_done
        With ``layer_events``: recorded once each layer's device rows are filled; empty where synchronous. Layers that
        one copy brings share an event, and so do all of a direct load that is over before its thread could have queued
        an event for each.
    """

    path: str
    reason: str
    bytes: int
    runs: int
    device_released: torch.cuda.Event | None = None
    host_ready: torch.cuda.Event | None = None
    copies: int = 0
    layer_done: tuple[torch.cuda.Event, ...] = ()
