"""The engine's input: tokens, positions and image patches, made from conversations by `preprocessing.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.engine.request import ImageSpan
from saccade.processor.image import Grid


@dataclass(frozen=True, kw_only=True)
class PromptImage:
    """An image of one prompt, or a part of a video that is encoded apart from the rest."""

    span: ImageSpan
    """Its key and its tokens in this prompt."""
    grid: Grid
    """How its patches are arranged, for the vision tower."""
    patches: NDArray[np.uint8]
    """[patches, patch_dim], read-only: prompts with the same image share it. Of a still image [patches, frame_dim]: each patch holds its one
    frame once, and the encoder repeats it; or the image as it is, which the encoder patchifies (`is_whole`)."""

    @property
    def is_whole(self) -> bool:
        """Whether `patches` is an image, [height, width, 3]."""
        return self.patches.ndim == 3


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """A tokenised prompt with its images."""

    token_ids: list[int]
    """Each image is repeated placeholders."""
    positions: NDArray[np.int64]
    """[3, tokens]: time, height, width. Generated tokens continue after the largest position of the last token."""
    images: tuple[PromptImage, ...] = ()
    """In order of their tokens."""

    def continued(self, token_ids: Sequence[int]) -> TokenPrompt:
        """The prompt followed by more text tokens, with the same images."""
        first = int(self.positions[:, -1].max()) + 1
        later = np.arange(first, first + len(token_ids))
        positions = np.concatenate([self.positions, np.broadcast_to(later, (3, len(later)))], axis=1)
        return TokenPrompt(token_ids=[*self.token_ids, *token_ids], positions=positions, images=self.images)
