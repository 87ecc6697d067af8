"""Loads modules on first use and remembers the outcome, good or bad: asking is cheap and never raises."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm_ffi

from .build import (
    CACHE_VARIABLE,
    WHEEL_MODULES,
    BuildRecord,
    boot_directory,
    build_key,
    build_lock,
    cache_directory,
    clear_remains,
    compile_module,
    covers,
    for_this_machine,
    keep,
    library_name,
    packaged_library,
    read_record,
    record_path,
    target_archs,
)
from .compilers import BuildError, Compiler, find_compiler
from .scratch import scratch_directory
from .spec import DEVICE_TYPES, ModuleSpec, module_specs
from .trusted_files import UntrustedPathError, open_directory, open_file

logger = logging.getLogger(__name__)

PREBUILT_VARIABLE = "HICACHE_KERNELS_PREBUILT"
BUILD_VARIABLE = "HICACHE_KERNELS_BUILD"
MIN_DRIVERS = {12: 525, 13: 580}
"""Oldest Linux driver that runs code of a CUDA toolkit, by major version (NVIDIA, CUDA Toolkit release notes, table
"CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility")."""


@dataclass(frozen=True)
class LoadOutcome:
    """How the attempt to load a module ended; it is made once a process.

    Attributes
    ----------
    module
        The module, or None.
    reason
        Why there is none; None where there is one.
    origin
        ``"prebuilt"``, ``"wheel"``, ``"cache"`` or ``"built"``; None without a module.
    path
        The library; it may be gone where the cache could not keep it.
    seconds
        What loading took, building included.
    """

    module: tvm_ffi.Module | None
    reason: str | None
    origin: str | None = None
    path: Path | None = None
    seconds: float = 0.0


_loaders: weakref.WeakSet[ModuleLoader] = weakref.WeakSet()


def _forget_attempts_of_the_parent() -> None:
    for loader in _loaders:
        loader._forget_attempts()


os.register_at_fork(after_in_child=_forget_attempts_of_the_parent)


class ModuleLoader:
    """Loads modules of a list of specs, each at most once; safe from several threads and processes.

    Parameters
    ----------
    specs
        Modules on offer; the package's own by default.
    cache
        Directory of builds; None takes :func:`hicache_kernels.build.cache_directory` at each load.
    wheel
        Directory of the modules that came with the package; by default, for the package's own specs, the wheel's.
    """

    def __init__(
        self, specs: Sequence[ModuleSpec] | None = None, *, cache: Path | None = None, wheel: Path | None = None
    ) -> None:
        self._specs = {(s.name, s.device_type): s for s in (module_specs() if specs is None else specs)}
        self._cache = cache
        self._wheel = WHEEL_MODULES if specs is None and wheel is None else wheel
        # Outcomes only grow; each is made under the lock of its key, so that two modules can build side by side.
        self._outcomes: dict[tuple[str, str], LoadOutcome] = {}
        self._forget_attempts()
        _loaders.add(self)

    def _forget_attempts(self) -> None:
        """Forget all except outcomes: a forked process lacks the threads that make them and hold locks."""
        # Guards the attempt to load one module: the others wait for its outcome.
        self._locks = {key: threading.Lock() for key in self._specs}
        self._started: dict[tuple[str, str], threading.Thread] = {}  # in the background

    def outcome(self, name: str, device_type: str) -> LoadOutcome:
        """Load the module unless that was tried before; never raises."""
        key = (name, device_type)
        known = self._outcomes.get(key)
        if known is not None:
            return known
        if device_type not in DEVICE_TYPES:
            return self._conclude(key, LoadOutcome(None, f"no kernels for {device_type}"))
        spec = self._specs.get(key)
        if spec is None:
            names = ", ".join(sorted({n for n, d in self._specs if d == device_type}))
            return self._conclude(key, LoadOutcome(None, f"no module named {name!r}; there are {names}"))
        with self._locks[key]:
            known = self._outcomes.get(key)
            return known if known is not None else self._conclude(key, self._attempt(spec))

    def outcome_so_far(self, name: str, device_type: str) -> LoadOutcome | None:
        """Outcome of the attempt to load a module, or None while there is none; returns at once.

        The first call starts the attempt on a thread of its own, which does not keep the process from ending. Where the
        system gives no thread, the next call tries again.
        """
        key = (name, device_type)
        known = self._outcomes.get(key)
        if known is None and key not in self._started:
            thread = threading.Thread(
                target=self.outcome, args=key, name=f"hicache-load-{name}-{device_type}", daemon=True
            )
            # Of two callers that come first at once, the one whose thread is put down starts it.
            if self._started.setdefault(key, thread) is thread:
                try:
                    thread.start()
                except RuntimeError as error:
                    self._started.pop(key, None)
                    logger.debug("module %s for %s is not loaded yet: %s", name, device_type, error)
        return known

    def _conclude(self, key: tuple[str, str], outcome: LoadOutcome) -> LoadOutcome:
        self._outcomes[key] = outcome
        if outcome.reason is not None:
            logger.warning("module %s for %s is not available: %s", *key, outcome.reason)
        else:
            logger.info("module %s for %s: %s (%s, %.2f s)", *key, outcome.path, outcome.origin, outcome.seconds)
        return outcome

    def _attempt(self, spec: ModuleSpec) -> LoadOutcome:
        start = time.perf_counter()
        try:
            module, origin, path = self._load(spec)
        except BuildError as error:
            return LoadOutcome(None, str(error), seconds=time.perf_counter() - start)
        except Exception as error:  # a probe must not raise, whatever a driver, file system or loader comes up with
            logger.debug("loading %s failed", spec.key, exc_info=True)
            reason = f"loading {spec.key} failed: {type(error).__name__}: {error}"
            return LoadOutcome(None, reason, seconds=time.perf_counter() - start)
        return LoadOutcome(module, None, origin, path, time.perf_counter() - start)

    def _load(self, spec: ModuleSpec) -> tuple[tvm_ffi.Module, str, Path]:
        archs = target_archs(spec.device_type)
        prebuilt = os.environ.get(PREBUILT_VARIABLE)
        if prebuilt:
            library = Path(prebuilt) / library_name(spec)
            try:
                check_prebuilt(spec, library, archs)
                return open_library(library), "prebuilt", library
            except BuildError as error:
                warn_once(f"prebuilt module not used: {error}")
        build_first = prefers_build()
        carried = None if build_first else self._from_wheel(spec, archs)
        if carried is not None:
            return carried
        try:
            return self._load_or_build(for_this_machine(spec), archs)
        except BuildError as error:
            carried = self._from_wheel(spec, archs) if build_first else None
            if carried is None:
                raise
            warn_once(f"{spec.key} is the wheel's, not one built for this machine: {error}")
            return carried

    def _from_wheel(self, spec: ModuleSpec, archs: Sequence[str]) -> tuple[tvm_ffi.Module, str, Path] | None:
        """Load the module that came with the package; None where none did, or it does not fit, which is logged."""
        library = wheel_library(spec, self._wheel)
        if library is None:
            return None
        try:
            check_prebuilt(spec, library, archs)
            return open_library(library), "wheel", library
        except BuildError as error:
            warn_once(f"the module in the wheel is not used: {error}")
            return None

    def _load_or_build(self, spec: ModuleSpec, archs: Sequence[str]) -> tuple[tvm_ffi.Module, str, Path]:
        cache = cache_directory() if self._cache is None else self._cache
        caches = [cache, *(directory for directory in (boot_directory(),) if directory not in (None, cache))]
        compiler = find_compiler(spec.device_type, memory=cache)
        check_driver(compiler.toolkit_major, compiler.path)
        key = build_key(spec, compiler, archs)
        for directory in caches:
            entry = directory / key
            with contextlib.ExitStack() as stack:
                try:
                    if kept_record(spec, entry) is None:
                        stack.enter_context(build_lock(directory / f"{key}.lock"))
                        clear_remains(entry)
                    record = kept_record(spec, entry)
                except OSError as error:
                    warn_once(
                        f"compiled modules cannot be kept in {directory}: {error}; name a directory of yours that can "
                        f"be written with {CACHE_VARIABLE}, or they are built again, at the latest with the next boot"
                    )
                    continue
                if record is not None:
                    try:
                        return open_library(entry / library_name(spec)), "cache", entry / library_name(spec)
                    except BuildError as error:
                        logger.warning("building %s again: %s", spec.key, error)
                return self._build(spec, compiler, archs, entry)
        return self._build(spec, compiler, archs, None)

    def _build(
        self, spec: ModuleSpec, compiler: Compiler, archs: Sequence[str], entry: Path | None
    ) -> tuple[tvm_ffi.Module, str, Path]:
        with contextlib.ExitStack() as stack:
            try:
                scratch = stack.enter_context(scratch_directory())
            except OSError as error:
                raise BuildError(f"no temporary directory to build {spec.key} in: {error}") from error
            library = compile_module(spec, compiler, archs, scratch)
            if entry is not None:
                try:
                    keep(library, entry)
                    library = entry / library.name
                except OSError as error:
                    logger.warning("the build of %s cannot be kept in %s: %s", spec.key, entry.parent, error)
            # A loaded library stays mapped after its file has gone with the temporary directory.
            return open_library(library), "built", library


def prefers_build() -> bool:
    """Whether the environment asks for modules built for this machine before those that the wheel carries."""
    return os.environ.get(BUILD_VARIABLE, "0") not in ("", "0")


def wheel_library(spec: ModuleSpec, modules: Path | None = WHEEL_MODULES) -> Path | None:
    """Path of a module that came with the package, whole or not; None where none did."""
    library = None if modules is None else modules / library_name(spec)
    return library if library is not None and (library.exists() or record_path(library).exists()) else None


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning that this process has not logged yet."""
    logger.warning("%s", message)


