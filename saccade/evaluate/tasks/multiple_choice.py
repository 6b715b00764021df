"""Multiple choice, asked in two ways: by the likelihood of each choice, and by the letter that the model generates.

`letter_accuracy` reads the generated answer as `metrics/choice.py` describes.

`likelihood_accuracy` compares the sums over the tokens of a choice, `normalized_accuracy` their mean, which does not
favour short choices. A model that gives no log-likelihoods is asked for the letter only.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from saccade.evaluate.example import Example
from saccade.evaluate.metrics.choice import chosen
from saccade.evaluate.model import Model
from saccade.evaluate.statistics import Metric, proportion_metric
from saccade.evaluate.tasks.task import Asking, Record, Task, answer_of, generate_answer


class MultipleChoice(Task):
    """Choose one of several answers."""

    max_tokens = 16
    takes = "questions with choices"

    def accepts(self, example: Example) -> bool:
        """Accept questions with up to 26 choices."""
        return bool(example.question) and 1 < len(example.choices) <= len(ascii_uppercase)

    def ask(self, model: Model, example: Example, asking: Asking) -> dict[str, Any]:
        """Ask for a letter, and score every choice as an answer to the bare question."""
        question = asking.prompt_of(example)
        listed = "\n".join(
            f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, example.choices, strict=False)
        )
        prompt = f"{question}\n{listed}\nAnswer with the letter of the right choice."
        record = generate_answer(model, example, asking, prompt) | {"choices": list(example.choices)}
        if model.can_score:
            scored = model.log_likelihoods(example.conversation(question), example.choices)
            record["logprobs"] = [one.logprob for one in scored]
            record["choice_tokens"] = [one.num_tokens for one in scored]
        return record

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute the accuracy of the letters, and of the likelihoods if all were computed."""
        metrics = {
            "letter_accuracy": proportion_metric(
                [float(chosen(answer_of(record), record.get("choices", ())) in _right(record)) for record in records]
            )
        }
        if all("logprobs" in record or "failure" in record for record in records):
            for name, is_mean in (("likelihood_accuracy", False), ("normalized_accuracy", True)):
                metrics[name] = proportion_metric(
                    [float(_most_likely(record, is_mean) in _right(record)) for record in records]
                )
        return metrics


def _right(record: Record) -> list[int]:
    return [number for number, choice in enumerate(record.get("choices", ())) if choice in record["references"]]


def _most_likely(record: Record, is_mean: bool) -> int | None:
    if "logprobs" not in record:
        return None
    lengths = record["choice_tokens"] if is_mean else [1] * len(record["logprobs"])
    scores = [logprob / max(1, length) for logprob, length in zip(record["logprobs"], lengths, strict=True)]
    return scores.index(max(scores))
