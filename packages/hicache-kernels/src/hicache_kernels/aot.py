"""Builds modules ahead of time into a directory that ``HICACHE_KERNELS_PREBUILT`` then names."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from .compilers import BuildError, find_compiler
from .scratch import scratch_directory
from .spec import ModuleSpec, module_specs


@dataclass(frozen=True)
class AotResult:
    """Outcome of one build.

    Attributes
    ----------
    key
        Of the spec: ``main-cuda``.
    archs
        Architectures asked for.
    library
        Where it lies, None where it failed.
    error
        Why it failed, None where it did not.
    seconds
        What it took.
    """

    key: str
    archs: tuple[str, ...]
    library: Path | None
    error: str | None
    seconds: float


def group_archs(archs: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Sort architectures by device type: ``sm_*`` is cuda, ``gfx*`` rocm, ``cpu`` this machine.

    Raises
    ------
    ValueError
        Where the list is empty or holds an unknown name.
    """
    groups: dict[str, set[str]] = {}
    for arch in archs:
        if re.fullmatch(r"sm_\d+[a-z]?", arch):
            groups.setdefault("cuda", set()).add(arch)
        elif re.fullmatch(r"gfx[0-9a-f]+", arch):
            groups.setdefault("rocm", set()).add(arch)
        elif arch == "cpu":
            groups.setdefault("cpu", set()).add(platform.machine())
        else:
            raise ValueError(f"arch is {arch!r}; it must be 'cpu', or look like 'sm_90' or 'gfx90a'")
    if not groups:
        raise ValueError("arch is empty; it must name at least one architecture")
    return {device_type: tuple(sorted(names)) for device_type, names in sorted(groups.items())}


def build_aot(
    archs: Sequence[str], out: Path, *, specs: Sequence[ModuleSpec] | None = None, jobs: int | None = None
) -> Iterator[AotResult]:
    """Build every module for the given architectures, yielding each outcome as it comes.

    Parameters
    ----------
    archs
        Such as ``["cpu", "sm_90", "gfx90a"]``; those of one device type go into one library.
    out
        Directory of the libraries; made if missing. A library that is there is replaced only by a finished one.
    specs
        Modules to build; the package's own by default.
    jobs
        Builds at a time; the number of processors by default.

    Raises
    ------
    ValueError
        Where an architecture is unknown.
    OSError
        Where ``out`` cannot be made or written.
    """
    groups = group_archs(archs)
    if not out.is_dir():
        out.mkdir(parents=True, exist_ok=True)
        out.chmod(0o755)  # a module is loaded only from a directory that no other user can write
    chosen = [spec for spec in (module_specs() if specs is None else specs) if spec.device_type in groups]
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        pending = [pool.submit(_build_one, spec, groups[spec.device_type], out) for spec in chosen]
        for future in as_completed(pending):
            yield future.result()


def _build_one(spec: ModuleSpec, archs: tuple[str, ...], out: Path) -> AotResult:
    from .build import compile_module, record_path  # with torch, which is not needed to see that an argument is wrong

    start = time.perf_counter()
    try:
        with scratch_directory(out, f".{spec.key}.") as scratch:
            built = compile_module(spec, find_compiler(spec.device_type), archs, scratch)
            library = out / built.name
            # A library counts only with its record, so no moment exists in which old and new are taken for a pair.
            with contextlib.suppress(FileNotFoundError):
                record_path(library).unlink()
            os.replace(built, library)
            os.replace(record_path(built), record_path(library))
    except (BuildError, FileNotFoundError) as error:
        return AotResult(spec.key, archs, None, str(error), time.perf_counter() - start)
    return AotResult(spec.key, archs, library, None, time.perf_counter() - start)
