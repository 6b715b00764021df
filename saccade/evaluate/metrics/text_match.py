"""Exact match, ANLS and relaxed accuracy of short answers.

Exact match: equal after case, punctuation at the ends and white space. ANLS (Biten et al., 2019) is that of the DocVQA
challenge's evaluator and of lmms-eval: 1 - normalized edit distance to the closest answer, or 0 if that is below 0.5.
Relaxed accuracy (Methani et al., 2020; ChartQA): numbers within 5 %, other answers equal but for case.
"""

from __future__ import annotations

from collections.abc import Sequence

_MIN_SIMILARITY = 0.5
_RELATIVE_TOLERANCE = 0.05


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer equals a reference, else 0."""
    return float(_plain(answer) in map(_plain, references))


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .,!?;:\"'")


def anls(answer: str, references: Sequence[str]) -> float:
    """Compute the Average Normalized Levenshtein Similarity of one answer."""
    similarity = max((_similarity(answer, reference) for reference in references), default=0.0)
    return similarity if similarity >= _MIN_SIMILARITY else 0.0


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def _similarity(answer: str, reference: str) -> float:
    """1 - edit distance of the folded texts / length of the longer text before folding, as the evaluators have it."""
    longest = max(len(answer), len(reference))
    return 1.0 - edit_distance(_folded(answer), _folded(reference)) / longest if longest else 1.0


def edit_distance(one: str, other: str) -> int:
    """Compute the Levenshtein distance."""
    row = list(range(len(other) + 1))
    for number, character in enumerate(one, 1):
        diagonal, row[0] = row[0], number
        for column, compared in enumerate(other, 1):
            above = row[column]
            row[column] = min(above + 1, row[column - 1] + 1, diagonal + (character != compared))
            diagonal = above
    return row[-1]


def relaxed_accuracy(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer is within 5 % of a numeric reference or equals another one, else 0."""
    return float(any(_is_close(answer.strip(), reference.strip()) for reference in references))


def _is_close(answer: str, reference: str) -> bool:
    value, expected = _number(answer), _number(reference)
    if value is not None and expected:  # 0 has no relative tolerance
        return abs(value - expected) / abs(expected) <= _RELATIVE_TOLERANCE
    return answer.lower() == reference.lower()


def _number(text: str) -> float | None:
    """Read a number, or a percentage as a fraction."""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
