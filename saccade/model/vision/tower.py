"""The interface of a vision tower to engine, trainer and family (`Tower`), and the parts that all towers share.

A tower alone knows what an image grid means: its layout, its patches, the order of its features. With the layout on the
device it needs no synchronisation, so that a CUDA graph can capture it. A pass can run in parts, between two blocks
(`TowerPass`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade.model.config import VisionConfig
from saccade.model.layers import LayerNorm, RMSNorm
from saccade.model.linear import PatchLinear
from saccade.model.normed_sum import add_update
from saccade.model.vision.layout import Layout, LayoutSizes, Segments
from saccade.processor.patches import Grid


class TowerPass:
    """A forward pass of a tower between two blocks, so that a pass can run in parts."""

    def __init__(self, x: Tensor, block_inputs: Sequence[tuple[Any, ...]]) -> None:
        """`x`: input of the first block; `block_inputs`: what each block reads apart from the residual stream."""
        self.x = x
        self.update: Tensor | None = None  # the residual stream is `x` plus `update`, see `add_update`
        self.block_inputs = block_inputs
        self.num_blocks_run = 0
        self.outputs: dict[int, Tensor] = {}  # by the number of blocks run


class Tower(nn.Module):
    """A vision tower: packed pixels and a layout to the outputs of its blocks. Only a tower knows what a grid means."""

    config: VisionConfig
    blocks: nn.ModuleList
    drop_path = 0.0
    """Stochastic depth in training: probability that an image skips the last block; see `drop_paths`."""

    @property
    def output_blocks(self) -> tuple[int, ...]:
        """The blocks whose residual stream is an output, counted from 1, in the order of the outputs; 0: the input."""
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

    def layout(self, grids: Sequence[Grid]) -> Layout:
        """The layout of packed images."""
        raise NotImplementedError

    def padded_layout(self, grids: Sequence[Grid], budget: int) -> Layout | None:
        """The layout of the images, padded to a budget of patches. None: it does not fit `budget_sizes`."""
        raise NotImplementedError

    def budget_sizes(self, budget: int) -> LayoutSizes:
        """Sizes of a padded layout."""
        raise NotImplementedError

    def square_grid(self, max_patches: int) -> tuple[Grid, int]:
        """The largest square image within `max_patches`, or the smallest of at least two tokens; and its patches."""
        raise NotImplementedError

    def num_patches(self, grids: Sequence[Sequence[int]]) -> int:
        """Patches of all images."""
        raise NotImplementedError

    def image_lengths(self, grids: Sequence[Sequence[int]]) -> list[int]:
        """Rows that attend to one another in blocks without windows: of each frame pair or tile of these images."""
        raise NotImplementedError

    def attention_pairs(self, grids: Sequence[Sequence[int]]) -> int:
        """Pairs of patches that attend to each other, over all blocks that are run."""
        raise NotImplementedError

    def patchify(self, pixels_HWC: Tensor, grid: Grid) -> Tensor:
        """[patches, frame_dim]: a uint8 image resized to a grid, as `processor.patches.video_patches` does.

        Only some families allow it: `VisionRules.can_patchify_on_device`.
        """
        raise NotImplementedError

    def warm_up(self, device: torch.device) -> None:
        """Compile the kernels of `patchify`, if it can."""

    def unused_modules(self) -> list[nn.Module]:
        """Modules that are in the checkpoint but not run; they are not trained."""
        return []


class PatchEmbedding(nn.Module):
    """Linear projection of each patch; the weight has the shape of a convolution, as on disk."""

    def __init__(self, config: VisionConfig, *, bias: bool) -> None:
        super().__init__()
        # A plain image has no dim of frames on disk.
        frames = () if config.tile_size is not None else (config.temporal_patch_size,)
        patch = (config.in_channels, *frames, config.patch_size, config.patch_size)
        self.proj = PatchLinear(patch, config.hidden_size, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, channels * frames * side * side] normalised pixels to [P, D]."""
        features_PD: Tensor = self.proj(pixels)
        return features_PD


def run_block(
    x_PD: Tensor, update_PD: Tensor | None, norm1: RMSNorm | LayerNorm, attention: nn.Module, inputs: tuple[Any, ...],
    norm2: RMSNorm | LayerNorm, mlp: nn.Module, kept_2P1: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Map the residual stream x + update (see `add_update`) by a pre-norm block: attention, then the MLP.

    `inputs`: what attention reads apart from the rows; `kept_2P1`: see `drop_paths`.
    """
    normed = norm1.add_norm(x_PD, update_PD)
    attn_out_PD = attention(normed.input, *inputs)
    if kept_2P1 is not None:
        attn_out_PD = attn_out_PD * kept_2P1[0]
    normed = norm2.add_norm(attn_out_PD, normed.total)
    mlp_out_PD = mlp(normed.input)
    if kept_2P1 is not None:
        mlp_out_PD = mlp_out_PD * kept_2P1[1]
    return add_update(normed.total, mlp_out_PD)


def drop_paths(rate: float, num_layers: int, segments: Segments, x_PD: Tensor) -> Sequence[Tensor | None]:
    """Draw the images that skip each block in training (stochastic depth).

    A block gets [2, P, 1], factors of its attention and its MLP output: 0 if the image skips it, else 1 / (1 -
    probability), so that the mean stays; or None if nothing is skipped. The probability grows linearly from 0 in the
    first block to `rate` in the last. The draw is here and not in the blocks, so that activation checkpointing repeats
    it; the device's generator draws, and is saved with the training state.
    """
    if rate == 0.0:
        return [None] * num_layers
    cu_seqlens = segments.cu_seqlens
    lengths_I = cu_seqlens.diff()
    image_P = torch.arange(len(lengths_I), device=x_PD.device).repeat_interleave(lengths_I, output_size=len(x_PD))
    share_L11 = 1.0 - torch.linspace(0.0, rate, num_layers, device=x_PD.device)[:, None, None]
    kept_L2I = (torch.rand(num_layers, 2, len(lengths_I), device=x_PD.device) < share_L11) / share_L11
    return kept_L2I[:, :, image_P, None].to(x_PD.dtype).unbind(0)
