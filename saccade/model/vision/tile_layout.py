"""The layout of tiles: their rows and segments, and the rows that each image token is made of.

Legend: P patches of all tiles, packed, S rows of the tower (patches, and a class token before each tile's if there are
any), M image tokens, K rows that a token is made of.

A grid is (tiles, height, width): the size of the original image, from which the family derives what becomes of the
features. Its *gather* lists the patches that each token is made of: one, several with weights if features are
interpolated, or none for a newline embedding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.model.config import VisionConfig
from saccade.model.vision.layout import Integers, Layout, LayoutSizes, Segments
from saccade.processor.patches import Grid
from saccade.processor.tiles import kept_features

NUM_TAPS = 4
"""K if features are interpolated: two rows x two columns."""


class Gathered(NamedTuple):
    """The patches of an image that its tokens are made of."""

    patches: Integers
    """[K, M]: patches of the image; their number stands for the newline."""
    shares: NDArray[np.float32] | None = None
    """[K, M]: shares of each; None: K is 1."""


Gather = Callable[[Grid, VisionConfig], Gathered]
"""The tokens of one image."""


def gather_tiles(grid: Grid, config: VisionConfig) -> Gathered:
    """The tokens of an AnyRes image: those of the whole, then the unpadded rows of all tiles, each with a newline."""
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
    """Resize features [rows, columns] bilinearly, corners not aligned.

    Returns the four features that each is made of, [4, rows, columns], and their shares.
    """
    row_taps, row_shares = _line_taps(table.shape[0], rows)
    column_taps, column_shares = _line_taps(table.shape[1], columns)
    index = [table[row][:, column] for row in row_taps for column in column_taps]
    shares = [row[:, None] * column for row in row_shares for column in column_shares]
    return np.stack(index), np.stack(shares)


def _line_taps(old: int, new: int) -> tuple[list[Integers], list[NDArray[np.float32]]]:
    """The two of `old` points around each of `new` points, and their shares, in fp32 as torch computes them."""
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


@dataclass(frozen=True)
class TileInputs:
    """Inputs of the tower apart from pixels, on the device, in int32."""

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


@dataclass(frozen=True)
class TileSizes(LayoutSizes):
    """Sizes of a layout; see `LayoutSizes`."""

    num_rows: int
    num_tiles: int
    max_tile: int
    """Rows of a whole tile."""
    num_tokens: int
    num_taps: int
    """K."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each part: rows, positions, `cu_seqlens`, index, and weights if there are several taps."""
        taps = self.num_taps * self.num_tokens
        lengths = self.num_rows, self.num_rows, self.num_tiles + 1, taps
        return (*lengths, taps) if self.num_taps > 1 else lengths

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
class TileLayout(Layout):
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

    def with_taps(self, num_taps: int) -> TileLayout:
        """The same layout with more taps per token."""
        index = self.index[_taps(len(self.index), num_taps)]
        return replace(self, index=index, weights=_padded(self.weights, num_taps))

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


def tile_layout(grids: Sequence[Grid], config: VisionConfig, gather: Gather, padding: Sequence[int] = ()) -> TileLayout:
    """The layout of packed images, followed by padding tiles with these numbers of patches."""
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
    """The rows of an image that each token is made of, whether each is the newline, and its share.

    Cached: an image of 37 tiles takes 1 ms and 0.4 MB.
    """
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
