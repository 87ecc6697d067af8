"""Measures the planner's constants on a device, once, in under a second, and keeps them on disk."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .build import cache_directory
from .layout import HostLayout, host_strides
from .plane import DeviceRows, HostRows, Plane
from .planner import CPU, H200, DeviceConstants, DirectionConstants
from .staging import Direction, StagingRing, canonical_device
from .transfer import PlaneTransfer

logger = logging.getLogger(__name__)

FORMAT = 1
BUFFER_BYTES = 16 << 20
WIDTHS = (256, 1024, 4096, 8192, 16384, 32768)
SMALL_PAGE_BYTES = 16 << 10
FULL_CTAS = 16
REPEATS = 3

_known: dict[torch.device, DeviceConstants] = {}
_lock = threading.Lock()


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
            try:
                constants = measure(device)
            except (RuntimeError, ValueError) as error:
                logger.warning("calibrating %s failed, so the planner goes by defaults: %s", device, error)
                constants = H200
            else:
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
        widths = tuple((int(width), float(share)) for width, share in fields[name]["width_efficiency"])
        return DirectionConstants(**{**fields[name], "width_efficiency": widths})

    return DeviceConstants(**{**fields, "write_back": direction("write_back"), "load": direction("load")})


def read_constants(path: Path) -> DeviceConstants | None:
    """Constants kept in a file; None where it is missing, damaged or makes no sense."""
    try:
        constants = constants_from_fields(json.loads(path.read_text()))
        numbers = [constants.launch_seconds, constants.relayout_bytes_per_second]
        for direction in (constants.write_back, constants.load):
            numbers += [value for value in dataclasses.astuple(direction) if not isinstance(value, tuple)]
            numbers += [share for _, share in direction.width_efficiency]
        return constants if all(number > 0 for number in numbers) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_constants(path: Path, constants: DeviceConstants) -> None:
    """Keep constants in a file that appears complete or not at all; a failure is logged and otherwise ignored."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w") as file:
            json.dump(dataclasses.asdict(constants), file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        logger.info("calibration is not kept: %s", error)
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


# ---- measuring


def measure(device: torch.device | str) -> DeviceConstants:
    """Measure a GPU's constants through the compiled modules; other work on the device makes them worse.

    Raises
    ------
    RuntimeError
        Where a path cannot be measured: no compiled modules, or no memory.
    """
    device = canonical_device(device)
    start = time.perf_counter()
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        bench = _Measurement(device)
        write_back = bench.direction(Direction.WRITE_BACK)
        load = bench.direction(Direction.LOAD)
        constants = DeviceConstants(
            source=f"measured on {torch.cuda.get_device_name(device)}",
            write_back=write_back,
            load=load,
            launch_seconds=bench.launch_seconds(),
            relayout_bytes_per_second=bench.relayout_bytes_per_second(),
        )
    logger.info("calibrated %s in %.2f s: %s", device, time.perf_counter() - start, constants)
    return constants


class _Measurement:
    """Two buffers, a staging ring, and the transfers that are timed over them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._rows = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=device)
        self._ring = StagingRing(device, budget_bytes=4 * BUFFER_BYTES, chunk_bytes=BUFFER_BYTES)

    def _seconds(self, call: Callable[[], object]) -> float:
        """Median device time of a call, from its submission to the end of its copies."""
        found = []
        for _ in range(REPEATS + 1):
            torch.cuda.synchronize(self._device)
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize(self._device)
            found.append(time.perf_counter() - begin)
        return median(found[1:])

    def _transfer(self, layout: HostLayout, row_bytes: int, layers: int, page_size: int = 1) -> PlaneTransfer:
        pages = BUFFER_BYTES // (row_bytes * layers * page_size)
        (strides,) = host_strides(layout, [row_bytes], layers=layers, pages=pages, page_size=page_size)
        rows = self._rows[: pages * page_size * layers * row_bytes].view(layers, pages * page_size, row_bytes)
        plane = Plane(
            "calibration", row_bytes, DeviceRows.slot_major(list(rows)), HostRows(self._host, strides, pages, page_size)
        )
        return PlaneTransfer([plane], ring=self._ring, constants=H200)

    def _run(
        self, direction: Direction, transfer: PlaneTransfer, policy: str, *, every: int = 1, quota: int | None = None
    ) -> tuple[float, int, int]:
        """Seconds, bytes and copies of a transfer of every ``every``-th page."""
        plane = transfer.planes[0]
        pages = torch.arange(0, plane.host.pages, every, dtype=torch.int64)
        slots = (pages[:, None] * plane.host.page_size + torch.arange(plane.host.page_size)).reshape(-1)
        on_device = slots.to(self._device)
        call = transfer.write_back if direction is Direction.WRITE_BACK else transfer.load
        result = call(slots, on_device, policy=policy, block_quota=quota)
        return (
            self._seconds(lambda: call(slots, on_device, policy=policy, block_quota=quota)),
            result.bytes,
            result.copies,
        )

    def direction(self, direction: Direction) -> DirectionConstants:
        """Measure one direction."""
        defaults = H200.write_back if direction is Direction.WRITE_BACK else H200.load
        to, of = (self._host, self._rows) if direction is Direction.WRITE_BACK else (self._rows, self._host)
        floor = self._seconds(lambda: None)
        plain = self._seconds(lambda: to.copy_(of, non_blocking=True)) - floor
        rate = BUFFER_BYTES / plain
        # Pages of one layer and row: what a scattered page costs beyond its bytes.
        scattered = self._transfer(HostLayout.PAGE_FIRST_DIRECT, SMALL_PAGE_BYTES, 1)
        seconds, size, copies = self._run(direction, scattered, "staged", every=2)
        batch = (seconds - floor - size / rate) / max(1, copies)
        widths = []
        for width in WIDTHS:
            by_layer = self._transfer(HostLayout.PAGE_FIRST_DIRECT, width, 4)
            seconds, size, _ = self._run(Direction.LOAD, by_layer, "staged")
            widths.append((width, min(1.0, max(0.05, size / rate / max(1e-9, seconds - floor)))))
        short_runs = self._transfer(HostLayout.PAGE_FIRST_DIRECT, 32 << 10, 4)
        full, half = (self._run(Direction.LOAD, short_runs, "staged", every=every) for every in (1, 2))
        copy_2d = (half[0] - full[0] / 2) / max(1, half[2])
        rows = self._transfer(HostLayout.PAGE_FIRST, 1024, 4)
        one = self._run(direction, rows, "direct", quota=1)
        many = self._run(direction, rows, "direct", quota=FULL_CTAS)
        full_rate = many[1] / max(1e-9, many[0] - floor)
        return DirectionConstants(
            copy_bytes_per_second=rate,
            batch_copy_seconds=_sane(batch, defaults.batch_copy_seconds),
            copy_seconds=max(defaults.copy_seconds, _sane(batch, defaults.batch_copy_seconds)),
            copy_2d_seconds=_sane(copy_2d, defaults.copy_2d_seconds),
            width_efficiency=tuple(widths),
            cta_bytes_per_second=min(full_rate, one[1] / max(1e-9, one[0] - floor)),
            direct_bytes_per_second=full_rate,
        )

    def launch_seconds(self) -> float:
        """Measure what one more kernel of a direct load costs."""
        rows = self._transfer(HostLayout.PAGE_FIRST, 1024, 4)
        slots = torch.arange(1, dtype=torch.int64)
        on_device = slots.to(self._device)

        def load(layers: int) -> None:
            for layer in range(layers):
                rows.load(slots, on_device, layer=layer % 4, policy="direct")

        return _sane((self._seconds(lambda: load(33)) - self._seconds(lambda: load(1))) / 32, H200.launch_seconds)

    def relayout_bytes_per_second(self) -> float:
        """Measure the re-layout kernel: device rows are released when it is done."""
        transfer = self._transfer(HostLayout.PAGE_FIRST, 1024, 4)
        slots = torch.arange(transfer.planes[0].host.slots, dtype=torch.int64)
        on_device = slots.to(self._device)
        found = []
        for _ in range(REPEATS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)
            begin.record()
            transfer.write_back(slots, on_device, policy="staged")
            end.record()
            torch.cuda.synchronize(self._device)
            found.append(begin.elapsed_time(end) / 1e3)
        return BUFFER_BYTES / _sane(median(found[1:]), BUFFER_BYTES / H200.relayout_bytes_per_second)


def _sane(value: float, default: float) -> float:
    """Take a measured time, unless noise made it vanish."""
    return value if value > default / 20 else default / 20
