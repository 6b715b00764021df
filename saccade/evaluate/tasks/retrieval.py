"""Image-text retrieval among a pool of pairs: recall@1, 5 and 10 in both directions.

By likelihood, a pair's score is log P(caption | image). To find the caption of an image, the caption's mean likelihood
over the pool is divided out: otherwise short and common captions win for every image. To find the image of a caption
nothing has to be divided out. By embedding, the score is the cosine of the two embeddings. Recall depends on the size
of the pool, which is part of a metric's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from saccade.evaluate.example import Example
from saccade.evaluate.model import Model
from saccade.evaluate.statistics import Floats, Metric, proportion_metric
from saccade.evaluate.tasks.task import Asking, Record, Task

_RANKS = (1, 5, 10)


class Retrieval(Task):
    """Find the caption of an image, and the image of a caption."""

    prompt = "Describe the image."
    takes = "images with captions"
    limit = 64

    def __init__(self, by: Literal["likelihood", "embedding"]) -> None:
        self._by = by
        self.needs = "score" if by == "likelihood" else "embed"

    def accepts(self, example: Example) -> bool:
        """Accept images with captions; the first caption is used."""
        return bool(example.images) and example.question is None

    def ask(self, model: Model, example: Example, asking: Asking) -> dict[str, Any]:
        """Score the captions of the whole pool for one image, or embed its image and caption."""
        if self._by == "embedding":
            image = example.conversation("")[0]["content"][:-1]
            text = [{"type": "text", "text": example.references[0]}]
            vectors = [model.embed([{"role": "user", "content": content}]) for content in (image, text)]
            return {"image_embedding": vectors[0], "text_embedding": vectors[1]}
        prompt = asking.prompt_of(example)
        captions = [other.references[0] for other in asking.pool]
        scored = model.log_likelihoods(example.conversation(prompt), captions)
        return {
            "prompt": prompt,
            "pool": [other.id for other in asking.pool],
            "logprobs": [one.logprob for one in scored],
        }

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute the recall in both directions; row i of the scores is image i, column j caption j."""
        images, texts = (_similarities if self._by == "embedding" else _likelihoods)(records)
        metrics = {}
        for direction, ranks in (("image_to_text", _ranks(images)), ("text_to_image", _ranks(texts.T))):
            for limit in _RANKS:
                metrics[f"{direction}_recall@{limit}"] = proportion_metric((ranks < limit).astype(np.float64))
        return metrics

    def notes(self, records: Sequence[Record]) -> list[str]:
        """Say what chance gives, which depends on the pool."""
        count = len(records)
        scored = f", {count * count:,} captions scored" if self._by == "likelihood" else ""
        return [f"retrieval among {count:,} pairs{scored}: recall@1 by chance is {1 / max(1, count):.4f}"]


def _ranks(scores: Floats) -> Floats:
    """Count the other columns of each row that score at least as high as the diagonal."""
    own = np.diagonal(scores)[:, None]
    ranks: Floats = (scores >= own).sum(axis=1).astype(np.float64) - 1
    return ranks


def _likelihoods(records: Sequence[Record]) -> tuple[Floats, Floats]:
    """Return the scores for finding captions, and for finding images."""
    scores = np.full((len(records), len(records)), -np.inf)
    for row, record in enumerate(records):
        by_id = dict(zip(record.get("pool", ()), record.get("logprobs", ()), strict=True))
        scores[row] = [by_id.get(other["id"], -np.inf) for other in records]
    with np.errstate(invalid="ignore"):
        normalized = scores - np.logaddexp.reduce(scores, axis=0)
    return np.nan_to_num(normalized, nan=-np.inf), scores


def _similarities(records: Sequence[Record]) -> tuple[Floats, Floats]:
    """Return the cosines of all images with all captions."""
    images, texts = (
        _unit([record.get(name) or [0.0] for record in records]) for name in ("image_embedding", "text_embedding")
    )
    cosines: Floats = images @ texts.T
    return cosines, cosines


def _unit(vectors: Sequence[Sequence[float]]) -> Floats:
    size = max(map(len, vectors))
    matrix = np.array([vector if len(vector) == size else [0.0] * size for vector in vectors], dtype=np.float64)
    unit: Floats = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12)
    return unit
