"""Packed model inputs: the output of the processor.

The tokens of several conversations are concatenated, and the patches of their images too. Nothing is padded;
`cu_seqlens` mark the boundaries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
"""Label of a token without loss."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """A packed sequence of conversations.

    Legend: T tokens, N conversations, P patches, I images and videos, M image tokens.
    """

    token_ids: Tensor
    """[T] int64. An image is a run of placeholder tokens, one per merged patch."""
    cu_seqlens: Tensor
    """[N + 1] int32: conversation i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]."""
    positions: Tensor
    """[3, T] int64: time, height and width position of each token, from 0 in each conversation."""
    loss_mask: Tensor
    """[T] bool: tokens that are trained on (assistant turns with their end-of-turn token)."""
    patches: Tensor
    """[P, channels * frames * side * side]: pixels, uint8 as decoded or float as normalised."""
    image_grids: Tensor
    """[I, 3] int64, always on the CPU: the grid of each image, or of each separately encoded part of a video, in the
    order of appearance. Only the tower knows its meaning."""
    image_token_index: Tensor
    """[M] int64: indices of the placeholder tokens, in the order of the patches."""
    pixel_mean: tuple[float, ...]
    """Mean per channel, in units of the 0..1 range; `normalized_patches` subtracts it."""
    pixel_std: tuple[float, ...]
    """Deviation per channel, in units of the 0..1 range; `normalized_patches` divides by it."""
    max_seqlen: int
    """Tokens of the longest conversation, on the host so that kernels need no synchronisation."""

    @property
    def num_tokens(self) -> int:
        """Length of the packed sequence."""
        return self.token_ids.shape[0]

    @property
    def num_conversations(self) -> int:
        """Number of conversations."""
        return self.cu_seqlens.shape[0] - 1

    def normalized_patches(self) -> Tensor:
        """[P, patch_dim] fp32: (pixel / 255 - mean) / std, Hugging Face's `pixel_values`."""
        return normalize_patches(self.patches, self.pixel_mean, self.pixel_std)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ModelInputs:
        """Move to a device. `image_grids` stays on the CPU, where window layouts are computed from it."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and field.name != "image_grids"
        }
        return dataclasses.replace(self, **moved)

    @staticmethod
    def from_arrays(
        *,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        loss_mask: NDArray[np.bool_],
        patches: NDArray[np.uint8],
        image_grids: NDArray[np.int64],
        image_token_index: NDArray[np.int64],
        pixel_mean: tuple[float, ...],
        pixel_std: tuple[float, ...],
    ) -> ModelInputs:
        """Inputs of one conversation; the tensors share the memory of the arrays."""
        return ModelInputs(
            token_ids=torch.from_numpy(token_ids),
            cu_seqlens=torch.from_numpy(np.array([0, len(token_ids)], np.int32)),
            positions=torch.from_numpy(positions),
            loss_mask=torch.from_numpy(loss_mask),
            patches=torch.from_numpy(patches),
            image_grids=torch.from_numpy(image_grids),
            image_token_index=torch.from_numpy(image_token_index),
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
            max_seqlen=len(token_ids),
        )

    @staticmethod
    def empty(
        *, patch_dim: int, pixel_mean: tuple[float, ...], pixel_std: tuple[float, ...], num_tokens: int = 0
    ) -> ModelInputs:
        """Inputs without images and labels: no conversation, or one of `num_tokens` tokens with id 0."""
        return ModelInputs(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64),
            cu_seqlens=torch.tensor([0, num_tokens] if num_tokens else [0], dtype=torch.int32),
            positions=torch.zeros(3, num_tokens, dtype=torch.int64),
            loss_mask=torch.zeros(num_tokens, dtype=torch.bool),
            patches=torch.zeros(0, patch_dim, dtype=torch.uint8),
            image_grids=torch.zeros(0, 3, dtype=torch.int64),
            image_token_index=torch.zeros(0, dtype=torch.int64),
            pixel_mean=pixel_mean,
            pixel_std=pixel_std,
            max_seqlen=num_tokens,
        )

    @staticmethod
    def pack(parts: Sequence[ModelInputs]) -> ModelInputs:
        """Concatenate model inputs into one packed sequence."""
        assert parts, "pack needs at least one part"
        kinds = {(part.patches.dtype, part.pixel_mean, part.pixel_std) for part in parts}
        assert len(kinds) == 1, f"packed inputs have pixels of one kind, not {kinds}"
        token_starts = [0]
        for part in parts:
            token_starts.append(token_starts[-1] + part.num_tokens)
        return dataclasses.replace(
            parts[0],
            token_ids=torch.cat([part.token_ids for part in parts]),
            cu_seqlens=_concatenate_cumulative([part.cu_seqlens for part in parts]),
            positions=torch.cat([part.positions for part in parts], dim=1),
            loss_mask=torch.cat([part.loss_mask for part in parts]),
            patches=torch.cat([part.patches for part in parts]),
            image_grids=torch.cat([part.image_grids for part in parts]),
            image_token_index=torch.cat(
                [part.image_token_index + start for part, start in zip(parts, token_starts, strict=False)]
            ),
            max_seqlen=max(part.max_seqlen for part in parts),
        )


def next_token_labels(inputs: ModelInputs) -> Tensor:
    """[T]: the next token, or `IGNORED`."""
    labels = torch.full_like(inputs.token_ids, IGNORED)
    labels[:-1] = inputs.token_ids[1:].masked_fill(~inputs.loss_mask[1:], IGNORED)
    labels[inputs.cu_seqlens[1:-1].long() - 1] = IGNORED  # the next token belongs to another conversation
    return labels


def count_labels(labels: Tensor) -> int:
    """Number of loss tokens. On the CPU."""
    return int((labels != IGNORED).sum())


def normalize_patches(patches: Tensor, pixel_mean: Sequence[float], pixel_std: Sequence[float]) -> Tensor:
    """[P, patch_dim] fp32 from uint8 pixels; float pixels are already normalised."""
    if patches.is_floating_point():
        return patches
    channels = patches.chunk(len(pixel_mean), dim=1)  # a patch is channel-major
    scaled = zip(channels, pixel_mean, pixel_std, strict=True)
    return torch.cat([(pixels.float() / 255.0 - mean) / std for pixels, mean, std in scaled], dim=1)


def _concatenate_cumulative(parts: Sequence[Tensor]) -> Tensor:
    lengths = torch.cat([part.diff() for part in parts])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
