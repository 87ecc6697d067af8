"""Counters and histograms of the controller as plain numbers, and an exporter for Prometheus."""

from __future__ import annotations

import importlib
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

Labels = tuple[tuple[str, str], ...]

SECONDS = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
"""Upper bounds of the buckets of times, in seconds."""

PREFIX = "hicache_"


class HistogramSnapshot(NamedTuple):
    """A histogram at one moment.

    Attributes
    ----------
    bounds
        Upper bounds of the buckets, except of the last, which has none.
    counts
        Observations a bucket, one more than there are bounds.
    sum
        Sum of the observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def observations(self) -> int:
        """Number of observations."""
        return sum(self.counts)


class MetricsSnapshot(NamedTuple):
    """All metrics at one moment, each under its name and the labels it was counted with."""

    counters: dict[str, dict[Labels, float]]
    gauges: dict[str, float]
    histograms: dict[str, dict[Labels, HistogramSnapshot]]

    def total(self, name: str, **labels: str) -> float:
        """Sum of a counter over everything that has these labels; 0 where it never counted."""
        wanted = set(labels.items())
        return sum(value for have, value in self.counters.get(name, {}).items() if wanted <= set(have))


class Metrics:
    """Counts by name and labels; safe to use from several threads.

    Counters: ``transfer_bytes``, ``transfer_operations`` and ``transfer_runs`` by ``direction``, ``path`` and ``pool``;
    ``transfer_failures`` by ``direction``; ``fallbacks`` by ``reason`` and ``direction``; ``deferred_frees``;
    ``storage_pages`` that storage took or gave, by ``operation`` and ``pool``;
    ``backup_pages``, ``backup_failed_pages``, ``backup_retries``; ``backup_skipped_pages`` by ``pool``;
    ``prefetch_pages``, ``prefetch_missing_pages``, ``prefetch_cancelled``, ``prefetch_dropped_pages``;
    ``storage_errors`` and
    ``storage_timeouts`` by ``operation``; ``lost_ranks``. Histograms: ``transfer_seconds`` (the transfer itself, on the
    device's clock) and ``transfer_submit_seconds`` by ``direction``, ``storage_seconds`` by ``operation``. Gauges:
    queue depths. Checksum failures and the like are in the storage's own ``stats()``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the three below: transfers and storage count on their threads
        self._counters: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, tuple[list[int], list[float]]]] = {}
        self._gauges: dict[str, Callable[[], float]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        self.add({(name, tuple(sorted(labels.items()))): amount})

    def add(self, counts: Mapping[tuple[str, Labels], float]) -> None:
        """Add to several counters at once, by name and labels; the labels are sorted by name."""
        with self._lock:
            for (name, key), amount in counts.items():
                series = self._counters.setdefault(name, {})
                series[key] = series.get(key, 0) + amount

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add an observation, in seconds, to a histogram."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            counts, total = self._histograms.setdefault(name, {}).setdefault(key, ([0] * (len(SECONDS) + 1), [0.0]))
            counts[bisect_left(SECONDS, value)] += 1
            total[0] += value

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """Read a value with a function whenever a snapshot is taken; the last function given for a name is used."""
        with self._lock:
            self._gauges[name] = read

    def snapshot(self) -> MetricsSnapshot:
        """Read everything."""
        with self._lock:
            counters = {name: dict(series) for name, series in self._counters.items()}
            histograms = {
                name: {
                    key: HistogramSnapshot(SECONDS, tuple(counts), total[0]) for key, (counts, total) in series.items()
                }
                for name, series in self._histograms.items()
            }
            gauges = dict(self._gauges)
        return MetricsSnapshot(counters, {name: read() for name, read in gauges.items()}, histograms)


class PrometheusCollector:
    """Hands a :class:`Metrics` to a Prometheus registry: ``registry.register(PrometheusCollector(metrics))``.

    Needs the package ``prometheus-client`` (extra ``prometheus``).

    Parameters
    ----------
    metrics
        What to export, every name with the prefix ``hicache_``.
    labels
        Labels of every series, such as the rank.

    Raises
    ------
    ImportError
        If ``prometheus-client`` is not installed.
    """

    def __init__(self, metrics: Metrics, labels: dict[str, str] | None = None) -> None:
        try:
            core = importlib.import_module("prometheus_client.core")
        except ImportError as error:
            raise ImportError(
                "prometheus-client is not installed; install hicache-controller[prometheus] to export metrics"
            ) from error
        self._core: Any = core
        self._metrics = metrics
        self._labels = tuple(sorted((labels or {}).items()))

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of one scrape."""
        snapshot, core = self._metrics.snapshot(), self._core
        gauges: dict[str, dict[Labels, float]] = {name: {(): value} for name, value in snapshot.gauges.items()}
        for family_of, metrics in (
            (core.CounterMetricFamily, snapshot.counters),
            (core.GaugeMetricFamily, gauges),
            (core.HistogramMetricFamily, snapshot.histograms),
        ):
            for name, series in metrics.items():
                own = {label for key in series for label, _ in key}
                labels = sorted(own) + [label for label, _ in self._labels if label not in own]
                family = family_of(PREFIX + name, name.replace("_", " "), labels=labels)
                for key, value in series.items():
                    known = dict(self._labels) | dict(key)
                    values = [known.get(label, "") for label in labels]
                    if isinstance(value, HistogramSnapshot):
                        family.add_metric(values, buckets=_cumulative(value), sum_value=value.sum)
                    else:
                        family.add_metric(values, value)
                yield family


def _cumulative(histogram: HistogramSnapshot) -> list[tuple[str, int]]:
    bounds = (*map(str, histogram.bounds), "+Inf")
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
