"""The metrics of the last half hour, so that the status view shows what happened before it was opened.

    every INTERVAL_S: registry -> MetricsHistory.record -> sample, the oldest is dropped -> since -> /metrics/history

A sample has the values of gauges, and what counters and histograms gained since the previous sample. Names are those of
`/metrics`, summed over labels (shares: the largest); a metric that the server does not have yet is null. What a counter
gained is computed by label, so that a model that is removed takes nothing away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
"""Time between two samples."""
CAPACITY = 900
"""Samples that are kept: half an hour."""

VALUES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:request_success_total",
    "saccade:process_resident_memory_bytes",
    "saccade:processed_image_cache_bytes",
)
"""Gauges, recorded as they are."""
INCREASES = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "saccade:encoder_cache_hits_total",
    "saccade:encoder_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "vllm:mm_cache_queries_total",
)
"""Counters, recorded by how much they grew."""
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "saccade:image_decode_seconds",
    "saccade:image_preprocess_seconds",
    "saccade:request_preprocess_seconds",
    "saccade:request_prefill_seconds",
    "vllm:e2e_request_latency_seconds",
)
"""Histograms, recorded by the observations that each bucket gained."""


_SHARES = frozenset({"vllm:kv_cache_usage_perc"})
"""Gauges from 0 to 1."""
_Series = tuple[str, tuple[tuple[str, str], ...]]
"""Name and labels of what Prometheus counts by itself."""


@dataclass(frozen=True, kw_only=True)
class _Sample:
    at: float
    """Unix time."""
    values: dict[str, float | None]
    """Values of the gauges."""
    increases: dict[str, float | None]
    """What counters gained since the previous sample."""
    observations: dict[str, list[tuple[int, int]]]
    """By histogram: buckets that gained observations, and how many."""


class MetricsHistory:
    """Keeps a bounded number of samples of the metrics. Used in the event loop."""

    def __init__(self, *, capacity: int = CAPACITY) -> None:
        self._samples: deque[_Sample] = deque(maxlen=capacity)
        self._totals: dict[_Series, float] = {}
        self._buckets: dict[_Series, list[float]] = {}
        self._bounds: dict[str, list[float]] = {}

    async def run(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Record what `collect` returns, until cancelled.

        `collect` runs in a thread, since it reads files of all processes.
        """
        while True:
            try:
                families = await asyncio.to_thread(lambda: list(collect()))
                self.record(time.time(), families)
            except Exception:  # a metric that cannot be read must not end the recording
                logger.exception("the metrics could not be recorded; the status view has a gap")
            await asyncio.sleep(INTERVAL_S)

    def record(self, at: float, families: Iterable[Metric]) -> None:
        """Add a sample of the metrics at the Unix time `at`."""
        values, totals, buckets = _read(families)
        increases: dict[str, float | None] = dict.fromkeys(INCREASES)
        for series, total in totals.items():
            increases[series[0]] = (increases[series[0]] or 0) + _increase(self._totals.get(series, 0), total)
        gained: dict[str, Counter[int]] = {}
        for series, counts in buckets.items():
            self._bounds[series[0]] = list(counts)
            before = self._buckets.get(series, [0] * len(counts))
            gained.setdefault(series[0], Counter()).update(_gained(before, list(counts.values())))
        self._totals = totals
        self._buckets = {series: list(counts.values()) for series, counts in buckets.items()}
        observations = {name: sorted(counts.items()) for name, counts in gained.items()}
        self._samples.append(_Sample(at=round(at, 3), values=values, increases=increases, observations=observations))

    def since(self, after: float) -> dict[str, Any]:
        """Return the samples later than the Unix time `after`, a column per metric.

        The last bucket has no upper bound.
        """
        samples = [sample for sample in self._samples if sample.at > after]
        return {
            "interval_s": INTERVAL_S,
            "at": [sample.at for sample in samples],
            "values": {name: [sample.values[name] for sample in samples] for name in VALUES},
            "increases": {name: [sample.increases[name] for sample in samples] for name in INCREASES},
            "histograms": {
                name: {
                    "bounds": self._bounds.get(name, [])[:-1],
                    "observations": [sample.observations.get(name, []) for sample in samples],
                }
                for name in HISTOGRAMS
            },
        }


def _read(
    families: Iterable[Metric],
) -> tuple[dict[str, float | None], dict[_Series, float], dict[_Series, dict[float, float]]]:
    """Return the gauges, the totals of counters, and the cumulative counts of histograms by upper bound."""
    values: dict[str, float | None] = dict.fromkeys(VALUES)
    totals: dict[_Series, float] = {}
    buckets: dict[_Series, dict[float, float]] = {}
    for family in families:
        for sample in family.samples:
            if sample.name in values:
                so_far = values[sample.name] or 0
                is_share = sample.name in _SHARES
                values[sample.name] = max(so_far, sample.value) if is_share else so_far + sample.value
            elif sample.name in _INCREASES:
                totals[_series(sample.name, sample.labels)] = sample.value
            elif family.name in _HISTOGRAMS and sample.name == f"{family.name}_bucket":
                labels = {name: value for name, value in sample.labels.items() if name != "le"}
                counts = buckets.setdefault(_series(family.name, labels), {})
                counts[float(sample.labels["le"])] = sample.value
    return values, totals, buckets


def _series(name: str, labels: Mapping[str, str]) -> _Series:
    return name, tuple(sorted(labels.items()))


_INCREASES = frozenset(INCREASES)
_HISTOGRAMS = frozenset(HISTOGRAMS)


def _increase(before: float, now: float) -> float:
    """Return how much a counter grew; one that restarted counts from zero."""
    return now - before if now >= before else now


def _gained(before: list[float], now: list[float]) -> dict[int, int]:
    """Return what buckets gained, from cumulative counts; a restarted histogram counts from zero."""
    grown = [max(0, b - a) for a, b in zip(before, now, strict=True)] if now[-1] >= before[-1] else now
    counts = [int(b - a) for a, b in zip([0, *grown], grown, strict=False)]
    return {bucket: count for bucket, count in enumerate(counts) if count > 0}
