"""LLaVA-NeXT: an image as a picture of the whole and tiles; a token is a patch, and each row of patches ends with a newline. No videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from saccade.errors import CheckpointError, ImageError
from saccade.processor.families.settings import required_id
from saccade.processor.families.tile_settings import TileDefaults, TileSettings, read_tile_settings
from saccade.processor.folder import read_json
from saccade.processor.image import Grid, MediaLimits, Pixels, Resize, check_size
from saccade.processor.parts import FeatureSpan, Part, VisualKind
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
"""Of `transformers`. A vision config that is there but empty is that of a smaller tower."""
IMAGE_ID = 32000
"""The placeholder, where `config.json` does not say it."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """See `VisionRules`. The grid of an image is (tiles, height, width)."""

    images: TileSettings
    """Settings of images."""
    image_id: int
    """Placeholder token of an image."""
    video_id: None = None
    """There are no videos."""

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """Read the rules of a checkpoint folder."""
        settings = read_tile_settings(folder, config, DEFAULTS)
        described = read_json(folder / "processor_config.json")
        expected = {"patch_size": settings.patch_size, "vision_feature_select_strategy": "default"}
        for name, value in expected.items():
            if described.get(name) not in (None, value):
                raise CheckpointError(
                    f"{folder}: {name} is {described[name]!r} in processor_config.json, but {value!r} in the model. "
                    "Take all files from the same model"
                )
        ids = {"image_token_index": IMAGE_ID} | dict(config)
        name = "image_token_id" if "image_token_id" in config else "image_token_index"
        return cls(images=settings, image_id=required_id(ids, name, folder))

    @property
    def videos(self) -> TileSettings:
        """See `VisionRules`."""
        return self.images

    # -------------------------------------------------------------- patches

    def counted_images(self, num_images: int) -> int:
        """See `VisionRules`."""
        return 1

    def image_grid(self, height: int, width: int, num_images: int = 1) -> Grid:
        """See `VisionRules`."""
        return self.images.tiling.num_tiles((height, width)), height, width

    def num_patches(self, grid: Grid) -> int:
        """See `VisionRules`."""
        return grid[0] * self.images.tiling.patches_per_tile

    def can_patchify_on_device(self, height: int, width: int) -> bool:
        """See `VisionRules`. Tiles are cut on the host."""
        return False

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
        height, width = frames[0].shape[:2]
        grid = self.image_grid(height, width)
        num_patches = self.num_patches(grid)
        if into is None:
            into = np.empty((num_patches, self.images.patch_dim), dtype=np.uint8)
        if len(into) < num_patches:
            raise ImageError(f"{width}x{height} pixels are {num_patches} patches, but there is memory for {len(into)}")
        self.images.tiling.cut(frames[0], resize, into[:num_patches])
        return into[:num_patches], grid

    def max_patches(self, kind: VisualKind, limits: MediaLimits) -> int:
        """See `VisionRules`."""
        tiling = self.images.tiling
        return tiling.max_tiles * tiling.patches_per_tile if kind == "image" else 0

    # -------------------------------------------------------------- tokens

    def num_texts(self, kind: VisualKind, grid: Grid) -> int:
        """See `VisionRules`."""
        return 0

    def texts(self, kind: VisualKind, num_frames: int, fps: float) -> list[str]:
        """See `VisionRules`."""
        return []

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
        try:
            check_size((width, height), limits)
        except ImageError:
            return False
        return kind == "image" and grid == self.image_grid(height, width)
