"""The vision tower in its three stages: patch embedding, vision blocks, and (in `projector.py`) the patch merger.

Legend: P patches of all images in one row, D hidden size, H heads, K head dim.

Most blocks attend within windows of 8 x 8 patches, a few over the whole image. So that windows are segments of the packed row,
patches are put into window order once, before the first block, and features back into reading order once, after the merger.
Which patch goes where follows from the image grids alone: `window_layout` works it out on the host, in plain integers. `TowerInputs`
is the plan on the device. Reading it, the tower asks the host for nothing but sizes, so that its work can be recorded and replayed.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from saccade.device import to_device
from saccade.kernels.attention import attention
from saccade.kernels.rope import CosSin, rope, vision_cos_sin
from saccade.model.config import VisionConfig
from saccade.model.layers import FeedForward, RMSNorm

Integers = NDArray[np.int64]
Numbers = TypeVar("Numbers", NDArray[np.int32], Tensor)

NORM_EPS = 1e-6
"""Added to the mean square in each norm; fixed in this family's towers."""


@dataclass(frozen=True)
class Segments:
    """Which patches see each other: consecutive stretches of the packed row."""

    cu_seqlens: Tensor
    """[segments + 1] int32."""
    max_seqlen: int
    """No segment has more patches."""


@dataclass(frozen=True)
class TowerInputs:
    """What the tower reads beside pixels, on their device: int32 throughout."""

    token_order: Tensor
    """[tokens]: the token, in reading order, that stands at each place in window order."""
    reading_order: Tensor
    """[tokens]: the place in window order of each token in reading order."""
    positions: Tensor
    """[2, patches]: row and column of each patch, in window order."""
    images: Segments
    """Images, each frame pair of a video one."""
    windows: Segments
    """Windows."""


class LayoutSizes(NamedTuple):
    """What a plan takes in a flat buffer of int32. A plan may be written to larger sizes than its own (`WindowLayout.write`)."""

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
        """Numbers of each part: two orders, positions, two lists of segments."""
        return self.num_tokens, self.num_tokens, 2 * self.num_patches, self.num_images + 1, self.num_windows + 1

    @property
    def total(self) -> int:
        """Numbers in all."""
        return sum(map(_aligned, self.lengths))

    def cut(self, buffer: Numbers) -> list[Numbers]:
        """The parts of a buffer of `total` numbers or more."""
        parts, start = [], 0
        for length in self.lengths:
            parts.append(buffer[start : start + length])
            start += _aligned(length)
        return parts

    def inputs(self, buffer: Tensor) -> TowerInputs:
        """The tower's inputs in a buffer that a plan was written to."""
        token_order, reading_order, positions, images, windows = self.cut(buffer)
        return TowerInputs(
            token_order=token_order,
            reading_order=reading_order,
            positions=positions.view(2, -1),
            images=Segments(images, self.max_image),
            windows=Segments(windows, self.max_window),
        )