def kept_record(spec: ModuleSpec, entry: Path) -> BuildRecord | None:
    """Record of the module that a directory of builds has under ``entry``; None where it has none that is whole.

    Raises
    ------
    UntrustedPathError
        Where another user may have written it.
    """
    try:
        os.close(open_directory(entry.parent))
    except UntrustedPathError:
        raise
    except OSError:
        return None
    return read_record(entry / library_name(spec))


def open_library(library: Path) -> tvm_ffi.Module:
    """Load a library that only this user and root can have written.

    Raises
    ------
    BuildError
        Where it does not load, or another user may have written it.
    """
    try:
        packaged = packaged_library(library)
        if packaged is not None:
            return tvm_ffi.load_module(str(packaged))
        # Through the directory that was checked, whatever its path leads to by now. Its descriptor stays open: the
        # dynamic linker takes two libraries of one path for one, so the number must not come to mean another directory.
        directory = open_directory(library.parent)
        try:
            os.close(open_file(library, directory=directory))
            return tvm_ffi.load_module(f"/proc/self/fd/{directory}/{library.name}")
        except BaseException:
            os.close(directory)
            raise
    except Exception as error:
        raise BuildError(f"{library} does not load: {error}") from error


def check_prebuilt(spec: ModuleSpec, library: Path, archs: Sequence[str]) -> None:
    """Check that a prebuilt library is of these sources and runs on ``archs``.

    Raises
    ------
    BuildError
        Saying what does not match.
    """
    try:
        record = read_record(library)
    except UntrustedPathError as error:
        raise BuildError(str(error)) from error
    if record is None:
        raise BuildError(f"{library} or its record is missing or damaged")
    if record.source_key != spec.source_key():
        raise BuildError(f"{library} was built from other sources ({record.source_key}, here {spec.source_key()})")
    if _series(record.tvm_ffi_version) != _series(tvm_ffi.__version__):
        raise BuildError(f"{library} was built with tvm-ffi {record.tvm_ffi_version}, here {tvm_ffi.__version__}")
    if not covers(spec.device_type, record.archs, archs):
        raise BuildError(f"{library} has code for {', '.join(record.archs)}, here {', '.join(archs)}")
    check_driver(record.toolkit_major, str(library))


