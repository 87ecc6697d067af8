"""Measures the planner's constants on a device, once, in under a second, and keeps them on disk.

What a model loses next to transfers takes seconds to measure, which no first transfer may wait for: :func:`calibrate`
does it, for those who ask, and until then the planner goes by an H200's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .build import build_lock, cache_directory
from .compilers import write_atomically
from .constants import CPU, H200, DeviceConstants, DirectionConstants, ModelLoss
from .layout import HostLayout, host_strides
from .losses import GraphTimes, with_losses, wrong_loss
from .plane import DeviceRows, HostRows, Plane
from .probe import warn_once
from .staging import Direction, StagingRing, canonical_device
from .transfer import PlaneTransfer, TransferResult
from .trusted_files import UntrustedPathError, read_text

logger = logging.getLogger(__name__)

FORMAT = 11
BUFFER_BYTES = 64 << 20
PAGE_BYTES = 32 << 10
ROW_BYTES = 512
DIRECT_ROW_BYTES = 1024
"""Rows of direct transfers: a CTA names so many a second that with shorter ones two do not fill the bus
(``direct_cost.py``), which the planner counts on top of the measured rates."""
LAYERS = 32
LOSS_ROW_BYTES, LOSS_LAYERS, LOSS_PAGE_SIZE = 2048, 16, 32
"""Rows next to which losses are measured: wide enough for all movers to be at their best."""
CTAS = (1, 2, 4, 8)
LAUNCHES = 16
REPEATS = 3
SPIN_CYCLES = 2_000_000
MAX_SPREAD = 1.2
"""Slowest over fastest of some equal copies: where they differ more, something else uses the device."""
ATTEMPTS = 2
BUSY_SECONDS = 60.0
"""For so long after measuring failed, other processes go by the defaults without an attempt of their own."""
MIN_DIRECT_SHARE = 0.4
MAX_DIRECT_SHARE = 1.5
"""Best rate of the main module, as a share of a plain copy's; 0.93 on an H200."""
MIN_WIDE_SHARE = 0.7
"""Share of the bandwidth that the widest 2-D copies reach; 0.98 on an H200."""
MAX_SECONDS = 200e-6
"""A launch, or one more copy; under 20 us on an H200."""
MIN_RELAYOUT = 1.5
"""Rate of the re-layout kernel over that of a plain copy; 20 on an H200."""

_known: dict[torch.device, DeviceConstants] = {}
_lock = threading.Lock()  # guards _known: threads of a process measure a device once, one at a time


def device_constants(device: torch.device | str) -> DeviceConstants:
    """Constants of a device: from this process, else from disk, else measured now and kept.

    Parameters
    ----------
    device
        Any device. For the CPU these are fixed figures. While a graph is captured on the current stream, nothing is
        measured, and the defaults are given.

    Returns
    -------
    DeviceConstants
        Never raises: where measuring fails, the defaults, with a warning in the log.
    """
    device = canonical_device(device)
    if device.type == "cpu":
        return CPU
    with _lock:
        known = _known.get(device)
        if known is not None:
            return known
        path = cache_path(device)
        constants = read_constants(path)
        if constants is None:
            if torch.cuda.is_current_stream_capturing():
                return H200
            constants = _measure_alone(device, path)
        _known[device] = constants
        return constants


def _measure_alone(device: torch.device, path: Path) -> DeviceConstants:
    """Measure while no other process does; the defaults where that fails, or failed a moment ago."""
    failed = path.with_suffix(".failed")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(build_lock(path.with_suffix(".lock")))
        constants = read_constants(path)
        if constants is not None:
            return constants
        with contextlib.suppress(OSError):
            if 0 <= time.time() - failed.stat().st_mtime < BUSY_SECONDS:
                logger.info("calibrating %s failed a moment ago, so the planner uses defaults", device)
                return H200
        try:
            constants = _measured(device)
        except RuntimeError as error:
            logger.warning("calibrating %s failed, so the planner uses defaults: %s", device, error)
            with contextlib.suppress(OSError):
                write_atomically(failed, str(error).encode())
            return H200
        write_constants(path, constants)
        return constants


def _measured(device: torch.device, *, losses: bool = False) -> DeviceConstants:
    """Measure, once more where that fails; RuntimeError where it does again."""
    reason = ""
    for _ in range(ATTEMPTS):
        try:
            constants = measure(device, losses=losses)
        except (RuntimeError, ValueError) as error:
            reason = str(error)
            continue
        reason = wrong_figure(constants) or ""
        if not reason:
            return constants
    raise RuntimeError(reason)


