"""What is measured of a text: words, repetition, language. Heuristics without a model, at tens of thousands of captions a second.

The language is a guess by script, and in Latin script by function words: "the", "with", "der", "und". A caption without any
("Red dress, size M") has no language here, and no rule drops it for that.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

_UNSPACED = (
    "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f"  # kana, Han, Hangul, Thai: a character counts as a word
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+(?:['\u2019][^\W_{_UNSPACED}]+)?")
_WORD_RUN, _CHARACTER_RUN = 3, 10
_MEASURED_CHARACTERS = 4000  # repetition is measured at the front of longer texts: their runs repeat by nature


@dataclass(frozen=True, slots=True)
class TextStatistics:
    """Of one text."""

    num_words: int
    word_repetition: float
    character_repetition: float
    language: str | None


def text_statistics(text: str) -> TextStatistics:
    """Count words, the share of three-word and ten-character runs that occurred before, and guess the language."""
    front = text[:_MEASURED_CHARACTERS].lower()
    words = _WORD.findall(front)
    return TextStatistics(
        num_words=len(words) if len(text) <= _MEASURED_CHARACTERS else len(_WORD.findall(text)),
        word_repetition=_repeated_share(list(zip(*(words[n:] for n in range(_WORD_RUN)), strict=False))),
        character_repetition=_repeated_share(
            [front[n : n + _CHARACTER_RUN] for n in range(len(front) - _CHARACTER_RUN + 1)]
        ),
        language=guess_language(front, words),
    )


def _repeated_share(runs: list[str] | list[tuple[str, ...]]) -> float:
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


# ------------------------------------------------------------------ language

_SCRIPTS = (
    ("latin", 0x41, 0x24F), ("greek", 0x370, 0x3FF), ("cyrillic", 0x400, 0x52F), ("hebrew", 0x590, 0x5FF),
    ("arabic", 0x600, 0x77F), ("devanagari", 0x900, 0x97F), ("bengali", 0x980, 0x9FF), ("tamil", 0xB80, 0xBFF),
    ("thai", 0xE00, 0xE7F), ("latin", 0x1E00, 0x1EFF), ("kana", 0x3040, 0x30FF), ("han", 0x3400, 0x9FFF),
    ("hangul", 0xAC00, 0xD7AF),
)  # fmt: skip
_SCRIPT_NAMES = sorted({name for name, _, _ in _SCRIPTS})
_LANGUAGE_OF_SCRIPT = {
    "greek": "el", "hebrew": "he", "devanagari": "hi", "bengali": "bn", "tamil": "ta", "thai": "th", "hangul": "ko",
    "han": "zh", "kana": "ja",
}  # fmt: skip
_FUNCTION_WORDS = {
    "en": "the an and of in on with is are at by for from to his her their this that it its while into near through as or be was "
    "were has have who which over under up out off down behind some other another one two what how many does do there these not no",
    "de": "der die das und ein eine einer einem einen mit auf im ist von zu für den dem des sich auch nicht bei sind vor wie viele",
    "fr": "le la les un une des et du dans avec sur est pour au aux qui par en ce sont cette son sa deux devant quel combien",
    "es": "el la los las un una de del en con por para es que se su al como está sobre más dos junto sin cuántos qué",
    "pt": "os as um uma do da dos das em no na com por para que se seu sua ao mais são está não quantos",
    "it": "il lo la gli le un una di del della dei in con per su che nel nella sono al alla da più non quanti",
    "nl": "de het een en van in op met is voor te zijn die dat aan door bij naar uit om niet ook zit staat hoeveel",
    "sv": "en ett och på med är av för till som den det de sitter står från vid inte har sig hans hennes",
    "da": "en et og på med er af for til som den det de sidder står fra ved ikke har sig hans hendes",
    "pl": "na do się nie jest to że od dla przez oraz po przy jak są ten ta pod",
    "tr": "bir ve bu için ile da de olan çok en gibi daha üzerinde var olarak üç iki",
    "id": "yang dan di dengan untuk dari ini pada adalah ke seorang sebuah dalam itu tidak atau",
    "vi": "và của một là có cho trong được với các trên người những không này đang",
    "ro": "și în cu pe un de la din este pentru care sunt nu mai al ale",
    "cs": "na se je do že pro od po jsou to ve jako při který která",
    "fi": "ja on ei se joka kanssa että mutta tai kun hän ovat myös oli sekä",
    "hu": "az és egy hogy nem is van meg egyik vagy csak volt",
}
"""Words of one letter belong to too many languages; the English "a" only decides a draw."""
LANGUAGES = frozenset({*_FUNCTION_WORDS, *_LANGUAGE_OF_SCRIPT.values(), "ru", "uk", "ar", "fa"})
"""Codes that can be guessed."""
_LANGUAGES_OF_WORD: dict[str, tuple[str, ...]] = {
    word: tuple(code for code, listed in _FUNCTION_WORDS.items() if word in listed.split())
    for words in _FUNCTION_WORDS.values()
    for word in words.split()
}


def guess_language(text: str, words: list[str]) -> str | None:
    """A two-letter code; None where nothing speaks clearly for one language. `text` and `words` are in lower case."""
    script = "latin" if text.isascii() else _main_script(text)
    if script == "cyrillic":
        return "uk" if re.search("[іїєґ]", text) else "ru"
    if script == "arabic":
        return "fa" if re.search("[پچژگ]", text) else "ar"
    if script != "latin":
        return _LANGUAGE_OF_SCRIPT.get(script or "")
    votes = Counter(code for word in words for code in _LANGUAGES_OF_WORD.get(word, ()))
    ranked = votes.most_common(2)
    if not ranked:
        return None
    if len(ranked) == 1 or ranked[0][1] > ranked[1][1]:
        return ranked[0][0]
    return "en" if votes["en"] == ranked[0][1] and "a" in words else None


def _main_script(text: str) -> str | None:
    """The script of most letters; kana anywhere among Han is Japanese."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = dict.fromkeys(_SCRIPT_NAMES, 0)
    for name, first, last in _SCRIPTS:
        counts[name] += int(((points >= first) & (points <= last)).sum())
    if counts["kana"] and counts["han"]:
        counts["kana"] += counts["han"]
    name = max(_SCRIPT_NAMES, key=lambda script: counts[script])
    return name if counts[name] else None
