"""LLaVA-NeXT: an image is a picture of the whole and tiles. There are no videos.

A token is a patch, and each row of patches ends with a newline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from saccade.errors import ImageError
from saccade.processor.families.settings import required_id
from saccade.processor.families.tile_rules import TileRules, check_processor, is_within
from saccade.processor.families.tile_settings import TileDefaults, read_tile_settings
from saccade.processor.image import MediaLimits, Pixels
from saccade.processor.parts import FeatureSpan, Part, VisualKind
from saccade.processor.patches import Grid, Resize
from saccade.processor.positions import TextSpan

MODEL_TYPE = "llava_next"

DEFAULTS = TileDefaults(
    tile_size=336,
    size=224,
    crop_size=224,
    patch_size=32,
    image_size=224,
    resolutions=((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)),
)
"""Defaults of `transformers`. An empty vision config is that of a smaller tower."""
IMAGE_ID = 32000
"""The placeholder, unless `config.json` names it."""


@dataclass(frozen=True, kw_only=True)
class Rules(TileRules):
    """See `VisionRules`."""

    video_id: None = None
    """There are no videos."""

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """Read the rules of a checkpoint folder."""
        settings = read_tile_settings(folder, config, DEFAULTS)
        expected = {"patch_size": settings.patch_size, "vision_feature_select_strategy": "default"}
        check_processor(folder, expected)
        ids = {"image_token_index": IMAGE_ID} | dict(config)
        name = "image_token_id" if "image_token_id" in config else "image_token_index"
        return cls(images=settings, image_id=required_id(ids, name, folder))

    # -------------------------------------------------------------- patches

    def counted_images(self, num_images: int) -> int:
        """See `VisionRules`."""
        return 1

    def image_grid(self, height: int, width: int, num_images: int = 1) -> Grid:
        """See `VisionRules`."""
        return self.images.tiling.num_tiles((height, width)), height, width

    def patchify(
        self,
        kind: VisualKind,
        frames: Sequence[Pixels],
        resize: Resize,
        into: Pixels | None = None,
        num_images: int = 1,
    ) -> tuple[Pixels, Grid]:
        """See `VisionRules`."""
        if kind == "video":
            raise ImageError("this model takes images but no videos. Send frames of the video as images")
        grid = self.image_grid(*frames[0].shape[:2])
        patches = self._rows_for(grid, frames[0], into)
        self.images.tiling.cut(frames[0], resize, patches)
        return patches, grid

    def max_patches(self, kind: VisualKind, limits: MediaLimits) -> int:
        """See `VisionRules`."""
        tiling = self.images.tiling
        return tiling.max_tiles * tiling.patches_per_tile if kind == "image" else 0

    # -------------------------------------------------------------- tokens

    def parts(self, kind: VisualKind, grid: Grid, fps: float, texts: Sequence[Sequence[int]]) -> tuple[Part, ...]:
        """See `VisionRules`."""
        tiling = self.images.tiling
        kept = tiling.unpadded(grid[1:])
        length = tiling.patches_per_tile + kept.rows * (kept.columns + 1)
        return (FeatureSpan(grid, self.num_patches(grid), TextSpan(length)),)

    def is_possible(
        self, kind: VisualKind, grid: Grid, fps: float, num_frames: range, limits: MediaLimits, num_images: int = 1
    ) -> bool:
        """See `VisionRules`."""
        _, height, width = grid
        return kind == "image" and is_within(height, width, limits) and grid == self.image_grid(height, width)
