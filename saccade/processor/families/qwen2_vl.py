"""Qwen2-VL: images and frame pairs of any size as grids of patches; a token is a square of merged patches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from saccade.processor.families.settings import read_settings, required_id
from saccade.processor.image import MediaLimits, Pixels
from saccade.processor.parts import FeatureSpan, Part, VisualKind
from saccade.processor.patches import Grid, ImageSettings, Resize, video_patches
from saccade.processor.positions import VisionSpan

MODEL_TYPE = "qwen2_vl"

_MAX_TIME_STEP = 2.0**20
"""Maximum positions between two frame pairs of a video."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """See `VisionRules`."""

    tower_patch_size: ClassVar[int] = 14
    """Side of a patch, unless `config.json` has it."""

    images: ImageSettings
    """Settings of images."""
    videos: ImageSettings
    """Settings of videos."""
    image_id: int
    """Placeholder token of an image."""
    video_id: int
    """Placeholder token of a video."""

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """Read the rules of a checkpoint folder."""
        return cls(**cls.fields(folder, config))

    @classmethod
    def fields(cls, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the rules, from the files of a checkpoint folder."""
        images, videos = read_settings(folder, config, ImageSettings(), cls.tower_patch_size)
        return {
            "images": images,
            "videos": videos,
            "image_id": required_id(config, "image_token_id", folder),
            "video_id": required_id(config, "video_token_id", folder),
        }

    def settings(self, kind: VisualKind) -> ImageSettings:
        """Settings of images or of videos."""
        return self.images if kind == "image" else self.videos

    # -------------------------------------------------------------- patches

    def counted_images(self, num_images: int) -> int:
        """See `VisionRules`. Other images do not matter."""
        return 1

    def image_grid(self, height: int, width: int, num_images: int = 1) -> Grid:
        """See `VisionRules`."""
        return self.images.grid(height, width)

    def num_patches(self, grid: Grid) -> int:
        """See `VisionRules`."""
        return math.prod(grid)

    def can_patchify_on_device(self, height: int, width: int) -> bool:
        """See `VisionRules`. An image with more pixels than its patches would have is resized on the host."""
        return height * width <= self.images.temporal_patch_size * math.prod(self.images.resized(height, width))

    def patchify(
        self,
        kind: VisualKind,
        frames: Sequence[Pixels],
        resize: Resize,
        into: Pixels | None = None,
        num_images: int = 1,
    ) -> tuple[Pixels, Grid]:
        """See `VisionRules`."""
        return video_patches(frames, self.settings(kind), resize, into)

    def max_patches(self, kind: VisualKind, limits: MediaLimits) -> int:
        """See `VisionRules`."""
        frames = 1 if kind == "image" else math.ceil(limits.max_frames / self.videos.temporal_patch_size)
        return frames * self._max_frame_patches(kind, limits)

    def _max_frame_patches(self, kind: VisualKind, limits: MediaLimits) -> int:
        """An upper bound for `ImageSettings.resized`: the pixel limit, and a cell on each side of the longest strip."""
        settings, max_aspect_ratio = self.settings(kind), min(limits.max_aspect_ratio, limits.max_side)
        cells = settings.max_pixels / settings.cell**2
        return math.ceil(cells + 2 * math.sqrt(cells * max_aspect_ratio) + 2) * settings.merge_size**2

    # -------------------------------------------------------------- tokens

    def time_step(self, kind: VisualKind, fps: float) -> float:
        """Positions between two frame pairs."""
        return 1.0

    def num_texts(self, kind: VisualKind, grid: Grid) -> int:
        """See `VisionRules`."""
        return 0

    def texts(self, kind: VisualKind, num_frames: int, fps: float) -> list[str]:
        """See `VisionRules`."""
        return []

    def parts(self, kind: VisualKind, grid: Grid, fps: float, texts: Sequence[Sequence[int]]) -> tuple[Part, ...]:
        """See `VisionRules`."""
        return (self.span(kind, grid, self.time_step(kind, fps)),)

    def span(self, kind: VisualKind, grid: Grid, time_step: float) -> FeatureSpan:
        """One span with all of a grid's tokens."""
        (frames, rows, columns), merge = grid, self.settings(kind).merge_size
        return FeatureSpan(grid, math.prod(grid), VisionSpan(frames, rows // merge, columns // merge, time_step))

    def is_possible(
        self, kind: VisualKind, grid: Grid, fps: float, num_frames: range, limits: MediaLimits, num_images: int = 1
    ) -> bool:
        """See `VisionRules`."""
        settings, (frames, rows, columns) = self.settings(kind), grid
        depth, merge = settings.temporal_patch_size, settings.merge_size
        return (
            math.ceil(num_frames[0] / depth) <= frames <= math.ceil(num_frames[-1] / depth)
            and 0 < rows * columns <= self._max_frame_patches(kind, limits)
            and rows % merge == columns % merge == 0
            and 0 < self.time_step(kind, fps) <= _MAX_TIME_STEP
        )
