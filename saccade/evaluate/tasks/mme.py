"""MME (Fu et al., 2023): two questions about each image, one with the answer yes and one with no.

The score of a category is its accuracy plus the share of images of which both answers are right, in percent: 200 at
most. The scores of ten categories add up to `perception`, those of four to `cognition`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from saccade.evaluate.example import Example
from saccade.evaluate.readers.published import SHORT_ANSWER, Published, Row
from saccade.evaluate.statistics import Floats, Metric, proportion_metric
from saccade.evaluate.tasks.task import Record, answer_of
from saccade.evaluate.tasks.yes_no import YesNo

_CATEGORIES = {
    "perception": "existence count position color posters celebrity scene landmark artwork OCR".split(),
    "cognition": ["commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning"],
}


class MME(YesNo):
    """Answer yes or no."""

    takes_other_data = False

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute the scores of perception and cognition, if their questions were asked, and the accuracy."""
        right = [float(_said(record) == record["references"][0]) for record in records]
        scores = {
            name: Metric(_counts(records, right, categories), _sum_of_categories)
            for name, categories in _CATEGORIES.items()
            if any(record["details"]["category"] in categories for record in records)
        }
        return scores | {"accuracy": proportion_metric(right)}


def _said(record: Record) -> str:
    """Return `yes` or `no` if it is within the first four letters of the answer."""
    answer = answer_of(record).lower().strip().replace(".", "")
    if answer in ("y", "n"):
        return {"y": "yes", "n": "no"}[answer]
    return next((word for word in ("yes", "no") if word in answer[:4]), "")


def _counts(records: Sequence[Record], right: Sequence[float], categories: Sequence[str]) -> Floats:
    """[records, 4 * categories]: right answers, answers, images with both right, images (with their first question)."""
    images = [(record["details"]["category"], record["details"]["image"]) for record in records]
    wrong = Counter(image for image, one in zip(images, right, strict=True) if not one)
    seen: set[tuple[str, str]] = set()
    counts = np.zeros((len(records), 4, len(categories)))
    for row, image in enumerate(images):
        if image[0] in categories:
            is_first = image not in seen
            seen.add(image)
            counts[row, :, categories.index(image[0])] = right[row], 1, is_first and not wrong[image], is_first
    return counts.reshape(len(records), -1)


def _sum_of_categories(sums: Floats) -> Floats:
    right, asked, pairs, images = np.split(sums, 4, axis=-1)
    score: Floats = 100 * (right / np.maximum(1, asked) + pairs / np.maximum(1, images)).sum(axis=-1)
    return score


def _example(row: Row) -> Example:
    return Example(
        id=f"{row.text('question_id')}/{row.number}",
        images=(row.image(),),
        question=row.text("question").replace(" Please answer yes or no.", ""),
        references=(row.text("answer").lower().replace(".", ""),),
        details={"category": row.text("category"), "image": row.text("question_id")},
    )


MME_TEST = MME(
    published=Published(
        hub="lmms-lab-encoder/MME",
        files=("data/test-*.parquet",),
        example=_example,
        prompt=SHORT_ANSWER,
        max_tokens=16,
    )
)
