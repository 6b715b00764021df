"""The vision tower (patch embedding, vision blocks) and the patch merger that projects its output to the decoder.

Legend: P patches of all images, packed, D hidden size, H heads, K head dim.

Most blocks attend within windows of 8 x 8 patches, a few over the whole image. Patches are permuted to window order before the
first block, so that windows are contiguous segments, and features back to reading order after the merger. The permutation depends
on the image grids alone: `window_layout` computes it on the host. `TowerInputs` is the layout on the device; with it the tower
needs no synchronisation, so that a CUDA graph can capture it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from saccade.device import to_device
from saccade.kernels.attention import attention
from saccade.kernels.rope import CosSin, rope, vision_cos_sin
from saccade.model.config import VisionConfig
from saccade.model.layers import FeedForward, RMSNorm
from saccade.model.linear import Input, Linear, PatchLinear, add_update

Integers = NDArray[np.int64]
Numbers = TypeVar("Numbers", NDArray[np.int32], Tensor)

NORM_EPS = 1e-6
"""Epsilon of all norms of the tower."""


@dataclass(frozen=True)
class Segments:
    """Segments of packed patches that attend to each other."""

    cu_seqlens: Tensor
    """[segments + 1] int32."""
    max_seqlen: int
    """Bound on the patches of a segment."""


@dataclass(frozen=True)
class TowerInputs:
    """Inputs of the tower besides pixels, on the device, in int32."""

    token_order: Tensor
    """[tokens]: index in reading order of each token in window order."""
    reading_order: Tensor
    """[tokens]: index in window order of each token in reading order."""
    positions: Tensor
    """[2, patches]: row and column of each patch, in window order."""
    images: Segments
    """Images; each frame pair of a video is one."""
    windows: Segments
    """Windows."""


class LayoutSizes(NamedTuple):
    """Sizes of a layout in a flat int32 buffer. A layout may be padded to larger sizes (`WindowLayout.write`)."""

    num_tokens: int
    num_patches: int
    num_images: int
    num_windows: int
    max_image: int
    """Bound on the patches of an image."""
    max_window: int
    """Bound on the patches of a window."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each part: two permutations, positions, two `cu_seqlens`."""
        return self.num_tokens, self.num_tokens, 2 * self.num_patches, self.num_images + 1, self.num_windows + 1

    @property
    def total(self) -> int:
        """Length of the buffer."""
        return sum(map(_aligned, self.lengths))

    def split(self, buffer: Numbers) -> list[Numbers]:
        """The parts of a buffer."""
        parts, start = [], 0
        for length in self.lengths:
            parts.append(buffer[start : start + length])
            start += _aligned(length)
        return parts

    def inputs(self, buffer: Tensor) -> TowerInputs:
        """Views of a buffer that a layout was written to."""
        token_order, reading_order, positions, images, windows = self.split(buffer)
        return TowerInputs(
            token_order=token_order,
            reading_order=reading_order,
            positions=positions.view(2, -1),
            images=Segments(images, self.max_image),
            windows=Segments(windows, self.max_window),
        )


