"""Tokenize captions as COCO caption evaluation does: Penn Treebank tokens in lower case, without punctuation.

    "A man's dog can't swim (yet)."  ->  a man 's dog ca n't swim -lrb- yet -rrb-

The published evaluation runs Stanford's PTBTokenizer with `-lowerCase` and removes a list of punctuation tokens. These
rules give its tokens for captions: contractions are split; hyphenated words, numbers, times, fractions and
abbreviations are one token; brackets become -lrb- and -rrb-, which that list does not contain in lower case, so they
stay.
"""

from __future__ import annotations

import re

_PUNCTUATION = frozenset({'"', "''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"})
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_SAME_AS = {
    "\u201c": '"', "\u201d": '"', "\u201e": '"', "\u00ab": '"', "\u00bb": '"',
    "\u2018": "'", "\u2019": "'", "\u201b": "'",
    "\u2013": " -- ", "\u2014": " -- ", "\u2026": " ... ", "&amp;": "&", "&quot;": '"', "&lt;": "<", "&gt;": ">",
    "\u00a2": " cents ", "\u00a3": "#", "\u20ac": "$", "\u00bd": "1/2", "\u00bc": "1/4", "\u00be": "3/4",
}  # fmt: skip
"""Typographic quotes and dashes, entities, currencies and fractions, as the tokenizer spells them."""
_STAND_IN = re.compile("|".join(map(re.escape, _SAME_AS)))
_ABBREVIATIONS = (
    "mr mrs ms messrs dr drs prof gen col capt cpt cmdr lt sgt sen sens rep reps gov hon rev pres "
    "st ste mt ft ave blvd rd hwy sq dept assn bros inc ltd corp co cos jr sr esq etc vs v est ca ed eds al ext "
    "jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri sat "
    "ala ariz ark calif colo conn del fla ga ill ind kan ky md mich minn miss mo mont neb nev "
    "okla ore pa tenn tex va vt wash wis wyo"
)
_ABBREVIATION = "|".join(sorted(_ABBREVIATIONS.split(), key=len, reverse=True))
_WORD = r"[^\W_]+"
_CLITIC = r"'(?:s|m|d|re|ve|ll)(?![^\W_])"
_TOKEN = re.compile(
    rf"""
      https?://[^\s"<>|()]*[^\s"<>|.!?(){{}},-]                     # an address
    | [\w.%+-]+@[a-z0-9-]+(?:\.[a-z0-9-]+)+                         # a mail address
    | (?:[a-z]\.)+[a-z](?![\w.]) | (?:[a-z]\.){{2,}} | (?-i:\b[A-Z]\.)(?!\w) | ph\.d\.   # a.b u.s. P.
    | (?:{_ABBREVIATION})\.(?![^\W_])                               # mr. ave.
    | (?:nos?|art|figs?|p|pp)\.(?=\s?\d)                            # no. 5
    | (?:can)(?=not\b) | (?:gon|wan)(?=na\b) | got(?=ta\b) | (?:gim|lem)(?=me\b) | 't(?=(?:is|was)\b) | y'(?=all\b)
    | '\d\ds\b | '?n'(?=\s) | 'em\b | '(?-i:n)\b
    | [$](?=\d)
    | (?<![^\W_])[+-]?\d+(?:[,.:]\d+)+ | (?<![\w])[+-]\d+\b | (?<![^\W_])\.\d+   # 1,000.5 10:30 -5
    | \d+(?:[-/]\d+)+(?:-{_WORD})*                                  # 3/4 1/2-inch 2001-09-11
    | (?-i:[A-Z]+&[A-Z]+)                                            # AT&T
    | [@\#](?:[^\W\d]\w*)                                           # #hashtag
    | c(?:\+\+|\#)
    | (?-i:US|C|A)\$ | \w+?(?=n't\b) | n't\b                            # do n't
    | (?:o'|d'|l'){_WORD} | {_CLITIC}
    | {_WORD}(?:[-_/.]{_WORD})*                                     # t-shirt and/or
    | \.{{2,}} | -+ | [!?]+ | [()\[\]{{}}] | '' | `` | \S
    """,
    re.VERBOSE | re.IGNORECASE,
)


def tokenize_caption(text: str) -> list[str]:
    """Return the tokens of a caption that are compared.

    >>> tokenize_caption("A man's dog can't swim (yet).")
    ['a', 'man', "'s", 'dog', 'ca', "n't", 'swim', '-lrb-', 'yet', '-rrb-']
    """
    text = _STAND_IN.sub(lambda found: _SAME_AS[found.group()], text)
    tokens = [_BRACKETS.get(token, token).lower() for token in _TOKEN.findall(text)]
    return [token for token in tokens if token not in _PUNCTUATION and not token.startswith(("..", "--"))]
