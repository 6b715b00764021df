"""FLOPs of training: what a micro-batch costs, and the peak of the device.

Work is counted from shapes on the host, before a micro-batch is copied to the device (`micro_batch_work`); it is
additive over micro-batches and ranks. Model FLOPs are those of the matmuls: decoder, head (loss tokens only: others are
dropped before it), vision tower and projector, counted from the projections the model has, and attention, 4 n^2 d with
the causal half counted once, vision blocks over full images or windows. Training costs up to three times the forward
pass: a frozen part needs no weight gradients, and no activation gradients unless something before it is trained.
Activation checkpointing is not counted.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from saccade.model.config import ModelConfig
from saccade.model.linear import checkpoint_shapes, projections
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs
from saccade.train.lora import lora_parameters
from saccade.train.parameter_groups import part_of

PEAK_FLOPS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Published dense bf16 peak, by substring of the device name; the first match counts."""


def peak_flops(device: torch.device) -> float | None:
    """bf16 peak FLOP/s of a GPU; None for an unknown one and for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


class Flops(NamedTuple):
    """FLOPs of each part, in forward order; a multiply-add is two."""

    vision: float
    projector: float
    language: float
    head: float


def forward_flops(
    config: ModelConfig,
    conversation_lengths: Sequence[int],
    image_grids: Sequence[Sequence[int]],
    num_head_tokens: int | None = None,
) -> Flops:
    """Forward pass over a packed sequence. Without `num_head_tokens`, every token goes through the head."""
    language, model = config.language, _meta_model(config)
    num_tokens = sum(conversation_lengths)
    num_head_tokens = num_tokens if num_head_tokens is None else num_head_tokens
    patches, weights = model.vision.num_patches(image_grids), _num_weights(config)
    pairs = sum(_causal_pairs(n, language.sliding_window) for n in conversation_lengths)
    attention = 4 * pairs * language.num_heads * language.head_dim
    return Flops(
        vision=2 * patches * weights["vision"]
        + 4 * model.vision.attention_pairs(image_grids) * config.vision.hidden_size,
        projector=2 * patches / config.vision.patches_per_token * weights["projector"],
        language=2 * num_tokens * weights["language"] + attention * language.num_layers,
        head=2 * num_head_tokens * language.hidden_size * language.vocab_size,
    )


def _causal_pairs(num_tokens: int, sliding_window: int | None) -> float:
    """Pairs of tokens that attend to each other, the causal half counted once."""
    if sliding_window is None or num_tokens <= sliding_window:
        return num_tokens**2 / 2
    return sliding_window * (num_tokens - sliding_window / 2)


@functools.lru_cache(maxsize=8)
def _meta_model(config: ModelConfig) -> VLM:
    with torch.device("meta"):
        return VLM(config)


@functools.lru_cache(maxsize=8)
def _num_weights(config: ModelConfig) -> dict[str, int]:
    """Count the projection weights that run, by part: each costs two FLOPs per patch (vision) or token (others)."""
    model, total = _meta_model(config), {"vision": 0, "projector": 0, "language": 0, "head": 0}
    shapes = checkpoint_shapes(model)
    unused = {inner for module in model.vision.unused_modules() for inner in module.modules()}
    for name in (name for name, layer in projections(model) if layer not in unused):
        total[name.partition(".")[0]] += math.prod(shapes.get(f"{name}.weight", ()))
    return total


def training_flops(forward: Flops, trained_parts: Iterable[str], *, tied_head: bool) -> Flops:
    """Forward and backward, given the trained parts (vision, projector, embedding, language, head).

    A part with LoRA adapters (`language.lora`) needs activation gradients only; the adapters themselves are not
    counted.
    """
    trained = set(trained_parts)
    order = [{"vision"}, {"projector"}, {"embedding", "language"}, {"embedding" if tied_head else "head"}]
    total, reached = [], set[str]()
    for flops, parts in zip(forward, order, strict=True):
        reached |= parts | {f"{part}.lora" for part in parts}
        total.append(flops * (1 + bool(parts & trained) + bool(reached & trained)))
    return Flops(*total)


def trained_parts(model: VLM) -> set[str]:
    """The trainable parts of a model, for `training_flops`; a head tied to the embedding is trained with it."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if adapters := lora_parameters(model):
        return {f"{part_of(name)}.lora" for name in names if name in adapters}
    parts = {part_of(name) or "" for name in names}
    return parts | ({"head"} if model.config.tied_head and "embedding" in parts else set())


class Work(NamedTuple):
    """Contents and cost of micro-batches. All values are additive over micro-batches and ranks."""

    samples: float = 0.0
    """Number of conversations."""
    text_tokens: float = 0.0
    image_tokens: float = 0.0
    loss_tokens: float = 0.0
    vision_flops: float = 0.0
    """Vision tower and projector, forward and backward."""
    decoder_flops: float = 0.0
    """Decoder and head, forward and backward."""

    def plus(self, other: "Work") -> "Work":
        """The sum."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


def micro_batch_work(config: ModelConfig, inputs: ModelInputs, num_loss_tokens: int, trained: Iterable[str]) -> Work:
    """The work of one micro-batch on the CPU, given the trained parts."""
    assert inputs.cu_seqlens.is_cpu, "micro_batch_work reads lengths on the host: call it before the copy to the device"
    lengths, grids = inputs.cu_seqlens.diff().tolist(), inputs.image_grids.tolist()
    flops = training_flops(forward_flops(config, lengths, grids, num_loss_tokens), trained, tied_head=config.tied_head)
    num_image_tokens = inputs.image_token_index.shape[0]
    return Work(
        samples=inputs.num_conversations,
        text_tokens=inputs.num_tokens - num_image_tokens,
        image_tokens=num_image_tokens,
        loss_tokens=num_loss_tokens,
        vision_flops=flops.vision + flops.projector,
        decoder_flops=flops.language + flops.head,
    )
