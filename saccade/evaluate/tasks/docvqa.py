"""DocVQA and InfographicVQA, validation (Mathew et al., 2021, 2022): questions about documents; ANLS."""

from __future__ import annotations

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import SHORT_ANSWER, Published, Row
from saccade.evaluate.tasks.question_answering import QuestionAnswering


def _example(row: Row) -> Example:
    return Example(
        id=row.text("questionId"),
        images=(row.image(),),
        question=row.text("question"),
        references=row.texts("answers"),
    )


def _task(config: str) -> QuestionAnswering:
    hub, files = "lmms-lab-encoder/DocVQA", (f"{config}/validation-*.parquet",)
    published = Published(hub=hub, files=files, example=_example, prompt=SHORT_ANSWER, max_tokens=32)
    return QuestionAnswering("anls", "exact_match", published=published)


DOCVQA = _task("DocVQA")
INFOVQA = _task("InfographicVQA")
