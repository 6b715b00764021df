"""Qwen2.5-VL: Qwen2-VL with a tower of window attention, RMSNorm and a gated MLP."""

from collections.abc import Mapping
from typing import Any

from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.families import qwen2_vl
from saccade.model.families.config_fields import integer, integers, refuse_unless, section
from saccade.model.families.family import CHATML_VISION_TOKENS, Family
from saccade.model.families.qwen2_vl import decoder, describe_images, describe_language, describe_patches, patch_fields
from saccade.model.layers import FeedForward, RMSNorm
from saccade.model.vision.patch_tower import PatchMerger, VisionBlock, VisionTower
from saccade.processor.patches import ImageSettings

MODEL_TYPE = "qwen2_5_vl"


def _block(config: VisionConfig) -> VisionBlock:
    return VisionBlock(config, RMSNorm, FeedForward(config.hidden_size, config.intermediate_size, bias=True))


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse `config.json`. Unsupported settings are refused."""
    text, vision = section(raw, "text_config") or raw, section(raw, "vision_config")
    language = qwen2_vl.parse_language(text)
    refuse_unless(vision, "hidden_act", "silu")
    refuse_unless(vision, "out_hidden_size", language.hidden_size)
    return ModelConfig(
        vision=_parse_vision(vision), language=language, tied_head=qwen2_vl.is_tied(raw), family=MODEL_TYPE
    )


def _parse_vision(raw: Mapping[str, Any]) -> VisionConfig:
    num_layers, full = integer(raw, "depth", 32), integers(raw, "fullatt_block_indexes", (7, 15, 23, 31))
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=integer(raw, "hidden_size", 3584),
        num_heads=qwen2_vl.vision_heads(raw),
        intermediate_size=integer(raw, "intermediate_size", 3420),
        full_attention_layers=tuple(layer for layer in full if 0 <= layer < num_layers),
        window_size=integer(raw, "window_size", 112),
        tokens_per_second=integer(raw, "tokens_per_second", 4),
        **patch_fields(raw, patch_size=14),
    )


def _describe_config(config: ModelConfig, token_ids: Mapping[str, int]) -> dict[str, Any]:
    vision = config.vision
    return {
        **describe_language(config),
        **qwen2_vl.token_ids_of(token_ids),
        "vision_config": {
            "model_type": MODEL_TYPE,
            "hidden_act": "silu",
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "num_heads": vision.num_heads,
            "intermediate_size": vision.intermediate_size,
            "out_hidden_size": config.language.hidden_size,
            "fullatt_block_indexes": list(vision.full_attention_layers),
            "window_size": vision.window_size,
            "tokens_per_second": vision.tokens_per_second,
            **describe_patches(vision),
        },
    }


def _describe_processor(config: ModelConfig) -> dict[str, dict[str, Any]]:
    images = ImageSettings(patch_size=config.vision.patch_size, merge_size=config.vision.merge_size)
    return {"preprocessor_config.json": describe_images(config, images, FAMILY.processor_class)}


def _tower(num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int, every: int) -> VisionConfig:
    """A tower with full attention in every `every`-th block."""
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        full_attention_layers=tuple(range(every - 1, num_layers, every)),
        tokens_per_second=2,
    )


_TOWERS = {
    "tiny": _tower(2, 64, 2, 128, every=2),
    "22m": _tower(12, 384, 6, 1024, every=3),
    "90m": _tower(12, 768, 12, 2048, every=3),
    "670m": _tower(32, 1280, 16, 3420, every=8),
}
_LARGE_TOWER = _tower(32, 1280, 16, 3456, every=8)


def _size(tower: VisionConfig, language: LanguageConfig, *, tied: bool) -> ModelConfig:
    return ModelConfig(vision=tower, language=language, tied_head=tied, family=MODEL_TYPE)


FAMILY = Family(
    model_type=MODEL_TYPE,
    name="Qwen2.5-VL",
    summary="tower of window attention with RMSNorm and a gated MLP; M-RoPE; positions of a video follow its clock",
    architecture="Qwen2_5_VLForConditionalGeneration",
    processor_class="Qwen2_5_VLProcessor",
    parse_config=parse_config,
    describe_config=_describe_config,
    describe_processor=_describe_processor,
    make_tower=lambda config: VisionTower(config, _block),
    make_projector=lambda config, size: PatchMerger(config, size, RMSNorm),
    disk_prefixes=qwen2_vl.DISK_PREFIXES,
    transformers_prefixes=qwen2_vl.TRANSFORMERS_PREFIXES,
    sizes={
        "tiny": _size(_TOWERS["tiny"], decoder(320, 128, 2, 4, 2, 256, 128000), tied=True),
        "3b": _size(_TOWERS["670m"], decoder(151936, 2048, 36, 16, 2, 11008, 128000), tied=True),
        "7b": _size(_TOWERS["670m"], decoder(152064, 3584, 28, 28, 4, 18944, 128000), tied=False),
        "32b": _size(_LARGE_TOWER, decoder(152064, 5120, 64, 40, 8, 27648, 128000), tied=False),
        "72b": _size(_LARGE_TOWER, decoder(152064, 8192, 80, 64, 8, 29568, 128000), tied=False),
    },
    published={f"Qwen/Qwen2.5-VL-{size.upper()}-Instruct": size for size in ("3b", "7b", "32b", "72b")},
    towers=_TOWERS,
    vision_tokens=CHATML_VISION_TOKENS,
)
