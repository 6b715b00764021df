"""Apply the rules of curation: the first rule each sample breaks. A pure function of index, features and settings.

`REASONS` is the order. Rules over several samples (shared texts, evaluation sets, duplicates) are applied afterwards,
to the samples that remain. A sample with several captions is kept if one of them breaks no rule; otherwise its
reason is that of its first caption. Length, boilerplate and repetition apply to captions only: an answer may be one
word, and ten questions about charts repeat each other. Patterns run in RE2, in time linear in the text whatever the
pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from saccade.data.curate.features import flat, read_features
from saccade.data.curate.settings import CurationSettings
from saccade.data.index import ShardIndex

REASONS = (
    "quarantined shard", "animated image", "unreadable sample", "no image", "image too small", "image too large",
    "aspect ratio", "corrupt image", "unusable text", "text too short", "text too long", "boilerplate text",
    "pattern in text", "repetitive text",
    "blocked word", "other language", "score", "text shared by many images", "in evaluation set", "exact duplicate",
    "near-duplicate image", "near-duplicate text",
)  # fmt: skip
"""All reasons, in the order of the rules. The reason of a score includes its name: "score similarity"."""

Reasons = NDArray[np.object_]
"""The rule that each row breaks, None if it breaks none."""
Broken = tuple[str, NDArray[np.bool_]]
"""The reason of a rule, and which rows or texts break the rule."""

SCORE_COLUMNS = ("score_names", "scores")
_INDEX_COLUMNS = ("error", "widths", "heights")
_FEATURE_COLUMNS = (
    "image_error", "text_error", "is_conversation", "texts", "num_words", "word_repetition", "character_repetition",
    "languages", *SCORE_COLUMNS,
)  # fmt: skip

_WHOLE = (  # boilerplate when it is the whole caption
    r"(https?://|www\.)\S*",
    r"[\w\-. ()%+@]*\.(jpe?g|png|gif|webp|bmp|tiff?|svg|heic|pdf|mp4|html?)",
    r"(img|dsc|dscn|dscf|pict?|mvc|p|cimg|gopr|imag|sam|wp|screen ?shot|vlcsnap)[ _-]?\d[\d_ -]*( \(\d+\)| copy)?",
    r"(an? |the )?(image|photo|picture|thumbnail|logo|icon|banner|avatar|alt|alt text|untitled|unnamed|placeholder|"
    r"default|figure|img|slide|screenshot|product image|featured image|main image|preview)( image| photo| picture)?"
    r"[ #:_-]*\d*( (of|/) \d+)?",
    r"[^\pL]*",  # no letter at all
    r"(<[^>]*>\s*)+",
)
_WITHIN = (  # boilerplate anywhere in a short caption
    r"(image|photo|picture|content|video|preview|thumbnail) (is )?(currently |temporarily )?(not|un)[ -]?"
    r"(available|found|supported)",
    r"no (image|photo|picture|thumbnail|preview|alt text)s? (available|found|yet|provided)",
    r"(image|photo|picture) (coming soon|missing|not (yet )?(loaded|uploaded)|(was|has been) (removed|deleted)|"
    r"may be subject to copyright)",
    r"click (here|on|to|for|image|photo|picture|the (image|photo|picture))",
    r"(tap|press|hover) (here )?to (enlarge|zoom|expand|view)",
    r"(enable|turn on) (javascript|cookies)|your browser does not support",
    r"thumbnail for version as of",
    r"lorem ipsum",
    r"(page|404|file) not found|access denied|403 forbidden",
)
_SHORT = 120  # characters


def apply_rules(index: ShardIndex, shard: int, settings: CurationSettings) -> Reasons:
    """The reasons of one shard's samples."""
    rows = index.read(shard, _INDEX_COLUMNS)
    features = read_features(index, shard, _FEATURE_COLUMNS)
    reasons = _first_reasons(len(rows), _broken_image_rules(rows, features, settings))
    for later in (_text_reasons(features, settings), _first_reasons(len(rows), _broken_scores(features, settings))):
        is_in = reasons == None  # noqa: E711 (elementwise)
        reasons[is_in] = later[is_in]
    return reasons


