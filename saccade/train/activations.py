"""Activation memory of a micro-batch: bytes that each block saves for backward, recomputes, and uses as workspace. No torch.

What is saved follows from the kernels (a test compares the counts with what autograd saves, to the byte):

    RMSNorm          its input, and one fp32 per token; after a residual sum, that sum
    linear layer     its input, if its weight is trained
    rope             nothing but the cos/sin table, shared by all blocks
    attention        rotated q and k, v, the output, and one fp32 per token and head; window attention neither of the last two
    swiglu_linear    gate and up; with a LoRA adapter on the down projection, its own output too
    residual sum     nothing
    LoRA             its input, and R values per token; with dropout, a separate input and a mask

In the vision tower v is a view of the fused projection, so all of it is saved: three widths instead of one. A tensor read by
several layers (a norm's output by q, k and v) is saved once. A frozen block with nothing trained before it saves nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from saccade.errors import ConfigError
from saccade.model.config import ModelConfig
from saccade.model.linear import ALIGNMENT
from saccade.train.config import Recompute


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """Maximum size of a micro-batch, that is of a packed sequence."""

    tokens: int
    """Tokens, including image tokens."""
    patches: int
    """Vision patches."""
    loss_tokens: int | None = None
    """Loss tokens; default: all tokens."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.patches < 0 or not 0 <= self.num_loss_tokens <= self.tokens:
            raise ConfigError(
                f"{self.tokens} tokens, {self.patches} patches and {self.loss_tokens} loss tokens are not a valid size. Give at least one token"
            )

    @property
    def num_loss_tokens(self) -> int:
        """Number of loss tokens."""
        return self.tokens if self.loss_tokens is None else self.loss_tokens


class BlockMemory(NamedTuple):
    """Bytes that the backward pass of one block needs."""

    saved: Mapping[str, int]
    """Saved in forward, by tensor."""
    recomputed: int
    """Recomputed in backward."""
    workspace: int
    """Peak of the activation gradients."""

    @property
    def num_saved(self) -> int:
        """Bytes of all saved tensors."""
        return sum(self.saved.values())


NOTHING = BlockMemory({}, 0, 0)


class BlockTraining(NamedTuple):
    """What is trained in and before a block."""

    layers: Collection[str]
    """Linear layers that save their input: with a trained weight or a LoRA adapter."""
    has_gradients: bool
    """Whether gradients pass through it: it, or something before it, is trained."""
    low_rank: int = 0
    """Values per token that its LoRA adapters save in addition."""
    splits_down: bool = False
    """Whether the down projection has a LoRA adapter."""
    reads_mlp_input: bool = False
    """Whether a layer that reads the input of its MLP saves it; the projector is one MLP."""
    reads_mlp_hidden: bool = False
    """Whether the second layer of the projector saves its input."""
    mlp_tensors: int = 2
    """Tensors of the intermediate size that its MLP saves."""
    num_statistics: int = 1
    """fp32 values per token that each norm saves: one of RMSNorm, two of LayerNorm."""


def vision_block(
    config: ModelConfig, size: MicroBatchSize, layer: int, training: BlockTraining, recompute: Recompute, element: int
) -> BlockMemory:
    """One vision block. `element`: bytes of an element in the compute dtype."""
    vision = config.vision
    width, inner = vision.hidden_size * element, _aligned(vision.intermediate_size) * element
    is_full = layer in vision.full_attention_layers or not vision.has_windows
    sizes = {
        "stream": 2 * width,
        "norms": width * ("qkv" in training.layers),
        "qkv": 3 * width,
        "q and k": 2 * width,
        "attended": width * (is_full or "proj" in training.layers),
        "statistics": 4 * (2 * training.num_statistics + is_full * vision.num_heads),
    }
    return _block(sizes, size.patches, (width, inner), training, recompute, element)


