"""Benchmarks: bandwidth, submission, release, first layer, both directions at once, and disturbance of compute.

Every figure is the median of repeated operations, as a ratio to a plain pinned copy of as many bytes, or to the
undisturbed graph, in the same process.
"""

from .cases import Case, Pattern, direct_grid, disturbing_cases, grid, quick_grid, quota_grid
from .interference import Disturbance, disturbances
from .measure import Measurement, measure_case
from .pool import BenchPool, Buffers
from .report import Report, run_benchmark
from .targets import Target, evaluate_targets

__all__ = [
    "BenchPool",
    "Buffers",
    "Case",
    "Disturbance",
    "Measurement",
    "Pattern",
    "Report",
    "Target",
    "direct_grid",
    "disturbances",
    "disturbing_cases",
    "evaluate_targets",
    "grid",
    "measure_case",
    "quick_grid",
    "quota_grid",
    "run_benchmark",
]