def _aligned(length: int) -> int:
    """Align parts to 16 bytes: Triton specializes kernels on pointer alignment."""
    return -(-length // 4) * 4


@dataclass(frozen=True)
class WindowLayout:
    """Permutation and segments of packed images for window attention; a token is a group of merged patches."""

    token_order: Integers
    """[tokens]: index in reading order of each token in window order."""
    reading_order: Integers
    """[tokens]: index in window order of each token in reading order."""
    positions: Integers
    """[2, patches]: row and column of each patch, in window order."""
    window_lengths: Integers
    """Patches of each window."""
    image_lengths: Integers
    """Patches of each image (of each frame pair of a video)."""

    @property
    def sizes(self) -> LayoutSizes:
        """The sizes without padding."""
        return LayoutSizes(
            num_tokens=len(self.token_order),
            num_patches=self.positions.shape[1],
            num_images=len(self.image_lengths),
            num_windows=len(self.window_lengths),
            max_image=int(self.image_lengths.max()),
            max_window=int(self.window_lengths.max()),
        )

    def write(self, buffer: NDArray[np.int32], sizes: LayoutSizes) -> None:
        """Write the layout to a buffer, padded with empty images and windows to `sizes`; tokens and patches must agree."""
        token_order, reading_order, positions, images, windows = sizes.split(buffer)
        token_order[:] = self.token_order
        reading_order[:] = self.reading_order
        positions[:] = self.positions.reshape(-1)
        for ends, lengths in ((images, self.image_lengths), (windows, self.window_lengths)):
            ends[0] = 0
            ends[1 : len(lengths) + 1] = np.cumsum(lengths)
            ends[len(lengths) + 1 :] = ends[len(lengths)]

    def to(self, device: torch.device) -> TowerInputs:
        """Copy the layout to the device, asynchronously."""
        sizes = self.sizes
        buffer = np.zeros(sizes.total, np.int32)
        self.write(buffer, sizes)
        return sizes.inputs(to_device(buffer, device))


def window_layout(grids: Sequence[tuple[int, int, int]], config: VisionConfig) -> WindowLayout:
    """The layout of packed images."""
    layouts = [_grid_layout(grid, config.merge_size, config.window_tokens) for grid in grids]
    starts = np.cumsum([0, *(len(layout.token_order) for layout in layouts)])
    return WindowLayout(
        token_order=np.concatenate(
            [layout.token_order + start for layout, start in zip(layouts, starts, strict=False)]
        ),
        reading_order=np.concatenate(
            [layout.reading_order + start for layout, start in zip(layouts, starts, strict=False)]
        ),
        positions=np.concatenate([layout.positions for layout in layouts], axis=1),
        window_lengths=np.concatenate([layout.window_lengths for layout in layouts]),
        image_lengths=np.concatenate([layout.image_lengths for layout in layouts]),
    )


@functools.lru_cache(maxsize=4096)
def _grid_layout(grid: tuple[int, int, int], merge: int, window: int) -> WindowLayout:
    """The layout of one image or video, cached: computing one of 24 x 24 tokens takes 0.1 ms."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    frame, row, column = (axis.reshape(-1) for axis in np.indices((frames, rows, columns)))
    windows_across, windows_down = -(-columns // window), -(-rows // window)
    window_of_token = (frame * windows_down + row // window) * windows_across + column // window
    token_order = np.argsort(window_of_token, kind="stable")
    inside_row, inside_column = (axis.reshape(-1) for axis in np.indices((merge, merge)))
    patch_rows = row[token_order, None] * merge + inside_row
    patch_columns = column[token_order, None] * merge + inside_column
    return WindowLayout(
        token_order=token_order,
        reading_order=np.argsort(token_order),
        positions=np.stack([patch_rows.reshape(-1), patch_columns.reshape(-1)]),
        window_lengths=np.bincount(window_of_token) * merge**2,
        image_lengths=np.full(frames, rows * columns * merge**2),
    )


class PatchEmbedding(nn.Module):
    """Linear projection of each patch; the weight has the shape of a convolution, as on disk."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = PatchLinear(patch, config.hidden_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, channels * frames * side * side] normalised pixels to [P, D]."""
        features_PD: Tensor = self.proj(pixels)
        return features_PD


class VisionAttention(nn.Module):
    """Bidirectional attention within segments of patches."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_PD: Input, cos_sin: CosSin, segments: Segments) -> Tensor:
        """[P, D] to [P, D]."""
        q_PHK, k_PHK, v_PHK = self.qkv(x_PD).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q_PHK, k_PHK = rope(q_PHK, k_PHK, cos_sin)
        out_PHK = attention(
            q_PHK, k_PHK, v_PHK, segments.cu_seqlens, segments.cu_seqlens,
            max_seqlen_q=segments.max_seqlen, max_seqlen_k=segments.max_seqlen, causal=False,
        )  # fmt: skip
        out: Tensor = self.proj(out_PHK.flatten(1))
        return out


class VisionBlock(nn.Module):
    """Pre-norm transformer block: attention, then the MLP, each with a residual connection."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS)
        self.attn = VisionAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size, bias=True)

    def forward(
        self, x_PD: Tensor, update_PD: Tensor | None, cos_sin: CosSin, segments: Segments
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream x + update to itself, see `add_update`."""
        normed = self.norm1.of_sum(x_PD, update_PD)
        attn_out_PD = self.attn(normed.input, cos_sin, segments)
        normed = self.norm2.of_sum(attn_out_PD, normed.total)
        mlp_out_PD = self.mlp(normed.input)
        return add_update(normed.total, mlp_out_PD)


class VisionTower(nn.Module):
    """Packed pixels of images of any sizes to patch features in window order."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))

    def forward(self, pixels: Tensor, inputs: TowerInputs) -> Tensor:
        """[P, patch_dim] normalised pixels in reading order to [P, D] features in window order."""
        x_PD = _reorder(self.patch_embed(pixels), inputs.token_order, self.config.patches_per_token)
        update_PD: Tensor | None = None
        cos_sin = vision_cos_sin(inputs.positions, self.config.head_dim)
        for layer, block in enumerate(self.blocks):
            is_full = layer in self.config.full_attention_layers
            x_PD, update_PD = block(x_PD, update_PD, cos_sin, inputs.images if is_full else inputs.windows)
        return x_PD if update_PD is None else x_PD + update_PD


def _reorder(x_PD: Tensor, token_order: Tensor, patches_per_token: int) -> Tensor:
    """Permute tokens, which are groups of `patches_per_token` rows."""
    return x_PD.view(-1, patches_per_token, x_PD.shape[-1])[token_order.long()].flatten(0, 1)


class PatchMerger(nn.Module):
    """The projector: [patches, vision width] to [tokens, decoder width]; the patches of a token are adjacent."""

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.patches_per_token
        self.ln_q = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = nn.Sequential(
            Linear(self.merged_size, self.merged_size), nn.GELU(), Linear(self.merged_size, out_size)
        )

    def forward(self, x_PD: Tensor) -> Tensor:
        """Normalise each patch, concatenate the patches of a token, project."""
        out: Tensor = self.mlp(self.ln_q(x_PD).view(-1, self.merged_size))
        return out
