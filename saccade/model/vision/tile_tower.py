"""The vision tower over tiles, for CLIP and SigLIP: images become squares of one size, each attends to itself.

Legend: P patches of all tiles, packed, S rows of the tower (patches, and a class token before each tile's if there are
any), M image tokens, D hidden size, H heads, C head dim, F decoder width.

The projector's output ends with the newline embedding, so that it is a row like any other; `arrange` picks the rows
that `tile_layout.py` lists for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from saccade.kernels.attention import attention
from saccade.model.config import VisionConfig
from saccade.model.layers import LayerNorm, PlainFeedForward, make_embedding
from saccade.model.linear import Linear
from saccade.model.merged_projections import project
from saccade.model.normed_sum import Input
from saccade.model.vision.layout import Segments
from saccade.model.vision.tile_layout import NUM_TAPS, Gather, TileInputs, TileLayout, TileSizes, tile_layout
from saccade.model.vision.tower import PatchEmbedding, Tower, TowerPass, drop_paths, run_block
from saccade.processor.patches import Grid


class TileAttention(nn.Module):
    """Bidirectional attention within tiles."""

    merged_projections = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def forward(self, x_SD: Input, segments: Segments) -> Tensor:
        """[S, D] to [S, D]."""
        q_SHC, k_SHC, v_SHC = (
            x.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]
            for x in project(x_SD, self.q_proj, self.k_proj, self.v_proj)
        )
        out_SHC = attention(
            q_SHC, k_SHC, v_SHC, segments.cu_seqlens, segments.cu_seqlens,
            max_seqlen_q=segments.max_seqlen, max_seqlen_k=segments.max_seqlen, causal=False,
        )  # fmt: skip
        out: Tensor = self.out_proj(out_SHC.flatten(1))
        return out


class _FeedForward(PlainFeedForward):
    names = ("fc1", "fc2")


class TileBlock(nn.Module):
    """Pre-norm transformer block: attention, then the MLP, each with a residual connection."""

    normed_inputs: ClassVar[dict[str, tuple[str, ...]]] = {
        "layer_norm1": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "layer_norm2": ("mlp.fc1",),
    }
    """Norms, and the projections that read each; nothing else does."""

    def __init__(self, config: VisionConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.norm_eps)
        self.self_attn = TileAttention(config)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = _FeedForward(config.hidden_size, config.intermediate_size, activation)

    def forward(
        self, x_SD: Tensor, update_SD: Tensor | None, segments: Segments, kept_2S1: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `run_block`."""
        norm1, norm2 = self.layer_norm1, self.layer_norm2
        return run_block(x_SD, update_SD, norm1, self.self_attn, (segments,), norm2, self.mlp, kept_2S1)


