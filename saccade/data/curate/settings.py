"""What curation keeps: every threshold, with its default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from saccade.data.curate.text_statistics import LANGUAGES
from saccade.errors import ConfigError
from saccade.processor.image import MediaLimits

DECODE_LIMITS = MediaLimits(allow_local_files=False)
"""What is decoded at all while features are measured: what training and serving decode."""


@dataclass(frozen=True, kw_only=True)
class ScoreRange:
    """The range of one number that somebody has written into the samples' json, such as a CLIP similarity."""

    min: float | None = None
    """Samples below are dropped."""
    max: float | None = None
    """Samples above are dropped."""
    when_absent: Literal["keep", "drop"] = "keep"
    """What happens to samples without this number; how many there are is reported either way."""

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ConfigError("a score needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"no score lies between min {self.min} and max {self.max}")


@dataclass(frozen=True, kw_only=True)
class CurationSettings:
    """The rules of curation. A sample is dropped by the first rule it breaks, in the order of `rules.REASONS`."""

    require_image: bool = False
    """Whether samples of text alone are dropped."""
    min_side: int = 64
    """Shorter side of every image in pixels, at least."""
    max_pixels: int = DECODE_LIMITS.max_pixels
    """Width times height of every image, at most."""
    max_aspect_ratio: float = 10.0
    """Longer over shorter side of every image, at most."""
    min_characters: int = 5
    """Length of a caption, at least. Conversations and questions are not judged by this."""
    min_words: int = 2
    """Words of a caption, at least; a Chinese, Japanese, Korean or Thai character counts as a word."""
    max_characters: int = 20_000
    """Length of a caption or a whole conversation, at most."""
    drop_boilerplate: bool = True
    """Whether captions like "image not available", a file name or a bare URL are dropped."""
    drop_patterns: tuple[str, ...] = ()
    """Regular expressions (RE2, case ignored): captions and conversations that match one anywhere are dropped."""
    max_word_repetition: float = 0.3
    """Share of a caption's three-word runs that occurred before, at most; 0.17 is the most repetitive of 5,000 human captions."""
    max_character_repetition: float = 0.5
    """Share of a caption's ten-character runs that occurred before, at most."""
    blocked_words: tuple[str, ...] = ()
    """Whole words or phrases (case ignored) that no text may contain."""
    languages: tuple[str, ...] | None = None
    """Two-letter codes that are kept; text whose language cannot be told is kept too. None keeps all."""
    scores: dict[str, ScoreRange] = field(default_factory=dict)
    """Ranges by name of a json field; LAION's are called similarity, AESTHETIC_SCORE, punsafe, pwatermark."""
    max_images_per_text: int | None = None
    """Samples whose caption is shared by more samples than this are all dropped: text that fits any image says nothing."""
    evaluation_sets: tuple[str, ...] = ()
    """Shard folders to be evaluated on: samples with one of their images, or a near-copy of it, are dropped."""
    exact_duplicates: bool = True
    """Whether of samples with the same image bytes only the best is kept."""
    near_duplicate_images: bool = True
    """Whether of samples with the same image, resized or encoded anew, only the best is kept."""
    max_hash_distance: int = 24
    """Bits of 255 in which the hashes of near-duplicates may differ. Copies of photos reach 18, pages of other text start at 30."""
    keep_one_per: Literal["image", "image and text"] = "image"
    """What makes a duplicate of a captioned image. Questions and conversations always count by image and text."""
    near_duplicate_texts: bool = False
    """Whether of samples with nearly the same text only the best is kept; off, for many images share a good caption."""
    min_text_similarity: float = 0.8
    """Jaccard similarity of near-duplicate texts, at least 0.7, below which they are no longer found reliably."""

    def __post_init__(self) -> None:
        for name in ("min_side", "max_pixels", "max_characters", "max_images_per_text"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        for name in ("min_characters", "min_words"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.max_pixels > DECODE_LIMITS.max_pixels:
            raise ConfigError(f"max_pixels is {self.max_pixels}; no image above {DECODE_LIMITS.max_pixels} is decoded")
        if self.max_aspect_ratio < 1:
            raise ConfigError(f"max_aspect_ratio is {self.max_aspect_ratio}; a square has 1")
        if self.min_characters > self.max_characters:
            raise ConfigError(
                f"no text has {self.min_characters} characters or more and {self.max_characters} or fewer"
            )
        for name in ("max_word_repetition", "max_character_repetition"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; a share lies between 0 and 1")
        if taken := sorted({"keep", "reason", "repeats_shard", "repeats_row"} & self.scores.keys()):
            raise ConfigError(f"scores cannot be called {', '.join(taken)}: decisions have columns of that name")
        if unknown := sorted(set(self.languages or ()) - LANGUAGES):
            raise ConfigError(
                f"languages {', '.join(unknown)} are not told apart; known: {' '.join(sorted(LANGUAGES))}"
            )
        if not all(word.split() for word in self.blocked_words):
            raise ConfigError("blocked_words has an empty entry, which every text contains. Remove it")
        for pattern in self.drop_patterns:
            _check_pattern(pattern)
        if not 0 <= self.max_hash_distance <= 64:
            raise ConfigError(f"max_hash_distance is {self.max_hash_distance}; choose 0 to 64 of 255 bits")
        if not 0.7 <= self.min_text_similarity <= 1:
            raise ConfigError(f"min_text_similarity is {self.min_text_similarity}; choose 0.7 to 1")


def _check_pattern(pattern: str) -> None:
    try:
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"drop_patterns: {pattern!r} is no regular expression for RE2: {error}") from error