def decoder_layer(
    config: ModelConfig, size: MicroBatchSize, training: BlockTraining, recompute: Recompute, element: int
) -> BlockMemory:
    """One decoder layer."""
    language = config.language
    width, inner = language.hidden_size * element, _aligned(language.intermediate_size) * element
    queries, keys = (heads * language.head_dim * element for heads in (language.num_heads, language.num_kv_heads))
    head_norms = (language.num_heads + language.num_kv_heads) * language.qk_norm
    sizes = {
        "stream": 2 * width,
        "norms": width * (not {"q_proj", "k_proj", "v_proj"}.isdisjoint(training.layers)),
        "q and k": (queries + keys) * (1 + language.qk_norm),
        "v": keys,
        "attended": queries,
        "statistics": 4 * (2 + language.num_heads + head_norms),
    }
    return _block(sizes, size.tokens, (width, inner), training, recompute, element)


def _block(
    sizes: Mapping[str, int],
    length: int,
    widths: tuple[int, int],
    training: BlockTraining,
    recompute: Recompute,
    element: int,
) -> BlockMemory:
    """Attention as given, plus the MLP, minus what is recomputed. Sizes and widths (hidden, intermediate) in bytes per token."""
    width, inner = widths
    if not training.has_gradients:
        return NOTHING
    reads_norm = recompute == "selective" or training.reads_mlp_input
    saved = dict(sizes) | {
        "norms": sizes["norms"] + width * reads_norm,
        "gate and up": training.mlp_tensors * inner,
        "activated": inner * training.splits_down,
        "low rank": training.low_rank * element,
    }
    recomputed = 0
    if recompute == "selective":
        recomputed = saved.pop("gate and up") + saved.pop("activated")
    elif recompute == "full":
        recomputed = sum(saved.values()) - width
        saved = {"stream": width}
    # The peak is inside the MLP: gradients of its activation, of gate and of up, and twice that of the residual stream. If activation
    # and down projection are fused, the activation is recomputed as well.
    workspace = (3 + (recompute == "none")) * inner + 2 * width
    return BlockMemory(
        {name: per_token * length for name, per_token in saved.items() if per_token},
        recomputed * length,
        workspace * length,
    )


def patch_embedding(config: ModelConfig, size: MicroBatchSize, training: BlockTraining, element: int) -> BlockMemory:
    """Patch embedding."""
    vision = config.vision
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    saved = {"pixels": pixels * element * size.patches} if training.layers else {}
    return BlockMemory(saved, 0, 0)


def projector(config: ModelConfig, size: MicroBatchSize, training: BlockTraining, element: int) -> BlockMemory:
    """The projector's norm, two linear layers, and the image features."""
    if not training.has_gradients:
        return NOTHING
    width, num_sets = config.vision.hidden_size * element * size.patches, config.vision.feature_sets
    features = size.patches // config.vision.patches_per_token * config.language.hidden_size * element
    saved = {
        "stream": width,
        "norms": width * training.reads_mlp_input,
        "hidden": width * (1 + training.reads_mlp_hidden),
        "features": features,
        "statistics": 4 * training.num_statistics * size.patches,
    }
    # The outputs of feature layers are the streams of the blocks behind them.
    total = {name: bytes_ * (1 if name == "stream" else num_sets) for name, bytes_ in saved.items() if bytes_}
    return BlockMemory(total, 0, 3 * width)


def final_norm(config: ModelConfig, size: MicroBatchSize, training: BlockTraining, element: int) -> BlockMemory:
    """The final norm before the head."""
    if not training.has_gradients:
        return NOTHING
    width = config.language.hidden_size * element * size.tokens
    return BlockMemory({"stream": width, "statistics": 4 * size.tokens}, 0, 2 * width)


def input_bytes(config: ModelConfig, size: MicroBatchSize) -> int:
    """Bytes of this micro-batch and the next one on the device (pixels as uint8), and of this one's cos/sin tables."""
    vision = config.vision
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    per_token = 5 * 8 + 1  # token id, label, three positions, loss mask
    tables = 4 * (vision.head_dim * size.patches + config.language.head_dim * size.tokens)
    return 2 * (per_token * size.tokens + pixels * size.patches) + tables


def _aligned(size: int) -> int:
    """The padded size of an aligned `Linear`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
