"""Body of `/metrics/history`."""

from __future__ import annotations

from saccade.serve.protocol.common import Wire


class RecordedHistogram(Wire):
    """Observations of a histogram between samples."""

    bounds: list[float]
    """Upper bounds of its buckets; a last bucket has none."""
    observations: list[list[tuple[int, int]]]
    """For each sample, the buckets that gained observations, and how many."""


class HistoryOfMetrics(Wire):
    """Recent metrics under their names in `/metrics`, one entry per sample in each list."""

    started_at: int
    """Unix time of the server's start."""
    interval_s: float
    """Time between samples."""
    at: list[float]
    """Unix time of each sample."""
    values: dict[str, list[float | None]]
    """Gauges, and totals of counters; null while the server does not have them."""
    increases: dict[str, list[float | None]]
    """What counters gained since the previous sample."""
    histograms: dict[str, RecordedHistogram]
    """Observations since the previous sample."""
