"""The vision tower over grids of patches, and the patch merger that projects its output.

Legend: P patches of all images, packed, D hidden size, H heads, K head dim.

A family says which norm, MLP and embeddings the blocks have (`families/`).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from saccade.kernels.attention import rope_attention
from saccade.kernels.resize import resize
from saccade.kernels.rope import CosSin, vision_cos_sin
from saccade.model.config import VisionConfig
from saccade.model.layers import LayerNorm, RMSNorm, make_embedding
from saccade.model.linear import Linear
from saccade.model.normed_sum import Input
from saccade.model.vision.layout import Segments
from saccade.model.vision.patch_layout import (
    PatchInputs,
    PatchLayout,
    PatchSizes,
    budget_sizes,
    padded_layout,
    patch_layout,
)
from saccade.model.vision.tower import PatchEmbedding, Tower, TowerPass, drop_paths, run_block
from saccade.processor.patches import Grid
from saccade.processor.pillow_resize import rows_first

NORM_EPS = 1e-6
"""Epsilon of all norms of the tower."""


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
        mlp_inputs = tuple(f"mlp.{name}" for name in mlp.input_layers)  # type: ignore[union-attr]
        self.normed_inputs = {"norm1": ("attn.qkv",), "norm2": mlp_inputs}
        """Norms, and the projections that read each; nothing else does."""

    def forward(
        self,
        x_PD: Tensor,
        update_PD: Tensor | None,
        cos_sin: CosSin,
        segments: Segments,
        kept_2P1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `run_block`."""
        inputs = (cos_sin, segments)
        return run_block(x_PD, update_PD, self.norm1, self.attn, inputs, self.norm2, self.mlp, kept_2P1)


class VisionTower(Tower):
    """Computes patch features in window order from the packed pixels of images of any sizes."""

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

    def start(self, pixels: Tensor, inputs: PatchInputs) -> TowerPass:
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

    def _position_embeddings(self, inputs: PatchInputs) -> Tensor:
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

    def arrange(self, features: Tensor, inputs: PatchInputs) -> Tensor:
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

    def layout(self, grids: Sequence[Grid]) -> PatchLayout:
        """See `Tower`."""
        return patch_layout(grids, self.config)

    def padded_layout(self, grids: Sequence[Grid], budget: int) -> PatchLayout | None:
        """See `Tower`. None: too many small images."""
        return padded_layout(grids, budget, self.config)

    def budget_sizes(self, budget: int) -> PatchSizes:
        """See `Tower`."""
        return budget_sizes(budget, self.config)

    def square_grid(self, max_patches: int) -> tuple[Grid, int]:
        """See `Tower`: the number of tokens per side is even."""
        merge = self.config.merge_size
        side = merge * 2 * (math.isqrt(max_patches) // (2 * merge))
        grid = (1, side, side) if side else (1, merge, 2 * merge)
        return grid, math.prod(grid)

    def num_patches(self, grids: Sequence[Sequence[int]]) -> int:
        """See `Tower`."""
        return sum(map(math.prod, grids))

    def image_lengths(self, grids: Sequence[Sequence[int]]) -> list[int]:
        """See `Tower`."""
        return [rows * columns for count, rows, columns in grids for _ in range(count)]

    def attention_pairs(self, grids: Sequence[Sequence[int]]) -> int:
        """See `Tower`."""
        frames = self.image_lengths(grids)
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
