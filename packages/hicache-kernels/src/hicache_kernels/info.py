"""Says what this installation can load and why not more, and builds only when asked to."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import tvm_ffi

from .build import CACHE_VARIABLE, build_key, cache_directory, for_this_machine, library_name, read_record, target_archs
from .calibrate import cache_path, read_constants
from .compilers import BuildError, compiler_name, find_compiler
from .constants import H200, DeviceConstants
from .probe import LOADER, PREBUILT_VARIABLE, ModuleLoader, check_prebuilt, kept_record, prefers_build, wheel_library
from .spec import DEVICE_TYPES, ModuleSpec, module_specs
from .trusted_files import UntrustedPathError


@dataclass(frozen=True)
class CompilerState:
    """The compiler of a device type: its path and version, or why there is none."""

    device_type: str
    name: str
    path: str | None
    detail: str


@dataclass(frozen=True)
class ModuleState:
    """What loading a module would do.

    Attributes
    ----------
    name, device_type
        The spec's.
    state
        ``"prebuilt"``, ``"in the wheel"``, ``"cached"``, ``"to build"``, ``"loaded"`` or ``"unavailable"``.
    detail
        The library, or the reason.
    note
        Why a library is passed over, else empty.
    source_key
        Digest of the sources, None where some are missing.
    """

    name: str
    device_type: str
    state: str
    detail: str
    note: str
    source_key: str | None


@dataclass(frozen=True)
class CacheState:
    """The directory of builds: where, from which setting, whether it takes new builds, what it holds."""

    path: Path
    setting: str
    writable: bool
    builds: int
    bytes: int


@dataclass(frozen=True)
class PlannerState:
    """What the planner goes by on a device.

    Attributes
    ----------
    device
        Its name.
    constants
        Where the figures come from: kept ones, or defaults that the first transfer replaces.
    losses
        Where the shares that a model loses come from.
    shares
        By mover, what a model loses next to it: ``(mover, prefill, decode)``, shares of its time from 0 to 1.
    """

    device: str
    constants: str
    losses: str
    shares: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True)
class KernelsInfo:
    """Everything ``hicache-kernels info`` shows."""

    versions: dict[str, str]
    devices: tuple[str, ...]
    cache: CacheState
    prebuilt: str | None
    compilers: tuple[CompilerState, ...]
    modules: tuple[ModuleState, ...]
    planners: tuple[PlannerState, ...]


def versions() -> dict[str, str]:
    """Versions of everything a build depends on."""
    return {
        "hicache-kernels": metadata.version("hicache-kernels"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": str(torch.version.cuda),
        "rocm of torch": str(torch.version.hip),
        "tvm-ffi": tvm_ffi.__version__,
    }


def devices() -> tuple[str, ...]:
    """Name of each accelerator here."""
    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count()))


def planner_state(device: str, constants: DeviceConstants | None) -> PlannerState:
    """Describe what the planner goes by; ``constants`` as kept, None where the device was never measured."""
    found = H200 if constants is None else constants
    shares = []
    for name, way in (("write-back", found.write_back), ("load", found.load)):
        movers = [(f"{name}, staged", way.staged_loss)]
        movers += [(f"{name}, direct, {ctas} CTA{'s' * (ctas != 1)}", loss) for ctas, loss in way.direct_losses]
        shares += [(mover, loss.prefill, loss.decode) for mover, loss in movers]
    source = f"{H200.source}, until the first transfer measures" if constants is None else constants.source
    return PlannerState(device, source, found.losses_source, tuple(shares))


def planner_states() -> tuple[PlannerState, ...]:
    """Describe what the planner goes by on each accelerator here; measures nothing."""
    return tuple(
        planner_state(name, read_constants(cache_path(torch.device("cuda", number))))
        for number, name in enumerate(devices())
    )


def cache_state(path: Path | None = None) -> CacheState:
    """Look at a directory of builds, the one in use by default."""
    directory = cache_directory() if path is None else path
    setting = "argument" if path is not None else CACHE_VARIABLE if os.environ.get(CACHE_VARIABLE) else "default"
    libraries = []
    for library in directory.glob("*/*.so"):
        with contextlib.suppress(UntrustedPathError):
            libraries += [library] if read_record(library) is not None else []
    nearest = directory
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return CacheState(directory, setting, writable, len(libraries), sum(lib.stat().st_size for lib in libraries))


def compiler_state(device_type: str, memory: Path | None = None) -> CompilerState:
    """Look for the compiler of a device type."""
    try:
        compiler = find_compiler(device_type, memory)
    except BuildError as error:
        return CompilerState(device_type, compiler_name(device_type), None, str(error))
    return CompilerState(device_type, compiler_name(device_type), compiler.path, compiler.summary)


def module_state(spec: ModuleSpec, cache: Path | None = None) -> ModuleState:
    """Say what loading ``spec`` would do; builds nothing, loads nothing."""
    notes: list[str] = []
    source_key = None
    try:
        source_key = spec.source_key()
        archs = target_archs(spec.device_type)
        prebuilt, carried = os.environ.get(PREBUILT_VARIABLE), wheel_library(spec)
        ways = [("prebuilt", Path(prebuilt) / library_name(spec))] if prebuilt else []
        last = [("in the wheel", carried)] if carried is not None else []
        if not prefers_build():
            ways, last = ways + last, []
        found = _first_that_fits(spec, archs, ways, notes)
        if found is None:
            try:
                found = _build_state(
                    for_this_machine(spec), archs, cache_directory() if cache is None else cache, notes
                )
            except BuildError:
                found = _first_that_fits(spec, archs, last, notes)
                if found is None:
                    raise
        state, detail = found
    except (BuildError, OSError) as error:
        state, detail = "unavailable", str(error)
    return ModuleState(spec.name, spec.device_type, state, detail, "; ".join(notes), source_key)


def _first_that_fits(
    spec: ModuleSpec, archs: Sequence[str], ways: Sequence[tuple[str, Path]], notes: list[str]
) -> tuple[str, str] | None:
    """Return state and path of the first finished library that fits, noting why others do not."""
    for state, library in ways:
        try:
            check_prebuilt(spec, library, archs)
        except BuildError as error:
            notes.append(f"{state}, passed over: {error}")
        else:
            return state, str(library)
    return None


def _build_state(spec: ModuleSpec, archs: Sequence[str], directory: Path, notes: list[str]) -> tuple[str, str]:
    entry = directory / build_key(spec, find_compiler(spec.device_type, directory), archs)
    try:
        if kept_record(spec, entry) is not None:
            return "cached", str(entry / library_name(spec))
    except UntrustedPathError as error:
        notes.append(f"cache passed over: {error}")
    return "to build", f"for {', '.join(archs)}"


def loaded_state(spec: ModuleSpec, loader: ModuleLoader) -> ModuleState:
    """Load ``spec``, building it if need be, and say how that ended."""
    outcome = loader.outcome(spec.name, spec.device_type)
    if outcome.module is None:
        return dataclasses.replace(module_state(spec), state="unavailable", detail=str(outcome.reason))
    detail = f"{outcome.path} ({outcome.origin}, {outcome.seconds:.2f} s)"
    return dataclasses.replace(module_state(spec), state="loaded", detail=detail)


def kernels_info(specs: Sequence[ModuleSpec] | None = None, *, load: bool = False) -> KernelsInfo:
    """Collect everything; never raises because something is missing.

    Parameters
    ----------
    specs
        Modules to look at; the package's own by default.
    load
        Load each, building what is missing, instead of saying what loading would do.
    """
    memory = cache_directory()
    chosen = module_specs() if specs is None else specs
    loader = LOADER if specs is None else ModuleLoader(specs)
    modules = [loaded_state(spec, loader) if load else module_state(spec) for spec in chosen]
    return KernelsInfo(
        versions=versions(),
        devices=devices(),
        cache=cache_state(),
        prebuilt=os.environ.get(PREBUILT_VARIABLE),
        compilers=tuple(compiler_state(device_type, memory) for device_type in DEVICE_TYPES),
        modules=tuple(modules),
        planners=planner_states(),
    )
