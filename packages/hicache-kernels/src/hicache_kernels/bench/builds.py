"""Times the build of the modules with nothing cached, as the first call on a new machine finds it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from ..build import CACHE_VARIABLE
from ..probe import PREBUILT_VARIABLE
from ..spec import TRANSFER_MODULES

BUILD_CORES = 2
"""Cores that the build may use: those of a small machine."""
_PROGRAM = """
import os, sys, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])])
from hicache_kernels.probe import load_outcome
start = time.perf_counter()
outcomes = [load_outcome(name, sys.argv[1]) for name in sys.argv[3:]]
print(time.perf_counter() - start if all(o.origin == "built" for o in outcomes) else "nan")
"""


def cold_build_seconds(
    device_type: str, *, cores: int = BUILD_CORES, modules: Sequence[str] = TRANSFER_MODULES
) -> float | None:
    """Build modules, one after the other, in a process of its own with an empty cache.

    Parameters
    ----------
    device_type
        Device type of the modules: ``"cpu"``, ``"cuda"`` or ``"rocm"``.
    cores
        Most cores that the process and the compilers use.
    modules
        Which ones.

    Returns
    -------
    float or None
        Seconds until both can be called; None where they cannot be built here.
    """
    with tempfile.TemporaryDirectory(prefix="hicache-kernels-build-") as cache:
        environment = {name: value for name, value in os.environ.items() if name != PREBUILT_VARIABLE}
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, device_type, str(cores), *modules],
            env={**environment, CACHE_VARIABLE: cache},
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        seconds = float(done.stdout.split()[-1])
    except (IndexError, ValueError):
        return None
    return seconds if seconds == seconds else None
