"""The parts that replace the placeholder of an image or video in a prompt: text and spans of features. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from saccade.processor.image import Pixels
from saccade.processor.patches import Grid
from saccade.processor.positions import TextSpan, VisionSpan, mrope_positions

VisualKind = Literal["image", "video"]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class TextTokens:
    """Tokens of text or of control, such as the time of a frame."""

    token_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class FeatureSpan:
    """Placeholder tokens for the features of patches that are encoded together and attend only to each other."""

    grid: Grid
    num_patches: int
    span: VisionSpan | TextSpan
    """The positions of its tokens; those of text in models with 1-D RoPE."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.span.length


Part = TextTokens | FeatureSpan


@dataclass(frozen=True)
class Visual:
    """A preprocessed image or video."""

    patches: Pixels
    """[patches, patch_dim]: those of its spans, in order."""
    grid: Grid
    """The grid of all its patches."""
    texts: list[list[int]]
    """Tokens of its texts (`VisionRules.texts`)."""
    parts: tuple[Part, ...]
    """All its tokens."""

    @property
    def spans(self) -> list[FeatureSpan]:
        """Spans of features of the image or video."""
        return feature_spans(self.parts)


def feature_spans(parts: Sequence[Part]) -> list[FeatureSpan]:
    """The parts that have features."""
    return [part for part in parts if isinstance(part, FeatureSpan)]


def in_written_order(
    written: Sequence[VisualKind], given: Sequence[VisualKind], values: Sequence[_Value]
) -> list[_Value]:
    """Values of images and videos in the order of their placeholders; images and videos each keep their order."""
    by_kind = {
        kind: iter([value for other, value in zip(given, values, strict=True) if other == kind]) for kind in set(given)
    }
    return [next(by_kind[kind]) for kind in written]


def expand_placeholders(
    token_ids: Sequence[int], placeholders: Sequence[int], visuals: Sequence[Sequence[Part]]
) -> tuple[list[int], NDArray[np.int64], list[int]]:
    """Replace each placeholder token by the parts of its image or video.

    Returns the token ids, their positions [3, tokens], and the index of the first token of each span of features.
    """
    expanded: list[int] = []
    starts: list[int] = []
    spans: list[TextSpan | VisionSpan] = []
    end = 0
    for index, parts in zip(placeholders, visuals, strict=True):
        expanded += token_ids[end:index]
        spans.append(TextSpan(index - end))
        for part in parts:
            if isinstance(part, FeatureSpan):
                starts.append(len(expanded))
                expanded += [token_ids[index]] * part.length
                spans.append(part.span)
            else:
                expanded += part.token_ids
                spans.append(TextSpan(part.length))
        end = index + 1
    expanded += token_ids[end:]
    spans.append(TextSpan(len(token_ids) - end))
    return expanded, mrope_positions(spans), starts


def repeat_placeholders(
    values: Sequence[_Value], placeholders: Sequence[int], visuals: Sequence[Sequence[Part]]
) -> list[_Value]:
    """One value per token of the expanded prompt, from one value per token with single placeholders."""
    repeated: list[_Value] = []
    end = 0
    for index, parts in zip(placeholders, visuals, strict=True):
        repeated += values[end:index]
        repeated += [values[index]] * sum(part.length for part in parts)
        end = index + 1
    repeated += values[end:]
    return repeated
