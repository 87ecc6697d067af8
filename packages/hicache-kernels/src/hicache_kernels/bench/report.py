"""Runs the whole benchmark and holds what it found, as values that become JSON and come back from it."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any

import torch

from .. import calibrate
from ..constants import DeviceConstants
from ..layout import HostLayout
from ..probe import load_outcome
from ..spec import TRANSFER_MODULES, module_device_type
from ..staging import Direction, StagingRing
from ..validation import whole
from .builds import cold_build_seconds
from .cases import SHAPES, Case, Pattern, Shape, disturbing_cases, pool_of, small_cases
from .interference import Disturbance, Duplex, disturbances, measure_duplex
from .measure import Measurement, measure_case, plain_copy_samples
from .pool import BenchPool, Buffers

Progress = Callable[[str], None]

MAX_SLOWDOWN = 1.05
"""Plain copies around the cases of a pool, over all plain copies so far: with more, others use the machine."""
SMALL_REPEATS = 21
"""Measured repetitions of small operations, which take microseconds."""
MAX_ATTEMPTS = 3
"""Measurements of a pool while others do. The CPU, whose copies are never the same, has one."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """A case and what was measured."""

    case: Case
    measurement: Measurement


@dataclass
class Report:
    """Everything one run of the benchmark found.

    Attributes
    ----------
    environment
        Device, versions, time.
    plain_bytes_per_second
        By direction: a plain copy of the whole buffer.
    modules
        By name: where the compiled module came from, and the seconds that took.
    constants
        What the planner went by.
    cold_build_seconds
        Time to build both modules on :data:`~hicache_kernels.bench.builds.BUILD_CORES` cores; None where not measured.
    cases
        The bandwidth grid.
    full_staging
        A staged write-back with staging memory as large as the operation.
    small
        Operations of one page of 16 slots, on an idle device, of shapes that were planned before.
    disturbances, duplex
        Compute during transfers; both directions at once. Empty and None on the CPU.
    """

    environment: dict[str, str]
    plain_bytes_per_second: dict[str, float]
    modules: dict[str, dict[str, Any]]
    constants: DeviceConstants
    cold_build_seconds: float | None = None
    cases: list[CaseResult] = field(default_factory=list)
    full_staging: CaseResult | None = None
    small: list[CaseResult] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    duplex: Duplex | None = None

    def to_json(self) -> str:
        """Serialise the report."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read a report that :meth:`to_json` wrote."""
        fields = json.loads(text)
        fields["constants"] = calibrate.constants_from_fields(fields["constants"])
        fields["cases"] = [_case_result(entry) for entry in fields["cases"]]
        fields["small"] = [_case_result(entry) for entry in fields["small"]]
        if fields["full_staging"] is not None:
            fields["full_staging"] = _case_result(fields["full_staging"])
        fields["disturbances"] = [
            Disturbance(**{**entry, "case": _case(entry["case"])}) for entry in fields["disturbances"]
        ]
        if fields["duplex"] is not None:
            fields["duplex"] = Duplex(**fields["duplex"])
        return cls(**fields)


def _case_result(entry: dict[str, Any]) -> CaseResult:
    return CaseResult(_case(entry["case"]), Measurement(**entry["measurement"]))


def _case(fields: dict[str, Any]) -> Case:
    return Case(
        **{
            **fields,
            "shape": Shape(**fields["shape"]),
            "layout": HostLayout(fields["layout"]),
            "pattern": Pattern(fields["pattern"]),
            "direction": Direction(fields["direction"]),
        }
    )


