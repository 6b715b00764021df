"""The layout of grids of patches: window order, and segments of patches that attend to each other.

Every block attends over whole images, or most within windows of 8 x 8 patches; then patches are permuted to window
order before the first block, so that windows are contiguous segments, and features back to reading order after the
merger. The permutation depends on the image grids alone, so the host computes it.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from saccade.model.config import VisionConfig
from saccade.model.vision.layout import Integers, Layout, LayoutSizes, Segments
from saccade.processor.patches import Grid

_PADDING_TOKENS = 8
"""Side of a padding image in tokens, without windows."""


@dataclass(frozen=True)
class PatchInputs:
    """Inputs of the tower apart from pixels, on the device, in int32."""

    token_order: Tensor
    """[tokens]: index in reading order of each token in window order."""
    reading_order: Tensor
    """[tokens]: index in window order of each token in reading order."""
    positions: Tensor
    """[2, patches]: row and column of each patch, in window order."""
    images: Segments
    """Images; each frame pair of a video is one."""
    windows: Segments
    """Windows."""
    grid_sizes: Tensor | None = None
    """[2, patches]: rows and columns of each patch's image, for position embeddings that are interpolated."""


@dataclass(frozen=True)
class PatchSizes(LayoutSizes):
    """Sizes of a layout; see `LayoutSizes`."""

    num_tokens: int
    num_patches: int
    num_images: int
    num_windows: int
    max_image: int
    """Bound on the patches of an image."""
    max_window: int
    """Bound on the patches of a window."""
    has_grid_sizes: bool = False
    """Whether the rows and columns of each patch's image are in it."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each part: two permutations, positions, two `cu_seqlens`, and grid sizes if there are any."""
        lengths = self.num_tokens, self.num_tokens, 2 * self.num_patches, self.num_images + 1, self.num_windows + 1
        return (*lengths, 2 * self.num_patches) if self.has_grid_sizes else lengths

    def inputs(self, buffer: Tensor) -> PatchInputs:
        """Views of a buffer that a layout was written to."""
        token_order, reading_order, positions, images, windows, *grid_sizes = self.split(buffer)
        return PatchInputs(
            token_order=token_order,
            reading_order=reading_order,
            positions=positions.view(2, -1),
            images=Segments(images, self.max_image),
            windows=Segments(windows, self.max_window),
            grid_sizes=grid_sizes[0].view(2, -1) if grid_sizes else None,
        )


@dataclass(frozen=True)
class PatchLayout(Layout):
    """Permutation and segments of packed images for window attention; a token is a group of merged patches."""

    token_order: Integers
    """[tokens]: index in reading order of each token in window order."""
    reading_order: Integers
    """[tokens]: index in window order of each token in reading order."""
    positions: Integers
    """[2, patches]: row and column of each patch, in window order."""
    window_lengths: Integers
    """Patches of each window."""
    image_lengths: Integers
    """Patches of each image (of each frame pair of a video)."""
    grid_sizes: Integers | None = None
    """[2, patches]: rows and columns of each patch's image."""

    @property
    def sizes(self) -> PatchSizes:
        """The sizes without padding."""
        return PatchSizes(
            num_tokens=len(self.token_order),
            num_patches=self.positions.shape[1],
            num_images=len(self.image_lengths),
            num_windows=len(self.window_lengths),
            max_image=int(self.image_lengths.max()),
            max_window=int(self.window_lengths.max(initial=0)),
            has_grid_sizes=self.grid_sizes is not None,
        )

    def write(self, buffer: NDArray[np.int32], sizes: PatchSizes) -> None:
        """Write the layout to a buffer, padded to `sizes` with empty images and windows.

        Tokens and patches must agree.
        """
        token_order, reading_order, positions, images, windows, *grid_sizes = sizes.split(buffer)
        token_order[:] = self.token_order
        reading_order[:] = self.reading_order
        positions[:] = self.positions.reshape(-1)
        for ends, lengths in ((images, self.image_lengths), (windows, self.window_lengths)):
            ends[0] = 0
            ends[1 : len(lengths) + 1] = np.cumsum(lengths)
            ends[len(lengths) + 1 :] = ends[len(lengths)]
        for part in grid_sizes:
            assert self.grid_sizes is not None, "a layout with grid sizes has them"
            part[:] = self.grid_sizes.reshape(-1)


