"""Show what this machine can do: versions, devices, and the path each transfer of a pool would take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from importlib import metadata

from rich.console import Console
from rich.table import Column, Table

from hicache_kernels import Direction, HostLayout
from hicache_kernels.cli import show_info
from hicache_kernels.info import kernels_info
from hicache_pools import HostPool

from .replay import ReplayOptions
from .replay.model import sample_group
from .replay.plans import PoolPlan

_OPERATION_BYTES = 512 << 20


def show_information(console: Console, plans: Sequence[PoolPlan], options: ReplayOptions) -> None:
    """Print versions, devices, compilers and the build cache, and the path each transfer of a model's pools would take.

    Parameters
    ----------
    console
        Where to print.
    plans
        The model's pools.
    options
        What they were planned from.
    """
    rows: list[tuple[str, tuple[str, ...]]] = []
    for layout in HostLayout:
        group = sample_group(plans, options.page_size, options.device, layout)
        try:
            for entry in group.entries:
                # Neither an anchor without bytes nor states, which are never layer_first, have a row here.
                if entry.host_pool.page_bytes and entry.host_pool.layout == layout:
                    rows += [(str(entry.name), (layout.value, *row)) for row in _paths(entry.host_pool)]
        finally:
            group.destroy()
    title = (
        f"{options.pool} pool on {options.device}: {options.layers} layers, rows of {options.row_bytes} bytes, "
        f"pages of {options.page_size} tokens"
    )
    several = len({name for name, _ in rows}) > 1
    columns = ("layout", "transfer", "host pages", "path", Column("why", overflow="fold"))
    table = Table(*(("pool", *columns) if several else columns), title=title)
    for name, row in rows:
        table.add_row(*((name, *row) if several else row))
    found = kernels_info()
    ours = {name: metadata.version(name) for name in ("hicache-controller", "hicache-pools")}
    show_info(dataclasses.replace(found, versions=ours | found.versions), console)
    console.print(table)


def _paths(pool: HostPool) -> Iterator[tuple[str, str, str, str]]:
    """Path and reason of each kind of operation of half a GiB."""
    pages = max(1, _OPERATION_BYTES // pool.page_bytes)
    for transfer, direction in (("write-back", Direction.WRITE_BACK), ("load-back", Direction.LOAD)):
        for shape, runs in (("one run", 1), ("scattered", pages)):
            plan = pool.transfer.plan(direction, pages=pages, runs=runs)
            yield transfer, shape, plan.path, plan.reason
