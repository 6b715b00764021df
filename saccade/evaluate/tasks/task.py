"""The base of all tasks: which examples they accept, how they ask a model, how they score its answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from saccade.evaluate.example import Example
from saccade.evaluate.model import Decoding, Model
from saccade.evaluate.readers.published import Published
from saccade.evaluate.statistics import Metric

Record = Mapping[str, Any]
"""A line of examples.jsonl: `id`, `images`, `references`, and what the task recorded, or the `failure`."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How the examples of a task are asked."""

    prompt: str
    """Text of the user's turn; `{question}` is replaced by the question."""
    decoding: Decoding
    """How answers are generated."""
    pool: Sequence[Example] = ()
    """All examples of the task."""

    def prompt_of(self, example: Example) -> str:
        """Return the user's text."""
        return self.prompt.replace("{question}", example.question or "")


class Task(ABC):
    """A task."""

    prompt: ClassVar[str] = "{question}"
    """Default of `Asking.prompt`."""
    max_tokens: ClassVar[int] = 32
    """Default of `Decoding.max_tokens`."""
    takes: ClassVar[str] = "questions with answers"
    """Description of the accepted examples, for messages."""
    limit: ClassVar[int | None] = None
    """Default number of examples; None: all."""
    needs: str | None = None
    """Ability that a model needs: `score` or `embed`."""
    published: Published | None = None
    """Benchmark of the task's name, with its own prompt."""
    takes_other_data: ClassVar[bool] = True
    """Whether the task accepts other data than that benchmark."""

    @abstractmethod
    def accepts(self, example: Example) -> bool:
        """Return whether the task accepts an example."""

    def ask(self, model: Model, example: Example, asking: Asking) -> dict[str, Any]:
        """Ask the model about one example; return what is recorded. By default it generates an answer."""
        return generate_answer(model, example, asking)

    @abstractmethod
    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute metrics by name, the most important one first. Each has one row per record."""

    def notes(self, records: Sequence[Record]) -> list[str]:
        """Return what a reader of the scores should know."""
        del records
        return []


def generate_answer(model: Model, example: Example, asking: Asking, prompt: str | None = None) -> dict[str, Any]:
    """Generate an answer to the prompt of an example, and record it."""
    text = asking.prompt_of(example) if prompt is None else prompt
    answer = model.generate(example.conversation(text), asking.decoding)
    return {
        "prompt": text,
        "answer": answer.text.encode(errors="replace").decode().strip(),  # a server may send half a surrogate pair
        "num_prompt_tokens": answer.num_prompt_tokens,
        "num_tokens": answer.num_tokens,
        "finish_reason": answer.finish_reason,
    }


def answer_of(record: Record) -> str:
    """Return the answer of a record; empty if the model refused the example."""
    return str(record.get("answer", ""))
