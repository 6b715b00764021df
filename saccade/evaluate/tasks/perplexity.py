"""Perplexity of the expected answers, given image and question; per token, without the end of the turn.

`bits_per_byte` is the same likelihood per byte of text, which can be compared between tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from saccade.evaluate.example import Example
from saccade.evaluate.model import Model
from saccade.evaluate.statistics import Floats, Metric, ratio_metric
from saccade.evaluate.tasks.captioning import Captioning
from saccade.evaluate.tasks.task import Asking, Record, Task


class Perplexity(Task):
    """Score the likelihood of the expected answers."""

    takes = "captions or questions with answers"
    needs = "score"

    def accepts(self, example: Example) -> bool:
        """Accept any example with a reference."""
        return bool(example.references)

    def ask(self, model: Model, example: Example, asking: Asking) -> dict[str, Any]:
        """Sum the log-likelihoods of all references."""
        prompt = asking.prompt_of(example) if example.question is not None else Captioning.prompt
        scored = model.log_likelihoods(example.conversation(prompt), example.references)
        return {
            "prompt": prompt,
            "logprob": sum(one.logprob for one in scored),
            "num_scored_tokens": sum(one.num_tokens for one in scored),
            "num_scored_bytes": sum(len(reference.encode()) for reference in example.references),
        }

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute perplexity and bits per byte."""
        losses = [-float(record.get("logprob", 0.0)) for record in records]
        tokens = [float(record.get("num_scored_tokens", 0)) for record in records]
        sizes = [float(record.get("num_scored_bytes", 0)) for record in records]
        bits = [loss / math.log(2) for loss in losses]
        values = np.exp(np.array(losses) / np.maximum(1.0, tokens))
        return {
            "perplexity": Metric(
                np.stack([losses, tokens], axis=1), _perplexity, higher_is_better=False, values=values
            ),
            "bits_per_byte": ratio_metric(bits, sizes, higher_is_better=False),
        }


def _perplexity(sums: Floats) -> Floats:
    value: Floats = np.exp(sums[..., 0] / np.maximum(1.0, sums[..., 1]))
    return value
