"""What the engine is given to answer: tokens, positions, pictures. Made from conversations by `preprocessing.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.engine.request import ImageSpan


@dataclass(frozen=True, kw_only=True)
class PromptImage:
    """A picture (or video) cut into patches."""

    span: ImageSpan
    """Its key and its place in the tokens of this prompt."""
    grid: tuple[int, int, int]
    """Frame pairs, rows and columns of patches."""
    patches: NDArray[np.uint8]
    """[patches, patch_dim]. Read only: requests with the same picture share it."""


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """One prompt, ready to be computed."""

    token_ids: list[int]
    """Each image stands in them as so many placeholders."""
    positions: NDArray[np.int64]
    """[3, tokens]: time, height, width. An answer goes on behind the largest position of the last token."""
    images: tuple[PromptImage, ...] = ()
    """In order of their tokens."""
