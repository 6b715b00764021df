"""Read out of an answer which choice of a multiple-choice question it names.

The rules join those of MMMU (Yue et al., 2024) and of lmms-eval: a letter in brackets, a letter that stands alone, the
text of a choice; of several the last one. They differ from MMMU's if that reading is plainly not what the answer says:

- An answer that is a choice word for word is that choice: `A dog` is not the letter A.
- `b`, `[B]`, `B:`, `Answer:B` and `\\boxed{B}` are letters too.
- A letter that is called the answer (`Answer: B`, `option B`, a box) counts before letters that come later.
- `A` and `I` before another word, and letters within the text of a choice (`vitamin C`), are words.
- An answer that names no choice is none, and wrong; MMMU draws one at random.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from string import ascii_uppercase

_ALONE = re.compile(r"[\W_]*([a-z])[\W_]*", re.IGNORECASE)
_NAMED = (
    re.compile(r"\\boxed\s*\{(?:\\\w+\s*\{)?[\W_]*([a-z])[\W_]*\}", re.IGNORECASE),
    re.compile(
        r"\b(?:answer|option|choice)(?:\s+(?:is|was|must be|should be|would be))?[\W_]*([a-z])(?![\w'])", re.IGNORECASE
    ),
    re.compile(r"\A[^\w([{]*([a-z])(?:[.):][.:*]*(?=\s|\Z)|[ \t*]*\n)", re.IGNORECASE),
    re.compile(r"[(\[{]\s*([a-z])\s*[)\]}]|\*\*([A-Z])\*\*", re.IGNORECASE),
    re.compile(r"(?<![\w'.&-])([A-Z])(?![\w'&-]|\.\w)"),
)
"""How a letter is named, the surest way first: in a box, as the answer, at the beginning, in brackets, standing
alone."""
_WORD_AFTER = re.compile(r"[ \t]+(?!(?:is|was|because|since|as|and|or|but)\b)\w")
_MARKS = " .,!?;:\"'*`"


def chosen(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the choice that an answer names, by its letter or its text; None if it names none.

    A choice without a text, `""`, is recognized by its letter only.
    """
    letters = ascii_uppercase[: len(choices)]
    alone = _ALONE.fullmatch(answer)
    if alone is not None and alone[1].upper() in letters:
        return letters.index(alone[1].upper())
    same = [index for index, choice in enumerate(choices) if choice and _plain(choice) == _plain(answer)]
    if same:
        return same[0]
    texts = list(_texts(answer, choices))
    for named in _NAMED:
        found = [
            letter for at, letter in _letters(answer, named) if not any(begin <= at < end for begin, end, _ in texts)
        ]
        found = [letter for letter in found if letter in letters]
        if found:
            return letters.index(found[-1])
    if texts:
        return max(texts, key=lambda text: (text[1], -text[0]))[
            2
        ]  # the last text counts; of two that end together the longer one
    return None


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(_MARKS)


def _letters(answer: str, named: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Return the offset and upper case of each letter that is named in one way, without those that are words."""
    for match in named.finditer(answer):
        letter = next(filter(None, match.groups()))
        after = match.end(match.lastindex or 1)
        is_word = letter in "AI" or letter.islower()
        if not (is_word and _WORD_AFTER.match(answer, after)):
            yield after - 1, letter.upper()


def _texts(answer: str, choices: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Find the texts of choices in the answer, as whole words: begin, end, and the choice's index."""
    for index, choice in enumerate(choices):
        words = r"\s+".join(map(re.escape, _plain(choice).split()))
        if len(words) > 1:
            for match in re.finditer(rf"(?<!\w){words}(?!\w)", answer, re.IGNORECASE):
                yield match.start(), match.end(), index
