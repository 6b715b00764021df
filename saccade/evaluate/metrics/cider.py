"""CIDEr-D of captions (Vedantam et al., 2015), as COCO caption evaluation defines it.

    mean over n = 1..4 and references of 10 * cosine of clipped TF-IDF vectors * exp(-(length difference)^2 / (2 * 6^2))

The document frequency of an n-gram is the number of images whose references contain it. Scores depend on the whole set:
those of two subsets cannot be compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from saccade.evaluate.metrics.bleu import MAX_N, ngram_counts

_SIGMA = 6.0
_Counts = Counter[tuple[str, ...]]
_Vectors = list[dict[tuple[str, ...], float]]


def cider_d(candidates: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> list[float]:
    """Compute CIDEr-D of each caption, 0 to 10; the score of the set is their mean."""
    counts = [[ngram_counts(reference) for reference in of_image] for of_image in references]
    frequency: _Counts = Counter()
    for of_image in counts:
        frequency.update({ngram for each in of_image for ngram in each})
    log_images = math.log(max(1, len(counts)))
    weights = {ngram: log_images - math.log(max(1, documents)) for ngram, documents in frequency.items()}
    return [
        _score(ngram_counts(candidate), of_image, weights, log_images)
        for candidate, of_image in zip(candidates, counts, strict=True)
    ]


def _score(
    candidate: _Counts, references: Sequence[_Counts], weights: dict[tuple[str, ...], float], unseen: float
) -> float:
    vectors, norms, length = _vectors(candidate, weights, unseen)
    total = 0.0
    for reference in references:
        theirs, their_norms, their_length = _vectors(reference, weights, unseen)
        penalty = math.exp(-((length - their_length) ** 2) / (2 * _SIGMA**2))
        for n in range(MAX_N):
            if norms[n] and their_norms[n]:
                dot = sum(
                    min(value, theirs[n].get(ngram, 0.0)) * theirs[n].get(ngram, 0.0)
                    for ngram, value in vectors[n].items()
                )
                total += penalty * dot / (norms[n] * their_norms[n])
    return 10.0 * total / MAX_N / len(references)


def _vectors(
    counts: _Counts, weights: dict[tuple[str, ...], float], unseen: float
) -> tuple[_Vectors, list[float], int]:
    """Return the TF-IDF vectors of each n, their norms, and the length (in bigrams, as published)."""
    vectors: _Vectors = [{} for _ in range(MAX_N)]
    for ngram, count in counts.items():
        vectors[len(ngram) - 1][ngram] = count * weights.get(ngram, unseen)
    norms = [math.sqrt(sum(value * value for value in vector.values())) for vector in vectors]
    return vectors, norms, sum(count for ngram, count in counts.items() if len(ngram) == 2)
