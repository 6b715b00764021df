"""Visual question answering with short answers: VQA v2, DocVQA, ChartQA and others, which differ in their metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from saccade.evaluate.example import Example
from saccade.evaluate.metrics.text_match import anls, exact_match, relaxed_accuracy
from saccade.evaluate.metrics.vqa_accuracy import textvqa_accuracy, vqa_accuracy
from saccade.evaluate.readers.published import Published
from saccade.evaluate.statistics import Metric, proportion_metric
from saccade.evaluate.tasks.task import Record, Task, answer_of

METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "vqa_accuracy": vqa_accuracy,
    "textvqa_accuracy": textvqa_accuracy,
    "anls": anls,
    "relaxed_accuracy": relaxed_accuracy,
    "exact_match": exact_match,
}
_MUCH_LONGER = 4


class QuestionAnswering(Task):
    """Answer a question in a few words."""

    def __init__(self, *metrics: str, published: Published | None = None) -> None:
        self._metrics, self.published = metrics, published

    def accepts(self, example: Example) -> bool:
        """Accept questions without choices."""
        return example.question is not None and bool(example.references)

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute the metrics of this kind of question."""
        return {
            name: proportion_metric([METRICS[name](answer_of(record), record["references"]) for record in records])
            for name in self._metrics
        }

    def notes(self, records: Sequence[Record]) -> list[str]:
        """Warn of long answers, which score 0 against short references whatever they say."""
        ours = median(len(answer_of(record).split()) for record in records)
        theirs = median(len(record["references"][0].split()) for record in records)
        if ours < _MUCH_LONGER * max(1, theirs):
            return []
        return [
            f"answers have {ours:g} words where the expected ones have {theirs:g}. If the model can be asked for short "
            "ones: --prompt 'TASK={question} Answer the question using a single word or phrase.'"
        ]
