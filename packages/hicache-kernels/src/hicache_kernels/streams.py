"""Streams of our own: torch hands its few out again and again, so one of those may be an engine's too."""

from __future__ import annotations

import functools

import torch

from .probe import load_module
from .spec import TRANSFER_MODULES, module_device_type


@functools.cache
def own_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Stream of a GPU for one purpose, the same at every call.

    Parameters
    ----------
    device
        With its index.
    purpose
        Any name.

    Returns
    -------
    torch.cuda.Stream
        One of the process's own; one of torch's where there is no compiled module to make it.
    """
    modules = (load_module(name, module_device_type(device)) for name in TRANSFER_MODULES)
    module = next((module for module in modules if module is not None), None)
    if module is None:
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        return torch.cuda.ExternalStream(module["create_stream"](), device)  # type: ignore[no-untyped-call]