def _aligned(length: int) -> int:
    """Parts begin at multiples of 16 bytes: Triton compiles a kernel anew for pointers that do not."""
    return -(-length // 4) * 4


@dataclass(frozen=True)
class WindowLayout:
    """Where the tokens (groups of merged patches) of a row of images go for window attention."""

    token_order: Integers
    """[tokens]: the token, in reading order, that stands at each place in window order."""
    reading_order: Integers
    """[tokens]: the inverse: the place in window order of each token in reading order."""
    positions: Integers
    """[2, patches]: row and column of each patch, in window order."""
    window_lengths: Integers
    """Patches of each window."""
    image_lengths: Integers
    """Patches of each image (of each frame pair of a video)."""

    @property
    def sizes(self) -> LayoutSizes:
        """Exactly those of this plan."""
        return LayoutSizes(
            num_tokens=len(self.token_order),
            num_patches=self.positions.shape[1],
            num_images=len(self.image_lengths),
            num_windows=len(self.window_lengths),
            max_image=int(self.image_lengths.max()),
            max_window=int(self.window_lengths.max()),
        )

    def write(self, buffer: NDArray[np.int32], sizes: LayoutSizes) -> None:
        """Write the plan. Where `sizes` has more images and windows, the rest of them are empty; tokens and patches must agree."""
        token_order, reading_order, positions, images, windows = sizes.cut(buffer)
        token_order[:] = self.token_order
        reading_order[:] = self.reading_order
        positions[:] = self.positions.reshape(-1)
        for ends, lengths in ((images, self.image_lengths), (windows, self.window_lengths)):
            ends[0] = 0
            ends[1 : len(lengths) + 1] = np.cumsum(lengths)
            ends[len(lengths) + 1 :] = ends[len(lengths)]

    def to(self, device: torch.device) -> TowerInputs:
        """The plan on the device, by one copy that is not waited for."""
        sizes = self.sizes
        buffer = np.zeros(sizes.total, np.int32)
        self.write(buffer, sizes)
        return sizes.inputs(to_device(buffer, device))


def window_layout(grids: Sequence[tuple[int, int, int]], config: VisionConfig) -> WindowLayout:
    """The plan of a row of images: the plans of its grids behind one another."""
    plans = [_grid_layout(grid, config.merge_size, config.window_tokens) for grid in grids]
    starts = np.cumsum([0, *(len(plan.token_order) for plan in plans)])
    return WindowLayout(
        token_order=np.concatenate([plan.token_order + start for plan, start in zip(plans, starts, strict=False)]),
        reading_order=np.concatenate([plan.reading_order + start for plan, start in zip(plans, starts, strict=False)]),
        positions=np.concatenate([plan.positions for plan in plans], axis=1),
        window_lengths=np.concatenate([plan.window_lengths for plan in plans]),
        image_lengths=np.concatenate([plan.image_lengths for plan in plans]),
    )


@functools.lru_cache(maxsize=4096)
def _grid_layout(grid: tuple[int, int, int], merge: int, window: int) -> WindowLayout:
    """One image or video. Grids repeat, so plans are kept: computing one of 24 x 24 tokens takes 0.1 ms."""
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
    """A linear map of each patch's pixels; the weight keeps the convolution's shape it has on disk."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel, stride=kernel, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, channels * frames * side * side] normalised pixels to [P, D]."""
        weight = self.proj.weight
        return F.linear(pixels.to(weight.dtype), weight.flatten(1))


class VisionAttention(nn.Module):
    """Attention among the patches of a segment, both ways."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_PD: Tensor, angles: CosSin, segments: Segments) -> Tensor:
        """[P, D] to the same."""
        q_PHK, k_PHK, v_PHK = self.qkv(x_PD).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q_PHK, k_PHK = rope(q_PHK, k_PHK, angles)
        out_PHK = attention(
            q_PHK, k_PHK, v_PHK, segments.cu_seqlens, segments.cu_seqlens,
            max_seqlen_q=segments.max_seqlen, max_seqlen_k=segments.max_seqlen, causal=False,
        )  # fmt: skip
        out: Tensor = self.proj(out_PHK.flatten(1))
        return out


class VisionBlock(nn.Module):
    """Attend, then think: each on a normalised copy, added to the stream."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, NORM_EPS)
        self.attn = VisionAttention(config)
        self.norm2 = RMSNorm(config.hidden_size, NORM_EPS)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size, bias=True)

    def forward(self, x_PD: Tensor, angles: CosSin, segments: Segments) -> Tensor:
        """[P, D] to the same."""
        attended_PD = self.attn(self.norm1(x_PD), angles, segments)
        normed_PD, x_PD = self.norm2.add_norm(attended_PD, x_PD)
        out: Tensor = x_PD + self.mlp(normed_PD)
        return out


class VisionTower(nn.Module):
    """Pixels of any number of images of any size to patch features, in window order."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))

    def forward(self, pixels: Tensor, inputs: TowerInputs) -> Tensor:
        """[P, patch_dim] normalised pixels in reading order to [P, D] features in window order."""
        x_PD = _reorder(self.patch_embed(pixels), inputs.token_order, self.config.patches_per_token)
        angles = vision_cos_sin(inputs.positions, self.config.head_dim)
        for layer, block in enumerate(self.blocks):
            is_full = layer in self.config.full_attention_layers
            x_PD = block(x_PD, angles, inputs.images if is_full else inputs.windows)
        return x_PD


def _reorder(x_PD: Tensor, token_order: Tensor, patches_per_token: int) -> Tensor:
    """Move whole tokens, that is groups of `patches_per_token` rows."""
    return x_PD.view(-1, patches_per_token, x_PD.shape[-1])[token_order.long()].flatten(0, 1)
