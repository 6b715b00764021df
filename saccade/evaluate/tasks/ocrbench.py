"""OCRBench (Liu et al., 2024): an answer is right if it contains an expected text.

A thousand times the accuracy is its score.
"""

from __future__ import annotations

from collections.abc import Sequence

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import Published, Row
from saccade.evaluate.statistics import Metric, proportion_metric
from saccade.evaluate.tasks.question_answering import QuestionAnswering
from saccade.evaluate.tasks.task import Record, answer_of

_TO_HALF_WIDTH = {0xFF01 + offset: 0x21 + offset for offset in range(94)} | {0x3000: 0x20}


class OCRBench(QuestionAnswering):
    """Read text in images."""

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute the share of right answers."""
        return {"accuracy": proportion_metric([_is_right(record) for record in records])}


def _is_right(record: Record) -> float:
    fold = _formula if record.get("details", {}).get("dataset") == "HME100k" else _text
    answer = fold(answer_of(record))
    return float("failure" not in record and any(fold(expected) in answer for expected in record["references"]))


def _formula(text: str) -> str:
    """Remove the spaces of a formula."""
    return text.strip().replace("\n", " ").replace(" ", "")


def _text(text: str) -> str:
    """Write text in lower case on one line, with full-width characters as ASCII."""
    return text.translate(_TO_HALF_WIDTH).lower().strip().replace("\n", " ")


def _example(row: Row) -> Example:
    kind = row.text("question_type")
    is_recognition = kind.endswith("Text Recognition") or kind in (
        "Handwriting Recognition",
        "Digit String Recognition",
    )
    return Example(
        id=str(row.number),
        images=(row.image(),),
        question=row.text("question"),
        references=row.texts("answer"),
        group="Text Recognition" if is_recognition else kind,
        details={"dataset": row.text("dataset")},
    )


OCRBENCH = OCRBench(
    published=Published(
        hub="echo840/OCRBench",
        files=("data/test-*.parquet",),
        example=_example,
        prompt="{question}",
        max_tokens=128,
    )
)
