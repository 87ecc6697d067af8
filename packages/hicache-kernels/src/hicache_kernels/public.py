"""Every public name of the package, which imports this module when the first of them is used."""

from .constants import Compute
from .layout import HostLayout, HostStrides, host_bytes, host_strides
from .plane import DeviceRows, HostRows, Plane
from .planner import PathUnavailableError
from .pointer_tables import pointer_table
from .staging import Direction, StagingRing
from .transfer import Capabilities, PlaneTransfer, TransferPolicy, TransferResult
from .work import Plan

__all__ = [
    "Capabilities",
    "Compute",
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
