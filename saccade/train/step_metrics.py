"""Metrics of a step, which travel over the ranks as one vector.

Counters known before the forward pass are summed at the start of the step (the loss needs the number of loss tokens of
all ranks), the rest at its end; then the host reads everything at once:

    summed at the start  [ work | normaliser | save failed | loss tokens by source ]  local_step_counters
    summed at the end    [ loss by source | metrics | loss | stop requested | gradient norm ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.train.batches import StepBatch
from saccade.train.flops import Work

NORMALIZER = len(Work._fields)
"""Index of the objective's normaliser in the vector."""


def local_step_counters(batch: StepBatch, *, save_failed: bool, counts_data: bool = True) -> NDArray[np.float64]:
    """The counters a rank contributes at the start of a step: the first half of the vector above.

    Of the ranks that read the same data one counts it (`counts_data`); any of them may have failed to save.
    """
    counters = np.array([*batch.work, batch.num_units, 0.0, *batch.loss_tokens_by_source], dtype=np.float64)
    counters *= counts_data
    counters[NORMALIZER + 1] = save_failed
    return counters


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a step, summed over the ranks."""

    loss: float
    """The objective, a mean over its units: over the loss tokens, for cross entropy."""
    grad_norm: float
    """Gradient norm before clipping."""
    work: Work
    """Tokens, samples and FLOPs."""
    must_stop: bool
    """Whether any rank was asked to stop."""
    save_failed: bool
    """Whether any rank failed to save."""
    source_losses: dict[str, tuple[float, float]]
    """Maps a source to (sum of the cross entropy, number of loss tokens); empty in steps that are not logged."""
    of_objective: dict[str, tuple[float, float]]
    """Maps a metric of the objective to (sum, number of units)."""

    @staticmethod
    def read(vector: list[float], source_names: list[str], metric_names: Sequence[str]) -> StepMetrics:
        """Parse the vector above."""
        values = iter(vector)
        work = Work(*(next(values) for _ in Work._fields))
        num_units, save_failed = next(values), next(values) > 0
        *sums, loss, must_stop, grad_norm = values
        num_sources = (len(sums) - len(metric_names)) // 2
        counts, sums, metrics = sums[:num_sources], sums[num_sources : 2 * num_sources], sums[2 * num_sources :]
        source_losses = dict(zip(source_names, zip(sums, counts, strict=True), strict=False))
        of_objective = {name: (value, num_units) for name, value in zip(metric_names, metrics, strict=True)}
        return StepMetrics(loss, grad_norm, work, must_stop > 0, save_failed, source_losses, of_objective)
