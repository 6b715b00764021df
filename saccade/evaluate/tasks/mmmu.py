"""MMMU, validation (Yue et al., 2024): college questions with one to seven images; accuracy.

Most questions are multiple choice. The images are shown where the question or its choices mention them. Answers to open
questions are read as MMMU's evaluator does.
"""

from __future__ import annotations

import ast
import re

from saccade.evaluate.example import Example
from saccade.evaluate.metrics.open_answer import names_answer
from saccade.evaluate.readers.published import LETTER, SHORT_ANSWER, Published, Row
from saccade.evaluate.tasks.choice_benchmark import ChoiceBenchmark, with_choices
from saccade.evaluate.tasks.task import Record, answer_of

_DISCIPLINES = {
    "Art and Design": "Art Art_Theory Design Music",
    "Business": "Accounting Economics Finance Manage Marketing",
    "Science": "Biology Chemistry Geography Math Physics",
    "Health and Medicine": (
        "Basic_Medical_Science Clinical_Medicine Diagnostics_and_Laboratory_Medicine Pharmacy Public_Health"
    ),
    "Humanities and Social Science": "History Literature Sociology Psychology",
    "Tech and Engineering": (
        "Agriculture Architecture_and_Engineering Computer_Science Electronics Energy_and_Power Materials "
        "Mechanical_Engineering"
    ),
}
_DISCIPLINE_OF = {subject: name for name, subjects in _DISCIPLINES.items() for subject in subjects.split()}
_MARK = re.compile(r"<image (\d+)>")


class MMMU(ChoiceBenchmark):
    """Answer with the letter of a choice, or in a few words."""

    def is_right(self, record: Record) -> float:
        """Return 1 if the answer is right, else 0."""
        if record.get("choices"):
            return super().is_right(record)
        return float("failure" not in record and names_answer(answer_of(record), record["references"]))


def _example(row: Row) -> Example:
    name = row.text("id")
    choices = tuple(map(str, _literal(row["options"]))) if row["question_type"] == "multiple-choice" else ()
    question = with_choices(row.text("question"), choices) + "\n"
    marks = sorted({int(number) for number in _MARK.findall(question)})
    order = {f"<image {mark}>": f"<image {number}>" for number, mark in enumerate(marks, 1)}
    question = _MARK.sub(lambda mark: order[mark[0]], question)
    return Example(
        id=name,
        images=tuple(row.image(f"image_{number}") for number in marks),
        question=(LETTER if choices else SHORT_ANSWER).replace("{question}", question),
        references=tuple(map(str, _literal(row["answer"]))),
        choices=choices,
        group=_DISCIPLINE_OF.get(name.partition("_")[2].rpartition("_")[0], ""),
        is_interleaved=True,
    )


def _literal(value: object) -> list[object]:
    """Read a list, or the text of a list, as MMMU stores it; another text is a list of itself."""
    if isinstance(value, str) and value.startswith("["):
        value = ast.literal_eval(value)
    return value if isinstance(value, list) else [value]


MMMU_VALIDATION = MMMU(
    Published(
        hub="lmms-lab-encoder/MMMU",
        files=("*validation-*.parquet",),
        example=_example,
        prompt="{question}",
        max_tokens=128,
    )
)
