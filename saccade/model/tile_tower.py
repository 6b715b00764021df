"""The vision tower over tiles, as CLIP and SigLIP are used: images become squares of one size, and each attends to itself.

Legend: P patches of all tiles, packed, S rows of the tower (patches, and a class token before each tile's if there are any), M image tokens,
K rows that a token is made of, D hidden size, H heads, C head dim, F decoder width.

A grid is (tiles, height, width): the size of the original image, from which the family derives what becomes of the features. Its *gather* lists
the patches that each token is made of: one, several with weights where features are interpolated, or none where a newline embedding
stands. The projector's output ends with the newline embedding, so that it is a row like any other; `arrange` picks the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from saccade.device import to_device
from saccade.kernels.attention import attention
from saccade.model.config import VisionConfig
from saccade.model.layers import LayerNorm, PlainFeedForward, make_embedding
from saccade.model.linear import Linear
from saccade.model.merged_projections import project
from saccade.model.normed_sum import Input, add_update
from saccade.model.vision import (
    Integers,
    Numbers,
    PatchEmbedding,
    Segments,
    Tower,
    TowerPass,
    aligned,
    drop_paths,
    split_aligned,
)
from saccade.processor.image import Grid
from saccade.processor.tiles import kept_features

NUM_TAPS = 4
"""K where features are interpolated: two rows x two columns."""


class Gathered(NamedTuple):
    """The patches of an image that its tokens are made of."""

    patches: Integers
    """[K, M]: patches of the image; their number stands for the newline."""
    shares: NDArray[np.float32] | None = None
    """[K, M]: shares of each; None: K is 1."""


Gather = Callable[[Grid, VisionConfig], Gathered]
"""The tokens of one image."""


def gather_tiles(grid: Grid, config: VisionConfig) -> Gathered:
    """The tokens of an AnyRes image: the picture of the whole, then the rows of all tiles without padding, each with a newline."""
    (tiles, *size), tiling = grid, config.tiling
    kept = kept_features((size[0], size[1]), tiling, config.max_feature_tiles)
    source, side = kept.source, tiling.patches_per_side
    down, up = np.divmod(np.arange(source.rows)[:, None] + source.top, side)
    across, along = np.divmod(np.arange(source.columns) + source.left, side)
    tile = 1 + down * tiling.tiles((size[0], size[1]))[1] + across
    patches = (tile * side + up) * side + along
    table, shares = interpolated(patches, kept.rows, kept.columns) if kept.is_interpolated else (patches[None], None)
    whole, newline = np.arange(side**2), np.full((len(table), kept.rows, 1), tiles * side**2)
    index = _joined(whole, np.concatenate([table, newline], axis=2))
    if shares is None:
        return Gathered(index)
    one = _first_tap(kept.rows)[:, :, None]
    return Gathered(index, np.concatenate([_first_tap(side**2), _flat(np.concatenate([shares, one], axis=2))], axis=1))


def interpolated(table: Integers, rows: int, columns: int) -> tuple[Integers, NDArray[np.float32]]:
    """Features [rows, columns] resized bilinearly, corners not aligned: the four that each is made of, [4, rows, columns], and their shares."""
    row_taps, row_shares = _line_taps(table.shape[0], rows)
    column_taps, column_shares = _line_taps(table.shape[1], columns)
    index = [table[row][:, column] for row in row_taps for column in column_taps]
    shares = [row[:, None] * column for row in row_shares for column in column_shares]
    return np.stack(index), np.stack(shares)


def _line_taps(old: int, new: int) -> tuple[list[Integers], list[NDArray[np.float32]]]:
    """The two of `old` points that each of `new` points is between, and their shares, in fp32 as torch computes them."""
    half = np.float32(0.5)
    at = np.maximum(np.float32(old) / np.float32(new) * (np.arange(new, dtype=np.float32) + half) - half, np.float32(0))
    low = at.astype(np.int64)
    share = at - low.astype(np.float32)
    return [low, np.minimum(low + 1, old - 1)], [1 - share, share]


def _first_tap(length: int) -> NDArray[np.float32]:
    """Shares of tokens made of one patch."""
    return np.repeat(np.eye(NUM_TAPS, 1, dtype=np.float32), length, axis=1)


def _joined(first: Integers, taps: NDArray[Any]) -> Integers:
    """Tokens of one patch each, and then of several: [K, M]."""
    return np.concatenate([np.repeat(first[None], len(taps), axis=0), _flat(taps)], axis=1)


def _flat(taps: NDArray[Any]) -> NDArray[Any]:
    return taps.reshape(len(taps), -1)


# ------------------------------------------------------------------ layout


@dataclass(frozen=True)
class TileInputs:
    """Inputs of the tower besides pixels, on the device, in int32."""

    rows: Tensor
    """[S]: the patch of each row, P for a class token."""
    positions: Tensor
    """[S]: index of each row's position embedding."""
    tiles: Segments
    """Tiles."""
    index: Tensor
    """[K, M]: rows that each token is made of, S for the newline."""
    weights: Tensor | None
    """[K, M] fp32: shares of each."""


