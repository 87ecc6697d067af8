"""Moves KV cache pages between device and host memory: staged and main transfer modules for CUDA, ROCm and CPU."""

from .layout import HostLayout, HostStrides, host_bytes, host_strides
from .plane import DeviceRows, HostRows, Plane
from .transfer import Capabilities, PlaneTransfer, TransferPolicy, TransferResult

__all__ = [
    "Capabilities",
    "DeviceRows",
    "HostLayout",
    "HostRows",
    "HostStrides",
    "Plane",
    "PlaneTransfer",
    "TransferPolicy",
    "TransferResult",
    "host_bytes",
    "host_strides",
]