def calibrate(device: torch.device | str) -> DeviceConstants:
    """Measure everything anew, what a model loses next to transfers too, and keep it; takes some seconds.

    Later processes go by it, and in this one pools that have planned nothing yet.

    Parameters
    ----------
    device
        A GPU; nothing else may use it during the measurement.

    Raises
    ------
    ValueError
        For the CPU, whose constants are fixed.
    RuntimeError
        Where measuring fails, or the figures are not those of an idle device; nothing is kept then.
    """
    device = canonical_device(device)
    if device.type == "cpu":
        raise ValueError("device is cpu; it must be a GPU: the constants of the CPU are fixed")
    path = cache_path(device)
    with _lock, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(build_lock(path.with_suffix(".lock")))
        constants = _measured(device, losses=True)
        write_constants(path, constants)
        _known[device] = constants
    return constants


# ---- on disk


def cache_path(device: torch.device) -> Path:
    """File of a device's constants: its name and driver are in it, so another device or driver measures anew."""
    name = f"{torch.cuda.get_device_name(device)}-{_driver_version()}"
    return cache_directory() / "calibration" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}-{FORMAT}.json"


def _driver_version() -> str:
    for path in (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")):
        try:
            found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text())
        except OSError:
            continue
        if found:
            return found.group()
    return f"cuda{torch.version.cuda}-hip{torch.version.hip}"


def constants_from_fields(fields: dict[str, Any]) -> DeviceConstants:
    """Constants from what :func:`dataclasses.asdict` and JSON made of them.

    Raises
    ------
    TypeError, KeyError, ValueError
        Where a field is missing, unknown, or of another form.
    """

    def direction(name: str) -> DirectionConstants:
        tables = {
            table: tuple((int(key), float(value)) for key, value in fields[name][table])
            for table in ("width_efficiency", "direct_rates")
        }
        losses = {
            "staged_loss": ModelLoss(**fields[name]["staged_loss"]),
            "direct_losses": tuple((int(ctas), ModelLoss(**loss)) for ctas, loss in fields[name]["direct_losses"]),
        }
        return DirectionConstants(**{**fields[name], **tables, **losses})

    return DeviceConstants(**{**fields, "write_back": direction("write_back"), "load": direction("load")})


def read_constants(path: Path) -> DeviceConstants | None:
    """Constants kept in a file; None where it is missing, damaged, another user's, or makes no sense."""
    try:
        constants = constants_from_fields(json.loads(read_text(path)))
        return constants if wrong_figure(constants) is None else None
    except UntrustedPathError as error:
        warn_once(f"calibration is not used: {error}")
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_constants(path: Path, constants: DeviceConstants) -> None:
    """Keep constants in a file that appears complete or not at all; a failure is logged and otherwise ignored."""
    try:
        write_atomically(path, json.dumps(dataclasses.asdict(constants), indent=1).encode())
    except OSError as error:
        logger.info("calibration is not kept: %s", error)


# ---- measuring


def measure(device: torch.device | str, *, losses: bool = False) -> DeviceConstants:
    """Measure a GPU's constants through the compiled modules; other work on the device makes them worse.

    With ``losses``, what a model loses next to transfers is measured too, instead of an H200's.

    Raises
    ------
    RuntimeError
        Where a path cannot be measured (no compiled modules, no memory), or others use the device.
    """
    device = canonical_device(device)
    start = time.perf_counter()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        probe = _Probe(device)
        before = probe.copy_seconds()
        constants = DeviceConstants(
            source=f"measured on {torch.cuda.get_device_name(device)}",
            write_back=probe.direction(Direction.WRITE_BACK),
            load=probe.direction(Direction.LOAD),
            launch_seconds=probe.launch_seconds(),
            relayout_bytes_per_second=probe.relayout_bytes_per_second(),
        )
        after = probe.copy_seconds()
        if losses:
            constants = with_losses(constants, probe.graph_times().seconds, CTAS)
    if max(before, after) > MAX_SPREAD * min(before, after):
        raise RuntimeError(f"equal copies took {before * 1e3:.3f} ms and {after * 1e3:.3f} ms: others use {device}")
    logger.info("calibrated %s in %.2f s: %s", device, time.perf_counter() - start, constants)
    return constants


@dataclasses.dataclass(frozen=True, slots=True)
class _Timing:
    seconds: float
    submit: float
    bytes: int
    copies: int


