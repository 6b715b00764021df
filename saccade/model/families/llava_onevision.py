"""LLaVA-OneVision: a SigLIP tower over tiles, an MLP, and a Qwen2 decoder with 1-D RoPE.

One image is a picture of the whole and tiles of it. Several images are a square each, followed by one newline
embedding. The frames of a video are pooled squares, and one newline follows all. Tensor names are read as published
(`vision_tower.vision_model.`), as `transformers` writes them and as it uses them in memory.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch.nn.functional as F

from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.families.config_fields import integer, number, refuse_unless, rope_theta, section
from saccade.model.families.decoder_fields import decoder_sizes, describe_decoder, sized_decoder
from saccade.model.families.family import Family
from saccade.model.families.qwen2_vl import is_tied
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
from saccade.model.vision.tile_layout import NUM_TAPS, Gathered, gather_tiles, interpolated
from saccade.model.vision.tile_tower import TileProjector, TileTower
from saccade.processor.families.llava_onevision import (
    DEFAULT_ASPECT_RATIO,
    DEFAULTS,
    MODEL_TYPE,
    max_feature_tiles,
    pooled_side,
)
from saccade.processor.families.tile_settings import tower_tiling
from saccade.processor.patches import Grid

VISION_TOKENS = {"image": "<image>", "video": "<video>"}

_gelu = functools.partial(F.gelu, approximate="tanh")


# ------------------------------------------------------------------ features to tokens


def gather(grid: Grid, config: VisionConfig) -> Gathered:
    """The patches that each token of an image, of one of several images, or of a video is made of."""
    tiles, *size = grid
    if size == [0, 0]:
        return _gather_video(tiles, config)
    if tiles == 1:
        return Gathered(np.arange(config.tiling.patches_per_tile + 1)[None])
    return gather_tiles(grid, config)


def _gather_video(num_frames: int, config: VisionConfig) -> Gathered:
    """Pooled frames, and one newline."""
    tiling = config.tiling
    side, pooled = tiling.patches_per_side, pooled_side(tiling)
    frame, shares = interpolated(np.arange(side**2).reshape(side, side), pooled, pooled)
    frames = frame.reshape(NUM_TAPS, 1, -1) + np.arange(num_frames)[:, None] * side**2
    newline, one_tap = np.full((NUM_TAPS, 1), num_frames * side**2), np.eye(NUM_TAPS, 1, dtype=np.float32)
    return Gathered(
        np.concatenate([frames.reshape(NUM_TAPS, -1), newline], axis=1),
        np.concatenate([np.tile(shares.reshape(NUM_TAPS, -1), num_frames), one_tap], axis=1),
    )


# ------------------------------------------------------------------ configuration


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse `config.json`. Unsupported settings are refused."""
    refuse_unless(raw, "projector_hidden_act", "gelu")
    refuse_unless(raw, "vision_feature_select_strategy", "full")
    return ModelConfig(
        vision=_parse_vision(raw), language=_parse_language(raw), tied_head=is_tied(raw), family=MODEL_TYPE
    )


_PUBLISHED_TOWER = {
    "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "num_hidden_layers": 26,
    "num_attention_heads": 16,
}  # fmt: skip
"""The vision config if `config.json` has none."""


def _parse_vision(raw: Mapping[str, Any]) -> VisionConfig:
    vision = section(raw, "vision_config") if raw.get("vision_config") is not None else _PUBLISHED_TOWER
    refuse_unless(vision, "model_type", "siglip_vision_model")
    refuse_unless(vision, "hidden_act", "gelu_pytorch_tanh")
    num_layers, selected = integer(vision, "num_hidden_layers", 12), raw.get("vision_feature_layer", -1)
    return VisionConfig(
        norm_eps=number(vision, "layer_norm_eps", 1e-6),
        max_feature_tiles=max_feature_tiles(raw.get("vision_aspect_ratio") or DEFAULT_ASPECT_RATIO),
        selected_layers=selected_layers(selected, num_layers),
        **tower_fields(raw, vision, tower_tiling(raw, DEFAULTS)),
    )


_DECODER = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
"""Defaults of `transformers`."""


