"""Rules on text. Each yields its reason and the texts that break it.

Length, boilerplate and repetition are asked of captions only: an answer may be one word, and ten questions about charts repeat
each other. Patterns run in RE2, which takes time linear in the text whatever the pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from saccade.data.curate.features import flat
from saccade.data.curate.image_rules import Broken
from saccade.data.curate.settings import CurationSettings

FEATURE_COLUMNS = (
    "text_error", "is_conversation", "texts", "num_words", "word_repetition", "character_repetition", "languages",
)  # fmt: skip

_WHOLE = (  # boilerplate when nothing else is said
    r"(https?://|www\.)\S*",
    r"[\w\-. ()%+@]*\.(jpe?g|png|gif|webp|bmp|tiff?|svg|heic|pdf|mp4|html?)",
    r"(img|dsc|dscn|dscf|pict?|mvc|p|cimg|gopr|imag|sam|wp|screen ?shot|vlcsnap)[ _-]?\d[\d_ -]*( \(\d+\)| copy)?",
    r"(an? |the )?(image|photo|picture|thumbnail|logo|icon|banner|avatar|alt|alt text|untitled|unnamed|placeholder|default|figure|img|slide|"
    r"screenshot|product image|featured image|main image|preview)( image| photo| picture)?[ #:_-]*\d*( (of|/) \d+)?",
    r"[^\pL]*",  # no letter at all
    r"(<[^>]*>\s*)+",
)
_WITHIN = (  # boilerplate anywhere in a short caption
    r"(image|photo|picture|content|video|preview|thumbnail) (is )?(currently |temporarily )?(not|un)[ -]?(available|found|supported)",
    r"no (image|photo|picture|thumbnail|preview|alt text)s? (available|found|yet|provided)",
    r"(image|photo|picture) (coming soon|missing|not (yet )?(loaded|uploaded)|(was|has been) (removed|deleted)|may be subject to copyright)",
    r"click (here|on|to|for|image|photo|picture|the (image|photo|picture))",
    r"(tap|press|hover) (here )?to (enlarge|zoom|expand|view)",
    r"(enable|turn on) (javascript|cookies)|your browser does not support",
    r"thumbnail for version as of",
    r"lorem ipsum",
    r"(page|404|file) not found|access denied|403 forbidden",
)
_SHORT = 120  # characters


def broken_text_rules(features: pa.Table, settings: CurationSettings) -> tuple[Iterator[Broken], NDArray[np.int64]]:
    """Broken rules of each text in order, and the row each text belongs to."""
    texts, owners = flat(features["texts"])
    return _broken(texts, owners, features, settings), owners


def _broken(
    texts: pa.Array, owners: NDArray[np.int64], features: pa.Table, settings: CurationSettings
) -> Iterator[Broken]:
    lengths = pc.utf8_length(texts).to_numpy()
    num_words, word_repetition, character_repetition = (
        flat(features[name])[0].to_numpy() for name in ("num_words", "word_repetition", "character_repetition")
    )
    is_caption = ~features["is_conversation"].combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)[owners]
    is_short = (lengths < settings.min_characters) | (num_words < settings.min_words)
    yield "text too short", is_caption & is_short
    yield "text too long", lengths > settings.max_characters
    if settings.drop_boilerplate:
        yield "boilerplate text", is_caption & _is_boilerplate(texts, lengths)
    if settings.drop_patterns:
        yield "pattern in text", _matches(texts, "|".join(f"(?:{pattern})" for pattern in settings.drop_patterns))
    is_repetitive = (word_repetition > settings.max_word_repetition) | (
        character_repetition > settings.max_character_repetition
    )
    yield "repetitive text", is_caption & is_repetitive
    if settings.blocked_words:
        yield "blocked word", _matches(texts, _words_pattern(settings.blocked_words))
    if settings.languages is not None:
        languages = flat(features["languages"])[0]
        is_other = pc.invert(pc.is_in(languages, pa.array(settings.languages, pa.string())))
        yield "other language", pc.and_(is_other, languages.is_valid()).to_numpy(zero_copy_only=False)


def _is_boilerplate(texts: pa.Array, lengths: NDArray[np.int32]) -> NDArray[np.bool_]:
    within = _matches(texts, "|".join(f"(?:{pattern})" for pattern in _WITHIN)) & (lengths <= _SHORT)
    whole = _matches(texts, r"^\s*(?:" + "|".join(f"(?:{pattern})" for pattern in _WHOLE) + r")[\s.!:]*$")
    boilerplate: NDArray[np.bool_] = within | whole
    return boilerplate


def _words_pattern(words: tuple[str, ...]) -> str:
    """Any of the words, not within a longer one. (RE2's \\b knows only the English alphabet.)"""
    listed = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
    return rf"(?:^|[^\pL\pN])(?:{listed})(?:$|[^\pL\pN])"


def _matches(texts: pa.Array, pattern: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.match_substring_regex(texts, pattern, ignore_case=True).to_numpy(zero_copy_only=False)
    return found
