"""The vision tower over grids of patches (patch embedding, vision blocks), its layouts, and the patch merger that projects its output.

Legend: P patches of all images, packed, D hidden size, H heads, K head dim.

A family says which norm, MLP and embeddings the blocks have (`families/`). Every block attends over whole images, or most within windows of
8 x 8 patches; then patches are permuted to window order before the first block, so that windows are contiguous segments, and features back to
reading order after the merger. The permutation depends on the image grids alone: `tower_layout` computes it on the host. `TowerInputs` is
the layout on the device; with it the tower needs no synchronisation, so that a CUDA graph can capture it.

All that depends on the meaning of a grid is asked of the tower (`Tower`). The tower here is for grids of frame pairs x rows x columns; one for
images in tiles is in `tile_tower.py`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from saccade.device import to_device
from saccade.kernels.attention import rope_attention
from saccade.kernels.resize import resize
from saccade.kernels.rope import CosSin, vision_cos_sin
from saccade.model.config import VisionConfig
from saccade.model.layers import LayerNorm, RMSNorm, make_embedding
from saccade.model.linear import Linear, PatchLinear
from saccade.model.normed_sum import Input, add_update
from saccade.processor.image import Grid
from saccade.processor.pillow_resize import rows_first

Integers = NDArray[np.int64]
Numbers = TypeVar("Numbers", NDArray[np.int32], Tensor)

NORM_EPS = 1e-6
"""Epsilon of all norms of the tower."""
_PADDING_TOKENS = 8
"""Side of a padding image in tokens, without windows."""


@dataclass(frozen=True)
class Segments:
    """Segments of packed patches that attend to each other."""

    cu_seqlens: Tensor
    """[segments + 1] int32."""
    max_seqlen: int
    """Bound on the patches of a segment."""


@dataclass(frozen=True)
class TowerInputs:
    """Inputs of the tower besides pixels, on the device, in int32."""

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


def split_aligned(buffer: Numbers, lengths: Sequence[int]) -> list[Numbers]:
    """Consecutive parts of a buffer, each of which starts at an aligned offset."""
    parts, start = [], 0
    for length in lengths:
        parts.append(buffer[start : start + length])
        start += aligned(length)
    return parts


class LayoutSizes(NamedTuple):
    """Sizes of a layout in a flat int32 buffer. A layout may be padded to larger sizes (`TowerLayout.write`)."""

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

    @property
    def total(self) -> int:
        """Length of the buffer."""
        return sum(map(aligned, self.lengths))

    def split(self, buffer: Numbers) -> list[Numbers]:
        """The parts of a buffer."""
        return split_aligned(buffer, self.lengths)

    def inputs(self, buffer: Tensor) -> TowerInputs:
        """Views of a buffer that a layout was written to."""
        token_order, reading_order, positions, images, windows, *grid_sizes = self.split(buffer)
        return TowerInputs(
            token_order=token_order,
            reading_order=reading_order,
            positions=positions.view(2, -1),
            images=Segments(images, self.max_image),
            windows=Segments(windows, self.max_window),
            grid_sizes=grid_sizes[0].view(2, -1) if grid_sizes else None,
        )


def aligned(length: int) -> int:
    """Align parts to 16 bytes: Triton specializes kernels on pointer alignment."""
    return -(-length // 4) * 4


@dataclass(frozen=True)
class TowerLayout:
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
    def sizes(self) -> LayoutSizes:
        """The sizes without padding."""
        return LayoutSizes(
            num_tokens=len(self.token_order),
            num_patches=self.positions.shape[1],
            num_images=len(self.image_lengths),
            num_windows=len(self.window_lengths),
            max_image=int(self.image_lengths.max()),
            max_window=int(self.window_lengths.max(initial=0)),
            has_grid_sizes=self.grid_sizes is not None,
        )

    def write(self, buffer: NDArray[np.int32], sizes: LayoutSizes) -> None:
        """Write the layout to a buffer, padded with empty images and windows to `sizes`; tokens and patches must agree."""
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

    def to(self, device: torch.device) -> TowerInputs:
        """Copy the layout to the device, asynchronously."""
        sizes = self.sizes
        buffer = np.zeros(sizes.total, np.int32)
        self.write(buffer, sizes)
        return sizes.inputs(to_device(buffer, device))


def tower_layout(grids: Sequence[Grid], config: VisionConfig) -> TowerLayout:
    """The layout of packed images."""
    layouts = [_grid_layout(grid, config.merge_size, config.window_tokens) for grid in grids]
    starts = np.cumsum([0, *(len(layout.token_order) for layout in layouts)])
    return TowerLayout(
        token_order=np.concatenate(
            [layout.token_order + start for layout, start in zip(layouts, starts, strict=False)]
        ),
        reading_order=np.concatenate(
            [layout.reading_order + start for layout, start in zip(layouts, starts, strict=False)]
        ),
        positions=np.concatenate([layout.positions for layout in layouts], axis=1),
        window_lengths=np.concatenate([layout.window_lengths for layout in layouts]),
        image_lengths=np.concatenate([layout.image_lengths for layout in layouts]),
        grid_sizes=None if config.num_position_embeddings is None else _grid_sizes(grids),
    )


def _grid_sizes(grids: Sequence[Grid]) -> Integers:
    lengths = [frames * rows * columns for frames, rows, columns in grids]
    return np.repeat(np.array([grid[1:] for grid in grids]).T, lengths, axis=1)


@functools.lru_cache(maxsize=4096)
def _grid_layout(grid: Grid, merge: int, window: int | None) -> TowerLayout:
    """The layout of one image or video, cached: computing one of 24 x 24 tokens takes 0.1 ms."""
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
    return TowerLayout(
        token_order=token_order,
        reading_order=np.argsort(token_order),
        positions=np.stack([patch_rows.reshape(-1), patch_columns.reshape(-1)]),
        window_lengths=window_lengths,
        image_lengths=np.full(frames, rows * columns * merge**2),
    )


# ------------------------------------------------------------------ layouts of a fixed size


def budget_sizes(budget: int, config: VisionConfig) -> LayoutSizes:
    """Capacity of a layout for up to `budget` patches: four times the number of full windows, one image per 64 patches, and a few more.

    An empty window or image costs next to nothing: a program of the attention kernel that exits at once.
    """
    max_window = 0 if config.window_tokens is None else config.window_tokens**2 * config.patches_per_token
    return LayoutSizes(
        num_tokens=budget // config.patches_per_token,
        num_patches=budget,
        num_images=budget // 64 + 8,
        num_windows=4 * -(-budget // max_window) + 32 if max_window else 0,
        max_image=budget,
        max_window=max_window,
        has_grid_sizes=config.num_position_embeddings is not None,
    )


def padded_layout(grids: Sequence[Grid], budget: int, config: VisionConfig) -> TowerLayout | None:
    """The layout of the images followed by padding up to the budget. None: too many small images."""
    return _padded_layout(tuple(grids), budget, config)


@functools.lru_cache(maxsize=64)
def _padded_layout(grids: tuple[Grid, ...], budget: int, config: VisionConfig) -> TowerLayout | None:
    """Cached: sizes of images recur, and one of 41 x 30 tokens takes 0.2 ms before the encoder can be launched."""
    missing = budget - sum(frames * rows * columns for frames, rows, columns in grids)
    layout = tower_layout([*grids, *_padding(missing // config.patches_per_token, config)], config)
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


# ------------------------------------------------------------------ modules


class PatchEmbedding(nn.Module):
    """Linear projection of each patch; the weight has the shape of a convolution, as on disk."""

    def __init__(self, config: VisionConfig, *, bias: bool) -> None:
        super().__init__()
        frames = (
            () if config.tile_size is not None else (config.temporal_patch_size,)
        )  # a plain image has no such dim on disk
        patch = (config.in_channels, *frames, config.patch_size, config.patch_size)
        self.proj = PatchLinear(patch, config.hidden_size, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, channels * frames * side * side] normalised pixels to [P, D]."""
        features_PD: Tensor = self.proj(pixels)
        return features_PD


