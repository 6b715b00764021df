"""ROUGE-L of captions (Lin, 2004), as COCO caption evaluation defines it.

F-score of the longest common subsequence with beta 1.2; precision and recall are each the best over the references.
"""

from __future__ import annotations

from collections.abc import Sequence

_BETA = 1.2


def rouge_l(candidate: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Compute ROUGE-L of one caption, 0 to 1."""
    if not candidate:
        return 0.0
    lengths = [(_common_subsequence(candidate, reference), len(reference)) for reference in references if reference]
    if not lengths:
        return 0.0
    precision = max(common for common, _ in lengths) / len(candidate)
    recall = max(common / length for common, length in lengths)
    if precision == 0 or recall == 0:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for token in one:
        diagonal = 0
        for column, compared in enumerate(other, 1):
            above = row[column]
            row[column] = diagonal + 1 if token == compared else max(above, row[column - 1])
            diagonal = above
    return row[-1]
