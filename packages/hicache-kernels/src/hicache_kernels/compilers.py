"""Finds the compiler of a device type and says what it is, without starting it when the answer is known already."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .trusted_files import make_directory, open_directory, read_text

_COMPILER_NAMES = {"cpu": "g++", "cuda": "nvcc", "rocm": "hipcc"}
_HOME_VARIABLES = {"cpu": (), "cuda": ("CUDA_HOME", "CUDA_PATH"), "rocm": ("ROCM_HOME", "ROCM_PATH")}
_WATCHED = """
exec 3<&0 </dev/null
(
  trap '' TERM
  read -r line <&3
  kill -TERM 0
  [ -z "$0" ] || rm -rf -- "$0"
  kill -KILL 0
) >/dev/null 2>&1 &
watcher=$!
exec 3<&-
"$@"
code=$?
kill -KILL $watcher
exit $code
"""
"""Runs a command in a process group of its own, which is killed once the other end of stdin is closed: at the latest
when this process ends, also where it is killed and can do nothing itself."""
_alive: set[int] = set()
"""Those other ends. A forked process closes its copies, or a compiler would outlive the process that started it."""
_starting = threading.RLock()  # guards the start of a compiler against a fork, whose child would keep its pipes open
_DEFAULT_HOMES = {"cpu": (), "cuda": ("/usr/local/cuda",), "rocm": ("/opt/rocm",)}


class BuildError(Exception):
    """A module cannot be had; the message is the one sentence that users see."""


@dataclass(frozen=True)
class Compiler:
    """A compiler that exists.

    Attributes
    ----------
    path
        The executable as found; it may be a wrapper script.
    real_path
        The executable that it starts; the same where it is none or unknown.
    version
        What ``--version`` prints.
    """

    path: str
    real_path: str
    version: str

    @property
    def toolkit_major(self) -> int | None:
        """Major version of the CUDA toolkit, None for other compilers."""
        found = re.search(r"release (\d+)\.", self.version)
        return int(found.group(1)) if found else None

    @property
    def summary(self) -> str:
        """Version on one line."""
        lines = self.version.splitlines() or ["unknown version"]
        return next((line for line in lines if "release" in line), lines[0])

    @property
    def identity(self) -> str:
        """What a build depends on of the compiler."""
        return f"{self.real_path}\n{self.version}"


def compiler_name(device_type: str) -> str:
    """Name of the compiler for ``device_type``, as messages use it."""
    return _COMPILER_NAMES[device_type]


def find_compiler_path(device_type: str) -> str:
    """Path of the compiler: the environment's choice, then PATH, then the usual place.

    ``CXX`` names the C++ compiler; ``CUDA_HOME`` or ``CUDA_PATH`` and ``ROCM_HOME`` or ``ROCM_PATH`` the toolkits.

    Raises
    ------
    BuildError
        Where there is none.
    """
    name = compiler_name(device_type)
    homes = [os.environ.get(variable) for variable in _HOME_VARIABLES[device_type]]
    candidates = [str(Path(home) / "bin" / name) for home in homes if home]
    if device_type == "cpu":
        candidates += [value for value in (os.environ.get("CXX"),) if value]
    candidates.append(name)
    if device_type == "cpu":
        candidates.append("c++")
    candidates += [str(Path(home) / "bin" / name) for home in _DEFAULT_HOMES[device_type]]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found is not None:
            return found
    looked = [*_HOME_VARIABLES[device_type], *(("CXX",) if device_type == "cpu" else ()), "PATH"]
    raise BuildError(f"no {name} found (looked at {', '.join(looked)})")


def run_compiler(
    device_type: str, arguments: Sequence[str], scratch: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a compiler to its end, with output and errors as text; the one place that starts one.

    Parameters
    ----------
    device_type, arguments
        Whose compiler it is, and the command.
    scratch
        Directory for its temporary files. Where this process ends first, however that happens, the compiler and every
        process it started are killed, and the directory is removed.
    """
    environment = {**os.environ, "LC_ALL": "C"}  # the errors are picked out by their English words
    if device_type == "rocm":
        environment["HIP_PLATFORM"] = "amd"
    if scratch is not None:
        environment["TMPDIR"] = str(scratch)
    with _starting:
        watched, alive = os.pipe()
        _alive.add(alive)
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHED, str(scratch or ""), *arguments],
                stdin=watched,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except BaseException:
            _close(alive)
            raise
        finally:
            os.close(watched)
    with process:
        try:
            output, errors = process.communicate()
        finally:
            _close(alive)
    return subprocess.CompletedProcess(list(arguments), process.returncode, output, errors)


def _close(alive: int) -> None:
    _alive.discard(alive)
    os.close(alive)


def _close_all_after_fork() -> None:
    while _alive:
        os.close(_alive.pop())
    _starting.release()


os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_close_all_after_fork)


def _stamp(path: str) -> list[int]:
    status = os.stat(path)
    return [status.st_mtime_ns, status.st_size]


def _ask(device_type: str, path: str) -> Compiler:
    result = run_compiler(device_type, [path, "--version"])
    if result.returncode != 0:
        raise BuildError(f"{path} --version failed: {' '.join((result.stderr + result.stdout).split())[:300]}")
    real_path = os.path.realpath(path)
    if device_type == "cuda":
        # A wrapper on PATH keeps its time stamp when the toolkit it starts is replaced; nvcc itself knows where it is.
        dry_run = run_compiler(device_type, [path, "--dryrun", "-x", "cu", "-c", os.devnull])
        top = re.search(r"^#\$ TOP=(.+)$", dry_run.stdout + dry_run.stderr, re.MULTILINE)
        if top:
            nvcc = os.path.realpath(Path(top.group(1).strip()) / "bin" / "nvcc")
            real_path = nvcc if os.path.isfile(nvcc) else real_path
    return Compiler(path, real_path, result.stdout.strip())


def find_compiler(device_type: str, memory: Path | None = None) -> Compiler:
    """Compiler of a device type.

    Parameters
    ----------
    device_type
        ``"cpu"``, ``"cuda"`` or ``"rocm"``.
    memory
        Directory in which the answer is kept, valid while path, time and size of the executables stay the same.

    Raises
    ------
    BuildError
        Where there is none, or it does not run.
    """
    path = find_compiler_path(device_type)
    record_path = None if memory is None else memory / f"compiler-{compiler_name(device_type).replace('+', 'x')}.json"
    if record_path is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(read_text(record_path))
            known = Compiler(record["path"], record["real_path"], record["version"])
            if known.path == path and record["stamps"] == [_stamp(known.path), _stamp(known.real_path)]:
                return known
    try:
        compiler = _ask(device_type, path)
        stamps = [_stamp(compiler.path), _stamp(compiler.real_path)]
    except OSError as error:
        raise BuildError(f"{path} does not run: {error}") from error
    if record_path is not None:
        record = {"path": path, "real_path": compiler.real_path, "version": compiler.version, "stamps": stamps}
        with contextlib.suppress(OSError):
            write_atomically(record_path, json.dumps(record).encode())
    return compiler


def write_atomically(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``, with mode 0600, so that no reader ever sees half of it.

    Raises
    ------
    OSError
        Where the directory is not writable, or is so for other users too, or the disk is full; nothing is left.
    """
    make_directory(path.parent)
    os.close(open_directory(path.parent))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o600)
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