class VisionAttention(nn.Module):
    """Bidirectional attention within segments of patches."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_PD: Input, cos_sin: CosSin, segments: Segments) -> Tensor:
        """[P, D] to [P, D]."""
        q_PHK, k_PHK, v_PHK = self.qkv(x_PD).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        out_PHK = rope_attention(
            q_PHK, k_PHK, v_PHK, cos_sin, segments.cu_seqlens, max_seqlen=segments.max_seqlen, causal=False
        )
        out: Tensor = self.proj(out_PHK.flatten(1))
        return out


class VisionBlock(nn.Module):
    """Pre-norm transformer block: attention, then the MLP, each with a residual connection."""

    def __init__(self, config: VisionConfig, norm: type[RMSNorm | LayerNorm], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm(config.hidden_size, NORM_EPS)
        self.attn = VisionAttention(config)
        self.norm2 = norm(config.hidden_size, NORM_EPS)
        self.mlp = mlp
        self.normed_inputs = {"norm1": ("attn.qkv",), "norm2": tuple(f"mlp.{name}" for name in mlp.input_layers)}  # type: ignore[union-attr]
        """Norms, and the projections that read each; nothing else does."""

    def forward(
        self,
        x_PD: Tensor,
        update_PD: Tensor | None,
        cos_sin: CosSin,
        segments: Segments,
        kept_2P1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream x + update to itself, see `add_update`. `kept_2P1`: see `drop_paths`."""
        normed = self.norm1.add_norm(x_PD, update_PD)
        attn_out_PD = self.attn(normed.input, cos_sin, segments)
        if kept_2P1 is not None:
            attn_out_PD = attn_out_PD * kept_2P1[0]
        normed = self.norm2.add_norm(attn_out_PD, normed.total)
        mlp_out_PD = self.mlp(normed.input)
        if kept_2P1 is not None:
            mlp_out_PD = mlp_out_PD * kept_2P1[1]
        return add_update(normed.total, mlp_out_PD)


