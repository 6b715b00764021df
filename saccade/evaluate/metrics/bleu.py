"""BLEU-1 to BLEU-4 of captions (Papineni et al., 2002), as COCO caption evaluation defines them.

    BLEU-N = brevity penalty * (product over n <= N of clipped matches_n / n-grams_n) ^ (1/N)

Matches, n-grams and lengths are summed over the corpus before they are divided. The length of the closest reference
counts, the shorter of two equally close ones. A tiny constant keeps a score without any match above 0, as in the
published evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_N = 4
_SMALL, _TINY = 1e-9, 1e-15


def bleu_counts(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """Count matches and n-grams of each n, the length, and that of the closest reference: ten numbers to sum."""
    limits: Counter[tuple[str, ...]] = Counter()
    for reference in references:
        limits |= ngram_counts(reference)
    counts = ngram_counts(candidate)
    matches = [0.0] * MAX_N
    for ngram, count in counts.items():
        matches[len(ngram) - 1] += min(count, limits[ngram])
    totals = [float(max(0, len(candidate) - n)) for n in range(MAX_N)]
    closest = min((abs(len(reference) - len(candidate)), len(reference)) for reference in references)[1]
    return [*matches, *totals, float(len(candidate)), float(closest)]


def bleu(counts: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Compute BLEU-n of summed counts [..., 10]."""
    matches, totals = counts[..., :n], counts[..., MAX_N : MAX_N + n]
    precision = np.prod((matches + _TINY) / (totals + _SMALL), axis=-1) ** (1 / n)
    ratio = (counts[..., -2] + _TINY) / (counts[..., -1] + _SMALL)
    penalty = np.where(ratio < 1, np.exp(1 - 1 / np.minimum(ratio, 1)), 1.0)
    score: NDArray[np.float64] = precision * penalty
    return score


def ngram_counts(tokens: Sequence[str], max_n: int = MAX_N) -> Counter[tuple[str, ...]]:
    """Count the n-grams of 1 to `max_n` tokens."""
    return Counter(
        tuple(tokens[start : start + n]) for n in range(1, max_n + 1) for start in range(len(tokens) - n + 1)
    )
