"""The engine's input: tokens, positions and image patches. `frontend.preprocessing` makes it from conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from saccade.engine.media import ImageTask
from saccade.engine.request import ImageSpan
from saccade.processor.patches import Grid


@dataclass(frozen=True, kw_only=True)
class PromptImage:
    """An image of a prompt, or a part of a video that is encoded by itself."""

    span: ImageSpan
    """Key of the image, and its tokens in this prompt."""
    grid: Grid
    """How its patches are arranged, for the vision tower."""
    patches: NDArray[np.uint8]
    """[patches, patch_dim], read-only: prompts with the same image share the array. A still image has [patches,
    frame_dim], each frame once, which the encoder repeats; or its pixels, [height, width, 3], which the encoder
    patchifies (`is_whole`). An image that was encoded elsewhere has its features, [tokens, bytes] (`is_encoded`)."""
    is_encoded: bool = False
    """Whether `patches` is the features of the image, so that the vision encoder does not read it."""

    @property
    def is_whole(self) -> bool:
        """Whether `patches` is the image itself, [height, width, 3]."""
        return self.patches.ndim == 3

    def without_encoding(self) -> PromptImage:
        """The image with a span that says that the vision encoder reads nothing for it, if it is encoded."""
        return replace(self, span=replace(self.span, num_patches=0)) if self.is_encoded else self


@dataclass(frozen=True, kw_only=True)
class PromptSources:
    """The inputs of a prompt, from which another engine can make it again."""

    token_ids: list[int]
    """Token ids with one placeholder per image and video."""
    tasks: tuple[ImageTask, ...] = ()
    """Images and videos, each kind in the order of its placeholders."""


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """A tokenised prompt with its images."""

    token_ids: list[int]
    """Token ids, with a placeholder for each token of an image."""
    positions: NDArray[np.int64]
    """[3, tokens]: time, height, width. Output tokens continue after the largest position of the last token."""
    images: tuple[PromptImage, ...] = ()
    """Images in the order of their tokens."""
    sources: PromptSources | None = None
    """What the prompt was made of, if its images were only measured: it has no patches (`measures_only`). Tokens by
    which the prompt was continued are not in there."""

    def continued(self, token_ids: Sequence[int]) -> TokenPrompt:
        """The prompt followed by more text tokens, with the same images."""
        first = int(self.positions[:, -1].max()) + 1
        later = np.arange(first, first + len(token_ids))
        positions = np.concatenate([self.positions, np.broadcast_to(later, (3, len(later)))], axis=1)
        return replace(self, token_ids=[*self.token_ids, *token_ids], positions=positions)
