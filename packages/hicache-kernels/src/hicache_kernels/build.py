"""Turns a spec into a shared library: command, architectures, and the directory of builds that processes share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tvm_ffi
from tvm_ffi.libinfo import find_dlpack_include_path, find_include_path, find_libtvm_ffi

from .compilers import BuildError, Compiler, run_compiler
from .spec import CSRC, ModuleSpec
from .trusted_files import UntrustedPathError, make_directory, open_directory, open_file, read_text

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "HICACHE_KERNELS_CACHE"
PACKAGE = CSRC.parent
_ERROR_LINES = 3


@dataclass(frozen=True)
class BuildRecord:
    """What a library was built from; lies next to it as JSON.

    Attributes
    ----------
    name, device_type
        The spec's.
    source_key
        :meth:`ModuleSpec.source_key` of the sources it was built from.
    archs
        Architectures inside: ``sm_90``, ``gfx90a``, or the machine's name for cpu.
    tvm_ffi_version
        Version of the headers it was built with.
    compiler
        Path and version of the compiler.
    toolkit_major
        Major version of the CUDA toolkit, None for other device types.
    bytes
        Size of the library: another size on disk means that it was cut off.
    """

    name: str
    device_type: str
    source_key: str
    archs: tuple[str, ...]
    tvm_ffi_version: str
    compiler: str
    toolkit_major: int | None
    bytes: int


def cache_directory() -> Path:
    """Directory of builds: ``HICACHE_KERNELS_CACHE``, else ``hicache-kernels`` in the user's cache directory."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path("~/.cache").expanduser()) / "hicache-kernels"
    except RuntimeError:
        # No home directory: a place where nothing can be kept.
        return Path(os.devnull) / "hicache-kernels"


def boot_directory() -> Path | None:
    """Directory of builds where the user's cannot be used: this user's in the temporary directory; None without one."""
    try:
        return Path(tempfile.gettempdir()) / f"hicache-kernels-{os.geteuid()}"
    except OSError:
        return None


def target_archs(device_type: str) -> tuple[str, ...]:
    """Architectures to build for on this machine: the environment's list, else those of the devices here.

    Returns
    -------
    tuple of str
        Sorted: ``("sm_90",)``, ``("gfx90a",)``, or the machine's name for cpu.

    Raises
    ------
    BuildError
        Where there is neither a list nor a device, or the list cannot be read.
    """
    if device_type == "cpu":
        return (platform.machine(),)
    variable = {"cuda": "TVM_FFI_CUDA_ARCH_LIST", "rocm": "TVM_FFI_ROCM_ARCH_LIST"}[device_type]
    listed = os.environ.get(variable, "").replace(";", " ").replace(",", " ").split()
    if listed:
        pattern, expected = (r"\d+\.\d[a-z]?", "8.0 9.0") if device_type == "cuda" else (r"gfx\w+", "gfx90a gfx942")
        for arch in listed:
            if not re.fullmatch(pattern, arch):
                raise BuildError(f"{variable} contains {arch!r}; it accepts a list like {expected!r}")
        return tuple(sorted({"sm_" + arch.replace(".", "") if device_type == "cuda" else arch for arch in listed}))
    is_rocm_torch = torch.version.hip is not None
    if is_rocm_torch != (device_type == "rocm") or not torch.cuda.is_available():
        raise BuildError(f"no {device_type} device here, and {variable} does not name an architecture")
    devices = range(torch.cuda.device_count())
    if device_type == "rocm":
        return tuple(sorted({torch.cuda.get_device_properties(d).gcnArchName.split(":")[0] for d in devices}))
    return tuple(sorted({"sm_{}{}".format(*torch.cuda.get_device_capability(d)) for d in devices}))


def _arch_number(arch: str) -> tuple[int, str]:
    found = re.fullmatch(r"sm_(\d+)([a-z]?)", arch)
    if found is None:
        raise BuildError(f"architecture {arch!r} is not known; a CUDA one looks like 'sm_90'")
    return int(found.group(1)), found.group(2)


