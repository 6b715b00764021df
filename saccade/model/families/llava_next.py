"""LLaVA-NeXT: a CLIP tower over tiles, an MLP, and a Mistral or Llama decoder with 1-D RoPE.

Published configs name little more than their differences from the classes of `transformers`, so those defaults are
here. Tensor names are read as published (`vision_tower.vision_model.`), as `transformers` writes them and as it uses
them in memory.
"""

from collections.abc import Mapping
from typing import Any

from saccade.errors import CheckpointError
from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.families.config_fields import flag, integer, number, refuse_unless, rope_theta, section
from saccade.model.families.decoder_fields import decoder_sizes, describe_decoder, sized_decoder
from saccade.model.families.family import Family
from saccade.model.families.qwen2_vl import quick_gelu
from saccade.model.families.tile_fields import (
    DISK_PREFIXES,
    OTHER_PREFIXES,
    TRANSFORMERS_PREFIXES,
    describe_layers,
    describe_tower,
    selected_layers,
    tile_fields,
    tower_fields,
)
from saccade.model.vision.tile_layout import gather_tiles
from saccade.model.vision.tile_tower import TileProjector, TileTower
from saccade.processor.families.llava_next import DEFAULTS, MODEL_TYPE
from saccade.processor.families.tile_settings import tower_tiling
from saccade.processor.patches import ImageSettings

