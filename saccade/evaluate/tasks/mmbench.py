"""MMBench, English, dev (Liu et al., 2023): each question is asked with every rotation of its choices.

The `index` of a rotation is that of its question plus a multiple of a million. `accuracy` counts questions whose
rotations are all right (circular evaluation), `vanilla_accuracy` the first rotation alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import LETTER, Published, Row
from saccade.evaluate.statistics import Metric, ratio_metric
from saccade.evaluate.tasks.choice_benchmark import ChoiceBenchmark
from saccade.evaluate.tasks.task import Record

_ROTATION = 1_000_000


class MMBench(ChoiceBenchmark):
    """Answer with the letter of a choice, whatever the order of the choices."""

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute the circular accuracy, and that of the first rotation."""
        is_right = [self.is_right(record) for record in records]
        is_first = [float(int(record["id"]) < _ROTATION) for record in records]
        whole: dict[int, float] = {}
        for record, right in zip(records, is_right, strict=True):
            question = int(record["id"]) % _ROTATION
            whole[question] = min(right, whole.get(question, 1.0))
        circular = [
            whole[int(record["id"]) % _ROTATION] * first for record, first in zip(records, is_first, strict=True)
        ]
        vanilla = [right * first for right, first in zip(is_right, is_first, strict=True)]
        return {
            "accuracy": replace(ratio_metric(circular, is_first), is_proportion=True),
            "vanilla_accuracy": replace(ratio_metric(vanilla, is_first), is_proportion=True, values=np.array(is_right)),
        }


def _example(row: Row) -> Example:
    letters = [letter for letter in "ABCDE" if row.has(letter)]
    listed = "\n".join(["There are several options:", *(f"{letter}. {row.text(letter)}" for letter in letters)])
    hint = f"{row.text('hint')} " if row.has("hint") else ""
    return Example(
        id=row.text("index"),
        images=(row.image(),),
        question=f"{hint}{row.text('question')} {listed}\n",
        references=(row.text("answer"),),
        choices=tuple(row.text(letter) for letter in letters),
        group=row.text("L2-category") if row.has("L2-category") else row.text("l2-category"),
    )


MMBENCH = MMBench(
    Published(
        hub="lmms-lab-encoder/MMBench",
        files=("en/dev-*.parquet", "MMBench_DEV_EN*.tsv"),
        example=_example,
        prompt=LETTER,
        max_tokens=1024,
    )
)