class TileSizes(NamedTuple):
    """Sizes of a layout in a flat int32 buffer. A layout may be padded to larger sizes (`TileLayout.write`)."""

    num_rows: int
    num_tiles: int
    max_tile: int
    """Rows of a whole tile."""
    num_tokens: int
    num_taps: int
    """K."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each part: rows, positions, `cu_seqlens`, index, and weights where there are several taps."""
        taps = self.num_taps * self.num_tokens
        lengths = self.num_rows, self.num_rows, self.num_tiles + 1, taps
        return (*lengths, taps) if self.num_taps > 1 else lengths

    @property
    def total(self) -> int:
        """Length of the buffer."""
        return sum(map(aligned, self.lengths))

    def split(self, buffer: Numbers) -> list[Numbers]:
        """The parts of a buffer."""
        return split_aligned(buffer, self.lengths)

    def inputs(self, buffer: Tensor) -> TileInputs:
        """Views of a buffer that a layout was written to."""
        rows, positions, tiles, index, *weights = self.split(buffer)
        return TileInputs(
            rows=rows,
            positions=positions,
            tiles=Segments(tiles, self.max_tile),
            index=index.view(self.num_taps, -1),
            weights=weights[0].view(torch.float32).view(self.num_taps, -1) if weights else None,
        )


@dataclass(frozen=True)
class TileLayout:
    """Rows, segments and tokens of packed images in tiles."""

    rows: Integers
    """[S]: the patch of each row, P for a class token."""
    positions: Integers
    """[S]: index of each row's position embedding."""
    lengths: Integers
    """Rows of each tile."""
    max_tile: int
    """Rows of a whole tile."""
    index: Integers
    """[K, M]: rows that each token is made of, S for the newline."""
    weights: NDArray[np.float32]
    """[K, M]: shares of each."""

    @property
    def sizes(self) -> TileSizes:
        """The sizes without padding."""
        num_taps, num_tokens = self.index.shape
        return TileSizes(len(self.rows), len(self.lengths), self.max_tile, num_tokens, num_taps)

    def write(self, buffer: NDArray[np.int32], sizes: TileSizes) -> None:
        """Write the layout to a buffer, padded with tokens made of the first row; rows, tiles and taps must agree."""
        rows, positions, tiles, *taps = sizes.split(buffer)
        rows[:] = self.rows
        positions[:] = self.positions
        tiles[0] = 0
        tiles[1:] = np.cumsum(self.lengths)
        values = self.index.astype(np.int32), self.weights.view(np.int32)
        for part, value in zip(taps, values, strict=False):
            padded = part.reshape(sizes.num_taps, -1)
            padded[:, : value.shape[1]] = value
            padded[:, value.shape[1] :] = 0

    def to(self, device: torch.device) -> TileInputs:
        """Copy the layout to the device, asynchronously."""
        sizes = self.sizes
        buffer = np.zeros(sizes.total, np.int32)
        self.write(buffer, sizes)
        return sizes.inputs(to_device(buffer, device))


def tile_layout(grids: Sequence[Grid], config: VisionConfig, gather: Gather, padding: Sequence[int] = ()) -> TileLayout:
    """The layout of packed images, followed by padding tiles of so many patches each."""
    whole = config.tiling.patches_per_tile
    patches = np.array([*[whole] * sum(tiles for tiles, _, _ in grids), *padding])
    lengths = patches + config.has_class_token
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    if config.has_class_token:
        rows = np.arange(lengths.sum()) - 1 - np.repeat(np.arange(len(lengths)), lengths)
        rows[starts] = patches.sum()
    else:
        rows = np.arange(lengths.sum())
    tokens = [_rows_of(grid, config, gather) for grid in grids]
    firsts = np.cumsum([0, *(grid[0] for grid in grids)]) * (whole + config.has_class_token)
    num_taps = max((len(index) for index, _, _ in tokens), default=1)
    index = [
        np.where(is_newline, len(rows), index + first)[_taps(len(index), num_taps)]
        for (index, is_newline, _), first in zip(tokens, firsts, strict=False)
    ]
    weights = [_padded(weights, num_taps) for _, _, weights in tokens]
    return TileLayout(
        rows=rows,
        positions=positions,
        lengths=lengths,
        max_tile=whole + config.has_class_token,
        index=np.concatenate([np.zeros((num_taps, 0), np.int64), *index], axis=1),
        weights=np.concatenate([np.zeros((num_taps, 0), np.float32), *weights], axis=1),
    )


