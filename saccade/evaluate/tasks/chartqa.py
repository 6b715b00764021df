"""ChartQA, test (Masry et al., 2022): questions about charts; relaxed accuracy, of human and augmented questions."""

from __future__ import annotations

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import Published, Row
from saccade.evaluate.tasks.question_answering import QuestionAnswering


def _example(row: Row) -> Example:
    return Example(
        id=str(row.number),
        images=(row.image(),),
        question=row.text("question"),
        references=row.texts("answer"),
        group=row.text("type").partition("_")[0],
    )


CHARTQA = QuestionAnswering(
    "relaxed_accuracy",
    "exact_match",
    published=Published(
        hub="lmms-lab-encoder/ChartQA",
        files=("data/test-*.parquet",),
        example=_example,
        prompt="{question}\nAnswer the question with a single word.",
        max_tokens=16,
    ),
)
