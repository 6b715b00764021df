"""Settings of curation: every threshold, with its default."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from saccade.data.curate.text_features import LANGUAGES
from saccade.errors import ConfigError
from saccade.processor.image import MediaLimits

DECODE_LIMITS = MediaLimits(allow_local_files=False)
"""Limits of decoding while features are measured: the same as in training and serving."""


@dataclass(frozen=True, kw_only=True)
class ScoreRange:
    """The allowed range of a number in the samples' json, such as a CLIP similarity."""

    min: float | None = None
    """Samples below are dropped."""
    max: float | None = None
    """Samples above are dropped."""
    when_absent: Literal["keep", "drop"] = "keep"
    """Whether samples without this number are kept; their count is reported either way."""

    def __post_init__(self) -> None:
        if self.min is None and self.max is None:
            raise ConfigError("a score needs min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ConfigError(f"no score is between min {self.min} and max {self.max}")


@dataclass(frozen=True, kw_only=True)
class CurationSettings:
    """Settings that decide which samples curation keeps.

    A sample is dropped by the first rule it breaks, in the order of `rules.REASONS`.
    """

    require_image: bool = False
    """Whether text-only samples are dropped."""
    min_side: int = 64
    """Minimum of the shorter side of every image, pixels."""
    max_pixels: int = DECODE_LIMITS.max_pixels
    """Maximum width times height of every image."""
    max_aspect_ratio: float = 10.0
    """Maximum ratio of the longer to the shorter side of every image."""
    min_characters: int = 5
    """Minimum length of a caption. Does not apply to conversations and questions."""
    min_words: int = 2
    """Minimum words of a caption; a Chinese, Japanese, Korean or Thai character counts as a word."""
    max_characters: int = 20_000
    """Maximum length of a caption or a whole conversation."""
    drop_boilerplate: bool = True
    """Whether captions like "image not available", a file name or a bare URL are dropped."""
    drop_patterns: tuple[str, ...] = ()
    """Regular expressions (RE2, case ignored): captions and conversations that match one anywhere are dropped."""
    max_word_repetition: float = 0.3
    """Maximum share of repeated 3-word n-grams in a caption; the most repetitive of 5,000 human captions has 0.17."""
    max_character_repetition: float = 0.5
    """Maximum share of repeated 10-character n-grams in a caption."""
    blocked_words: tuple[str, ...] = ()
    """Whole words or phrases (case ignored) that no text may contain."""
    languages: tuple[str, ...] | None = None
    """Two-letter codes to keep; text of undetected language is kept too. None keeps all."""
    scores: dict[str, ScoreRange] = field(default_factory=dict)
    """Allowed ranges by name of a json field; LAION has similarity, AESTHETIC_SCORE, punsafe, pwatermark."""
    max_images_per_text: int | None = None
    """Captions shared by more samples than this are dropped with all their samples: they describe no image."""
    evaluation_sets: tuple[str, ...] = ()
    """Shard folders of evaluation data: samples that show one of their images, as it is or edited, are dropped."""
    exact_duplicates: bool = True
    """Whether only the best of samples with the same image bytes is kept; see `keep_one_per`."""
    near_duplicate_images: bool = True
    """Whether only the best of samples with the same image is kept: resized, re-encoded, cropped, mirrored, turned by
    quarter turns, brighter, grey."""
    keep_one_per: Literal["image", "file and text", "image and text"] = "file and text"
    """Which captioned images are duplicates. "image": the same image, whatever the caption. "file and text": the same
    bytes and the same caption, or a near-duplicate image whatever its caption; data with one caption per row keeps all
    captions. "image and text": the same image and the same caption. Questions and conversations always count by image
    and text."""
    near_duplicate_texts: bool = False
    """Whether only the best of samples with nearly the same text is kept; off, since many images
    share a good caption."""
    min_text_similarity: float = 0.8
    """Minimum Jaccard similarity of near-duplicate texts; below 0.7 they are not found reliably."""

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
                raise ConfigError(f"{name} is {getattr(self, name)}; a share is between 0 and 1")
        if taken := sorted({"keep", "reason", "repeats_shard", "repeats_row"} & self.scores.keys()):
            raise ConfigError(f"scores cannot be called {', '.join(taken)}: decisions have columns of that name")
        if unknown := sorted(set(self.languages or ()) - LANGUAGES):
            raise ConfigError(f"languages {', '.join(unknown)} are not detected; known: {' '.join(sorted(LANGUAGES))}")
        if not all(word.split() for word in self.blocked_words):
            raise ConfigError("blocked_words has an empty entry, which every text contains. Remove it")
        for pattern in self.drop_patterns:
            _check_pattern(pattern)
        if not 0.7 <= self.min_text_similarity <= 1:
            raise ConfigError(f"min_text_similarity is {self.min_text_similarity}; choose 0.7 to 1")


def _check_pattern(pattern: str) -> None:
    try:
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"drop_patterns: {pattern!r} is not a regular expression of RE2: {error}") from error
