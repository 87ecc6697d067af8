"""What a compiled module is: one list of specs for the loader, ahead-of-time builds, compile tests and ``info``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CSRC = Path(__file__).resolve().parent / "csrc"
"""Sources shipped inside the package."""

TRANSFER_MODULES = ("main", "staged")
"""Modules that move rows, for every device type."""

MODULE_NAMES = (*TRANSFER_MODULES, "files")
"""Modules, each compiled apart from the others; ``files`` reads files, and has nothing to do with a device."""

DEVICE_TYPES = ("cpu", "cuda", "rocm")
"""Device types with kernels."""

_COMMON_FLAGS = ("-std=c++17", "-O3")

# Hidden visibility keeps the inline helpers of csrc/include private to each module: without it the dynamic linker
# would merge their function-local statics across the modules of one process. "defs" turns a missing symbol into an
# error of the build; found out later, by lazy binding, it would end the process.
#
# nvcc links cudart statically: streams, events and contexts are objects of the driver, so they pass between the
# engine's runtime and ours, while a shared libcudart would have to be of the same major version as the one torch
# brings along, and found at load time. It also keeps our last-error state apart from the engine's.
_FLAGS: dict[str, tuple[str, ...]] = {
    "cpu": (*_COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-z,defs"),
    "cuda": (*_COMMON_FLAGS, "-Xcompiler=-fPIC,-fvisibility=hidden,-pthread", "-Xlinker=-z,defs", "-cudart=static"),
    "rocm": (*_COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-pthread", "-Wl,-z,defs", "-D__HIP_PLATFORM_AMD__=1"),
}


@dataclass(frozen=True)
class ModuleSpec:
    """One module for one device type, before any compiler has been asked.

    Attributes
    ----------
    name
        ``"main"``, ``"staged"`` or ``"files"``.
    device_type
        ``"cpu"``, ``"cuda"`` or ``"rocm"``.
    source_files
        Translation units handed to the compiler.
    include_dirs
        Directories of the project's own headers; tvm-ffi's are added when building.
    flags
        Compiler flags, without those that name an architecture.
    """

    name: str
    device_type: str
    source_files: tuple[Path, ...]
    include_dirs: tuple[Path, ...]
    flags: tuple[str, ...]

    @property
    def key(self) -> str:
        """Name of the spec, unique in a list of specs: ``main-cuda``."""
        return f"{self.name}-{self.device_type}"

    def _named_files(self) -> list[tuple[str, Path]]:
        directories = {source.parent for source in self.source_files} | set(self.include_dirs)
        return sorted(
            (path.relative_to(directory.parent).as_posix(), path)
            for directory in directories
            for path in directory.rglob("*")
            if path.is_file()
        )

    def source_key(self) -> str:
        """Digest (32 hex digits) of the sources; equal wherever the package is installed, with any compiler.

        Raises
        ------
        FileNotFoundError
            Where a source is missing.
        """
        for source in self.source_files:
            if not source.is_file():
                raise FileNotFoundError(f"source {source} is missing")
        digest = hashlib.sha256(repr((self.name, self.device_type)).encode())
        for name, path in self._named_files():
            content = path.read_bytes()
            digest.update(repr((name, len(content))).encode())
            digest.update(content)
        return digest.hexdigest()[:32]


def module_specs(csrc: Path = CSRC) -> tuple[ModuleSpec, ...]:
    """Specs of every module, and of those that move rows for every device type, over the sources in ``csrc``."""
    return tuple(
        ModuleSpec(
            name=name,
            device_type=device_type,
            source_files=(csrc / name / f"{name}{'.cc' if device_type == 'cpu' else '.cu'}",),
            include_dirs=(csrc / "include",),
            flags=_FLAGS[device_type],
        )
        for name in MODULE_NAMES
        for device_type in (DEVICE_TYPES if name in TRANSFER_MODULES else ("cpu",))
    )


def module_device_type(device: torch.device) -> str:
    """Device type whose modules serve tensors on ``device``: torch calls AMD devices ``cuda`` too."""
    if device.type == "cuda":
        import torch

        return "cuda" if torch.version.hip is None else "rocm"
    return device.type
