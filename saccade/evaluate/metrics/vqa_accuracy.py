"""Soft accuracy of VQA v2 (https://visualqa.org/evaluation.html) with its normalization of answers.

    accuracy = mean over the ten people of  min(1, how many of the other nine gave this answer / 3)

Before the comparison answers are in lower case, without full stops (but decimal points), articles and punctuation,
number words are digits, and contractions have their apostrophe. The challenge's server and lmms-eval do the same; the
evaluator that was released first leaves answers as they are if all ten people agree. With a single reference answer the
accuracy is 1 or 0 (published: always 0).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
_ARTICLES = frozenset({"a", "an", "the"})
_CONTRACTIONS = (
    "ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd "
    "he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've must've mustn't "
    "needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd "
    "somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've "
    "something'll that'd that'd've that's there'd there'd've there're there's they'd they'd've they'll they're "
    "they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's where'd where's where've who'd "
    "who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'd've y'all'll "
    "you'd you'd've you'll you're you've"
)
_APOSTROPHE_MISSING = {
    word[:at] + word[at + 1 :]: word for word in _CONTRACTIONS.split() for at in range(len(word)) if word[at] == "'"
}
"""Contractions without one of their apostrophes."""
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
_PERIOD = re.compile(r"\.(?!\d)")
_COMMA_IN_NUMBER = re.compile(r"(?<=\d),(?=\d)")


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Compute the soft accuracy of one answer against the answers of several people."""
    given = normalize_answer(answer)
    matches = [normalize_answer(reference) == given for reference in references]
    if len(matches) < 2:
        return float(any(matches))
    total = sum(matches)
    return sum(min(1.0, (total - match) / 3) for match in matches) / len(matches)


def textvqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """Compute it with the normalization of TextVQA, which first drops commas, question marks and a final `'s`."""
    return vqa_accuracy(_cut(answer), [_cut(reference) for reference in references])


def _cut(answer: str) -> str:
    return answer.lower().replace(",", "").replace("?", "").replace("'s", " 's")


def normalize_answer(answer: str) -> str:
    """Normalize an answer for the comparison.

    >>> normalize_answer("The  two dogs, dont move.")
    "2 dogs don't move"
    """
    text = _replace_punctuation(" ".join(answer.lower().split()))
    words = [_NUMBERS.get(word, word) for word in text.split()]
    return " ".join(_APOSTROPHE_MISSING.get(word, word) for word in words if word not in _ARTICLES)


def _replace_punctuation(text: str) -> str:
    """Replace punctuation by a space, or by nothing next to a space or in an answer with a number such as 1,000."""
    has_number, kept = _COMMA_IN_NUMBER.search(text) is not None, text
    for mark in _PUNCTUATION:
        is_beside_space = f"{mark} " in text or f" {mark}" in text
        kept = kept.replace(mark, "" if is_beside_space or has_number else " ")
    return _PERIOD.sub("", kept)
