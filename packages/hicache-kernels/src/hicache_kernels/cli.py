"""Command line of the kernels: build modules ahead of time, see what is there, and measure it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from .aot import build_aot, group_archs
from .bench_command import bench
from .command_line import (
    FAILED,
    CommandError,
    CommandGroup,
    check_device,
    errors,
    find_device,
    first_line,
    output,
    show,
    unwritable,
)
from .spec import MODULE_NAMES, module_specs

if TYPE_CHECKING:
    from .info import KernelsInfo, PlannerState

app = typer.Typer(
    name="hicache-kernels",
    cls=CommandGroup,
    help="Compiled modules that move KV cache pages: build them, see what is there, and measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(bench)


@app.command()
def build(
    arch: Annotated[
        str, typer.Option(help="Architectures, separated by commas: cpu, sm_NN (CUDA), gfxNNN (ROCm).")
    ] = "cpu,sm_80,sm_90,sm_100,sm_120",
    out: Annotated[Path, typer.Option(help="Directory of the libraries.")] = Path("prebuilt"),
    module: Annotated[list[str] | None, typer.Option(help="Only this module; may be repeated.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Builds at a time; by default one a processor.")] = None,
) -> None:
    """Build modules ahead of time, one library a module and device type."""
    wanted = module or list(MODULE_NAMES)
    archs = [name.strip() for name in arch.split(",") if name.strip()]
    specs = [spec for spec in module_specs() if spec.name in wanted]
    try:
        groups = group_archs(archs)
        if unknown := sorted(set(wanted) - set(MODULE_NAMES)):
            raise ValueError(f"module is {unknown[0]!r}; it must be one of {', '.join(MODULE_NAMES)}")
        if not any(spec.device_type in groups for spec in specs):
            raise ValueError(
                f"arch is {arch!r}; it must name one that {' or '.join(wanted)} is built for, such as 'cpu'"
            )
    except ValueError as error:
        raise CommandError(str(error)) from None
    table = Table("module", "architectures", "seconds", "KiB", Column("library", overflow="fold"))
    failures = []
    try:
        with errors.status("building"):
            for result in build_aot(archs, out, specs=specs, jobs=jobs):
                if result.library is None:
                    failures.append(f"{result.key}: {result.error}")
                    continue
                size = f"{result.library.stat().st_size / 1024:.0f}"
                row = (result.key, " ".join(result.archs), f"{result.seconds:.1f}", size, str(result.library))
                table.add_row(*row)
    except OSError as error:
        raise unwritable("--out", out, error) from None
    if table.row_count:
        from .probe import PREBUILT_VARIABLE

        show(table)
        output.print(f"Use them with {PREBUILT_VARIABLE}={out.resolve()}", soft_wrap=True)
    for failure in failures:
        errors.print(f"error: {failure}")
    if failures:
        raise typer.Exit(FAILED)


@app.command()
def info(
    load: Annotated[bool, typer.Option("--load", help="Load every module, building what is missing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show versions, compilers, the build cache, and for each module what loading it would do (or did) and why."""
    from .info import kernels_info

    found = kernels_info(load=load)
    if as_json:
        output.print_json(json.dumps(dataclasses.asdict(found), default=str))
        return
    show_info(found, output)


def show_info(found: KernelsInfo, to: Console) -> None:
    """Print the tables of ``hicache-kernels info``."""
    from .probe import PREBUILT_VARIABLE

    general = Table("what", Column("value", overflow="fold"), title="installation")
    for name, version in found.versions.items():
        general.add_row(name, version)
    general.add_row("devices", ", ".join(found.devices) or "none")
    cache = found.cache
    state = "" if cache.writable else ", not writable"
    general.add_row("build cache", f"{cache.path} ({cache.setting}{state})")
    general.add_row("builds kept", f"{cache.builds}, {cache.bytes / 2**20:.1f} MiB")
    general.add_row("prebuilt", found.prebuilt or f"none ({PREBUILT_VARIABLE} is not set)")
    to.print(general)
    compilers = Table("device type", "compiler", Column("version or reason", overflow="fold"), title="compilers")
    for compiler in found.compilers:
        compilers.add_row(compiler.device_type, compiler.path or f"no {compiler.name}", compiler.detail)
    to.print(compilers)
    modules = Table("module", "device type", "state", Column("library or reason", overflow="fold"), title="modules")
    for module in found.modules:
        detail = "\n".join(part for part in (module.detail, module.note) if part)
        modules.add_row(module.name, module.device_type, module.state, detail)
    to.print(modules)
    for planner in found.planners:
        show_planner(planner, to)


def show_planner(planner: PlannerState, to: Console) -> None:
    """Print what the planner goes by on a device."""
    to.print(f"{planner.device}: the planner uses constants {planner.constants}", soft_wrap=True)
    losses = Table(
        "transfer",
        Column("prefill", justify="right"),
        Column("decode", justify="right"),
        title=f"share of its time that a model loses meanwhile, {planner.losses}",
    )
    for mover, prefill, decode in planner.shares:
        losses.add_row(mover, f"{prefill:.1%}", f"{decode:.1%}")
    to.print(losses)


@app.command()
def calibrate(
    device: Annotated[str | None, typer.Option(help="Device to measure; the GPU if there is one.")] = None,
) -> None:
    """Measure what the planner goes by, with what a model loses next to transfers, and keep it.

    Takes some seconds; nothing else may use the device meanwhile.
    """
    check_device(device)
    where = find_device(device)
    from .calibrate import calibrate as measure_all
    from .info import planner_state

    try:
        constants = measure_all(where)
    except ValueError as error:
        raise CommandError(str(error)) from None
    except RuntimeError as error:
        raise CommandError(f"calibrating {where} failed: {first_line(error)}", FAILED) from None
    show_planner(planner_state(str(where), constants), output)
