"""AnyRes: an image becomes a small picture of the whole and tiles of one size. No torch.

    size -> best resolution of a list -> resize within it, pad around it -> tiles
    size -> rows and columns of features that are not padding -> tokens

The rounding is that of LLaVA's published code: a feature at the border of image and padding is kept or dropped as the
model was trained, and the padding of the pixels (`fitted_size`) is not always that of the features (`unpadded`). A very
long strip may keep no row at all. Sizes are height, width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from saccade.errors import ConfigError
from saccade.processor.image import Pixels
from saccade.processor.patches import Resize

Size = tuple[int, int]
"""Height and width."""

_RATIO = 1.1
"""Features are interpolated if a side has more than this factor times the maximum."""


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The resolution that keeps most pixels of an image, and of several the one with least padding."""

    def score(resolution: Size) -> tuple[int, int]:
        scale = min(resolution[1] / size[1], resolution[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=score)  # the first of equals


def fitted_size(size: Size, resolution: Size) -> Size:
    """The largest size of the image's aspect ratio within a resolution."""
    by_width, by_height = resolution[1] / size[1], resolution[0] / size[0]
    if by_width < by_height:
        return min(math.ceil(size[0] * by_width), resolution[0]), resolution[1]
    return resolution[0], min(math.ceil(size[1] * by_height), resolution[1])


class Unpadded(NamedTuple):
    """The rows and columns of a padded image's features that are not padding."""

    top: int
    left: int
    rows: int
    columns: int


def unpadded(size: Size, rows: int, columns: int) -> Unpadded:
    """The features that are not padding among `rows` x `columns` features of an image of this size; maybe none."""
    if size[1] / size[0] > columns / rows:
        padding = (rows - int(round(size[0] * (columns / size[1]), 7))) // 2
        return Unpadded(padding, 0, rows - 2 * padding, columns)
    padding = (columns - int(round(size[1] * (rows / size[0]), 7))) // 2
    return Unpadded(0, padding, rows, columns - 2 * padding)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The division of images into tiles, and of tiles into patches."""

    tile_size: int
    """Side of a tile in pixels."""
    patch_size: int
    """Side of a patch in pixels. Pixels of a tile beyond its whole patches are dropped."""
    resolutions: tuple[Size, ...]
    """Sizes that images are fitted to, each of whole tiles."""

    def __post_init__(self) -> None:
        if not 0 < self.patch_size <= self.tile_size:
            raise ConfigError(f"patches of {self.patch_size} pixels do not fit tiles of {self.tile_size}")
        if not self.resolutions:
            raise ConfigError("image_grid_pinpoints is empty: give at least one resolution")
        for resolution in self.resolutions:
            if min(resolution) < 1 or any(length % self.tile_size for length in resolution):
                raise ConfigError(f"resolution {resolution} is not made of whole tiles of {self.tile_size} pixels")

    @property
    def patches_per_side(self) -> int:
        """Patches of a side of a tile."""
        return self.tile_size // self.patch_size

    @property
    def patches_per_tile(self) -> int:
        """Patches of a tile."""
        return self.patches_per_side**2

    @property
    def max_tiles(self) -> int:
        """Maximum tiles of an image, with the picture of the whole."""
        return 1 + max(height * width for height, width in self.resolutions) // self.tile_size**2

    def resolution(self, size: Size) -> Size:
        """The resolution that an image of this size is fitted to."""
        return _resolution(self, size)

    def tiles(self, size: Size) -> Size:
        """Rows and columns of tiles of an image of this size, without the picture of the whole."""
        height, width = self.resolution(size)
        return height // self.tile_size, width // self.tile_size

    def num_tiles(self, size: Size) -> int:
        """Tiles of an image of this size, with the picture of the whole."""
        return 1 + math.prod(self.tiles(size))

    def unpadded(self, size: Size) -> Unpadded:
        """The patches of an image's tiles that are not padding, counted over all tiles."""
        rows, columns = self.tiles(size)
        return unpadded(size, rows * self.patches_per_side, columns * self.patches_per_side)

    def cut(self, pixels: Pixels, resize: Resize, into: Pixels) -> None:
        """Write the patches of an image to `into` [tiles * patches, patch_dim].

        The picture of the whole is first, then all tiles in reading order.
        """
        height, width = pixels.shape[:2]
        side = self.patches_per_side
        patches = into.reshape(-1, side, side, 3, self.patch_size, self.patch_size)
        self.patchify(_resized(pixels, (self.tile_size, self.tile_size), resize), patches[:1])
        resolution = self.resolution((height, width))
        fitted = _resized(pixels, fitted_size((height, width), resolution), resize)
        padded = np.zeros((*resolution, 3), np.uint8)
        top, left = ((length - used) // 2 for length, used in zip(resolution, fitted.shape, strict=False))
        padded[top : top + fitted.shape[0], left : left + fitted.shape[1]] = fitted
        self.patchify(padded, patches[1:])

    def patchify(self, pixels: Pixels, patches: Pixels) -> None:
        """Cut whole tiles into patches: [tiles, patch rows, patch columns, channels, rows, columns]."""
        tile, side, patch = self.tile_size, self.patches_per_side, self.patch_size
        down, across = pixels.shape[0] // tile, pixels.shape[1] // tile
        tiles = pixels.reshape(down, tile, across, tile, 3)[:, : side * patch, :, : side * patch]
        in_patches = tiles.reshape(down, side, patch, across, side, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        patches[...] = in_patches.reshape(patches.shape)


class KeptFeatures(NamedTuple):
    """The features of an image's tiles that become tokens."""

    source: Unpadded
    """The features that are not padding."""
    rows: int
    """Rows after interpolation; without it those of `source`."""
    columns: int
    """Columns after interpolation."""

    @property
    def is_interpolated(self) -> bool:
        """Whether they are fewer than those of `source`."""
        return (self.rows, self.columns) != (self.source.rows, self.source.columns)


def kept_features(size: Size, tiling: Tiling, max_feature_tiles: int | None) -> KeptFeatures:
    """The features of the tiles of an image of this size, interpolated to about those of `max_tiles` at most."""
    source = tiling.unpadded(size)
    if max_feature_tiles is None:
        return KeptFeatures(source, source.rows, source.columns)
    ratio = math.sqrt(source.rows * source.columns / (max_feature_tiles * tiling.patches_per_tile))
    if ratio <= _RATIO:
        return KeptFeatures(source, source.rows, source.columns)
    return KeptFeatures(source, max(1, int(source.rows // ratio)), max(1, int(source.columns // ratio)))


@functools.lru_cache(maxsize=4096)
def _resolution(tiling: Tiling, size: Size) -> Size:
    return best_resolution(size, tiling.resolutions)


def _resized(pixels: Pixels, size: Size, resize: Resize) -> Pixels:
    return pixels if pixels.shape[:2] == size else resize(pixels, *size)
