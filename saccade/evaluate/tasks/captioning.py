"""Captioning: describe the image; CIDEr-D, BLEU-1 to BLEU-4 and ROUGE-L against the captions people wrote."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from saccade.evaluate.example import Example
from saccade.evaluate.metrics.bleu import MAX_N, bleu, bleu_counts
from saccade.evaluate.metrics.caption_tokenizer import tokenize_caption
from saccade.evaluate.metrics.cider import cider_d
from saccade.evaluate.metrics.rouge import rouge_l
from saccade.evaluate.statistics import Metric, mean_metric
from saccade.evaluate.tasks.task import Record, Task, answer_of


class Captioning(Task):
    """Describe the image."""

    prompt = "Describe the image."
    max_tokens = 64
    takes = "images with captions"

    def accepts(self, example: Example) -> bool:
        """Accept images with captions and no question."""
        return bool(example.images) and example.question is None

    def score(self, records: Sequence[Record]) -> dict[str, Metric]:
        """Compute CIDEr-D, BLEU and ROUGE-L on the tokens of COCO caption evaluation."""
        captions = [tokenize_caption(answer_of(record)) for record in records]
        references = [[tokenize_caption(text) for text in record["references"]] for record in records]
        counts = np.array([bleu_counts(*pair) for pair in zip(captions, references, strict=True)])
        scores = {
            "cider": mean_metric(cider_d(captions, references)),
            "rouge_l": mean_metric([rouge_l(*pair) for pair in zip(captions, references, strict=True)]),
        }
        return scores | {
            f"bleu_{n}": Metric(counts, partial(bleu, n=n), values=bleu(counts, n)) for n in range(1, MAX_N + 1)
        }