def arch_flags(device_type: str, archs: Sequence[str]) -> list[str]:
    """Return the flags that emit code for ``archs``, and on CUDA also portable code of the newest one."""
    if device_type == "cpu":
        return []
    if device_type == "rocm":
        return [f"--offload-arch={arch}" for arch in archs]
    ordered = sorted(archs, key=_arch_number)
    flags = [f"-gencode=arch=compute_{arch[3:]},code=sm_{arch[3:]}" for arch in ordered]
    newest = ordered[-1][3:]
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def covers(device_type: str, built: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a library with code for ``built`` runs on every architecture of ``wanted``."""
    if device_type != "cuda":
        return set(wanted) <= set(built)
    numbers = [_arch_number(arch) for arch in built]
    newest = max(numbers)

    def runs(arch: str) -> bool:
        number, suffix = _arch_number(arch)
        if (number, suffix) in numbers:
            return True
        # Machine code runs on later minor versions of its major version; the portable code of the newest on all later
        # devices. Code for a suffixed architecture (sm_90a) runs on that one only.
        same_major = any(b // 10 == number // 10 and b <= number and not s for b, s in numbers)
        return same_major or (not newest[1] and newest[0] <= number)

    return all(runs(arch) for arch in wanted)


def include_flags(spec: ModuleSpec) -> list[str]:
    """Include paths: the project's own, and as system headers, whose warnings are not ours, tvm-ffi's and dlpack's."""
    ours = [f"-I{directory}" for directory in spec.include_dirs]
    theirs = dict.fromkeys([find_include_path(), find_dlpack_include_path()])
    return ours + [word for directory in theirs for word in ("-isystem", directory)]


def compile_commands(spec: ModuleSpec, compiler: Compiler, archs: Sequence[str], output: Path) -> list[list[str]]:
    """Commands that compile and link ``spec`` into the shared library ``output``; they may leave files next to it."""
    start = [compiler.path, *spec.flags, *arch_flags(spec.device_type, archs)]
    inputs = [*include_flags(spec), *map(str, spec.source_files)]
    link = ["-shared", f"-L{Path(find_libtvm_ffi()).parent}", "-ltvm_ffi", "-o", str(output)]
    if spec.device_type != "cuda" or len(archs) == 1:
        return [[*start, *inputs, *link]]
    # nvcc links once for each architecture, through one file for all: threads would read what is not written yet.
    compiled = str(output.with_suffix(".o"))
    return [[*start, "--threads=0", "-c", *inputs, "-o", compiled], [*start, compiled, *link]]


def first_errors(output: str) -> str:
    """Put the first errors on one line: the lines that say ``error``, or the last ones where none does."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b|undefined|no space left", line, re.IGNORECASE)]
    chosen = errors[:_ERROR_LINES] or lines[-_ERROR_LINES:]
    return " | ".join(line[:300] for line in chosen) or "it printed nothing"


def compile_module(spec: ModuleSpec, compiler: Compiler, archs: Sequence[str], directory: Path) -> Path:
    """Compile ``spec`` into ``directory``, which then holds the library and its record.

    The directory is made for this build alone: where this process ends before the compiler does, it is removed.

    Returns
    -------
    Path
        The library.

    Raises
    ------
    BuildError
        With the compiler's first errors, or the reason why it does not run.
    """
    library = directory / library_name(spec)
    try:
        source_key = spec.source_key()
        for command in compile_commands(spec, compiler, archs, library):
            result = run_compiler(spec.device_type, command, directory)
            if result.returncode != 0:
                break
        library.with_suffix(".o").unlink(missing_ok=True)
    except OSError as error:
        raise BuildError(f"{compiler.path} cannot build {spec.key}: {error}") from error
    if result.returncode != 0 or not library.is_file():
        printed = result.stderr + result.stdout
        logger.debug("output of the failed build of %s:\n%s", spec.key, printed)
        raise BuildError(f"{compiler.path} exited with {result.returncode} on {spec.key}: {first_errors(printed)}")
    record = BuildRecord(
        name=spec.name,
        device_type=spec.device_type,
        source_key=source_key,
        archs=tuple(archs),
        tvm_ffi_version=tvm_ffi.__version__,
        compiler=f"{compiler.real_path}: {compiler.summary}",
        toolkit_major=compiler.toolkit_major,
        bytes=library.stat().st_size,
    )
    try:
        record_path(library).write_text(json.dumps(asdict(record), indent=1))
        for path in (library, record_path(library)):
            path.chmod(0o644)
    except OSError as error:
        raise BuildError(f"cannot write {record_path(library)}: {error}") from error
    return library


def library_name(spec: ModuleSpec) -> str:
    """File name of a spec's library."""
    return f"{spec.key}.so"


def record_path(library: Path) -> Path:
    """Where the record of a library lies."""
    return library.with_suffix(".json")


def read_record(library: Path) -> BuildRecord | None:
    """Record of a library, or None where library or record are missing, cut off or not readable.

    Raises
    ------
    UntrustedPathError
        Where another user may have written the library, its record or their directory. Modules inside the installed
        package are trusted as its other files are.
    """
    try:
        packaged = packaged_library(library)
        if packaged is not None:
            text, size = record_path(packaged).read_text(), packaged.stat().st_size
        else:
            text, descriptor = read_text(record_path(library)), open_file(library)
            size = os.fstat(descriptor).st_size
            os.close(descriptor)
        fields = json.loads(text)
        record = BuildRecord(**{**fields, "archs": tuple(fields["archs"])})
        return record if size == record.bytes else None
    except UntrustedPathError:
        raise
    except (OSError, ValueError, TypeError, KeyError):
        return None


def packaged_library(library: Path) -> Path | None:
    """Path without links of a library inside the installed package; None for any other."""
    path = library.resolve()
    return path if path.is_relative_to(PACKAGE) else None


def build_key(spec: ModuleSpec, compiler: Compiler, archs: Sequence[str]) -> str:
    """Name of the build in the cache: changes with sources, flags, compiler, architectures and tvm-ffi's headers.

    Raises
    ------
    FileNotFoundError
        Where a source is missing.
    """
    parts = (spec.source_key(), compiler.identity, tuple(archs), tvm_ffi.__version__)
    return f"{spec.key}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


@contextlib.contextmanager
def build_lock(path: Path) -> Iterator[None]:
    """Hold the lock of one build; the kernel drops it with its holder, so a dead builder never blocks.

    Raises
    ------
    OSError
        Where the lock file cannot be made, or another user may have written it or its directory.
    """
    make_directory(path.parent)
    directory = open_directory(path.parent)
    try:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT, directory=directory)
    finally:
        os.close(directory)
    try:
        # A file system without locks costs at most a second build: renames are atomic on their own.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing is not enough: a process forked meanwhile has the file open too, and would wait for itself.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def keep(library: Path, entry: Path) -> None:
    """Move a finished build into the cache: ``entry`` appears with all its files or not at all.

    Raises
    ------
    OSError
        Where the cache is not writable or full; nothing is left.
    """
    make_directory(entry.parent)
    staging = Path(tempfile.mkdtemp(dir=entry.parent, prefix=f".{entry.name}."))
    try:
        os.chmod(staging, 0o700)
        for path in (library, record_path(library)):
            shutil.copy(path, staging / path.name)
            os.chmod(staging / path.name, 0o600)
        if entry.exists():
            shutil.rmtree(entry)
        os.rename(staging, entry)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def clear_remains(entry: Path) -> None:
    """Remove what killed builders of ``entry`` left; only for the holder of its lock."""
    with contextlib.suppress(OSError):
        for remains in entry.parent.glob(f".{entry.name}.*"):
            shutil.rmtree(remains, ignore_errors=True)
