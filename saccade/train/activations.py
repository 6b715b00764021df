"""What backward needs of a row, tensor by tensor: bytes that each block keeps, makes again and works in. Plain arithmetic, no torch.

What is kept follows from the kernels (the counts of a test on what autograd really saves agree to the byte):

    RMSNorm          its input, and one fp32 a row; after a residual sum, that sum
    linear layer     its input, where its weight learns
    rope             nothing but the table of angles, which all blocks share
    attention        q and k as turned, v, the result, and one fp32 a row and head; in windows neither of the last two
    swiglu_linear    gate and up; where low-rank matrices stand beside the layer behind it, its own result too
    residual sum     nothing
    low rank         its input, and R numbers a row; with dropout an input of its own and a mask

In the tower, v is a view of the fused projection, so the whole of it stays: three widths for one. What two layers share (a norm's
output, read by q, k and v) is kept once. A block that is frozen, behind nothing that learns, keeps nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from saccade.errors import ConfigError
from saccade.model.config import ModelConfig
from saccade.model.layers import ALIGNMENT
from saccade.train.config import Recompute


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """What one row holds: the most that any row of a stage may."""

    tokens: int
    """Tokens, image tokens included."""
    patches: int
    """Image patches."""
    loss_tokens: int | None = None
    """Tokens that are predicted; all of them where not given."""

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.patches < 0 or not 0 <= self.num_loss_tokens <= self.tokens:
            raise ConfigError(
                f"a row of {self.tokens} tokens, {self.patches} patches and {self.loss_tokens} learned tokens cannot be"
            )

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are predicted."""
        return self.tokens if self.loss_tokens is None else self.loss_tokens


class Needs(NamedTuple):
    """Bytes that one block's backward needs."""

    kept: Mapping[str, int]
    """From forward on, by tensor."""
    remade: int
    """Dropped in forward and made again."""
    working: int
    """Gradients of activations, at most at a time."""

    @property
    def num_kept(self) -> int:
        """Bytes of all tensors that are kept."""
        return sum(self.kept.values())


NOTHING = Needs({}, 0, 0)


class Learning(NamedTuple):
    """How a block stands to what learns."""

    layers: Collection[str]
    """Its linear layers that keep their input: those whose weight learns, or has low-rank matrices beside it."""
    is_reached: bool
    """Whether gradients pass through it: it, or something before it, learns."""
    low_rank: int = 0
    """Numbers a row that its low-rank matrices keep besides."""
    splits_down: bool = False
    """Whether low-rank matrices stand beside its down projection."""


def vision_block(
    config: ModelConfig, row: MicroBatchSize, layer: int, learning: Learning, recompute: Recompute, element: int
) -> Needs:
    """One block of the tower. `element`: bytes of a number in the compute dtype."""
    vision = config.vision
    width, inner = vision.hidden_size * element, _aligned(vision.intermediate_size) * element
    is_full = layer in vision.full_attention_layers
    sizes = {
        "stream": 2 * width,
        "norms": width * ("qkv" in learning.layers),
        "qkv": 3 * width,
        "q and k": 2 * width,
        "attended": width * (is_full or "proj" in learning.layers),
        "statistics": 4 * (2 + is_full * vision.num_heads),
    }
    return _block(sizes, row.patches, (width, inner), learning, recompute, element)


def decoder_layer(
    config: ModelConfig, row: MicroBatchSize, learning: Learning, recompute: Recompute, element: int
) -> Needs:
    """One layer of the decoder."""
    language = config.language
    width, inner = language.hidden_size * element, _aligned(language.intermediate_size) * element
    sizes = {
        "stream": 2 * width,
        "norms": width * (not {"q_proj", "k_proj", "v_proj"}.isdisjoint(learning.layers)),
        "q and k": width + language.num_kv_heads * language.head_dim * element,
        "v": language.num_kv_heads * language.head_dim * element,
        "attended": width,
        "statistics": 4 * (2 + language.num_heads),
    }
    return _block(sizes, row.tokens, (width, inner), learning, recompute, element)


def _block(
    sizes: Mapping[str, int], rows: int, widths: tuple[int, int], learning: Learning, recompute: Recompute, element: int
) -> Needs:
    """Attention as given, then the feed-forward; less what is recomputed. Sizes and widths, outer and inner, are bytes a row."""
    width, inner = widths
    if not learning.is_reached:
        return NOTHING
    reads_norm = recompute == "selective" or not {"gate_proj", "up_proj"}.isdisjoint(learning.layers)
    kept = dict(sizes) | {
        "norms": sizes["norms"] + width * reads_norm,
        "gate and up": 2 * inner,
        "activated": inner * learning.splits_down,
        "low rank": learning.low_rank * element,
    }
    remade = 0
    if recompute == "selective":
        remade = kept.pop("gate and up") + kept.pop("activated")
    elif recompute == "full":
        remade = sum(kept.values()) - width
        kept = {"stream": width}
    # Most inside the feed-forward: gradients of its result, of gate and of up, and the stream's twice. Where activation and down
    # projection are one function, the result is made again beside them.
    working = (3 + (recompute == "none")) * inner + 2 * width
    return Needs({name: size * rows for name, size in kept.items() if size}, remade * rows, working * rows)


def patch_embedding(config: ModelConfig, row: MicroBatchSize, learning: Learning, element: int) -> Needs:
    """Pixels to the tower's width."""
    vision = config.vision
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    kept = {"pixels": pixels * element * row.patches} if learning.layers else {}
    return Needs(kept, 0, 0)


def projector(config: ModelConfig, row: MicroBatchSize, learning: Learning, element: int) -> Needs:
    """The tower's last norm, two linear layers, and the features that go among the tokens."""
    if not learning.is_reached:
        return NOTHING
    width = config.vision.hidden_size * element * row.patches
    features = row.patches // config.vision.patches_per_token * config.language.hidden_size * element
    kept = {
        "stream": width,
        "norms": width * ("0" in learning.layers),
        "hidden": width * (1 + ("2" in learning.layers)),
        "features": features,
        "statistics": 4 * row.patches,
    }
    return Needs({name: size for name, size in kept.items() if size}, 0, 3 * width)


def final_norm(config: ModelConfig, row: MicroBatchSize, learning: Learning, element: int) -> Needs:
    """The norm before the head."""
    if not learning.is_reached:
        return NOTHING
    width = config.language.hidden_size * element * row.tokens
    return Needs({"stream": width, "statistics": 4 * row.tokens}, 0, 2 * width)


def input_bytes(config: ModelConfig, row: MicroBatchSize) -> int:
    """This row and the next on the device, with pixels in bytes, and this one's tables of angles."""
    vision = config.vision
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    numbers = 5 * 8 + 1  # token id, label, three positions, whether it is learned
    tables = 4 * (vision.head_dim * row.patches + config.language.head_dim * row.tokens)
    return 2 * (numbers * row.tokens + pixels * row.patches) + tables


def _aligned(size: int) -> int:
    """As `FeedForward` lies in memory."""
    return -(-size // ALIGNMENT) * ALIGNMENT
