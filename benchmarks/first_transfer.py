"""Time from the import of hicache_kernels to the first write-back and the first load, in fresh processes; JSON.

Each run is a process of its own with an empty cache. Before the clock starts it has imported torch and used the device,
as an engine has. ``to_first_write_back`` and ``to_first_load`` count from the start of the import to the moment when
the bytes have arrived; they are checked afterwards. The other figures are the parts of that; ``capabilities`` has the
measuring of the device in it.

    python benchmarks/first_transfer.py --output benchmarks/results/first_transfer.json
    python benchmarks/first_transfer.py --device cpu --megabytes 16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 0.5
ROW_BYTES, LAYERS, PAGE_SIZE = 2048, 32, 16


def run_once(device: str, megabytes: int) -> dict[str, Any]:
    """Make the first transfers of this process; seconds of each step, and what was used."""
    start = time.perf_counter()
    import torch

    torch.zeros(1, device=device).add_(1).cpu()
    parts = {"torch_and_device": time.perf_counter() - start}
    page_bytes = 2 * ROW_BYTES * LAYERS * PAGE_SIZE
    pages = max(2, (megabytes << 20) // page_bytes)
    slots = pages * PAGE_SIZE
    rows = [
        [torch.randint(0, 256, (slots, ROW_BYTES), dtype=torch.uint8, device=device) for _ in range(LAYERS)]
        for _ in range(2)
    ]
    before = [layer.clone() for plane in rows for layer in plane]
    host = torch.empty(pages * page_bytes, dtype=torch.uint8, pin_memory=device != "cpu")
    chosen = torch.randperm(slots)
    if device != "cpu":
        torch.cuda.synchronize()

    began = last = time.perf_counter()

    def done(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        parts[name], last = now - last, now

    from hicache_kernels import DeviceRows, HostRows, Plane, PlaneTransfer, host_strides

    done("import")
    strides = host_strides("page_first_direct", [ROW_BYTES] * 2, layers=LAYERS, pages=pages, page_size=PAGE_SIZE)
    transfer = PlaneTransfer(
        [
            Plane(name, ROW_BYTES, DeviceRows.slot_major(layers), HostRows(host, place, pages, PAGE_SIZE))
            for name, layers, place in zip(("k", "v"), rows, strides, strict=True)
        ]
    )
    done("pool")
    capabilities = transfer.capabilities()
    done("capabilities")
    host_slots = torch.arange(slots)
    written = transfer.write_back(host_slots, chosen)
    done("write_back_call")
    if written.host_ready is not None:
        written.host_ready.synchronize()
    done("write_back_bytes")
    to_write_back = last - began
    for plane in rows:
        for layer in plane:
            layer.zero_()
    if device != "cpu":
        torch.cuda.synchronize()
    last = time.perf_counter()
    loaded = transfer.load(host_slots, chosen)
    done("load_call")
    if loaded.device_released is not None:
        loaded.device_released.synchronize()
    done("load_bytes")
    to_load = last - began
    if not all(torch.equal(a, b) for a, b in zip((x for plane in rows for x in plane), before, strict=True)):
        raise RuntimeError("the bytes that came back are not those that were written")
    from hicache_kernels.calibrate import device_constants

    return {
        "to_first_write_back": to_write_back,
        "to_first_load": to_load,
        "parts": parts,
        "reason": written.reason,
        "modules": module_origins(torch.device(device)),
        "capabilities": capabilities.reason,
        "constants": device_constants(device).source,
    }


def module_origins(device: Any) -> dict[str, str]:
    """Say where each module came from, and how long it took to load."""
    from hicache_kernels.probe import load_outcome
    from hicache_kernels.spec import TRANSFER_MODULES, module_device_type

    found = {name: load_outcome(name, module_device_type(device)) for name in TRANSFER_MODULES}
    return {name: f"{each.origin or each.reason}, {each.seconds:.3f} s" for name, each in found.items()}


def main() -> None:
    """Start processes, and put their figures together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--megabytes", type=int, default=512, help="bytes of each transfer")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file for the JSON; standard output by default")
    parser.add_argument("--once", action="store_true", help="one run in this process, with the cache as it is")
    given = parser.parse_args()
    if given.once:
        print(json.dumps(run_once(given.device, given.megabytes)))
        return
    command = [sys.executable, __file__, "--once", "--device", given.device, "--megabytes", str(given.megabytes)]
    runs = []
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "HICACHE_KERNELS_CACHE": cache}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    import torch

    name = platform.processor() or platform.machine()
    if given.device == "cuda":
        name = torch.cuda.get_device_name()
    summary = {key: statistics.median(run[key] for run in runs) for key in ("to_first_write_back", "to_first_load")}
    report = {
        "device": name,
        "torch": torch.__version__,
        "megabytes": given.megabytes,
        "limit_seconds": LIMIT_SECONDS,
        **{f"median_{key}": seconds for key, seconds in summary.items()},
        "holds": max(run["to_first_write_back"] for run in runs) <= LIMIT_SECONDS,
        "runs": runs,
    }
    text = json.dumps(report, indent=1)
    if given.output is None:
        print(text)
    else:
        given.output.write_text(text + "\n")
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
