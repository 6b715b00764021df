"""Model sizes. The families parse them from `config.json`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from saccade.errors import ConfigError
from saccade.processor.tiles import Tiling


def _check_positive(config: object) -> None:
    """Check that every number is above 0."""
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise ConfigError(f"{field.name} is {value}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and the projector."""

    num_layers: int
    """Vision blocks."""
    hidden_size: int
    """Width of the tower."""
    num_heads: int
    """Attention heads; the head dim is hidden_size / num_heads."""
    intermediate_size: int
    """Width of the MLP."""
    full_attention_layers: tuple[int, ...]
    """Blocks with attention over the whole image; the others attend within windows."""
    patch_size: int = 14
    """Side of a patch in pixels."""
    temporal_patch_size: int = 2
    """Frames in one patch."""
    in_channels: int = 3
    """Colour channels."""
    merge_size: int = 2
    """Patches merged into one token, per side."""
    has_windows: bool = True
    """Whether blocks attend within windows, except for `full_attention_layers`; otherwise over the whole image."""
    window_size: int = 112
    """Side of an attention window in pixels."""
    tokens_per_second: int = 4
    """Time positions per second of video, in families whose positions follow its clock."""
    num_position_embeddings: int | None = None
    """Number of learned position embeddings, a square that is interpolated to each image; None: there are none."""
    feature_layers: tuple[int, ...] = ()
    """Blocks whose output is also projected: the first enters the decoder after its first layer, and so on."""
    norm_eps: float = 1e-6
    """Added to the variance in each norm."""
    tile_size: int | None = None
    """Side of a tile in pixels, in families that cut images into tiles; each tile attends to itself. None: no tiles."""
    resolutions: tuple[tuple[int, int], ...] = ()
    """Heights and widths in pixels that images are fitted to before they are cut into tiles."""
    max_feature_tiles: int | None = None
    """Images with more features than this many tiles have are interpolated to about as many; None: they are not."""
    has_class_token: bool = False
    """Whether each tile has a class token, which is not projected."""
    selected_layers: tuple[int, ...] = ()
    """Layers of a tower of tiles whose concatenated outputs are projected: n is after block n. Later ones are idle."""

    projector_bias: bool = True
    """Whether the projector of a tower of tiles has biases."""

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.in_channels != 3:
            raise ConfigError(f"vision in_channels is {self.in_channels}; only RGB is supported")
        if self.tile_size is not None:
            self._check_tiles()
        elif self.hidden_size % (4 * self.num_heads):
            raise ConfigError(
                f"vision hidden size {self.hidden_size} must be a multiple of 4 x {self.num_heads} heads (2-D RoPE)"
            )
        if self.has_windows and self.window_size % (self.patch_size * self.merge_size):
            raise ConfigError(
                f"vision window of {self.window_size} pixels must be a multiple of the token size, "
                f"{self.patch_size * self.merge_size} pixels"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.full_attention_layers):
            raise ConfigError(
                f"full-attention layers {self.full_attention_layers} must be among the {self.num_layers} vision layers"
            )
        if any(not 0 <= layer < self.num_layers for layer in self.feature_layers):
            raise ConfigError(f"feature layers {self.feature_layers} must be among the {self.num_layers} vision layers")
        if list(self.feature_layers) != sorted(set(self.feature_layers)):
            raise ConfigError(f"feature layers {self.feature_layers} must ascend")
        if (
            self.num_position_embeddings is not None
            and math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings
        ):
            raise ConfigError(f"{self.num_position_embeddings} position embeddings are no square")

    def _check_tiles(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ConfigError(f"vision hidden size {self.hidden_size} must be a multiple of {self.num_heads} heads")
        if not self.selected_layers or any(not 0 <= layer <= self.num_layers for layer in self.selected_layers):
            raise ConfigError(
                f"selected layers {self.selected_layers} must be among the outputs 0 to {self.num_layers} of the "
                "vision layers"
            )
        _ = self.tiling  # checked by itself

    @property
    def tiling(self) -> Tiling:
        """How images become tiles, in families that cut them."""
        assert self.tile_size is not None, "asked of families with tiles"
        return Tiling(tile_size=self.tile_size, patch_size=self.patch_size, resolutions=self.resolutions)

    @property
    def num_run_layers(self) -> int:
        """Blocks that are run."""
        return max(self.selected_layers) if self.selected_layers else self.num_layers

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def window_tokens(self) -> int | None:
        """Side of a window in tokens (merged patches)."""
        return self.window_size // self.patch_size // self.merge_size if self.has_windows else None

    @property
    def patch_dim(self) -> int:
        """Pixel values of one patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def with_few_layers(self) -> VisionConfig:
        """A tower of the same widths with one layer of each kind of attention, and as many feature layers."""
        is_full = sorted({layer in self.full_attention_layers for layer in range(self.num_layers)})
        return replace(
            self,
            num_layers=max(len(is_full), len(self.feature_layers)),
            selected_layers=(1,) * len(self.selected_layers),
            full_attention_layers=tuple(index for index, full in enumerate(is_full) if full),
            feature_layers=tuple(range(len(self.feature_layers))),
        )

    @property
    def feature_sets(self) -> int:
        """Features of a token: one for its embedding, and one for each of the feature layers."""
        return 1 + len(self.feature_layers)

    @property
    def patches_per_token(self) -> int:
        """Patches merged into one token."""
        return self.merge_size**2


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """The decoder."""

    vocab_size: int
    """Number of token embeddings."""
    hidden_size: int
    """Width of a token."""
    num_layers: int
    """Decoder layers."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads, each shared by num_heads / num_kv_heads query heads."""
    intermediate_size: int
    """Width of the MLP."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rope_sections: tuple[int, ...]
    """M-RoPE frequencies of time, height and width; they sum to half the head dim. With 1-D RoPE time has all."""
    norm_eps: float
    """Added to the mean square in each norm."""
    max_positions: int
    """Maximum sequence length."""
    rope_interleaved: bool = False
    """Whether the frequencies of time, height and width alternate instead of forming sections."""
    qkv_bias: bool = True
    """Whether queries, keys and values have biases."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised."""
    explicit_head_dim: int | None = None
    """Width of one head; None: hidden_size / num_heads."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to, itself included; None: all earlier ones."""

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.explicit_head_dim is None and self.hidden_size % (2 * self.num_heads):
            raise ConfigError(f"hidden size {self.hidden_size} must be a multiple of 2 x {self.num_heads} heads")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly")
        if len(self.rope_sections) != 3 or sum(self.rope_sections) * 2 != self.head_dim:
            raise ConfigError(
                f"rope sections {self.rope_sections} must be three and sum to half the head dim, {self.head_dim // 2}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.explicit_head_dim or self.hidden_size // self.num_heads

    @property
    def window(self) -> int | None:
        """The sliding window of the kernels: earlier tokens that a token attends to, itself not included."""
        return None if self.sliding_window is None else self.sliding_window - 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A vision-language model."""

    vision: VisionConfig
    """The vision tower."""
    language: LanguageConfig
    """The decoder."""
    tied_head: bool
    """Whether the head shares the weight of the embedding."""
    family: str
    """`model_type` of `config.json`, and name of the module in `families/`."""
