"""Histograms of durations, cheap enough to observe every token. Plain Python, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

STAGE_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Default bucket bounds, for one stage of a request or image."""


class TimeHistogram:
    """Counts of durations by bucket. One thread observes; any thread may read."""

    __slots__ = ("_bounds", "_counts", "total_s")

    def __init__(self, bounds: tuple[float, ...] = STAGE_SECONDS) -> None:
        """`bounds`: upper bounds of the buckets in seconds, ascending; one more bucket has no upper bound."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self.total_s += seconds

    def observe_all(self, seconds: Iterable[float]) -> None:
        """Count several durations."""
        for one in seconds:
            self.observe(one)

    @property
    def counts(self) -> list[int]:
        """Number of durations in each bucket."""
        return list(self._counts)

    @staticmethod
    def of_counts(counts: Sequence[int], total_s: float, bounds: tuple[float, ...] = STAGE_SECONDS) -> TimeHistogram:
        """A histogram of counts that another process sent."""
        made = TimeHistogram(bounds)
        if counts:
            made._counts, made.total_s = list(counts), total_s
        return made

    def copy(self) -> TimeHistogram:
        """A copy with the current counts."""
        other = TimeHistogram(self._bounds)
        other._counts, other.total_s = list(self._counts), self.total_s
        return other

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Prometheus buckets: each bound as text, with the number of durations up to it; the last bound is infinite."""
        so_far = 0
        for bound, count in zip((*self._bounds, float("inf")), tuple(self._counts), strict=True):
            so_far += count
            yield "+Inf" if bound == float("inf") else str(float(bound)), so_far