def drop_paths(rate: float, num_layers: int, segments: Segments, x_PD: Tensor) -> Sequence[Tensor | None]:
    """Draw the images that skip each block in training (stochastic depth).

    Of each block [2, P, 1]: factors of its attention and its MLP output, 0 where an image skips it, else 1 / (1 - probability), so that the mean
    stays; or None if nothing is skipped. The probability grows linearly from 0 in the first block to `rate` in the last. Drawn here and not in
    the blocks, so that activation checkpointing repeats them; with the device's generator, which is saved with the training state.
    """
    if rate == 0.0:
        return [None] * num_layers
    cu_seqlens = segments.cu_seqlens
    lengths_I = cu_seqlens.diff()
    image_P = torch.arange(len(lengths_I), device=x_PD.device).repeat_interleave(lengths_I, output_size=len(x_PD))
    share_L11 = 1.0 - torch.linspace(0.0, rate, num_layers, device=x_PD.device)[:, None, None]
    kept_L2I = (torch.rand(num_layers, 2, len(lengths_I), device=x_PD.device) < share_L11) / share_L11
    return kept_L2I[:, :, image_P, None].to(x_PD.dtype).unbind(0)


class LayoutOnHost(Protocol):
    """The layout of packed images."""

    @property
    def sizes(self) -> "BufferSizes":
        """The sizes without padding."""
        ...

    def write(self, buffer: NDArray[np.int32], sizes: Any) -> None:
        """Write the layout to a buffer of these sizes."""
        ...

    def to(self, device: torch.device) -> Any:
        """Copy the layout to the device, asynchronously: the tower's inputs besides pixels."""
        ...


class BufferSizes(Protocol):
    """Sizes of a layout in a flat int32 buffer."""

    @property
    def num_tokens(self) -> int:
        """Image tokens."""
        ...

    @property
    def total(self) -> int:
        """Length of the buffer."""
        ...

    def inputs(self, buffer: Tensor) -> Any:
        """The tower's inputs, as views of a buffer that a layout was written to."""
        ...


class TowerPass:
    """A forward pass of a tower between two blocks, so that a pass can run in parts."""

    def __init__(self, x: Tensor, block_inputs: Sequence[tuple[Any, ...]]) -> None:
        """`x`: input of the first block; `block_inputs`: what each block reads besides the residual stream."""
        self.x = x
        self.update: Tensor | None = None  # the residual stream is `x` plus `update`, see `add_update`
        self.block_inputs = block_inputs
        self.num_blocks_run = 0
        self.outputs: dict[int, Tensor] = {}  # by the number of blocks run


