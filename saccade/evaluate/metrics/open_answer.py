"""Decide whether a longer answer names the expected one, as MMMU's evaluator does (Yue et al., 2024).

From each line the shortest part after a word such as `is`, `so` or `answer` is taken, or the whole answer if no line
has one; the numbers in these parts are candidates too. A candidate that is text is right if it contains an expected
text; a number, if it equals an expected number when both are rounded to two decimals.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_INDICATORS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_TRIVIAL = frozenset(":,.!?;'")
_EXPONENT = r"e[+-]?\d+"
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(rf"-?\d+(?:\.\d+)?{_EXPONENT}"),
    re.compile(rf"-?(?:\d*\.\d+|\d+\b)(?!{_EXPONENT}|[,\d])"),
)
"""Numbers with commas, with an exponent, and others."""


def names_answer(answer: str, expected: Sequence[str]) -> bool:
    """Whether an answer names one of the expected ones."""
    parts = list(_key_parts(answer))
    candidates = parts + [number for part in parts for pattern in _NUMBERS for number in pattern.findall(part)]
    given = [value for candidate in candidates for value in _normalized(candidate)]
    wanted = [value for text in expected for value in _normalized(text)]
    texts = [value for value in wanted if isinstance(value, str)]
    return any(any(text in value for text in texts) if isinstance(value, str) else value in wanted for value in given)


def _key_parts(answer: str) -> Iterator[str]:
    """Return the part of each line that says the answer; the whole answer if no line has one."""
    whole = answer.strip().strip(".").lower()
    lines, found = whole.split("\n"), False
    for number, line in enumerate(lines, 1):
        shortest = ""
        for indicator in (*_INDICATORS, "=") if number == len(lines) else _INDICATORS:
            tail = line.split(indicator)[-1].strip()
            if indicator in line and (not shortest or len(tail) < len(shortest)):
                shortest = tail
        if shortest and shortest not in _TRIVIAL:
            found = True
            yield shortest
    if not found:
        yield whole


def _normalized(text: str) -> list[str | float]:
    """Round a number to two decimals, and write text in lower case; a single character gets spaces around it."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]