def run_benchmark(
    cases: Iterable[Case],
    *,
    device: torch.device | str,
    size: int = 512 << 20,
    repeats: int = 5,
    constants: DeviceConstants | None = None,
    interference: bool = True,
    build: bool = False,
    progress: Progress = lambda _: None,
) -> Report:
    """Measure cases over buffers of ``size`` bytes, then everything else where the device is a GPU.

    Parameters
    ----------
    cases
        Consecutive cases of one pool share it.
    device
        A GPU, or the CPU, where everything is one memory and only the grid is measured.
    size
        Bytes of an operation.
    repeats
        Measured repetitions of each.
    constants
        What the planner goes by; calibrated where None.
    interference
        Measure graphs next to transfers too.
    build
        Build the modules anew too, and time it.
    progress
        Called with what is measured next.
    """
    for name, value in (("size", size), ("repeats", repeats)):
        whole(name, value)
    device = torch.device(device)
    constants = calibrate.device_constants(device) if constants is None else constants
    report = Report(_environment(device), {}, _modules(device), constants)
    if build:
        progress("building the modules")
        report.cold_build_seconds = cold_build_seconds(module_device_type(device))
    buffers = Buffers.allocate(size, device)
    # Copied between the cases too: the shares are of what the bus gave over the whole run, not in a moment of it.
    copies = {direction: plain_copy_samples(buffers, direction, repeats + 1) for direction in Direction}
    attempts = 1 if device.type == "cpu" else MAX_ATTEMPTS
    shapes: dict[Shape, None] = {}
    for (shape, page_size, layout, _), group in itertools.groupby(cases, pool_of):
        shapes[shape] = None
        progress(f"{shape.row_bytes} x {shape.layers}, pages of {page_size}, {layout.value}")
        report.cases += _measure_pool(list(group), buffers, constants, copies, repeats, attempts)
    plain = {direction: median(samples) for direction, samples in copies.items()}
    report.plain_bytes_per_second = {direction.value: size / seconds for direction, seconds in plain.items()}
    report.cases = [
        replace(
            result, measurement=result.measurement.held_against(report.plain_bytes_per_second[result.case.direction])
        )
        for result in report.cases
    ]
    progress("staging as large as the operation")
    report.full_staging = _full_staging(buffers, report, repeats)
    progress("small operations")
    report.small = _small_operations(shapes, buffers, report, repeats)
    if interference:
        progress("graphs next to transfers")
        report.disturbances = list(disturbances(buffers, plain, disturbing_cases(), repeats=repeats))
    del buffers
    if device.type != "cpu":
        progress("both directions at once")
        report.duplex = measure_duplex(Buffers.allocate(2 * size, device), repeats=repeats)
    return report


def _measure_pool(
    cases: list[Case],
    buffers: Buffers,
    constants: DeviceConstants,
    copies: dict[Direction, list[float]],
    repeats: int,
    attempts: int,
) -> list[CaseResult]:
    """Measure cases of one pool, again while plain copies before or after them are slower than usual.

    The last attempt counts, and the plain copies around it.
    """
    pool = BenchPool.build(cases[0], buffers, constants=constants)
    for left in reversed(range(attempts)):
        around = {direction: plain_copy_samples(buffers, direction, 2) for direction in Direction}
        results = [CaseResult(case, measure_case(case, pool, 1.0, repeats=repeats)) for case in cases]
        for direction, samples in around.items():
            samples += plain_copy_samples(buffers, direction, 2)
        if not left or not any(disturbed(around[way], copies[way] + around[way]) for way in Direction):
            break
    for direction, samples in around.items():
        copies[direction] += samples
    return results


def disturbed(samples: Sequence[float], usual: Sequence[float]) -> bool:
    """Whether copies before or after something took longer than usual: others use the bus, or the host's memory."""
    # Not the median: at first, those of a disturbed moment may be most of all there are.
    quarter = sorted(usual)[len(usual) // 4]
    return max(median(samples[:2]), median(samples[2:])) > MAX_SLOWDOWN * quarter


def _full_staging(buffers: Buffers, report: Report, repeats: int) -> CaseResult | None:
    case = Case(SHAPES[0], 16, HostLayout.PAGE_FIRST_DIRECT, Pattern.RUN, Direction.WRITE_BACK, "staged")
    if buffers.size < case.page_bytes:
        return None
    # Half of a ring belongs to each direction; a page more, because the last buffer is not full.
    ring = StagingRing(buffers.device, budget_bytes=2 * (buffers.size + (64 << 20)))
    pool = BenchPool.build(case, buffers, ring=ring)
    rate = report.plain_bytes_per_second[case.direction.value]
    return CaseResult(case, measure_case(case, pool, rate, repeats=repeats))


def _small_operations(shapes: Iterable[Shape], buffers: Buffers, report: Report, repeats: int) -> list[CaseResult]:
    """Measure operations of one page in pools of the engine shapes among those of the grid."""
    found = []
    for case in small_cases(shape for shape in shapes if shape in SHAPES):
        if case.page_bytes <= buffers.size:
            pool = BenchPool.build(case, buffers, constants=report.constants).one_page(case.page_size)
            rate = report.plain_bytes_per_second[case.direction.value]
            found.append(CaseResult(case, measure_case(case, pool, rate, repeats=max(repeats, SMALL_REPEATS))))
    return found


def _environment(device: torch.device) -> dict[str, str]:
    gpu = device.type != "cpu"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _modules(device: torch.device) -> dict[str, dict[str, Any]]:
    found = {}
    for name in TRANSFER_MODULES:
        outcome = load_outcome(name, module_device_type(device))
        found[name] = {"origin": outcome.origin, "seconds": outcome.seconds, "reason": outcome.reason}
    return found
