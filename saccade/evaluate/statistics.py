"""Confidence intervals by bootstrap, and paired tests of a difference.

A metric is a function of sums: each example contributes a few numbers (matches, lengths, hits), which are added and
combined. A resample is therefore a weighted sum, a thousand of them are one matrix product, and corpus metrics such as
BLEU and F1 are resampled exactly. Examples about the same image are drawn together (cluster bootstrap): their scores
depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
NUM_RESAMPLES = 2000
_CHUNK_ELEMENTS = 2**22
_SMALLEST_DIFFERENCE = 1e-5
"""Smaller differences of two scores are not significant: BLEU without any match is up to 1e-6 instead of 0."""


@dataclass(frozen=True)
class Metric:
    """A score of a set of examples."""

    counts: Floats
    """[examples, k]: the contributions of each example."""
    combine: Callable[[Floats], Floats]
    """Computes scores [...] from summed counts [..., k]."""
    higher_is_better: bool = True
    values: Floats | None = None
    """[examples]: the score of each example, if the metric has one."""
    is_proportion: bool = False
    """Whether the metric is a share of examples, each right or wrong."""

    @property
    def value(self) -> float:
        """The score of all examples."""
        return float(self.combine(self.counts.sum(axis=0)))

    def subset(self, rows: Sequence[int] | NDArray[np.int64]) -> Metric:
        """Return the metric of some of the examples."""
        values = None if self.values is None else self.values[rows]
        return Metric(self.counts[rows], self.combine, self.higher_is_better, values, self.is_proportion)


def mean_metric(values: Sequence[float] | Floats, *, higher_is_better: bool = True) -> Metric:
    """Return the mean of one value per example."""
    array = np.asarray(values, dtype=np.float64)
    return Metric(np.stack([array, np.ones_like(array)], axis=1), _ratio, higher_is_better, array)


def proportion_metric(values: Sequence[float] | Floats) -> Metric:
    """Return the share of examples that are right; 0 to 1 each."""
    return replace(mean_metric(values), is_proportion=True)


def ratio_metric(
    numerators: Sequence[float], denominators: Sequence[float], *, higher_is_better: bool = True
) -> Metric:
    """Return the sum of numerators divided by the sum of denominators."""
    counts = np.stack([np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)], axis=1)
    return Metric(counts, _ratio, higher_is_better)


def _ratio(sums: Floats) -> Floats:
    quotient: Floats = np.divide(sums[..., 0], sums[..., 1], out=np.zeros_like(sums[..., 0]), where=sums[..., 1] != 0)
    return quotient


@dataclass(frozen=True)
class Interval:
    """A score with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def bootstrap(
    metric: Metric, clusters: Sequence[str], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Interval:
    """Compute a percentile interval over resampled clusters. `clusters` names the cluster of each example.

    If all examples are right, or all are wrong, every resample is the same; the exact binomial interval is used
    instead.
    """
    sums = _cluster_sums(metric.counts, clusters)
    if metric.is_proportion and metric.value in (0.0, 1.0):
        reach = 1 - 0.025 ** (1 / len(sums))
        return Interval(metric.value, max(0.0, metric.value - reach), min(1.0, metric.value + reach))
    scores = [metric.combine(weights @ sums) for weights in _resamples(len(sums), seed, num_resamples)]
    low, high = np.quantile(np.concatenate(scores), [0.025, 0.975])
    return Interval(metric.value, float(low), float(high))


@dataclass(frozen=True)
class Difference:
    """A paired difference between two models on the same examples."""

    value: float
    """First minus second."""
    low: float
    high: float
    p_value: float
    """p-value of a permutation test: the share of random exchanges of answers with a difference at least as large."""


def paired_difference(
    one: Metric, other: Metric, clusters: Sequence[str], *, seed: int = 0, num_resamples: int = NUM_RESAMPLES
) -> Difference:
    """Compute an interval by paired bootstrap and a p-value by paired permutation, both by cluster."""
    ours, theirs = _cluster_sums(one.counts, clusters), _cluster_sums(other.counts, clusters)
    observed = one.value - other.value
    resampled = [
        one.combine(weights @ ours) - one.combine(weights @ theirs)
        for weights in _resamples(len(ours), seed, num_resamples)
    ]
    low, high = np.quantile(np.concatenate(resampled), [0.025, 0.975])
    if abs(observed) < _SMALLEST_DIFFERENCE:
        return Difference(observed, float(low), float(high), 1.0)
    num_extreme = 0
    for swaps in _swaps(len(ours), seed + 1, num_resamples):
        moved = swaps @ (theirs - ours)
        exchanged = one.combine(ours.sum(axis=0) + moved) - one.combine(theirs.sum(axis=0) - moved)
        num_extreme += int(np.sum(np.abs(exchanged) >= abs(observed) - 1e-12))
    return Difference(observed, float(low), float(high), (num_extreme + 1) / (num_resamples + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for testing all of them at once (Holm-Bonferroni)."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, p_values[number] * (len(p_values) - rank)))
        adjusted[number] = largest
    return adjusted


def _cluster_sums(counts: Floats, clusters: Sequence[str]) -> Floats:
    """Add up the counts of each cluster: [clusters, k]."""
    _, numbers = np.unique(np.asarray(clusters), return_inverse=True)
    sums: Floats = np.zeros((int(numbers.max()) + 1, counts.shape[1]))
    np.add.at(sums, numbers, counts)
    return sums


def _resamples(num_clusters: int, seed: int, num_resamples: int) -> Iterator[Floats]:
    """Yield how often each cluster is drawn, in chunks of [resamples, clusters]."""
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_ELEMENTS // num_clusters)
    for begin in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - begin)
        drawn = rng.integers(num_clusters, size=(size, num_clusters)) + num_clusters * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * num_clusters).reshape(size, num_clusters).astype(np.float64)


def _swaps(num_clusters: int, seed: int, num_resamples: int) -> Iterator[Floats]:
    """Yield 1 where the answers of two models are exchanged, in chunks of [permutations, clusters]."""
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_ELEMENTS // num_clusters)
    for begin in range(0, num_resamples, chunk):
        yield rng.integers(2, size=(min(chunk, num_resamples - begin), num_clusters)).astype(np.float64)