class TileTower(Tower):
    """Computes features from packed pixels of tiles, with a position embedding per patch of a tile."""

    def __init__(
        self, config: VisionConfig, activation: Callable[[Tensor], Tensor], gather: Gather, *, smallest: Grid
    ) -> None:
        """`smallest`: the image with the fewest tiles.

        With a class token there is a norm before the first block and no bias of the patch embedding (CLIP); without it
        there is no such norm but a bias (SigLIP).
        """
        super().__init__()
        self.config, self._gather, self._smallest = config, gather, smallest
        num_positions = config.tiling.patches_per_tile + config.has_class_token
        self.patch_embed = PatchEmbedding(config, bias=not config.has_class_token)
        self.pos_embed = make_embedding(num_positions, config.hidden_size)
        self.class_embedding: nn.Parameter | None = None
        self.pre_norm: LayerNorm | None = None
        if config.has_class_token:
            self.class_embedding = nn.Parameter(torch.zeros(config.hidden_size))
            self.pre_norm = LayerNorm(config.hidden_size, config.norm_eps)
        self.blocks = nn.ModuleList(TileBlock(config, activation) for _ in range(config.num_layers))
        self.post_norm = LayerNorm(config.hidden_size, config.norm_eps)

    @property
    def output_blocks(self) -> tuple[int, ...]:
        """See `Tower`: the selected layers."""
        return self.config.selected_layers

    def start(self, pixels: Tensor, inputs: TileInputs) -> TowerPass:
        """See `Tower`: embed patches, with a class token before those of each tile if the tower has one."""
        x_SD = self.patch_embed(pixels)
        if self.class_embedding is not None:
            x_SD = torch.cat([x_SD, self.class_embedding[None].to(x_SD.dtype)])[inputs.rows.long()]
        x_SD = x_SD + self.pos_embed(inputs.positions.long()).to(x_SD.dtype)
        if self.pre_norm is not None:
            x_SD = self.pre_norm(x_SD)
        paths = drop_paths(self.drop_path if self.training else 0.0, self.config.num_run_layers, inputs.tiles, x_SD)
        return TowerPass(x_SD, [(inputs.tiles, kept_2S1) for kept_2S1 in paths])

    def arrange(self, features: Tensor, inputs: TileInputs) -> Tensor:
        """See `Tower`: [S + 1, F] features of all rows and the newline to [M, F]."""
        if inputs.weights is None:
            return features.index_select(0, inputs.index[0])
        total = features.index_select(0, inputs.index[0]) * inputs.weights[0, :, None]
        for index, weight in zip(inputs.index[1:], inputs.weights[1:], strict=True):
            total = total + features.index_select(0, index) * weight[:, None]
        return total.to(features.dtype)

    # -------------------------------------------------------------- what a grid means

    def layout(self, grids: Sequence[Grid]) -> TileLayout:
        """See `Tower`."""
        return tile_layout(grids, self.config, self._gather)

    def padded_layout(self, grids: Sequence[Grid], budget: int) -> TileLayout | None:
        """See `Tower`. The padding is whole tiles, a partial one, and empty ones."""
        whole, sizes = self.config.tiling.patches_per_tile, self.budget_sizes(budget)
        num_tiles = sum(tiles for tiles, _, _ in grids)
        num_whole, rest = divmod(budget - num_tiles * whole, whole)
        num_empty = sizes.num_tiles - num_tiles - num_whole - 1
        layout = tile_layout(grids, self.config, self._gather, [*[whole] * num_whole, rest, *[0] * num_empty])
        return layout.with_taps(sizes.num_taps)

    def budget_sizes(self, budget: int) -> TileSizes:
        """See `Tower`. Each row of a tile's patches may be followed by a newline."""
        tiling = self.config.tiling
        num_tiles = budget // tiling.patches_per_tile + 1
        return TileSizes(
            num_rows=budget + num_tiles * self.config.has_class_token,
            num_tiles=num_tiles,
            max_tile=tiling.patches_per_tile + self.config.has_class_token,
            num_tokens=budget + -(-budget // tiling.patches_per_side),
            num_taps=1 if self.config.max_feature_tiles is None else NUM_TAPS,
        )

    def square_grid(self, max_patches: int) -> tuple[Grid, int]:
        """See `Tower`: one of the resolutions, of any shape."""
        tiling = self.config.tiling
        grids = [self._smallest, *((tiling.num_tiles(size), *size) for size in tiling.resolutions)]
        fitting = [grid for grid in grids if self.num_patches([grid]) <= max_patches]
        grid = max(fitting, key=lambda grid: grid[0], default=self._smallest)
        return grid, self.num_patches([grid])

    def num_patches(self, grids: Sequence[Sequence[int]]) -> int:
        """See `Tower`."""
        return sum(tiles for tiles, _, _ in grids) * self.config.tiling.patches_per_tile

    def image_lengths(self, grids: Sequence[Sequence[int]]) -> list[int]:
        """See `Tower`."""
        rows = self.config.tiling.patches_per_tile + self.config.has_class_token
        return [rows] * sum(tiles for tiles, _, _ in grids)

    def attention_pairs(self, grids: Sequence[Sequence[int]]) -> int:
        """See `Tower`."""
        return sum(n * n for n in self.image_lengths(grids)) * self.config.num_run_layers

    def unused_modules(self) -> list[nn.Module]:
        """See `Tower`: the blocks after the selected layers, and the last norm."""
        return [*self.blocks[self.config.num_run_layers :], self.post_norm]


class TileProjector(nn.Module):
    """The projector: an MLP on each row of the selected layers, and the newline embedding as one more row."""

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        bias = config.projector_bias
        self.linear_1 = Linear(config.hidden_size * len(config.selected_layers), out_size, bias=bias)
        self.act = nn.GELU()
        self.linear_2 = Linear(out_size, out_size, bias=bias)
        self.image_newline = nn.Parameter(torch.zeros(out_size))

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """[S, D] of each selected layer to [S + 1, F]."""
        x_SF = self.linear_2(self.act(self.linear_1(torch.cat(outputs, dim=-1))))
        return torch.cat([x_SF, self.image_newline[None].to(x_SF.dtype)])