def _parse_language(raw: Mapping[str, Any]) -> LanguageConfig:
    text = _DECODER | section(raw, "text_config")
    refuse_unless(text, "model_type", "qwen2")
    refuse_unless(text, "hidden_act", "silu")
    refuse_unless(text, "use_sliding_window", False)
    sizes = decoder_sizes(text)
    head_dim = integer(text, "head_dim", sizes["hidden_size"] // max(1, sizes["num_heads"]))
    return LanguageConfig(
        **sizes,
        rope_theta=rope_theta(text),
        rope_sections=(head_dim // 2, 0, 0),
        norm_eps=number(text, "rms_norm_eps", 1e-6),
        max_positions=integer(text, "max_position_embeddings", 32768),
        explicit_head_dim=text.get("head_dim"),
    )


def _without_pooling_head(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Say that the tower has no pooling head; without a vision config there is none to begin with."""
    vision = raw.get("vision_config")
    return dict(raw) if vision is None else dict(raw) | {"vision_config": vision | {"vision_use_head": False}}


def _describe_config(config: ModelConfig, token_ids: Mapping[str, int]) -> dict[str, Any]:
    vision, language = config.vision, config.language
    return {
        **{f"{name}_token_index": token_ids[name] for name in VISION_TOKENS},
        "image_grid_pinpoints": [list(size) for size in vision.resolutions],
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": vision.projector_bias,
        "vision_aspect_ratio": f"anyres_max_{vision.max_feature_tiles}",
        "vision_feature_layer": describe_layers(vision),
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": config.tied_head,
        "text_config": {
            "model_type": "qwen2",
            **describe_decoder(language),
            "tie_word_embeddings": config.tied_head,
            "use_sliding_window": False,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            **describe_tower(vision),
            "vision_use_head": False,
        },
    }


def _describe_processor(config: ModelConfig) -> dict[str, dict[str, Any]]:
    vision = config.vision
    pixels = {
        "processor_class": FAMILY.processor_class,
        "size": {"height": vision.tile_size, "width": vision.tile_size},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    tiles = {"image_grid_pinpoints": [list(size) for size in vision.resolutions], "do_pad": True}
    return {
        "preprocessor_config.json": {"image_processor_type": "LlavaOnevisionImageProcessor"} | pixels | tiles,
        "video_preprocessor_config.json": {"video_processor_type": "LlavaOnevisionVideoProcessor"} | pixels,
        "processor_config.json": {
            "processor_class": FAMILY.processor_class,
            "num_image_tokens": vision.tiling.patches_per_tile,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": f"anyres_max_{vision.max_feature_tiles}",
            **{f"{name}_token": token for name, token in VISION_TOKENS.items()},
        },
    }


# ------------------------------------------------------------------ sizes


def _tower(
    num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int, tile: int, tiles: int
) -> VisionConfig:
    """`tiles`: maximum number of tiles per side."""
    sides = range(tile, tiles * tile + 1, tile)
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
        max_feature_tiles=9,
        selected_layers=(num_layers,),
        **tile_fields(tile, 14, tuple((height, width) for height in sides for width in sides)),
    )


_TOWERS = {"tiny": _tower(2, 64, 2, 128, 56, 4), "400m": _tower(26, 1152, 16, 4304, 384, 6)}


def _size(
    tower: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool
) -> ModelConfig:
    language = sized_decoder(
        vocab, hidden, layers, heads, kv_heads, intermediate, rope_theta=1e6,
        rope_sections=(hidden // heads // 2, 0, 0), norm_eps=1e-6, max_positions=32768,
    )  # fmt: skip
    return ModelConfig(vision=_TOWERS[tower], language=language, tied_head=tied, family=MODEL_TYPE)


def _make_tower(config: VisionConfig) -> TileTower:
    assert config.tile_size is not None, "this family has tiles"
    return TileTower(config, _gelu, gather, smallest=(1, config.tile_size, config.tile_size))


FAMILY = Family(
    model_type=MODEL_TYPE,
    name="LLaVA-OneVision",
    summary="SigLIP tower over AnyRes tiles, interpolated when there are many; several images as a square each; "
    "pooled frames; 1-D RoPE",
    architecture="LlavaOnevisionForConditionalGeneration",
    processor_class="LlavaOnevisionProcessor",
    parse_config=parse_config,
    describe_config=_describe_config,
    describe_processor=_describe_processor,
    make_tower=_make_tower,
    make_projector=TileProjector,
    disk_prefixes=DISK_PREFIXES,
    transformers_prefixes=TRANSFORMERS_PREFIXES,
    other_prefixes=OTHER_PREFIXES,
    unused_prefixes=tuple(
        f"{start}vision_tower.{model}head." for start in ("", "model.") for model in ("", "vision_model.")
    ),
    without_unused=_without_pooling_head,
    packs_tower=False,
    sizes={
        "tiny": _size("tiny", 320, 128, 2, 4, 2, 256, tied=True),
        "0.5b": _size("400m", 152000, 896, 24, 14, 2, 4864, tied=True),
        "7b": _size("400m", 152128, 3584, 28, 28, 4, 18944, tied=False),
    },
    published={f"llava-hf/llava-onevision-qwen2-{size}-ov-hf": size for size in ("0.5b", "7b")},
    towers=_TOWERS,
    vision_tokens=VISION_TOKENS,
    image_text="<image>",
    video_text="<video>",
)
