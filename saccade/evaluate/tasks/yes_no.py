"""Questions with the answer yes or no: hallucination probing with POPE, statements about images with NLVR.

The positive class of precision, recall and F1 is yes. `yes_rate` shows a model that affirms whatever it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from saccade.evaluate.example import Example
from saccade.evaluate.metrics.yes_no import is_yes
from saccade.evaluate.readers.published import Published
from saccade.evaluate.statistics import Floats, Metric, proportion_metric, ratio_metric
from saccade.evaluate.tasks.task import Record, Task, answer_of

_ANSWERS = {"yes": True, "true": True, "no": False, "false": False}


class YesNo(Task):
    """Answer yes or no."""

    max_tokens = 16
    takes = "questions with the answer yes or no"

    def __init__(self, published: Published | None = None) -> None:
        self.published = published

    def accepts(self, example: Example) -> bool:
        """Accept questions whose reference is yes or no."""
        return example.question is not None and example.references[0].lower() in _ANSWERS

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute accuracy, F1, precision, recall, and how often the answer is yes."""
        truth = np.array([_ANSWERS[record["references"][0].lower()] for record in records])
        has_failed = np.array(["failure" in record for record in records])
        said = np.array([is_yes(answer_of(record)) for record in records]) & ~has_failed
        right = (truth == said) & ~has_failed
        true_positive, false_positive, false_negative = truth & said, ~truth & said, truth & ~said
        counts = np.stack([true_positive, false_positive, false_negative], axis=1).astype(np.float64)
        return {
            "accuracy": proportion_metric(right.astype(np.float64)),
            "f1": Metric(counts, _f1),
            "precision": ratio_metric(true_positive.tolist(), said.tolist()),
            "recall": ratio_metric(true_positive.tolist(), truth.tolist()),
            "yes_rate": proportion_metric(said.astype(np.float64)),
        }


def _f1(sums: Floats) -> Floats:
    """Compute F1 of summed true positives, false positives, false negatives."""
    double = 2 * sums[..., 0]
    total = double + sums[..., 1] + sums[..., 2]
    score: Floats = np.divide(double, total, out=np.zeros_like(double), where=total != 0)
    return score
