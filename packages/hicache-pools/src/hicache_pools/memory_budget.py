"""How much host memory a pool may take: what the machine and its control groups have left, less a reserve."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hicache_kernels.validation import whole

_GIB = 1 << 30
_UNLIMITED = 1 << 60
"""Control groups of version 1 write an absurd number where there is no limit."""


class HostMemory(NamedTuple):
    """Host memory as this process sees it.

    Attributes
    ----------
    total, free
        Bytes: all there is, and what can be had without swapping.
    limited_by
        ``"machine"``, or the directory of the control group that allows less.
    """

    total: int
    free: int
    limited_by: str


class HostMemoryBudgetError(MemoryError):
    """More host memory was asked for than the budget has.

    Attributes
    ----------
    asked, free, reserve
        Bytes.
    """

    def __init__(self, asked: int, memory: HostMemory, reserve: int) -> None:
        super().__init__(
            f"asked for {asked} bytes ({asked / _GIB:.2f} GiB) of host memory; {memory.free} bytes "
            f"({memory.free / _GIB:.2f} GiB) are free (limit: {memory.limited_by}), of which {reserve} bytes "
            f"({reserve / _GIB:.2f} GiB) are kept in reserve: at most {max(memory.free - reserve, 0)} are accepted"
        )
        self.asked = asked
        self.free = memory.free
        self.reserve = reserve


@dataclass(frozen=True)
class HostMemoryBudget:
    """A limit on host memory.

    Attributes
    ----------
    reserve_bytes
        What is left to everything else; None keeps 1/16 of all memory, at most 10 GiB.
    proc_root, cgroup_root
        Where procfs and the control groups are mounted.
    """

    reserve_bytes: int | None = None
    proc_root: str | os.PathLike[str] = "/proc"
    cgroup_root: str | os.PathLike[str] = "/sys/fs/cgroup"

    def __post_init__(self) -> None:
        if self.reserve_bytes is not None:
            whole("reserve_bytes", self.reserve_bytes, least=0)

    def memory(self) -> HostMemory:
        """Read what there is now."""
        return host_memory(proc_root=self.proc_root, cgroup_root=self.cgroup_root)

    def check(self, nbytes: int) -> HostMemory:
        """Raise :class:`HostMemoryBudgetError` where ``nbytes`` is more than the free memory less the reserve."""
        nbytes = whole("nbytes", nbytes, least=0)
        memory = self.memory()
        reserve = min(memory.total // 16, 10 * _GIB) if self.reserve_bytes is None else self.reserve_bytes
        if nbytes > memory.free - reserve:
            raise HostMemoryBudgetError(nbytes, memory, reserve)
        return memory


def host_memory(
    *, proc_root: str | os.PathLike[str] = "/proc", cgroup_root: str | os.PathLike[str] = "/sys/fs/cgroup"
) -> HostMemory:
    """Read the machine's MemAvailable and the limits of the process's control groups, version 1 and 2.

    A group's page cache counts as free, as the kernel gives it up first.
    """
    fields = _numbers(Path(proc_root) / "meminfo")
    if "MemTotal" not in fields or "MemAvailable" not in fields:
        raise OSError(f"{Path(proc_root) / 'meminfo'} has no MemTotal or no MemAvailable")
    best = HostMemory(fields["MemTotal"] * 1024, fields["MemAvailable"] * 1024, "machine")
    for directory, version in _groups(Path(proc_root), Path(cgroup_root)):
        limit = _number(directory / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        used = _number(directory / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        statistics = _numbers(directory / "memory.stat")
        cache = statistics.get("inactive_file" if version == 2 else "total_inactive_file", 0)
        free = max(limit - max(used - cache, 0), 0)
        best = HostMemory(
            min(best.total, limit), min(best.free, free), str(directory) if free < best.free else best.limited_by
        )
    return best


def _groups(proc_root: Path, cgroup_root: Path) -> Iterator[tuple[Path, int]]:
    """Memory control groups of this process, from its own up to the root: any of them may be the tightest."""
    try:
        lines = (proc_root / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            # In a mixed system the version 2 tree has a directory of its own.
            unified = cgroup_root / "unified"
            root, version = (unified if unified.is_dir() else cgroup_root), 2
        elif "memory" in controllers.split(","):
            root, version = cgroup_root / "memory", 1
        else:
            continue
        # A container sees its own group as the root, while the path may name the host's: then only the root is there.
        group = root if ".." in path.split("/") else root / path.lstrip("/")
        while group != root:
            if group.is_dir():
                yield group, version
            group = group.parent
        yield root, version


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _numbers(file: Path) -> dict[str, int]:
    """Read lines of ``name number`` or ``name: number kB``."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}
