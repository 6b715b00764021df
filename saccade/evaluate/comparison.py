"""Compare two results on the examples they share: which differences are significant, and which examples changed.

Both models answered the same questions, so differences are paired: an interval by bootstrap, a p-value by permutation.
The metrics of a task are tested at once, so their p-values are adjusted (Holm); a difference is significant below 0.05.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from saccade.errors import DataError
from saccade.evaluate.example import image_key
from saccade.evaluate.results import Results
from saccade.evaluate.statistics import Metric, holm, paired_difference
from saccade.evaluate.tasks import task_named

SIGNIFICANCE = 0.05


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One metric of both results on the same examples."""

    task: str
    """Name of the task."""
    metric: str
    """Name of the metric."""
    ours: float
    """Score of the first results."""
    theirs: float
    """Score of the second."""
    difference: float
    """First minus second."""
    low: float
    """Lower end of the 95 % interval of the difference."""
    high: float
    """Upper end of the interval."""
    p_value: float
    """p-value, adjusted for the number of metrics of the task."""
    higher_is_better: bool
    """Whether a positive difference is an improvement."""

    @property
    def is_significant(self) -> bool:
        """Whether the difference is significant."""
        return self.p_value < SIGNIFICANCE

    @property
    def is_better(self) -> bool:
        """Whether the first model is ahead."""
        return self.difference != 0 and (self.difference > 0) == self.higher_is_better


@dataclass(frozen=True, kw_only=True)
class Change:
    """An example that the two models answered with different success."""

    task: str
    """Name of the task."""
    id: str
    """Id of the example."""
    ours: Mapping[str, Any]
    """Record of the first results."""
    theirs: Mapping[str, Any]
    """Record of the second."""
    difference: float
    """Difference in the task's first metric with a value per example; positive if the first is better."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All shared tasks of two results."""

    ours: str
    """Name of the first results."""
    theirs: str
    """Name of the second."""
    metrics: tuple[MetricComparison, ...]
    """Compared metrics, task by task."""
    changes: Mapping[str, tuple[Change, ...]]
    """Changed examples by task: the largest improvement first, the largest loss last."""
    num_shared: Mapping[str, int]
    """Number of examples in both results, by task."""

    def of(self, task: str, metric: str) -> MetricComparison | None:
        """Return the comparison of one metric."""
        return next((one for one in self.metrics if (one.task, one.metric) == (task, metric)), None)

    def to_json(self) -> dict[str, Any]:
        """Return the content of comparison.json: the metrics, and the changed examples by id."""
        return {
            "ours": self.ours,
            "theirs": self.theirs,
            "num_shared": dict(self.num_shared),
            "metrics": [
                vars(one) | {"is_significant": one.is_significant, "is_better": one.is_better} for one in self.metrics
            ],
            "changes": {
                task: [{"id": one.id, "difference": one.difference} for one in changes]
                for task, changes in self.changes.items()
            },
        }


def compare(ours: Results, theirs: Results, *, seed: int = 0) -> Comparison:
    """Compare two results; tasks and examples that only one of them has are left out."""
    shared = [task for task in ours.settings["tasks"] if task in theirs.settings["tasks"]]
    if not shared:
        raise DataError(f"{ours.folder} and {theirs.folder} have no task in common: nothing can be compared")
    metrics: list[MetricComparison] = []
    changes, num_shared = {}, {}
    for task in shared:
        pairs = _pairs(task, ours, theirs)
        scored, num_shared[task] = _score_pairs(task, pairs), len(pairs)
        metrics += _adjusted([_compare_metric(task, name, *both, pairs, seed) for name, both in scored.items()])
        changes[task] = _changes(task, scored, pairs)
    return Comparison(
        ours=ours.name, theirs=theirs.name, metrics=tuple(metrics), changes=changes, num_shared=num_shared
    )


def _adjusted(metrics: Sequence[MetricComparison]) -> list[MetricComparison]:
    p_values = holm([one.p_value for one in metrics])
    return [replace(one, p_value=p_value) for one, p_value in zip(metrics, p_values, strict=True)]


_Pair = tuple[dict[str, Any], dict[str, Any]]


def _pairs(task: str, ours: Results, theirs: Results) -> list[_Pair]:
    """Pair the records of the same examples: id, question and references are equal."""
    by_id = {record["id"]: record for record in theirs.records(task)}
    pairs = [(record, by_id[record["id"]]) for record in ours.records(task) if record["id"] in by_id]
    same = [
        pair for pair in pairs if all(pair[0].get(name) == pair[1].get(name) for name in ("question", "references"))
    ]
    if not same:
        raise DataError(
            f"{ours.folder} and {theirs.folder}: {task} was evaluated on other examples. Use the same data and seed"
        )
    return same


def _score_pairs(task: str, pairs: Sequence[_Pair]) -> dict[str, tuple[Metric, Metric]]:
    """Score the metrics that both have on the shared examples."""
    one, other = (task_named(task).score([pair[side] for pair in pairs]) for side in (0, 1))
    return {name: (metric, other[name]) for name, metric in one.items() if name in other}


def _compare_metric(
    task: str, name: str, one: Metric, other: Metric, pairs: Sequence[_Pair], seed: int
) -> MetricComparison:
    clusters = [image_key(ours["images"], ours["id"]) for ours, _ in pairs]
    found = paired_difference(one, other, clusters, seed=seed)
    return MetricComparison(
        task=task,
        metric=name,
        ours=one.value,
        theirs=other.value,
        difference=found.value,
        low=found.low,
        high=found.high,
        p_value=found.p_value,
        higher_is_better=one.higher_is_better,
    )


def _changes(task: str, scored: Mapping[str, tuple[Metric, Metric]], pairs: Sequence[_Pair]) -> tuple[Change, ...]:
    """Return the examples whose value differs, the best for the first model first."""
    for one, other in scored.values():
        if one.values is not None and other.values is not None:
            sign = 1 if one.higher_is_better else -1
            gains = (one.values - other.values) * sign
            changes = [
                Change(task=task, id=ours["id"], ours=ours, theirs=theirs, difference=float(gain))
                for (ours, theirs), gain in zip(pairs, gains, strict=True)
                if abs(gain) > 1e-9
            ]
            return tuple(sorted(changes, key=lambda change: -change.difference))
    return ()
