"""Decoded images and video frames to patches: resize to a multiple of the patch grid, cut into patches.

The default resize is Pillow's, bit-identical to Hugging Face's processor; a caller may pass another one
(`torch_resize.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from saccade.errors import ConfigError, ImageError
from saccade.processor.pillow_resize import Pixels, pillow_resize

Resize = Callable[[Pixels, int, int], Pixels]
"""(pixels, height, width) -> pixels of that size: bicubic, antialiased when shrinking."""

Grid = tuple[int, int, int]
"""The arrangement of the patches of an image or video; only the rules of its family read it (`families`)."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Resizing, patching and normalisation of images: the fields of `preprocessor_config.json` that are honoured."""

    patch_size: int = 14
    """Side of a patch in pixels."""
    merge_size: int = 2
    """Patches merged into one token, per side."""
    temporal_patch_size: int = 2
    """Frames in one patch; an image is repeated."""
    min_pixels: int = 56 * 56
    """Smaller images are enlarged to about this many pixels."""
    max_pixels: int = 28 * 28 * 1280
    """Larger images are shrunk to at most this many pixels."""
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    """Per channel, in the 0..1 range."""
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    """Per channel, in the 0..1 range."""

    def __post_init__(self) -> None:
        for name in ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"image settings: {name} is {value!r}, not a whole number of at least 1")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
                raise ConfigError(f"image settings: {name} is {values!r}, not three numbers, one per colour")
        if min(self.std) <= 0:
            raise ConfigError(f"image settings: std is {self.std!r}; every colour's must be above 0")
        if self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"image settings: min_pixels {self.min_pixels} must be over 0 and at most max_pixels {self.max_pixels}"
            )
        if self.max_pixels < self.cell**2:
            raise ConfigError(
                f"image settings: max_pixels {self.max_pixels} is less than one token ({self.cell}x{self.cell} pixels)"
            )

    @property
    def cell(self) -> int:
        """Side of one token in pixels; resized images are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def frame_dim(self) -> int:
        """Pixel values of one frame of a patch."""
        return len(self.mean) * self.patch_size**2

    @property
    def patch_dim(self) -> int:
        """Pixel values of one patch."""
        return self.temporal_patch_size * self.frame_dim

    def grid(self, height: int, width: int, num_frames: int = 1) -> tuple[int, int, int]:
        """Frame pairs, rows and columns of patches of an image or video of this size."""
        resized_height, resized_width = self.resized(height, width)
        frames = math.ceil(num_frames / self.temporal_patch_size)
        return frames, resized_height // self.patch_size, resized_width // self.patch_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing: multiples of `cell` within the pixel limits, close to the aspect ratio."""
        rows, columns = round(height / self.cell), round(width / self.cell)
        if rows * columns * self.cell**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / self.cell))
            columns = max(1, math.floor(width / shrink / self.cell))
        elif rows * columns * self.cell**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / self.cell)
            columns = math.ceil(width * grow / self.cell)
        return rows * self.cell, columns * self.cell


def image_patches(
    pixels: Pixels, settings: ImageSettings, resize: Resize = pillow_resize, into: Pixels | None = None
) -> tuple[Pixels, Grid]:
    """[patches, patch_dim] uint8 and the grid of one image."""
    return video_patches([pixels], settings, resize, into)


def video_patches(
    frames: Sequence[Pixels],
    settings: ImageSettings,
    resize: Resize = pillow_resize,
    into: Pixels | None = None,
    size: tuple[int, int] | None = None,
) -> tuple[Pixels, Grid]:
    """[patches, patch_dim] uint8 and the grid of frames of one size; the last frame pair may repeat the last frame.

    The patches are written to the first rows of `into`, or to new memory. If the rows of `into` have `frame_dim`
    values, each patch holds the one frame of an image once. `size`: height and width to resize to (None:
    `settings.resized`).
    """
    height, width = frames[0].shape[:2]
    size = size or settings.resized(height, width)
    num_pairs = math.ceil(len(frames) / settings.temporal_patch_size)
    grid = num_pairs, size[0] // settings.patch_size, size[1] // settings.patch_size
    num_patches = math.prod(grid)
    if into is None:
        into = np.empty((num_patches, settings.patch_dim), dtype=np.uint8)
    if len(into) < num_patches:
        raise ImageError(f"{width}x{height} pixels are {num_patches} patches, but there is memory for {len(into)}")
    resized = (frame if frame.shape[:2] == size else resize(frame, *size) for frame in frames)
    _patchify(resized, into[:num_patches], grid, settings)
    return into[:num_patches], grid


def _patchify(frames: Iterable[Pixels], into: Pixels, grid: tuple[int, int, int], settings: ImageSettings) -> None:
    """Frames to patches: the patches of one token are adjacent; a patch is [channel, frame, row, column]."""
    side, merge, depth = settings.patch_size, settings.merge_size, into.shape[1] // settings.frame_dim
    assert into.flags.c_contiguous, "patches are written through a view"
    pairs, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    #                     time  row of tokens  column  row and column in token  channel  frame  pixel row and column
    patches = into.reshape(pairs, rows, columns, merge, merge, -1, depth, side, side)
    frame_views = [patches[number // depth, ..., number % depth, :, :] for number in range(pairs * depth)]
    number = 0
    for number, frame in enumerate(frames):
        frame_views[number][...] = frame.reshape(rows, merge, side, columns, merge, side, -1).transpose(
            0, 3, 1, 4, 6, 2, 5
        )
    for view in frame_views[number + 1 :]:
        view[...] = frame_views[number]
