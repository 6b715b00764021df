"""Read yes or no out of an answer, as POPE's evaluator does (Li et al., 2023).

An answer is yes, unless its first sentence has a word for no.

POPE's words are `No`, `no` and `not` between spaces. Here `NO`, `no!`, `isn't` and `false` are words for no as well. An
empty answer has none of them and is yes, as in POPE. (lmms-eval compares the whole answer with `yes` and `no`.)
"""

from __future__ import annotations

import re

_NO = frozenset({"no", "not", "false", "n't"})
_WORD = re.compile(r"n't\b|\w+?(?=n't\b)|\w+")


def is_yes(answer: str) -> bool:
    """Return whether an answer affirms: its first sentence contains no `no`, `not` or `false`.

    >>> [is_yes(answer) for answer in ("Yes, there is.", "No.", "There is not a dog. Yes.", "True")]
    [True, False, False, True]
    """
    sentence = answer.lower().replace("\u2019", "'").partition(".")[0]
    return not _NO.intersection(_WORD.findall(sentence))
