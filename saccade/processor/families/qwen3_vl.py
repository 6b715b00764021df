"""Qwen3-VL: images are those of Qwen2-VL; each frame pair of a video is a separate image after its time in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from saccade.processor.families import qwen2_vl
from saccade.processor.families.settings import preprocessor_config, read_settings, required_id
from saccade.processor.image import MediaLimits, Pixels
from saccade.processor.parts import Part, TextTokens, VisualKind
from saccade.processor.patches import Grid, ImageSettings, Resize, video_patches

MODEL_TYPE = "qwen3_vl"

_VIDEO_PIXELS = 128 * 32 * 32, 768 * 32 * 32
"""Default pixels of all frames of a video, at least and at most."""


@dataclass(frozen=True, kw_only=True)
class Rules(qwen2_vl.Rules):
    """See `VisionRules`."""

    tower_patch_size: ClassVar[int] = 16
    """Side of a patch, unless `config.json` has it."""

    vision_start_id: int
    """Control token before a frame pair."""
    vision_end_id: int
    """Control token after a frame pair."""
    max_frame_tokens: int | None
    """Maximum tokens of a frame, if the checkpoint limits them (`cap_pixels_per_frame`)."""

    @classmethod
    def fields(cls, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the rules, from the files of a checkpoint folder."""
        images, videos = read_settings(folder, config, ImageSettings(), cls.tower_patch_size)
        described = preprocessor_config(folder, "video_preprocessor_config.json", "video_processor")
        if not described:
            videos = replace(images, min_pixels=_VIDEO_PIXELS[0], max_pixels=_VIDEO_PIXELS[1])
        limit = described.get("max_video_tokens", 768) if described.get("cap_pixels_per_frame") else None
        markers = {
            f"{name}_id": required_id(config, f"{name}_token_id", folder) for name in ("vision_start", "vision_end")
        }
        return super().fields(folder, config) | markers | {"videos": videos, "max_frame_tokens": limit}

    # -------------------------------------------------------------- patches

    def patchify(
        self,
        kind: VisualKind,
        frames: Sequence[Pixels],
        resize: Resize,
        into: Pixels | None = None,
        num_images: int = 1,
    ) -> tuple[Pixels, Grid]:
        """See `VisionRules`."""
        if kind == "image":
            return super().patchify(kind, frames, resize, into, num_images)
        height, width = frames[0].shape[:2]
        size = resized_video(len(frames), height, width, self._limited(len(frames)))
        return video_patches(frames, self.videos, resize, into, size)

    def _limited(self, num_frames: int) -> ImageSettings:
        """The settings of a video with this number of frames."""
        if self.max_frame_tokens is None:
            return self.videos
        share = min(self.max_frame_tokens * self.videos.cell**2, self.videos.max_pixels // num_frames)
        limit = num_frames * max(share, int(self.videos.min_pixels * 1.05))
        return replace(self.videos, min_pixels=min(self.videos.min_pixels, limit), max_pixels=limit)

    def max_patches(self, kind: VisualKind, limits: MediaLimits) -> int:
        """See `VisionRules`. The share of a frame shrinks with their number, but not below one token."""
        if kind == "image":
            return super().max_patches(kind, limits)
        return math.ceil(limits.max_frames / self.videos.temporal_patch_size) * self._max_pair_patches(
            limits.max_frames, limits
        )

    def _max_pair_patches(self, num_frames: int, limits: MediaLimits) -> int:
        """Upper bound on the patches of each frame pair of a video."""
        counted = max(self.videos.temporal_patch_size, num_frames - 1)  # the count is rounded to even, up or down
        total = max(self.videos.max_pixels, self._limited(num_frames).max_pixels)
        share = replace(self.videos, min_pixels=1, max_pixels=max(self.videos.cell**2, total // counted))
        return replace(self, videos=share)._max_frame_patches("video", limits)

    # -------------------------------------------------------------- tokens

    def num_texts(self, kind: VisualKind, grid: Grid) -> int:
        """See `VisionRules`."""
        return 0 if kind == "image" else grid[0]

    def texts(self, kind: VisualKind, num_frames: int, fps: float) -> list[str]:
        """The time of each frame pair of a video: the mean of its two frames."""
        if kind == "image":
            return []
        depth = self.videos.temporal_patch_size
        pairs = [(first, min(first + depth, num_frames) - 1) for first in range(0, num_frames, depth)]
        return [f"<{(first / fps + last / fps) / 2:.1f} seconds>" for first, last in pairs]

    def parts(self, kind: VisualKind, grid: Grid, fps: float, texts: Sequence[Sequence[int]]) -> tuple[Part, ...]:
        """See `VisionRules`."""
        if kind == "image":
            return super().parts(kind, grid, fps, texts)
        pair = self.span(kind, (1, *grid[1:]), 1.0)
        around = [
            (TextTokens((*text, self.vision_start_id)), pair, TextTokens((self.vision_end_id,))) for text in texts
        ]
        return tuple(part for parts in around for part in parts)

    def is_possible(
        self, kind: VisualKind, grid: Grid, fps: float, num_frames: range, limits: MediaLimits, num_images: int = 1
    ) -> bool:
        """See `VisionRules`."""
        if kind == "image":
            return super().is_possible(kind, grid, fps, num_frames, limits, num_images)
        (frames, rows, columns), depth, merge = grid, self.videos.temporal_patch_size, self.videos.merge_size
        return (
            math.ceil(num_frames[0] / depth) <= frames <= math.ceil(num_frames[-1] / depth)
            and 0 < rows * columns <= self._max_pair_patches(frames * depth - depth + 1, limits)
            and rows % merge == columns % merge == 0
        )


def resized_video(num_frames: int, height: int, width: int, settings: ImageSettings) -> tuple[int, int]:
    """Height and width of every frame: multiples of a token's side, with the pixels of all frames within the limits."""
    cell, depth = settings.cell, settings.temporal_patch_size
    num_frames = max(num_frames, depth)
    if min(height, width) < cell:
        scale = max(cell / height, cell / width)
        height, width = int(height * scale), int(width * scale)
    rows, columns = round(height / cell), round(width / cell)
    num_pixels = round(num_frames / depth) * depth * rows * columns * cell**2
    if num_pixels > settings.max_pixels:
        shrink = math.sqrt(num_frames * height * width / settings.max_pixels)
        rows = max(1, math.floor(height / shrink / cell))
        columns = max(1, math.floor(width / shrink / cell))
    elif num_pixels < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (num_frames * height * width))
        rows, columns = math.ceil(height * grow / cell), math.ceil(width * grow / cell)
    return rows * cell, columns * cell
