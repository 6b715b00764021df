"""Published multiple-choice benchmarks: the question lists its choices, the answer is a letter.

The reference of an example is the letter of the right choice. `multiple_choice` is the task for other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, ClassVar

from saccade.evaluate.example import Example
from saccade.evaluate.metrics.choice import chosen
from saccade.evaluate.model import Model
from saccade.evaluate.readers.published import Published
from saccade.evaluate.statistics import Metric, proportion_metric
from saccade.evaluate.tasks.task import Asking, Record, Task, answer_of, generate_answer

LETTERS_ONLY = ("", "", "", "")
"""Choices of a question that lists them itself: answers name their letters, A to D."""


class ChoiceBenchmark(Task):
    """Answer with the letter of a choice."""

    takes_other_data: ClassVar[bool] = False

    def __init__(self, published: Published) -> None:
        self.published = published

    def accepts(self, example: Example) -> bool:
        """Accept all questions of the benchmark."""
        return bool(example.question)

    def ask(self, model: Model, example: Example, asking: Asking) -> dict[str, Any]:
        """Generate an answer."""
        return generate_answer(model, example, asking) | {"choices": list(example.choices)}

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute the share of right answers."""
        return {"accuracy": proportion_metric([self.is_right(record) for record in records])}

    def is_right(self, record: Record) -> float:
        """Return 1 if the answer names the right choice, else 0."""
        index = chosen(answer_of(record), record.get("choices", ()))
        return float(index is not None and ascii_uppercase[index] in record["references"])


def with_choices(question: str, choices: Sequence[str]) -> str:
    """List the choices below a question, as `A. first`."""
    return "\n".join([question, *(f"{letter}. {text}" for letter, text in zip(ascii_uppercase, choices, strict=False))])