class _Probe:
    """Two buffers, a staging ring, and the transfers that are timed over them.

    Work is queued after a kernel that spins, so that times are those of a busy device: what the caller's thread needs
    to queue an operation is hidden. What an operation of hardly any bytes takes is subtracted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
        self._rows = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._ring = StagingRing(device, budget_bytes=2 * BUFFER_BYTES)
        self._stream = torch.cuda.current_stream(device)

    def _transfer(self, row_bytes: int, layers: int, page_size: int = 1) -> PlaneTransfer:
        """Make a pool of one plane over both buffers."""
        slots = BUFFER_BYTES // (row_bytes * layers)
        pages = slots // page_size
        size = {"layers": layers, "pages": pages, "page_size": page_size}
        (strides,) = host_strides(HostLayout.PAGE_FIRST_DIRECT, [row_bytes], **size)
        rows = DeviceRows.slot_major(list(self._rows.view(layers, slots, row_bytes)))
        plane = Plane("calibration", row_bytes, rows, HostRows(self._host, strides, pages, page_size))
        return PlaneTransfer([plane], ring=self._ring, constants=H200)

    def graph_times(self) -> GraphTimes:
        """Make graphs, and a pool that transfers next to them move."""
        transfer = self._transfer(LOSS_ROW_BYTES, LOSS_LAYERS, LOSS_PAGE_SIZE)
        return GraphTimes(transfer, self._host, self._rows)

    def _time(
        self, call: Callable[[], TransferResult | None], *, until_released: bool = False, repeats: int = REPEATS
    ) -> _Timing:
        """Least device time of what a call queues, to the end of its copies or of its row kernels: noise only adds."""
        found = []
        for _ in range(repeats + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            start = time.perf_counter()
            result = call()
            submit = time.perf_counter() - start
            if result is not None and result.host_ready is not None and not until_released:
                self._stream.wait_event(result.host_ready)
            end.record()
            torch.cuda.synchronize(self._device)
            found.append((float(begin.elapsed_time(end)) / 1e3, submit))
        moved, copies = (0, 0) if result is None else (result.bytes, result.copies)
        return _Timing(min(s for s, _ in found[1:]), median(s for _, s in found[1:]), moved, copies)

    def _marginal(
        self,
        direction: Direction,
        transfer: PlaneTransfer,
        policy: str,
        keep: Callable[[torch.Tensor], torch.Tensor] = lambda pages: pages >= 0,
        quotas: Sequence[int | None] = (None,),
    ) -> list[_Timing]:
        """Time transfers of the pages that ``keep`` selects, one for each quota, less one of a single page."""
        call = transfer.write_back
        if direction is Direction.LOAD:
            call = functools.partial(transfer.load, layer_events=True)
        pages = torch.arange(transfer.planes[0].host.pages, device="cpu")

        def timing(chosen: torch.Tensor, quota: int | None) -> _Timing:
            on_device = chosen.to(self._device)
            return self._time(lambda: call(chosen, on_device, policy=policy, block_quota=quota))

        single = timing(pages[:1], quotas[0])
        return [_difference(timing(pages[keep(pages)], quota), single) for quota in quotas]

    def _copy_to_host(self) -> None:
        self._host.copy_(self._rows, non_blocking=True)

    def copy_seconds(self) -> float:
        """Time of one plain copy to the host.

        Raises
        ------
        RuntimeError
            Where equal copies take different times.
        """
        found = [self._time(self._copy_to_host, repeats=1).seconds for _ in range(REPEATS)]
        if max(found) > MAX_SPREAD * min(found):
            raise RuntimeError(
                f"equal copies took {min(found) * 1e3:.3f} to {max(found) * 1e3:.3f} ms: others use {self._device}"
            )
        return median(found)

    def direction(self, direction: Direction) -> DirectionConstants:
        """Measure one direction, except what single copies and 2-D copies cost: those stay the defaults.

        Measured in the moment, 2-D copies seem as fast as plain ones, as what they read is in the caches of the CPU:
        those 8 to 18 KB wide made 0.92 to 0.97 of the bus, and 0.80 to 0.90 in operations of 512 MiB (on an H200).
        """
        defaults = H200.write_back if direction is Direction.WRITE_BACK else H200.load
        to, of = (self._host, self._rows) if direction is Direction.WRITE_BACK else (self._rows, self._host)

        def copy(size: int) -> None:
            to[:size].copy_(of[:size], non_blocking=True)

        whole, small = self._time(lambda: copy(BUFFER_BYTES)), self._time(lambda: copy(PAGE_BYTES))
        rate = (BUFFER_BYTES - PAGE_BYTES) / max(1e-7, whole.seconds - small.seconds)
        (scattered,) = self._marginal(direction, self._transfer(PAGE_BYTES, 1), "staged", lambda pages: pages % 2 == 0)
        batch_copy = (scattered.seconds - scattered.bytes / rate) / scattered.copies
        # Rows of a layer lie as far apart as those of a model, which is what they cost.
        rows = self._transfer(DIRECT_ROW_BYTES, LAYERS)
        direct = self._marginal(direction, rows, "direct", quotas=CTAS)
        return DirectionConstants(
            copy_bytes_per_second=rate,
            batch_copy_seconds=_sane(batch_copy, defaults.batch_copy_seconds),
            batch_submit_seconds=_sane(scattered.submit / scattered.copies, defaults.batch_submit_seconds),
            copy_seconds=defaults.copy_seconds,
            copy_2d_seconds=defaults.copy_2d_seconds,
            width_efficiency=defaults.width_efficiency,
            staged_loss=defaults.staged_loss,
            direct_losses=defaults.direct_losses,
            direct_rates=tuple(
                (ctas, timing.bytes / timing.seconds) for ctas, timing in zip(CTAS, direct, strict=True)
            ),
        )

    def launch_seconds(self) -> float:
        """Measure what one more kernel of a direct load costs: a load in parts against the same in one."""
        transfer = self._transfer(ROW_BYTES, 1)
        pages = torch.arange(transfer.planes[0].host.pages, device="cpu")
        on_device = pages.to(self._device)

        def load(parts: int) -> None:
            for host, device in zip(pages.chunk(parts), on_device.chunk(parts), strict=True):
                transfer.load(host, device, policy="direct")

        whole, parts = self._time(lambda: load(1)), self._time(lambda: load(LAUNCHES))
        return _sane((parts.seconds - whole.seconds) / (LAUNCHES - 1), H200.launch_seconds)

    def relayout_bytes_per_second(self) -> float:
        """Measure the re-layout kernel: device rows are released when it is done."""
        transfer = self._transfer(ROW_BYTES, LAYERS)
        pages = torch.arange(transfer.planes[0].host.pages, device="cpu")
        on_device = pages.to(self._device)
        timing = self._time(lambda: transfer.write_back(pages, on_device, policy="staged"), until_released=True)
        return BUFFER_BYTES / _sane(timing.seconds, BUFFER_BYTES / H200.relayout_bytes_per_second)


def _difference(whole: _Timing, single: _Timing) -> _Timing:
    return _Timing(
        max(1e-7, whole.seconds - single.seconds),
        max(1e-7, whole.submit - single.submit),
        whole.bytes - single.bytes,
        max(1, whole.copies - single.copies),
    )


def _sane(value: float, default: float) -> float:
    """Take a measured time, unless noise made it vanish."""
    return max(value, default / 20)


def wrong_figure(constants: DeviceConstants) -> str | None:
    """Say why constants cannot be those of an idle device, in a few words; None where they can."""
    for name, direction in (("write_back", constants.write_back), ("load", constants.load)):
        reason = _wrong_figure_of(direction)
        if reason is not None:
            return f"{name}: {reason}"
    if not 0 < constants.launch_seconds < MAX_SECONDS:
        return f"launch_seconds is {constants.launch_seconds:.3g}"
    fastest = max(constants.write_back.copy_bytes_per_second, constants.load.copy_bytes_per_second)
    if constants.relayout_bytes_per_second < MIN_RELAYOUT * fastest:
        return f"relayout_bytes_per_second is {constants.relayout_bytes_per_second:.3g}, copies make {fastest:.3g}"
    return wrong_loss(constants)


def _wrong_figure_of(direction: DirectionConstants) -> str | None:
    numbers = [value for value in dataclasses.astuple(direction) if not isinstance(value, tuple)]
    for table in (direction.width_efficiency, direction.direct_rates):
        numbers += [value for _, value in table] or [0.0]
    if not all(number > 0 for number in numbers):
        return "a figure is not positive"
    best = max(rate for _, rate in direction.direct_rates) / direction.copy_bytes_per_second
    if not MIN_DIRECT_SHARE <= best <= MAX_DIRECT_SHARE:
        return f"direct transfers reach {best:.2f} of a plain copy"
    widest = direction.width_efficiency[-1][1]
    if not MIN_WIDE_SHARE <= widest <= 1:
        return f"wide 2-D copies reach {widest:.2f} of a plain copy"
    for name in ("batch_copy_seconds", "batch_submit_seconds", "copy_seconds", "copy_2d_seconds"):
        if getattr(direction, name) > MAX_SECONDS:
            return f"{name} is {getattr(direction, name):.3g}"
    return None
