"""RealWorldQA (xAI, 2024): questions about photos, most with choices, which the question lists; accuracy.

An answer that is no letter is compared as a whole, without case and a full stop.
"""

from __future__ import annotations

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import Published, Row
from saccade.evaluate.tasks.choice_benchmark import LETTERS_ONLY, ChoiceBenchmark
from saccade.evaluate.tasks.task import Record, answer_of


class RealWorldQA(ChoiceBenchmark):
    """Answer with a letter, a number or a word, as the question asks."""

    def is_right(self, record: Record) -> float:
        """Return 1 if the answer is right, else 0."""
        if record.get("choices"):
            return super().is_right(record)
        return float(answer_of(record).lower().strip().rstrip(".") == record["references"][0].lower())


def _example(row: Row) -> Example:
    answer = row.text("answer")
    is_letter = answer.upper() in ("A", "B", "C", "D")
    return Example(
        id=str(row.number),
        images=(row.image(),),
        question=row.text("question"),
        references=(answer.upper() if is_letter else answer,),
        choices=LETTERS_ONLY if is_letter else (),
    )


REALWORLDQA = RealWorldQA(
    Published(
        hub="lmms-lab-encoder/RealWorldQA",
        files=("data/test-*.parquet",),
        example=_example,
        prompt="{question}",
        max_tokens=16,
    )
)
