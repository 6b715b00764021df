"""LLaVA-OneVision: one image is AnyRes tiles, several are padded squares, the frames of a video pooled squares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from saccade.errors import CheckpointError
from saccade.processor.families.settings import preprocessor_config, required_id
from saccade.processor.families.tile_rules import TileRules, check_processor, is_within
from saccade.processor.families.tile_settings import TileDefaults, TileSettings, read_tile_settings
from saccade.processor.image import MediaLimits, Pixels
from saccade.processor.parts import FeatureSpan, Part, VisualKind
from saccade.processor.patches import Grid, Resize
from saccade.processor.positions import TextSpan
from saccade.processor.tiles import Tiling, kept_features

MODEL_TYPE = "llava_onevision"

_SIDES = range(384, 2304 + 1, 384)
DEFAULTS = TileDefaults(
    tile_size=384, size=384, crop_size=None, patch_size=16, image_size=224,
    resolutions=tuple((height, width) for height in _SIDES for width in _SIDES),
)  # fmt: skip
"""Defaults of `transformers`. An empty vision config is that of a smaller tower."""
DEFAULT_ASPECT_RATIO = "anyres_max_9"


@dataclass(frozen=True, kw_only=True)
class Rules(TileRules):
    """See `VisionRules`. The grid of a video is (frames, 0, 0): its size does not matter."""

    video_id: int
    """Placeholder token of a video."""

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """Read the rules of a checkpoint folder."""
        aspect_ratio = config.get("vision_aspect_ratio") or DEFAULT_ASPECT_RATIO
        settings = read_tile_settings(folder, config, DEFAULTS, max_feature_tiles(aspect_ratio))
        expected = {"vision_aspect_ratio": aspect_ratio, "num_image_tokens": settings.tiling.patches_per_tile}
        check_processor(folder, expected)
        _check_videos(folder, settings)
        ids = {"image_token_index": 151646, "video_token_index": 151647} | dict(config)
        return cls(
            images=settings,
            image_id=required_id(ids, "image_token_id" if "image_token_id" in ids else "image_token_index", folder),
            video_id=required_id(ids, "video_token_id" if "video_token_id" in ids else "video_token_index", folder),
        )

    # -------------------------------------------------------------- patches

    def counted_images(self, num_images: int) -> int:
        """See `VisionRules`. An image is cut into tiles when it is the only one."""
        return min(num_images, 2)

    def image_grid(self, height: int, width: int, num_images: int = 1) -> Grid:
        """See `VisionRules`."""
        return self.images.tiling.num_tiles((height, width)) if num_images <= 1 else 1, height, width

    def patchify(
        self,
        kind: VisualKind,
        frames: Sequence[Pixels],
        resize: Resize,
        into: Pixels | None = None,
        num_images: int = 1,
    ) -> tuple[Pixels, Grid]:
        """See `VisionRules`."""
        (height, width), tiling = frames[0].shape[:2], self.images.tiling
        grid = self.image_grid(height, width, num_images) if kind == "image" else (len(frames), 0, 0)
        patches = self._rows_for(grid, frames[0], into)
        if kind == "image" and num_images <= 1:
            tiling.cut(frames[0], resize, patches)
        else:
            squares = [_padded_square(frames[0], self.images.mean)] if kind == "image" else frames
            for square, part in zip(squares, np.split(patches, len(squares)), strict=True):
                self._square_patches(square, resize, part)
        return patches, grid

    def _square_patches(self, pixels: Pixels, resize: Resize, into: Pixels) -> None:
        """The patches of one tile."""
        tiling, side = self.images.tiling, self.images.tiling.patches_per_side
        size = tiling.tile_size, tiling.tile_size
        resized = pixels if pixels.shape[:2] == size else resize(pixels, *size)
        tiling.patchify(resized, into.reshape(1, side, side, 3, tiling.patch_size, tiling.patch_size))

    def max_patches(self, kind: VisualKind, limits: MediaLimits) -> int:
        """See `VisionRules`."""
        tiling = self.images.tiling
        return (tiling.max_tiles if kind == "image" else limits.max_frames) * tiling.patches_per_tile

    # -------------------------------------------------------------- tokens

    def parts(self, kind: VisualKind, grid: Grid, fps: float, texts: Sequence[Sequence[int]]) -> tuple[Part, ...]:
        """See `VisionRules`."""
        return (FeatureSpan(grid, self.num_patches(grid), TextSpan(self.num_tokens(kind, grid))),)

    def num_tokens(self, kind: VisualKind, grid: Grid) -> int:
        """Tokens of an image or video, newlines included."""
        tiles, tiling = grid[0], self.images.tiling
        if kind == "video":
            return tiles * pooled_side(tiling) ** 2 + 1
        if tiles == 1:
            return tiling.patches_per_tile + 1
        kept = kept_features(grid[1:], tiling, self.images.max_feature_tiles)
        return tiling.patches_per_tile + kept.rows * (kept.columns + 1)

    def is_possible(
        self, kind: VisualKind, grid: Grid, fps: float, num_frames: range, limits: MediaLimits, num_images: int = 1
    ) -> bool:
        """See `VisionRules`."""
        tiles, height, width = grid
        if kind == "video":
            return tiles in num_frames and (height, width) == (0, 0)
        return is_within(height, width, limits) and grid == self.image_grid(height, width, num_images)


def pooled_side(tiling: Tiling) -> int:
    """Tokens of a side of a video's frame."""
    return math.ceil(tiling.patches_per_side / 2)


def max_feature_tiles(aspect_ratio: object) -> int:
    """N of `anyres_max_N`."""
    prefix, _, number = str(aspect_ratio).rpartition("_")
    if prefix != "anyres_max" or not number.isdecimal() or int(number) < 1:
        raise CheckpointError(f"vision_aspect_ratio is {aspect_ratio!r}; only anyres_max_N is supported")
    return int(number)


def _padded_square(pixels: Pixels, mean: Sequence[float]) -> Pixels:
    """The image in the middle of a square of the mean colour."""
    height, width = pixels.shape[:2]
    if height == width:
        return pixels
    side = max(height, width)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = [int(value * 255) for value in mean]
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def _check_videos(folder: Path, images: TileSettings) -> None:
    """Refuse frames that are preprocessed differently from images; the file may be missing."""
    found = preprocessor_config(folder, "video_preprocessor_config.json", "video_processor")
    for name, value in (("image_mean", images.mean), ("image_std", images.std)):
        if found.get(name) is not None and tuple(found[name]) != value:
            raise CheckpointError(f"{folder}: images and videos have different {name}; one of each is supported")
    size = found.get("size") or {}
    if any(size.get(name) not in (None, images.tiling.tile_size) for name in ("height", "width", "shortest_edge")):
        raise CheckpointError(
            f"{folder}: frames of videos have the size {size}, tiles {images.tiling.tile_size}. "
            "Take all files from the same model"
        )