def patch_layout(grids: Sequence[Grid], config: VisionConfig) -> PatchLayout:
    """The layout of packed images."""
    layouts = [_grid_layout(grid, config.merge_size, config.window_tokens) for grid in grids]
    starts = np.cumsum([0, *(len(layout.token_order) for layout in layouts)])
    return PatchLayout(
        token_order=np.concatenate([one.token_order + start for one, start in zip(layouts, starts, strict=False)]),
        reading_order=np.concatenate([one.reading_order + start for one, start in zip(layouts, starts, strict=False)]),
        positions=np.concatenate([layout.positions for layout in layouts], axis=1),
        window_lengths=np.concatenate([layout.window_lengths for layout in layouts]),
        image_lengths=np.concatenate([layout.image_lengths for layout in layouts]),
        grid_sizes=None if config.num_position_embeddings is None else _grid_sizes(grids),
    )


def _grid_sizes(grids: Sequence[Grid]) -> Integers:
    lengths = [frames * rows * columns for frames, rows, columns in grids]
    return np.repeat(np.array([grid[1:] for grid in grids]).T, lengths, axis=1)


@functools.lru_cache(maxsize=4096)
def _grid_layout(grid: Grid, merge: int, window: int | None) -> PatchLayout:
    """The layout of one image or video, cached: it takes 0.1 ms for 24 x 24 tokens."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    frame, row, column = (axis.reshape(-1) for axis in np.indices((frames, rows, columns)))
    if window is None:
        window_lengths, token_order = np.zeros(0, np.int64), np.arange(frames * rows * columns)
    else:
        windows_across, windows_down = -(-columns // window), -(-rows // window)
        window_of_token = (frame * windows_down + row // window) * windows_across + column // window
        window_lengths, token_order = (
            np.bincount(window_of_token) * merge**2,
            np.argsort(window_of_token, kind="stable"),
        )
    inside_row, inside_column = (axis.reshape(-1) for axis in np.indices((merge, merge)))
    patch_rows = row[token_order, None] * merge + inside_row
    patch_columns = column[token_order, None] * merge + inside_column
    return PatchLayout(
        token_order=token_order,
        reading_order=np.argsort(token_order),
        positions=np.stack([patch_rows.reshape(-1), patch_columns.reshape(-1)]),
        window_lengths=window_lengths,
        image_lengths=np.full(frames, rows * columns * merge**2),
    )


def budget_sizes(budget: int, config: VisionConfig) -> PatchSizes:
    """Capacity of a layout for up to `budget` patches.

    It has room for four times the number of full windows and for one image per 64 patches, and a few more. An empty
    window or image costs next to nothing: a program of the attention kernel that exits at once.
    """
    max_window = 0 if config.window_tokens is None else config.window_tokens**2 * config.patches_per_token
    return PatchSizes(
        num_tokens=budget // config.patches_per_token,
        num_patches=budget,
        num_images=budget // 64 + 8,
        num_windows=4 * -(-budget // max_window) + 32 if max_window else 0,
        max_image=budget,
        max_window=max_window,
        has_grid_sizes=config.num_position_embeddings is not None,
    )


def padded_layout(grids: Sequence[Grid], budget: int, config: VisionConfig) -> PatchLayout | None:
    """The layout of the images followed by padding up to the budget. None: too many small images."""
    return _padded_layout(tuple(grids), budget, config)


@functools.lru_cache(maxsize=64)
def _padded_layout(grids: tuple[Grid, ...], budget: int, config: VisionConfig) -> PatchLayout | None:
    """`padded_layout`, cached: sizes of images recur, and a layout takes 0.2 ms before the encoder can be launched."""
    missing = budget - sum(frames * rows * columns for frames, rows, columns in grids)
    layout = patch_layout([*grids, *_padding(missing // config.patches_per_token, config)], config)
    sizes, capacity = layout.sizes, budget_sizes(budget, config)
    fits = sizes.num_images <= capacity.num_images and sizes.num_windows <= capacity.num_windows
    return layout if fits else None


def _padding(num_tokens: int, config: VisionConfig) -> list[Grid]:
    """Blank images of this many tokens in total: a strip of full windows, and a strip of single tokens."""
    merge, window = config.merge_size, config.window_tokens or _PADDING_TOKENS
    side = merge * window
    num_windows, num_rest = divmod(num_tokens, window**2)
    rest = [(1, merge, merge * num_rest)] if num_rest else []
    if config.window_tokens is None:  # attention is over whole images, so they are small
        return [(1, side, side)] * num_windows + rest
    return [(1, side, side * num_windows)] * bool(num_windows) + rest