class Tower(nn.Module):
    """A vision tower: packed pixels and a layout to the outputs of its blocks. It alone knows what a grid means."""

    config: VisionConfig
    blocks: nn.ModuleList
    drop_path = 0.0
    """Stochastic depth in training: probability that an image skips the last block; see `drop_paths`."""

    @property
    def output_blocks(self) -> tuple[int, ...]:
        """Numbers of blocks after which the residual stream is an output, in the order of the outputs; 0 is before the first."""
        raise NotImplementedError

    def forward(self, pixels: Tensor, inputs: Any) -> list[Tensor]:
        """[P, patch_dim] normalised pixels to the outputs that the projector reads, [P, D] each."""
        tower_pass = self.start(pixels, inputs)
        self.run_blocks(tower_pass, len(tower_pass.block_inputs))
        return self.outputs(tower_pass)

    def start(self, pixels: Tensor, inputs: Any) -> TowerPass:
        """Start a forward pass: everything before the first block."""
        raise NotImplementedError

    def run_blocks(self, tower_pass: TowerPass, num_blocks: int) -> None:
        """Run the next blocks of a pass."""
        first, outputs = tower_pass.num_blocks_run, tower_pass.outputs
        if first == 0 and 0 in self.output_blocks:
            outputs[0] = tower_pass.x
        for index in range(first, first + num_blocks):
            x, update = self.blocks[index](tower_pass.x, tower_pass.update, *tower_pass.block_inputs[index])
            if index + 1 in self.output_blocks:
                x, update = x if update is None else x + update, None
                outputs[index + 1] = x
            tower_pass.x, tower_pass.update = x, update
        tower_pass.num_blocks_run = first + num_blocks

    def outputs(self, tower_pass: TowerPass) -> list[Tensor]:
        """The outputs of a pass whose blocks have all run."""
        return [tower_pass.outputs[number] for number in self.output_blocks]

    def arrange(self, features: Tensor, inputs: Any) -> Tensor:
        """The projector's output to the features of all image tokens, in their order."""
        raise NotImplementedError

    def layout(self, grids: Sequence[Grid]) -> LayoutOnHost:
        """The layout of packed images."""
        raise NotImplementedError

    def padded_layout(self, grids: Sequence[Grid], budget: int) -> LayoutOnHost | None:
        """The layout of the images followed by padding up to a budget of patches. None: it does not fit `budget_sizes`."""
        raise NotImplementedError

    def budget_sizes(self, budget: int) -> BufferSizes:
        """Sizes of a padded layout."""
        raise NotImplementedError

    def square_grid(self, max_patches: int) -> tuple[Grid, int]:
        """The largest square image within so many patches, or the smallest there is, of at least two tokens; and its patches."""
        raise NotImplementedError

    def num_patches(self, grids: Sequence[Sequence[int]]) -> int:
        """Patches of all images."""
        raise NotImplementedError

    def attention_pairs(self, grids: Sequence[Sequence[int]]) -> int:
        """Pairs of patches that attend to each other, over all blocks that are run."""
        raise NotImplementedError

    def patchify(self, pixels_HWC: Tensor, grid: Grid) -> Tensor:
        """[patches, frame_dim]: a uint8 image resized to a grid, as `processor.image.video_patches` does. For families that allow it
        (`VisionRules.can_patchify_on_device`)."""
        raise NotImplementedError

    def warm_up(self, device: torch.device) -> None:
        """Compile the kernels of `patchify`, if it can."""

    def unused_modules(self) -> list[nn.Module]:
        """Modules that are in the checkpoint but not run; they are not trained."""
        return []


