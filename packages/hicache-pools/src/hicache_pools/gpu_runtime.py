"""The few calls of the CUDA or HIP runtime that pinning needs, reached through ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

_PORTABLE_AND_MAPPED = 3
"""Flags of both runtimes: pinned for every context, and addressable by kernels."""


class GpuRuntime:
    """The CUDA or HIP runtime this process has loaded, called without torch's C++ interface.

    The pending error is kept by the runtime library that made the call, so it has to be the one torch uses.
    """

    def __init__(self) -> None:
        prefix, stem = ("hip", "libamdhip64.so") if torch.version.hip else ("cuda", "libcudart.so")
        self._library = ctypes.CDLL(_loaded_library(stem))
        self._register = self._library[f"{prefix}HostRegister"]
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        self._unregister = self._library[f"{prefix}HostUnregister"]
        self._unregister.argtypes = [ctypes.c_void_p]
        self._device_pointer = self._library[f"{prefix}HostGetDevicePointer"]
        self._device_pointer.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint]
        self._pci_bus_id = self._library[f"{prefix}DeviceGetPCIBusId"]
        self._pci_bus_id.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        self._last_error = self._library[f"{prefix}GetLastError"]
        self._name = self._library[f"{prefix}GetErrorName"]
        self._text = self._library[f"{prefix}GetErrorString"]
        for function in (self._name, self._text):
            function.restype = ctypes.c_char_p

    def register(self, address: int, nbytes: int) -> int:
        """Pin; returns the runtime's error code, 0 for success."""
        return int(self._register(address, nbytes, _PORTABLE_AND_MAPPED))

    def unregister(self, address: int) -> int:
        """Unpin what was registered at ``address``; returns the runtime's error code."""
        return int(self._unregister(address))

    def device_address(self, address: int) -> tuple[int, int]:
        """Error code, and where kernels of the current device find what was registered at ``address``."""
        found = ctypes.c_void_p()
        code = int(self._device_pointer(ctypes.byref(found), address, 0))
        return code, found.value or 0

    def clear_error(self) -> None:
        """Forget the pending error."""
        self._last_error()

    def describe(self, code: int) -> str:
        """Name and meaning of an error code."""
        return f"{self._name(code).decode()} ({code}): {self._text(code).decode()}"

    def pci_address(self, device: int) -> str:
        """Return a device's PCI address as sysfs spells it, e.g. ``0000:9a:00.0``; RuntimeError if there is none."""
        text = ctypes.create_string_buffer(32)
        code = int(self._pci_bus_id(text, len(text), device))
        if code:
            self.clear_error()
            raise RuntimeError(f"device {device} has no PCI address: {self.describe(code)}")
        return text.value.decode().lower()


def _loaded_library(stem: str) -> str:
    """Path of the shared library this process has loaded under a name that starts with ``stem``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.rsplit("/", 1)[-1].startswith(stem):
            return path
    # Linked statically into torch: then any copy will do, as its errors are its own.
    return stem