def _series(version: str) -> list[str]:
    return version.split(".")[:2]


def check_driver(toolkit_major: int | None, subject: str) -> None:
    """Check that the driver here, if any, runs what a CUDA toolkit of this major version builds.

    Parameters
    ----------
    toolkit_major
        Major version of the toolkit; None where the code is not CUDA's.
    subject
        Path of the library or the compiler, for the message.

    Raises
    ------
    BuildError
        Where the toolkit is newer than the driver.
    """
    if toolkit_major is None:
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 and 0 < version.value // 1000 < toolkit_major:
        needed = f", which needs driver {MIN_DRIVERS[toolkit_major]}" if toolkit_major in MIN_DRIVERS else ""
        supported = f"{version.value // 1000}.{version.value % 1000 // 10}"  # 12090 is CUDA 12.9
        raise BuildError(
            f"{subject} is of CUDA {toolkit_major}{needed}; the driver here supports CUDA {supported}: "
            "install a newer driver, or name an older toolkit with CUDA_HOME"
        )


LOADER = ModuleLoader()
"""Loader of the package's own modules, one a process."""


def load_module(name: str, device_type: str) -> tvm_ffi.Module | None:
    """Compiled module, built on first use; None where it cannot be had (:func:`unavailable_reason` says why).

    Parameters
    ----------
    name
        ``"main"``, ``"staged"`` or ``"files"``.
    device_type
        ``"cpu"``, ``"cuda"`` or ``"rocm"``, for ``"files"`` only the first; see
        :func:`hicache_kernels.spec.module_device_type`.
    """
    return LOADER.outcome(name, device_type).module


def unavailable_reason(name: str, device_type: str) -> str | None:
    """Why :func:`load_module` gives None, in one sentence; None where it gives a module."""
    return LOADER.outcome(name, device_type).reason


def load_outcome(name: str, device_type: str) -> LoadOutcome:
    """Everything known about the attempt to load a module; makes it if there was none."""
    return LOADER.outcome(name, device_type)


def load_outcome_so_far(name: str, device_type: str) -> LoadOutcome | None:
    """Everything known about the attempt to load a module, or None while it goes on; starts it, and never waits."""
    return LOADER.outcome_so_far(name, device_type)
