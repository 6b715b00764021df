"""Qwen2-VL: a tower of full attention with LayerNorm and a plain MLP, M-RoPE, and a decoder with QKV biases.

Both forms of `config.json` are read: the published one with the decoder's fields at the top level, and the one with a
`text_config` that newer `transformers` versions save. Likewise tensor names: `visual.` / `model.` as published, which
is what we write, or `model.visual.` / `model.language_model.`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.errors import ConfigError
from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.families.config_fields import (
    flag,
    integer,
    integers,
    number,
    refuse_unless,
    rope_parameters,
    section,
    sections_for,
)
from saccade.model.families.decoder_fields import decoder_sizes, describe_decoder, sized_decoder
from saccade.model.families.family import CHATML_VISION_TOKENS, Family
from saccade.model.layers import LayerNorm, PlainFeedForward
from saccade.model.vision.patch_tower import PatchMerger, VisionBlock, VisionTower
from saccade.processor.patches import ImageSettings

MODEL_TYPE = "qwen2_vl"

DISK_PREFIXES = {"projector.": "visual.merger.", "vision.": "visual.", "language.": "model.", "head.": "lm_head."}
TRANSFORMERS_PREFIXES = {
    "projector.": "model.visual.merger.",
    "vision.": "model.visual.",
    "language.": "model.language_model.",
    "head.": "lm_head.",
}


# ------------------------------------------------------------------ modules


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


class _FeedForward(PlainFeedForward):
    names = ("fc1", "fc2")


def _block(config: VisionConfig) -> VisionBlock:
    return VisionBlock(config, LayerNorm, _FeedForward(config.hidden_size, config.intermediate_size, quick_gelu))


# ------------------------------------------------------------------ configuration


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse `config.json`. Unsupported settings are refused."""
    text, vision = section(raw, "text_config") or raw, section(raw, "vision_config")
    language = parse_language(text)
    refuse_unless(vision, "hidden_act", "quick_gelu")
    refuse_unless(vision, "hidden_size", language.hidden_size)
    return ModelConfig(vision=_parse_vision(vision), language=language, tied_head=is_tied(raw), family=MODEL_TYPE)


def is_tied(raw: Mapping[str, Any]) -> bool:
    """Whether the head is tied: either config may say so."""
    return any(flag(part, "tie_word_embeddings", False) for part in (raw, section(raw, "text_config")))


def _parse_vision(raw: Mapping[str, Any]) -> VisionConfig:
    width = integer(raw, "embed_dim", 1280)
    return VisionConfig(
        num_layers=integer(raw, "depth", 32),
        hidden_size=width,
        num_heads=vision_heads(raw),
        intermediate_size=int(width * number(raw, "mlp_ratio", 4)),
        full_attention_layers=(),
        has_windows=False,
        **patch_fields(raw, patch_size=14),
    )


def patch_fields(raw: Mapping[str, Any], patch_size: int) -> dict[str, Any]:
    """The sizes of a patch and of a token."""
    refuse_unless(rope_parameters(raw, kinds=("default", "axial")), "rope_theta", 10000.0)
    return {
        "patch_size": integer(raw, "patch_size", patch_size),
        "temporal_patch_size": integer(raw, "temporal_patch_size", 2),
        "in_channels": integer(raw, "in_channels", raw.get("in_chans", 3)),
        "merge_size": integer(raw, "spatial_merge_size", 2),
    }


def vision_heads(raw: Mapping[str, Any]) -> int:
    """Heads of the tower, under either of their names."""
    return integer(raw, "num_heads", raw.get("num_attention_heads", 16))


_DECODER = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rope_theta": 1e6,
}  # fmt: skip
"""Defaults of `transformers`."""


def parse_language(stated: Mapping[str, Any]) -> LanguageConfig:
    """Parse the decoder's fields."""
    raw = _DECODER | dict(stated)
    refuse_unless(raw, "hidden_act", "silu")
    refuse_unless(raw, "use_sliding_window", False)
    rope = rope_parameters(raw)
    return LanguageConfig(
        **decoder_sizes(raw),
        rope_theta=number(rope, "rope_theta", 1e6),
        rope_sections=integers(rope, "mrope_section", (16, 24, 24)),
        norm_eps=number(raw, "rms_norm_eps", 1e-5),
        max_positions=integer(raw, "max_position_embeddings", 32768),
    )


def describe_language(config: ModelConfig) -> dict[str, Any]:
    """The decoder's fields of `config.json`."""
    return {
        **describe_decoder(config.language),
        "rope_scaling": {"type": "mrope", "mrope_section": list(config.language.rope_sections)},
        "tie_word_embeddings": config.tied_head,
        "use_sliding_window": False,
    }


