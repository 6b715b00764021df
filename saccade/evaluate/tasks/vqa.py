"""VQA v2 (Goyal et al., 2017) and TextVQA (Singh et al., 2019), validation: ten people's answers; VQA accuracy."""

from __future__ import annotations

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import SHORT_ANSWER, Published, Row
from saccade.evaluate.tasks.question_answering import QuestionAnswering


def _example(row: Row) -> Example:
    return Example(
        id=row.text("question_id"),
        images=(row.image(),),
        question=row.text("question"),
        references=tuple(str(answer["answer"]) for answer in row["answers"]),
        group=row.text("answer_type"),
    )


def _textvqa_example(row: Row) -> Example:
    return Example(
        id=row.text("question_id"),
        images=(row.image(),),
        question=row.text("question").capitalize(),
        references=row.texts("answers"),
    )


VQAV2 = QuestionAnswering(
    "vqa_accuracy",
    "exact_match",
    published=Published(
        hub="lmms-lab-encoder/VQAv2",
        files=("data/validation-*.parquet",),
        example=_example,
        prompt=SHORT_ANSWER,
        max_tokens=16,
    ),
)
TEXTVQA = QuestionAnswering(
    "textvqa_accuracy",
    "exact_match",
    published=Published(
        hub="lmms-lab-encoder/textvqa",
        files=("data/validation-*.parquet",),
        example=_textvqa_example,
        prompt=SHORT_ANSWER,
        max_tokens=32,
    ),
)
