"""The numbers of a run: how far it is, and what is known of a step.

A step's numbers travel over the ranks as one vector. Before the first row, what every rank brings is summed (the loss needs the
learned tokens of all of them); after the last, the losses are; then the host reads everything at once:

    [ work | told to stop, could not save | learned tokens by source | loss by source | loss | gradient norm ]
      `-- brought by each rank, summed at the start of the step --'    `-- summed at its end --'
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.train.feed import StepRows
from saccade.train.metrics import Work

LEARNED_TOKENS = Work._fields.index("learned_tokens")
"""Where in the vector the learned tokens of the step stand."""


@dataclass
class Progress:
    """How far a run is; saved as JSON beside the tensors."""

    stage: int = 0
    """Number of the stage, from 0."""
    step: int = 0
    """Steps of the run, bad ones counted."""
    stage_step: int = 0
    """Steps of the stage."""
    stage_samples: int = 0
    """Samples seen in the stage."""
    samples: int = 0
    """Samples seen in the run."""
    tokens: int = 0
    """Tokens seen in the run."""
    is_stage_done: bool = False
    """Whether the next stage is to begin."""
    data: dict[str, int | str] | None = None
    """Where the stage's data goes on; None at its beginning."""

    def advance(self, work: Work, data: dict[str, int | str]) -> None:
        """One step is behind us."""
        self.step += 1
        self.stage_step += 1
        self.samples += int(work.samples)
        self.stage_samples += int(work.samples)
        self.tokens += int(work.text_tokens + work.image_tokens)
        self.data = data


def brought_by(rows: StepRows, *, must_stop: bool, save_failed: bool) -> NDArray[np.float64]:
    """What a rank brings to a step: the first half of the vector above."""
    return np.array([*rows.work, must_stop, save_failed, *rows.learned_by_source], dtype=np.float64)


@dataclass(frozen=True)
class StepNumbers:
    """What is known of a step once it is computed, summed over the ranks."""

    loss: float
    """Mean over the learned tokens."""
    grad_norm: float
    """Before clipping."""
    work: Work
    """What its rows held and cost."""
    must_stop: bool
    """Some rank was told to end."""
    save_failed: bool
    """Some rank could not save."""
    source_losses: dict[str, tuple[float, float]]
    """(sum of the loss, learned tokens) of each source; empty in steps that are not logged."""

    @staticmethod
    def read(vector: list[float], source_names: list[str]) -> StepNumbers:
        """Take the vector above apart."""
        values = iter(vector)
        work = Work(*(next(values) for _ in Work._fields))
        must_stop, save_failed = next(values) > 0, next(values) > 0
        *by_source, loss, grad_norm = values
        learned, sums = by_source[: len(by_source) // 2], by_source[len(by_source) // 2 :]
        source_losses = dict(zip(source_names, zip(sums, learned, strict=True), strict=False))
        return StepNumbers(loss, grad_norm, work, must_stop, save_failed, source_losses)
