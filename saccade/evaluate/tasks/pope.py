"""POPE (Li et al., 2023): whether an object is in the image; accuracy, F1, precision, recall and yes rate."""

from __future__ import annotations

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import SHORT_ANSWER, Published, Row
from saccade.evaluate.tasks.yes_no import YesNo


def _example(row: Row) -> Example:
    return Example(
        id=f"{row.text('category')}/{row.text('question_id')}",
        images=(row.image(),),
        question=row.text("question"),
        references=(row.text("answer").lower(),),
        group=row.text("category"),
    )


POPE = YesNo(
    published=Published(
        hub="lmms-lab-encoder/POPE",
        files=("data/test-*.parquet",),
        example=_example,
        prompt=SHORT_ANSWER,
        max_tokens=128,
    )
)