class VisionTower(Tower):
    """Packed pixels of images of any sizes to patch features in window order."""

    def __init__(
        self, config: VisionConfig, block: Callable[[VisionConfig], VisionBlock], *, patch_bias: bool = False
    ) -> None:
        """`block` makes a block of the family's kind."""
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config, bias=patch_bias)
        self.pos_embed: nn.Embedding | None = None
        if config.num_position_embeddings is not None:
            self.pos_embed = make_embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(block(config) for _ in range(config.num_layers))

    @property
    def output_blocks(self) -> tuple[int, ...]:
        """See `Tower`: the last block, then the feature layers. The features are in window order."""
        return self.config.num_layers, *(layer + 1 for layer in self.config.feature_layers)

    def start(self, pixels: Tensor, inputs: TowerInputs) -> TowerPass:
        """See `Tower`: embed patches and permute them to window order."""
        config = self.config
        x_PD = self.patch_embed(pixels)
        if config.has_windows:
            x_PD = _reorder(x_PD, inputs.token_order, config.patches_per_token)
        if self.pos_embed is not None:
            x_PD = x_PD + self._position_embeddings(inputs).to(x_PD.dtype)
        cos_sin = vision_cos_sin(inputs.positions, config.head_dim)
        full, windows = inputs.images, inputs.windows
        is_full = [
            layer in config.full_attention_layers or not config.has_windows for layer in range(config.num_layers)
        ]
        paths = drop_paths(self.drop_path if self.training else 0.0, config.num_layers, inputs.images, x_PD)
        return TowerPass(
            x_PD, [(cos_sin, full if one else windows, kept) for one, kept in zip(is_full, paths, strict=True)]
        )

    def _position_embeddings(self, inputs: TowerInputs) -> Tensor:
        """[P, D]: the square of learned embeddings, interpolated bilinearly to each image with the corners aligned."""
        assert self.pos_embed is not None, "checked by the caller"
        assert inputs.grid_sizes is not None, "a layout for position embeddings has them"
        side = math.isqrt(self.pos_embed.num_embeddings)
        source_2P = inputs.positions * (side - 1) / (inputs.grid_sizes - 1).clamp(min=1)
        low_2P = source_2P.floor()
        near_2P, far_2P = low_2P.long(), (low_2P.long() + 1).clamp(max=side - 1)
        share_2P = source_2P - low_2P
        index = torch.stack(
            [row * side + column for row in (near_2P[0], far_2P[0]) for column in (near_2P[1], far_2P[1])]
        )
        weight = torch.stack(
            [row * column for row in (1 - share_2P[0], share_2P[0]) for column in (1 - share_2P[1], share_2P[1])]
        )
        embeddings_PD: Tensor = (self.pos_embed(index) * weight[..., None]).sum(0)
        return embeddings_PD

    def arrange(self, features: Tensor, inputs: TowerInputs) -> Tensor:
        """See `Tower`: window order to reading order."""
        return features[inputs.reading_order.long()] if self.config.has_windows else features

    # -------------------------------------------------------------- what a grid means

    def patchify(self, pixels_HWC: Tensor, grid: Grid) -> Tensor:
        """See `Tower`: the patches of a token are adjacent, and a patch is [channel, row, column]."""
        (_, rows, columns), side, merge = grid, self.config.patch_size, self.config.merge_size
        (old_height, old_width, channels), height, width = pixels_HWC.shape, rows * side, columns * side
        is_rows_first = rows_first(old_height, old_width, height, width)
        resized_HWC = resize(pixels_HWC, height, width, rows_first=is_rows_first)
        cells = resized_HWC.view(rows // merge, merge, side, columns // merge, merge, side, channels)
        return cells.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, channels * side * side)

    def warm_up(self, device: torch.device) -> None:
        """See `Tower`."""
        grid, _ = self.square_grid(0)
        self.patchify(torch.zeros(7, 9, self.config.in_channels, dtype=torch.uint8, device=device), grid)

    def layout(self, grids: Sequence[Grid]) -> TowerLayout:
        """The layout of packed images."""
        return tower_layout(grids, self.config)

    def padded_layout(self, grids: Sequence[Grid], budget: int) -> TowerLayout | None:
        """The layout of the images followed by padding up to the budget. None: too many small images."""
        return padded_layout(grids, budget, self.config)

    def budget_sizes(self, budget: int) -> LayoutSizes:
        """Sizes of a padded layout."""
        return budget_sizes(budget, self.config)

    def square_grid(self, max_patches: int) -> tuple[Grid, int]:
        """The largest square image of an even number of tokens per side within so many patches, but at least two tokens; its patches."""
        merge = self.config.merge_size
        side = merge * 2 * (math.isqrt(max_patches) // (2 * merge))
        grid = (1, side, side) if side else (1, merge, 2 * merge)
        return grid, math.prod(grid)

    def num_patches(self, grids: Sequence[Sequence[int]]) -> int:
        """Patches of all images."""
        return sum(map(math.prod, grids))

    def attention_pairs(self, grids: Sequence[Sequence[int]]) -> int:
        """Pairs of patches that attend to each other, over all blocks."""
        frames = [rows * columns for count, rows, columns in grids for _ in range(count)]
        if not self.config.has_windows:
            return sum(n * n for n in frames) * self.config.num_layers
        num_full = len(self.config.full_attention_layers)
        window = (self.config.window_size // self.config.patch_size) ** 2
        return sum(n * n for n in frames) * num_full + sum(frames) * window * (self.config.num_layers - num_full)


def _reorder(x_PD: Tensor, token_order: Tensor, patches_per_token: int) -> Tensor:
    """Permute tokens, which are groups of `patches_per_token` rows."""
    return x_PD.view(-1, patches_per_token, x_PD.shape[-1])[token_order.long()].flatten(0, 1)


class PatchMerger(nn.Module):
    """The projector: [patches, vision width] to [tokens, decoder width]; the patches of a token are adjacent."""

    def __init__(self, config: VisionConfig, out_size: int, norm: type[RMSNorm | LayerNorm]) -> None:
        super().__init__()
        self.merged_size = config.hidden_size * config.patches_per_token
        self.ln_q = norm(config.hidden_size, NORM_EPS)
        self.mlp = nn.Sequential(
            Linear(self.merged_size, self.merged_size), nn.GELU(), Linear(self.merged_size, out_size)
        )

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Normalise each patch of the tower's last output, concatenate the patches of a token, project."""
        [x_PD] = outputs
        out: Tensor = self.mlp(self.ln_q(x_PD).view(-1, self.merged_size))
        return out
