"""The packed row: what the processor hands to the model.

Several conversations lie behind one another in one row of tokens, the patches of all their images in one row of patches.
Nothing is padded; who belongs to whom is said by cumulative lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """One packed row of conversations. Legend: T tokens, N conversations, P patches, I images and videos, M merged patches."""

    token_ids: Tensor
    """[T] int64. An image stands in the row as M placeholder tokens."""
    cu_seqlens: Tensor
    """[N + 1] int32: conversation i is tokens cu_seqlens[i] .. cu_seqlens[i + 1]."""
    positions: Tensor
    """[3, T] int64: time, height and width position of each token, from 0 in each conversation."""
    loss_mask: Tensor
    """[T] bool: tokens the model is trained to predict (the assistant's words and the end of its turn)."""
    patches: Tensor
    """[P, channels * frames * side * side]: pixels, uint8 as decoded or float as normalised."""
    image_grids: Tensor
    """[I, 3] int64, always on the CPU: frame pairs, rows and columns of patches of each image, in the order of appearance."""
    image_token_index: Tensor
    """[M] int64: the tokens that are replaced by image features, in the order of the patches."""
    pixel_mean: tuple[float, ...]
    """Per channel, in units of the 0..1 range; subtracted by `normalized_patches`."""
    pixel_std: tuple[float, ...]
    """Per channel, in units of the 0..1 range; divided by in `normalized_patches`."""
    max_seqlen: int
    """Tokens of the longest conversation, known on the host so that kernels need no synchronisation."""

    @property
    def num_tokens(self) -> int:
        """Length of the row."""
        return self.token_ids.shape[0]

    @property
    def num_conversations(self) -> int:
        """Conversations in the row."""
        return self.cu_seqlens.shape[0] - 1

    def normalized_patches(self) -> Tensor:
        """[P, patch_dim] fp32: pixel / 255, less the mean, over the deviation. What Hugging Face calls `pixel_values`."""
        return normalize_patches(self.patches, self.pixel_mean, self.pixel_std)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ModelInputs:
        """The same row on another device. `image_grids` stays on the CPU, where plans are made from it."""
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=non_blocking)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and field.name != "image_grids"
        }
        return dataclasses.replace(self, **moved)

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
    def pack(rows: Sequence[ModelInputs]) -> ModelInputs:
        """Put rows behind one another into one row."""
        assert rows, "pack needs at least one row"
        kinds = {(row.patches.dtype, row.pixel_mean, row.pixel_std) for row in rows}
        assert len(kinds) == 1, f"rows of one pack have pixels of one kind, not {kinds}"
        token_starts = [0]
        for row in rows:
            token_starts.append(token_starts[-1] + row.num_tokens)
        return dataclasses.replace(
            rows[0],
            token_ids=torch.cat([row.token_ids for row in rows]),
            cu_seqlens=_concatenate_cumulative([row.cu_seqlens for row in rows]),
            positions=torch.cat([row.positions for row in rows], dim=1),
            loss_mask=torch.cat([row.loss_mask for row in rows]),
            patches=torch.cat([row.patches for row in rows]),
            image_grids=torch.cat([row.image_grids for row in rows]),
            image_token_index=torch.cat(
                [row.image_token_index + start for row, start in zip(rows, token_starts, strict=False)]
            ),
            max_seqlen=max(row.max_seqlen for row in rows),
        )


def normalize_patches(patches: Tensor, pixel_mean: Sequence[float], pixel_std: Sequence[float]) -> Tensor:
    """[P, patch_dim] fp32 from uint8 pixels; float ones are taken to be normalised already."""
    if patches.is_floating_point():
        return patches
    channels = patches.chunk(len(pixel_mean), dim=1)  # a patch lies channel by channel
    scaled = zip(channels, pixel_mean, pixel_std, strict=True)
    return torch.cat([(pixels.float() / 255.0 - mean) / std for pixels, mean, std in scaled], dim=1)


def _concatenate_cumulative(parts: Sequence[Tensor]) -> Tensor:
    lengths = torch.cat([part.diff() for part in parts])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