@functools.lru_cache(maxsize=64)
def _rows_of(
    grid: Grid, config: VisionConfig, gather: Gather
) -> tuple[Integers, NDArray[np.bool_], NDArray[np.float32]]:
    """Rows of an image that each token is made of, where the newline is, and the shares of each. Cached: 37 tiles take 1 ms and 0.4 MB."""
    index, weights = gather(grid, config)
    whole = config.tiling.patches_per_tile
    is_newline = index == grid[0] * whole
    rows = index + (index // whole + 1) * config.has_class_token
    return rows, is_newline, np.ones(index.shape, np.float32) if weights is None else weights.astype(np.float32)


def _taps(given: int, num_taps: int) -> list[int]:
    """The taps of a token, the last one repeated."""
    return [min(tap, given - 1) for tap in range(num_taps)]


def _padded(weights: NDArray[np.float32], num_taps: int) -> NDArray[np.float32]:
    missing = num_taps - len(weights)
    return np.concatenate([weights, np.zeros((missing, weights.shape[1]), np.float32)])


# ------------------------------------------------------------------ modules


class TileAttention(nn.Module):
    """Bidirectional attention within tiles."""

    merged_projections = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def forward(self, x_SD: Input, segments: Segments) -> Tensor:
        """[S, D] to [S, D]."""
        q_SHC, k_SHC, v_SHC = (
            x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
            for x in project(x_SD, self.q_proj, self.k_proj, self.v_proj)
        )
        out_SHC = attention(
            q_SHC, k_SHC, v_SHC, segments.cu_seqlens, segments.cu_seqlens,
            max_seqlen_q=segments.max_seqlen, max_seqlen_k=segments.max_seqlen, causal=False,
        )  # fmt: skip
        out: Tensor = self.out_proj(out_SHC.flatten(1))
        return out


class _FeedForward(PlainFeedForward):
    names = ("fc1", "fc2")


class TileBlock(nn.Module):
    """Pre-norm transformer block: attention, then the MLP, each with a residual connection."""

    normed_inputs: ClassVar[dict[str, tuple[str, ...]]] = {
        "layer_norm1": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "layer_norm2": ("mlp.fc1",),
    }
    """Norms, and the projections that read each; nothing else does."""

    def __init__(self, config: VisionConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.norm_eps)
        self.self_attn = TileAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = _FeedForward(config.hidden_size, config.intermediate_size, activation)

    def forward(
        self, x_SD: Tensor, update_SD: Tensor | None, segments: Segments, kept_2S1: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream x + update to itself, see `add_update`. `kept_2S1`: see `drop_paths`."""
        normed = self.layer_norm1.add_norm(x_SD, update_SD)
        attn_out_SD = self.self_attn(normed.input, segments)
        if kept_2S1 is not None:
            attn_out_SD = attn_out_SD * kept_2S1[0]
        normed = self.layer_norm2.add_norm(attn_out_SD, normed.total)
        mlp_out_SD = self.mlp(normed.input)
        if kept_2S1 is not None:
            mlp_out_SD = mlp_out_SD * kept_2S1[1]
        return add_update(normed.total, mlp_out_SD)


class TileTower(Tower):
    """Packed pixels of tiles to features, with a position embedding per patch of a tile."""

    def __init__(
        self, config: VisionConfig, activation: Callable[[Tensor], Tensor], gather: Gather, *, smallest: Grid
    ) -> None:
        """`smallest`: the image with the fewest tiles. With a class token there is a norm before the first block and no bias of the
        patch embedding (CLIP), without one it is the other way round (SigLIP)."""
        super().__init__()
        self.config, self._gather, self._smallest = config, gather, smallest
        num_positions = config.tiling.patches_per_tile + config.has_class_token
        self.patch_embed = PatchEmbedding(config, bias=not config.has_class_token)
        self.pos_embed = make_embedding(num_positions, config.hidden_size)
        self.class_embedding: nn.Parameter | None = None
        self.pre_norm: LayerNorm | None = None
        if config.has_class_token:
            self.class_embedding = nn.Parameter(torch.zeros(config.hidden_size))
            self.pre_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.blocks = nn.ModuleList(TileBlock(config, activation) for _ in range(config.num_layers))
        self.post_norm = LayerNorm(config.hidden_size, config.norm_eps)

    @property
    def output_blocks(self) -> tuple[int, ...]:
        """See `Tower`: the selected layers."""
        return self.config.selected_layers

    def start(self, pixels: Tensor, inputs: TileInputs) -> TowerPass:
        """See `Tower`: embed patches, with a class token before those of each tile if the tower has one."""
        x_SD = self.patch_embed(pixels)
        if self.class_embedding is not None:
            x_SD = torch.cat([x_SD, self.class_embedding[None].to(x_SD.dtype)])[inputs.rows.long()]
        x_SD = x_SD + self.pos_embed(inputs.positions.long()).to(x_SD.dtype)
        if self.pre_norm is not None:
            x_SD = self.pre_norm(x_SD)
        paths = drop_paths(self.drop_path if self.training else 0.0, self.config.num_run_layers, inputs.tiles, x_SD)
        return TowerPass(x_SD, [(inputs.tiles, kept_2S1) for kept_2S1 in paths])

    def arrange(self, features: Tensor, inputs: TileInputs) -> Tensor:
        """See `Tower`: [S + 1, F] features of all rows and the newline to [M, F]."""
        if inputs.weights is None:
            return features.index_select(0, inputs.index[0])
        total = features.index_select(0, inputs.index[0]) * inputs.weights[0, :, None]
        for index, weight in zip(inputs.index[1:], inputs.weights[1:], strict=True):
            total = total + features.index_select(0, index) * weight[:, None]
        return total.to(features.dtype)

    # -------------------------------------------------------------- what a grid means

    def layout(self, grids: Sequence[Grid]) -> TileLayout:
        """See `Tower`."""
        return tile_layout(grids, self.config, self._gather)

    def padded_layout(self, grids: Sequence[Grid], budget: int) -> TileLayout | None:
        """See `Tower`. The padding is whole tiles, one that is not, and empty ones."""
        whole, sizes = self.config.tiling.patches_per_tile, self.budget_sizes(budget)
        num_tiles = sum(tiles for tiles, _, _ in grids)
        num_whole, rest = divmod(budget - num_tiles * whole, whole)
        num_empty = sizes.num_tiles - num_tiles - num_whole - 1
        layout = tile_layout(grids, self.config, self._gather, [*[whole] * num_whole, rest, *[0] * num_empty])
        return self._with_taps(layout, sizes.num_taps)

    def _with_taps(self, layout: TileLayout, num_taps: int) -> TileLayout:
        given = len(layout.index)
        index, weights = layout.index[_taps(given, num_taps)], _padded(layout.weights, num_taps)
        return TileLayout(layout.rows, layout.positions, layout.lengths, layout.max_tile, index, weights)

    def budget_sizes(self, budget: int) -> TileSizes:
        """See `Tower`. Each row of a tile's patches may be followed by a newline."""
        tiling = self.config.tiling
        num_tiles = budget // tiling.patches_per_tile + 1
        return TileSizes(
            num_rows=budget + num_tiles * self.config.has_class_token,
            num_tiles=num_tiles,
            max_tile=tiling.patches_per_tile + self.config.has_class_token,
            num_tokens=budget + -(-budget // tiling.patches_per_side),
            num_taps=1 if self.config.max_feature_tiles is None else NUM_TAPS,
        )

    def square_grid(self, max_patches: int) -> tuple[Grid, int]:
        """See `Tower`: among the resolutions, whatever their shape."""
        tiling = self.config.tiling
        grids = [self._smallest, *((tiling.num_tiles(size), *size) for size in tiling.resolutions)]
        fitting = [grid for grid in grids if self.num_patches([grid]) <= max_patches]
        grid = max(fitting, key=lambda grid: grid[0], default=self._smallest)
        return grid, self.num_patches([grid])

    def num_patches(self, grids: Sequence[Sequence[int]]) -> int:
        """See `Tower`."""
        return sum(tiles for tiles, _, _ in grids) * self.config.tiling.patches_per_tile

    def attention_pairs(self, grids: Sequence[Sequence[int]]) -> int:
        """See `Tower`."""
        rows = self.config.tiling.patches_per_tile + self.config.has_class_token
        return sum(tiles for tiles, _, _ in grids) * rows**2 * self.config.num_run_layers

    def unused_modules(self) -> list[nn.Module]:
        """See `Tower`: what comes behind the selected layers."""
        return [*self.blocks[self.config.num_run_layers :], self.post_norm]


class TileProjector(nn.Module):
    """The projector: an MLP on each row of the selected layers, and the newline embedding as one more row."""

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        bias = config.projector_bias
        self.linear_1 = Linear(config.hidden_size * len(config.selected_layers), out_size, bias=bias)
        self.act = nn.GELU()
        self.linear_2 = Linear(out_size, out_size, bias=bias)
        self.image_newline = nn.Parameter(torch.zeros(out_size))

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """[S, D] of each selected layer to [S + 1, F]."""
        x_SF = self.linear_2(self.act(self.linear_1(torch.cat(outputs, dim=-1))))
        return torch.cat([x_SF, self.image_newline[None].to(x_SF.dtype)])