_TOWER = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
"""The vision config if `config.json` has none."""
_DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048, "sliding_window": None},
    "mistral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
}  # fmt: skip
"""Text configs by `model_type`: the differences of the defaults of their classes in `transformers`."""
_DECODER = {
    "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""The defaults of both classes."""


# ------------------------------------------------------------------ configuration


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse `config.json`. Unsupported settings are refused."""
    refuse_unless(raw, "projector_hidden_act", "gelu")
    refuse_unless(raw, "vision_feature_select_strategy", "default")
    return ModelConfig(
        vision=_parse_vision(raw),
        language=_parse_language(section(raw, "text_config")),
        tied_head=flag(raw, "tie_word_embeddings", False),
        family=MODEL_TYPE,
    )


def _parse_vision(raw: Mapping[str, Any]) -> VisionConfig:
    vision = section(raw, "vision_config") if raw.get("vision_config") is not None else _TOWER
    refuse_unless(vision, "model_type", "clip_vision_model")
    refuse_unless(vision, "hidden_act", "quick_gelu")
    num_layers, stated = integer(vision, "num_hidden_layers", 12), raw.get("vision_feature_layer")
    return VisionConfig(
        norm_eps=number(vision, "layer_norm_eps", 1e-5),
        has_class_token=True,
        selected_layers=selected_layers(-2 if stated is None else stated, num_layers),
        **tower_fields(raw, vision, tower_tiling(raw, DEFAULTS)),
    )


def _parse_language(stated: Mapping[str, Any]) -> LanguageConfig:
    model_type = stated.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in _DECODERS:
        raise CheckpointError(
            f"config.json: text_config is of model_type {model_type!r}; only {', '.join(_DECODERS)} are supported"
        )
    text = _DECODER | _DECODERS[model_type] | dict(stated)
    for name, value in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        refuse_unless(text, name, value)
    sizes = decoder_sizes(text)
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_heads"]
    head_dim = integer(text, "head_dim", hidden_size // max(1, num_heads))
    window = text["sliding_window"] if model_type == "mistral" else None
    return LanguageConfig(
        **sizes,
        rope_theta=rope_theta(text),
        rope_sections=(head_dim // 2, 0, 0),
        norm_eps=number(text, "rms_norm_eps", 1e-6),
        max_positions=integer(text, "max_position_embeddings"),
        qkv_bias=False,
        explicit_head_dim=None if head_dim * num_heads == hidden_size else head_dim,
        sliding_window=None if window is None else integer(text, "sliding_window"),
    )


def _describe_config(config: ModelConfig, token_ids: Mapping[str, int]) -> dict[str, Any]:
    vision, language = config.vision, config.language
    return {
        "image_token_index": token_ids["image"],
        "image_grid_pinpoints": [list(size) for size in vision.resolutions],
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": vision.projector_bias,
        "vision_feature_layer": describe_layers(vision),
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": config.tied_head,
        "text_config": {
            "model_type": "mistral" if language.sliding_window is not None else "llama",
            **describe_decoder(language),
            "head_dim": language.head_dim,
            "sliding_window": language.sliding_window,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_act": "quick_gelu",
            **describe_tower(vision),
        },
    }


def _describe_processor(config: ModelConfig) -> dict[str, dict[str, Any]]:
    vision = config.vision
    return {
        "preprocessor_config.json": {
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": FAMILY.processor_class,
            "size": {"shortest_edge": vision.tile_size},
            "crop_size": {"height": vision.tile_size, "width": vision.tile_size},
            "image_grid_pinpoints": [list(size) for size in vision.resolutions],
            "image_mean": list(ImageSettings.mean),
            "image_std": list(ImageSettings.std),
        },
        "processor_config.json": {
            "processor_class": FAMILY.processor_class,
            "patch_size": vision.patch_size,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    }


# ------------------------------------------------------------------ sizes


def _tower(
    num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int, tile_size: int, patch_size: int = 14
) -> VisionConfig:
    """A tower whose second last block is selected, with the published resolutions in tiles of this size."""
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        norm_eps=1e-5,
        has_class_token=True,
        selected_layers=(num_layers - 1,),
        **tile_fields(
            tile_size,
            patch_size,
            tuple((height // 336 * tile_size, width // 336 * tile_size) for height, width in DEFAULTS.resolutions),
        ),
    )


_TOWERS = {"tiny": _tower(3, 64, 2, 128, 56), "300m": _tower(24, 1024, 16, 4096, 336)}


def _size(
    tower: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, max_positions: int,
    theta: float, window: int | None = None, norm_eps: float = 1e-5,
) -> ModelConfig:  # fmt: skip
    language = sized_decoder(
        vocab, hidden, layers, heads, kv_heads, intermediate, rope_theta=theta,
        rope_sections=(hidden // heads // 2, 0, 0), norm_eps=norm_eps, max_positions=max_positions, qkv_bias=False,
        sliding_window=window,
    )  # fmt: skip
    return ModelConfig(vision=_TOWERS[tower], language=language, tied_head=False, family=MODEL_TYPE)


def _make_tower(config: VisionConfig) -> TileTower:
    tiling = config.tiling
    smallest = min(((tiling.num_tiles(size), *size) for size in tiling.resolutions), key=lambda grid: grid[0])
    return TileTower(config, quick_gelu, gather_tiles, smallest=smallest)


FAMILY = Family(
    model_type=MODEL_TYPE,
    name="LLaVA-NeXT",
    summary="CLIP tower over AnyRes tiles without their padding; Mistral or Llama decoder, 1-D RoPE, sliding window; "
    "no videos",
    architecture="LlavaNextForConditionalGeneration",
    processor_class="LlavaNextProcessor",
    parse_config=parse_config,
    describe_config=_describe_config,
    describe_processor=_describe_processor,
    make_tower=_make_tower,
    make_projector=TileProjector,
    disk_prefixes=DISK_PREFIXES,
    transformers_prefixes=TRANSFORMERS_PREFIXES,
    other_prefixes=OTHER_PREFIXES,
    sizes={
        "tiny": _size("tiny", 320, 128, 2, 4, 2, 256, 32768, 1e4, window=4096),
        "7b-mistral": _size("300m", 32064, 4096, 32, 32, 8, 14336, 32768, 1e6, window=4096),
        "7b-vicuna": _size("300m", 32064, 4096, 32, 32, 32, 11008, 4096, 1e4),
    },
    published={f"llava-hf/llava-v1.6-{text}-7b-hf": f"7b-{text}" for text in ("mistral", "vicuna")},
    towers=_TOWERS,
    vision_tokens={"image": "<image>"},
    image_text="<image>",
    video_text="",
)
