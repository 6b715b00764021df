"""Rules that families with images in tiles share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.errors import CheckpointError, ImageError
from saccade.processor.families.tile_settings import TileSettings
from saccade.processor.folder import read_json
from saccade.processor.image import MediaLimits, Pixels, check_size
from saccade.processor.parts import VisualKind
from saccade.processor.patches import Grid


@dataclass(frozen=True, kw_only=True)
class TileRules:
    """See `VisionRules`. The grid of an image is (tiles, height, width)."""

    images: TileSettings
    """Settings of images."""
    image_id: int
    """Placeholder token of an image."""

    @property
    def videos(self) -> TileSettings:
        """See `VisionRules`."""
        return self.images

    def num_patches(self, grid: Grid) -> int:
        """See `VisionRules`."""
        return grid[0] * self.images.tiling.patches_per_tile

    def can_patchify_on_device(self, height: int, width: int) -> bool:
        """See `VisionRules`. Tiles are cut on the host."""
        return False

    def num_texts(self, kind: VisualKind, grid: Grid) -> int:
        """See `VisionRules`."""
        return 0

    def texts(self, kind: VisualKind, num_frames: int, fps: float) -> list[str]:
        """See `VisionRules`."""
        return []

    def _rows_for(self, grid: Grid, pixels: Pixels, into: Pixels | None) -> Pixels:
        """Memory for the patches of a grid: the first rows of `into`, or new."""
        (height, width), num_patches = pixels.shape[:2], self.num_patches(grid)
        if into is None:
            return np.empty((num_patches, self.images.patch_dim), dtype=np.uint8)
        if len(into) < num_patches:
            raise ImageError(f"{width}x{height} pixels are {num_patches} patches, but there is memory for {len(into)}")
        return into[:num_patches]


def is_within(height: int, width: int, limits: MediaLimits) -> bool:
    """Whether an image of this size may be sent."""
    try:
        check_size((width, height), limits)
    except ImageError:
        return False
    return True


def check_processor(folder: Path, expected: Mapping[str, Any]) -> None:
    """Refuse a `processor_config.json` that contradicts `config.json`."""
    described = read_json(folder / "processor_config.json")
    for name, value in expected.items():
        if described.get(name) not in (None, value):
            raise CheckpointError(
                f"{folder}: {name} is {described[name]!r} in processor_config.json, but {value!r} in config.json. "
                "Take both files from the same model"
            )
