"""Features of a text: word counts, repetition and language; MinHash bands that find near-duplicates.

    text  ->  lower case, single blanks  ->  set of 5-byte shingles  ->  120 minima  ->  20 band keys of 6 minima each

Texts with a Jaccard similarity of 0.8 share a band with 99.8 % probability, with 0.7 at 92 %. A shared band only makes
a candidate; the similarity itself is computed from the texts. The language is a heuristic without a model, at tens of
thousands of captions a second: by script, and in Latin script by function words ("the", "with", "der", "und"). A
caption without any ("Red dress, size M") has no language, and no rule drops it for that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

NUM_BANDS = 20
_ROWS = 6
_SHINGLE_BYTES = 5
_CHUNK_SHINGLES = 2048  # shingles hashed at a time: 2048 x 120 of 4 bytes stay in the cache


def normalized(text: str) -> str:
    """The text in the form that is compared: case folded, single blanks."""
    return " ".join(text.casefold().split())


def text_hash(text: str) -> int:
    """64-bit hash of a text, independent of case and blanks."""
    return xxhash.xxh3_64_intdigest(normalized(text).encode("utf-8", "surrogatepass"))


def minhash_bands(texts: Sequence[str]) -> NDArray[np.uint32]:
    """[texts, 20] band keys; near-duplicates agree in at least one column."""
    if not texts:
        return np.zeros((0, NUM_BANDS), np.uint32)
    found, begins = _shingles(texts)
    shingles = (found * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)).astype(np.uint32)
    factor, offset = _permutations()
    minima = np.full((len(texts), NUM_BANDS * _ROWS), np.iinfo(np.uint32).max, np.uint32)
    owners = np.repeat(np.arange(len(texts)), np.diff(np.append(begins, len(shingles))))
    for begin in range(0, len(shingles), _CHUNK_SHINGLES):
        chunk = shingles[begin : begin + _CHUNK_SHINGLES]
        hashed = chunk[:, None] * factor + offset
        owner = owners[begin : begin + _CHUNK_SHINGLES]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        minima[owner[first]] = np.minimum(minima[owner[first]], np.minimum.reduceat(hashed, first, axis=0))
    return _mixed(minima.reshape(len(texts), NUM_BANDS, _ROWS))


def similarity(one: str, other: str) -> float:
    """Exact Jaccard similarity of the shingle sets of two texts."""
    first, second = _shingle_set(one), _shingle_set(other)
    shared = len(first & second)
    return shared / (len(first) + len(second) - shared)


@lru_cache(maxsize=2**16)
def _shingle_set(text: str) -> frozenset[bytes]:
    data = _padded(text)
    return frozenset(data[begin : begin + _SHINGLE_BYTES] for begin in range(len(data) - _SHINGLE_BYTES + 1))


def _padded(text: str) -> bytes:
    """Normalized bytes, at least one shingle long."""
    return normalized(text).encode("utf-8", "surrogatepass").ljust(_SHINGLE_BYTES, b"\0")


def _shingles(texts: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Shingles of all texts as integers, and the offset of each text's first."""
    encoded = [_padded(text) for text in texts]
    num_shingles = np.array([len(text) - _SHINGLE_BYTES + 1 for text in encoded])
    data = np.frombuffer(b"".join(encoded) + bytes(8), np.uint8)
    starts = np.cumsum([0, *map(len, encoded)])[:-1]
    begins = np.cumsum(num_shingles) - num_shingles
    where = np.arange(num_shingles.sum()) + np.repeat(starts - begins, num_shingles)
    windows = np.lib.stride_tricks.sliding_window_view(data, 8)[where]
    shingles = np.ascontiguousarray(windows).view("<u8").reshape(-1) & np.uint64(2 ** (8 * _SHINGLE_BYTES) - 1)
    return shingles, begins


def _mixed(rows: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Mix the numbers of the last axis into one key."""
    key = np.zeros(rows.shape[:-1], np.uint64)
    for number in range(rows.shape[-1]):
        key = (key ^ rows[..., number]) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(32)
    return key.astype(np.uint32)


@cache
def _permutations() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """An odd factor and an offset modulo 2^32 for each minimum; deterministic."""
    random = np.random.Generator(np.random.PCG64(20240229))
    drawn = random.integers(0, 2**32, (2, NUM_BANDS * _ROWS), dtype=np.uint32)
    return drawn[0] | np.uint32(1), drawn[1]


# ------------------------------------------------------------------ words and repetition

_UNSPACED = (
    "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u0e00-\u0e7f"  # kana, Han, Hangul, Thai: a character counts as a word
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+(?:['\u2019][^\W_{_UNSPACED}]+)?")
_WORD_NGRAM, _CHARACTER_NGRAM = 3, 10
_MEASURED_CHARACTERS = 4000  # repetition is measured at the front of longer texts, whose n-grams repeat by nature


@dataclass(frozen=True, slots=True)
class TextStatistics:
    """Statistics of one text."""

    num_words: int
    word_repetition: float
    character_repetition: float
    language: str | None


def text_statistics(text: str) -> TextStatistics:
    """Count words, measure the share of repeated 3-word and 10-character n-grams, and detect the language."""
    front = text[:_MEASURED_CHARACTERS].lower()
    words = _WORD.findall(front)
    return TextStatistics(
        num_words=len(words) if len(text) <= _MEASURED_CHARACTERS else len(_WORD.findall(text)),
        word_repetition=_repeated_share(list(zip(*(words[n:] for n in range(_WORD_NGRAM)), strict=False))),
        character_repetition=_repeated_share(
            [front[n : n + _CHARACTER_NGRAM] for n in range(len(front) - _CHARACTER_NGRAM + 1)]
        ),
        language=detect_language(front, words),
    )


def _repeated_share(ngrams: list[str] | list[tuple[str, ...]]) -> float:
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


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
    "en": "the an and of in on with is are at by for from to his her their this that it its while into near through as "
    "or be was were has have who which over under up out off down behind some other another one two what how many does "
    "do there these not no",
    "de": "der die das und ein eine einer einem einen mit auf im ist von zu für den dem des sich auch nicht bei sind "
    "vor wie viele",
    "fr": "le la les un une des et du dans avec sur est pour au aux qui par en ce sont cette son sa deux devant quel "
    "combien",
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
"""One-letter words are in too many languages; the English "a" only breaks a tie."""
LANGUAGES = frozenset({*_FUNCTION_WORDS, *_LANGUAGE_OF_SCRIPT.values(), "ru", "uk", "ar", "fa"})
"""Language codes that can be detected."""
_LANGUAGES_OF_WORD: dict[str, tuple[str, ...]] = {
    word: tuple(code for code, listed in _FUNCTION_WORDS.items() if word in listed.split())
    for words in _FUNCTION_WORDS.values()
    for word in words.split()
}


def detect_language(text: str, words: list[str]) -> str | None:
    """A two-letter code, None if the evidence is unclear. `text` and `words` are in lower case."""
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
    """The script of most letters; Han with any kana is Japanese."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    counts = dict.fromkeys(_SCRIPT_NAMES, 0)
    for name, first, last in _SCRIPTS:
        counts[name] += int(((points >= first) & (points <= last)).sum())
    if counts["kana"] and counts["han"]:
        counts["kana"] += counts["han"]
    name = max(_SCRIPT_NAMES, key=lambda script: counts[script])
    return name if counts[name] else None
