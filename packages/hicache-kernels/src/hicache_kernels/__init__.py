"""Moves KV cache pages between device and host memory: staged and main transfer modules for CUDA, ROCm and CPU."""

from .layout import HostLayout, HostStrides, host_bytes, host_strides
from .plane import DeviceRows, HostRows, Plane
from .planner import PathUnavailableError, Plan
from .pointer_table import pointer_table
from .staging import Direction, StagingRing
from .transfer import Capabilities, PlaneTransfer, TransferPolicy, TransferResult

__all__ = [
    "Capabilities",
    "DeviceRows",
    "Direction",
    "HostLayout",
    "HostRows",
    "HostStrides",
    "PathUnavailableError",
    "Plan",
    "Plane",
    "PlaneTransfer",
    "StagingRing",
    "TransferPolicy",
    "TransferResult",
    "host_bytes",
    "host_strides",
    "pointer_table",
]
