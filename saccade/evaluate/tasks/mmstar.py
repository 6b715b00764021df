"""MMStar (Chen et al., 2024): questions that need their image.

`average` is the mean accuracy of its 18 fine categories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import Published, Row
from saccade.evaluate.statistics import Floats, Metric
from saccade.evaluate.tasks.choice_benchmark import LETTERS_ONLY, ChoiceBenchmark
from saccade.evaluate.tasks.task import Record


class MMStar(ChoiceBenchmark):
    """Answer with the letter of a choice."""

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute the mean over categories, and over questions."""
        accuracy = super().score(records)
        categories = sorted({record["details"]["l2_category"] for record in records})
        counts = np.zeros((len(records), 2, len(categories)))
        for row, record in enumerate(records):
            column = categories.index(record["details"]["l2_category"])
            counts[row, :, column] = self.is_right(record), 1
        return {"average": Metric(counts.reshape(len(records), -1), _mean_of_categories)} | accuracy


def _mean_of_categories(sums: Floats) -> Floats:
    """Average the accuracies of the categories that occur. `sums`: right answers of each, then all answers of each."""
    right, asked = np.split(sums, 2, axis=-1)
    accuracies = np.divide(right, asked, out=np.zeros_like(right), where=asked != 0)
    score: Floats = accuracies.sum(axis=-1) / np.maximum(1, (asked != 0).sum(axis=-1))
    return score


def _example(row: Row) -> Example:
    return Example(
        id=row.text("index"),
        images=(row.image(),),
        question=row.text("question"),
        references=(row.text("answer").upper(),),
        choices=LETTERS_ONLY,
        group=row.text("category"),
        details={"l2_category": row.text("l2_category")},
    )


MMSTAR = MMStar(
    Published(
        hub="Lin-Chen/MMStar",
        files=("mmstar.parquet", "*val-*.parquet"),
        example=_example,
        prompt="{question}\nAnswer with the option's letter from the given choices directly",
        max_tokens=16,
    )
)