def describe_patches(vision: VisionConfig) -> dict[str, Any]:
    """The sizes of patches and tokens in `vision_config`."""
    return {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "in_channels": vision.in_channels,
        "spatial_merge_size": vision.merge_size,
    }


def token_ids_of(token_ids: Mapping[str, int]) -> dict[str, int]:
    """The ids of the vision tokens in `config.json`."""
    return {f"{name}_token_id": token_ids[name] for name in CHATML_VISION_TOKENS}


def _describe_config(config: ModelConfig, token_ids: Mapping[str, int]) -> dict[str, Any]:
    vision = config.vision
    return {
        **describe_language(config),
        **token_ids_of(token_ids),
        "vision_config": {
            "model_type": MODEL_TYPE,
            "hidden_act": "quick_gelu",
            "depth": vision.num_layers,
            "embed_dim": vision.hidden_size,
            "hidden_size": config.language.hidden_size,
            "num_heads": vision.num_heads,
            "mlp_ratio": _mlp_ratio(vision),
            **describe_patches(vision),
        },
    }


def _mlp_ratio(vision: VisionConfig) -> int:
    ratio, rest = divmod(vision.intermediate_size, vision.hidden_size)
    if rest:
        raise ConfigError(
            f"vision intermediate size {vision.intermediate_size} must be a multiple of the hidden size "
            f"{vision.hidden_size} in this family"
        )
    return ratio


def describe_images(config: ModelConfig, images: ImageSettings, processor_class: str) -> dict[str, Any]:
    """A `preprocessor_config.json`."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": processor_class,
        "min_pixels": images.min_pixels,
        "max_pixels": images.max_pixels,
        "patch_size": images.patch_size,
        "temporal_patch_size": config.vision.temporal_patch_size,
        "merge_size": images.merge_size,
        "image_mean": list(images.mean),
        "image_std": list(images.std),
    }


def _describe_processor(config: ModelConfig) -> dict[str, dict[str, Any]]:
    images = ImageSettings(patch_size=config.vision.patch_size, merge_size=config.vision.merge_size)
    return {"preprocessor_config.json": describe_images(config, images, FAMILY.processor_class)}


# ------------------------------------------------------------------ sizes


def decoder(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, max_positions: int
) -> LanguageConfig:
    """A decoder with the sections of its head dim."""
    return sized_decoder(
        vocab, hidden, layers, heads, kv_heads, intermediate, rope_theta=1e6,
        rope_sections=sections_for(hidden // heads), norm_eps=1e-6, max_positions=max_positions,
    )  # fmt: skip


def _tower(num_layers: int, hidden_size: int, num_heads: int) -> VisionConfig:
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=4 * hidden_size,
        full_attention_layers=(),
        has_windows=False,
    )


_TOWERS = {"tiny": _tower(2, 64, 2), "670m": _tower(32, 1280, 16)}


def _size(tower: str, language: LanguageConfig, *, tied: bool) -> ModelConfig:
    return ModelConfig(vision=_TOWERS[tower], language=language, tied_head=tied, family=MODEL_TYPE)


FAMILY = Family(
    model_type=MODEL_TYPE,
    name="Qwen2-VL",
    summary="tower of full attention with LayerNorm and a plain MLP; M-RoPE; frames of a video one position apart",
    architecture="Qwen2VLForConditionalGeneration",
    processor_class="Qwen2VLProcessor",
    parse_config=parse_config,
    describe_config=_describe_config,
    describe_processor=_describe_processor,
    make_tower=lambda config: VisionTower(config, _block),
    make_projector=lambda config, size: PatchMerger(config, size, LayerNorm),
    disk_prefixes=DISK_PREFIXES,
    transformers_prefixes=TRANSFORMERS_PREFIXES,
    sizes={
        "tiny": _size("tiny", decoder(320, 128, 2, 4, 2, 256, 32768), tied=True),
        "2b": _size("670m", decoder(151936, 1536, 28, 12, 2, 8960, 32768), tied=True),
        "7b": _size("670m", decoder(152064, 3584, 28, 28, 4, 18944, 32768), tied=False),
        "72b": _size("670m", decoder(152064, 8192, 80, 64, 8, 29568, 32768), tied=False),
    },
    published={f"Qwen/Qwen2-VL-{size.upper()}-Instruct": size for size in ("2b", "7b", "72b")},
    towers=_TOWERS,
    vision_tokens=CHATML_VISION_TOKENS,
)