def in_order(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by reason, in the order of the rules."""
    return {reason: counts[reason] for reason in sorted(counts, key=lambda reason: (_rank(reason), reason))}


def _rank(reason: str) -> int:
    known = "score" if reason.startswith("score ") else reason
    return REASONS.index(known) if known in REASONS else len(REASONS)


def scores_of(features: pa.Table, name: str) -> NDArray[np.float64]:
    """A number of the samples' json; NaN if a sample has none. Needs `SCORE_COLUMNS`."""
    (names, owners), (values, _) = flat(features["score_names"]), flat(features["scores"])
    is_meant = pc.equal(names, name).to_numpy(zero_copy_only=False)
    scores = np.full(len(features), np.nan)
    scores[owners[is_meant]] = values.to_numpy()[is_meant]
    return scores


def _first_reasons(num_items: int, rules: Iterable[Broken]) -> Reasons:
    reasons = np.full(num_items, None, object)
    for reason, is_broken in rules:
        reasons[is_broken & (reasons == None)] = reason  # noqa: E711 (elementwise)
    return reasons


# ------------------------------------------------------------------ images and scores


def _broken_image_rules(index: pa.Table, features: pa.Table, settings: CurationSettings) -> Iterator[Broken]:
    """A sample of several images breaks a rule if one of its images does."""
    errors = index["error"].to_pylist()
    yield "animated image", np.array([error is not None and ": animated " in error for error in errors], bool)
    yield "unreadable sample", np.array([error is not None for error in errors], bool)
    widths, owners = flat(index["widths"])
    heights, _ = flat(index["heights"])
    # An image whose header cannot be read has no size; its sample is already unreadable.
    width, height = (side.fill_null(settings.min_side).to_numpy().astype(np.int64) for side in (widths, heights))

    def samples_of(images: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.bincount(owners[images], minlength=len(index)) > 0

    if settings.require_image:
        yield "no image", ~samples_of(np.ones(len(owners), bool))
    shorter, longer = np.minimum(width, height), np.maximum(width, height)
    yield "image too small", samples_of(shorter < settings.min_side)
    yield "image too large", samples_of(width * height > settings.max_pixels)
    yield "aspect ratio", samples_of(longer > settings.max_aspect_ratio * shorter)
    yield "corrupt image", features["image_error"].is_valid().to_numpy()


def _broken_scores(features: pa.Table, settings: CurationSettings) -> Iterator[Broken]:
    for name, allowed in settings.scores.items():
        scores = scores_of(features, name)
        is_outside = np.isnan(scores) & (allowed.when_absent == "drop")
        if allowed.min is not None:
            is_outside |= scores < allowed.min
        if allowed.max is not None:
            is_outside |= scores > allowed.max
        yield f"score {name}", is_outside


# ------------------------------------------------------------------ texts


def _text_reasons(features: pa.Table, settings: CurationSettings) -> Reasons:
    texts, owners = flat(features["texts"])
    by_text = _first_reasons(len(owners), _broken_text_rules(texts, owners, features, settings))
    has_good_text = np.bincount(owners[by_text == None], minlength=len(features)) > 0  # noqa: E711 (elementwise)
    reasons = np.full(len(features), None, object)
    reasons[owners[::-1]] = by_text[::-1]  # backwards: the first text of a sample is written last
    reasons[has_good_text] = None
    reasons[features["text_error"].is_valid().to_numpy()] = "unusable text"
    return reasons


def _broken_text_rules(
    texts: pa.Array, owners: NDArray[np.int64], features: pa.Table, settings: CurationSettings
) -> Iterator[Broken]:
    """The rules of single texts; `owners` are the rows they belong to."""
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
    """Any of the words, not within a longer one. (RE2's \\b is ASCII only.)"""
    listed = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
    return rf"(?:^|[^\pL\pN])(?:{listed})(?:$|[^\pL\pN])"


def _matches(texts: pa.Array, pattern: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.match_substring_regex(texts, pattern, ignore_case=True).to_numpy(zero_copy_only=False)
    return found
