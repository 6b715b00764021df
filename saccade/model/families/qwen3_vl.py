"""Qwen3-VL, dense.

The tower has learned position embeddings, and outputs of several blocks enter the first decoder layers (DeepStack). The
decoder has interleaved M-RoPE, and norms on queries and keys instead of biases.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade.errors import CheckpointError
from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.families.config_fields import (
    flag,
    integer,
    integers,
    number,
    refuse_unless,
    rope_parameters,
    section,
)
from saccade.model.families.decoder_fields import decoder_sizes, describe_decoder, sized_decoder
from saccade.model.families.family import CHATML_VISION_TOKENS, Family
from saccade.model.families.qwen2_vl import describe_images, describe_patches, patch_fields, token_ids_of, vision_heads
from saccade.model.layers import LayerNorm, PlainFeedForward
from saccade.model.linear import Linear
from saccade.model.vision.patch_tower import NORM_EPS, VisionBlock, VisionTower
from saccade.processor.patches import ImageSettings

MODEL_TYPE = "qwen3_vl"

_PREFIXES = {
    "projector.deepstack_merger_list.": "model.visual.deepstack_merger_list.",
    "projector.": "model.visual.merger.",
    "vision.": "model.visual.",
    "language.": "model.language_model.",
    "head.": "lm_head.",
}


# ------------------------------------------------------------------ modules


class _FeedForward(PlainFeedForward):
    names = ("linear_fc1", "linear_fc2")


_gelu = functools.partial(F.gelu, approximate="tanh")


def _block(config: VisionConfig) -> VisionBlock:
    return VisionBlock(config, LayerNorm, _FeedForward(config.hidden_size, config.intermediate_size, _gelu))


class _Merger(nn.Module):
    """Merges the patches of one output of the tower and projects them; the norm comes before or after merging."""

    def __init__(self, config: VisionConfig, out_size: int, *, norms_merged: bool) -> None:
        super().__init__()
        self._merged_size = config.hidden_size * config.patches_per_token
        self._norms_merged = norms_merged
        self.norm = LayerNorm(self._merged_size if norms_merged else config.hidden_size, NORM_EPS)
        self.linear_fc1 = Linear(self._merged_size, self._merged_size)
        self.linear_fc2 = Linear(self._merged_size, out_size)

    def merge(self, x_PD: Tensor) -> Tensor:
        """[patches, vision width] to [tokens, decoder width]."""
        x = x_PD.view(-1, self._merged_size) if self._norms_merged else x_PD
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(self.norm(x).view(-1, self._merged_size))))
        return out


class _Projector(_Merger):
    """The merger of the tower's last output, and one for each of its feature layers."""

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__(config, out_size, norms_merged=False)
        self.deepstack_merger_list = nn.ModuleList(
            _Merger(config, out_size, norms_merged=True) for _ in config.feature_layers
        )

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """[tokens, outputs * decoder width]: the concatenated features of all outputs."""
        mergers: list[Any] = [self, *self.deepstack_merger_list]
        return torch.cat([merger.merge(x) for merger, x in zip(mergers, outputs, strict=True)], dim=-1)


# ------------------------------------------------------------------ configuration


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse `config.json`. Unsupported settings are refused."""
    text, vision = section(raw, "text_config"), section(raw, "vision_config")
    language = _parse_language(text)
    refuse_unless(vision, "hidden_act", "gelu_pytorch_tanh")
    refuse_unless(vision, "out_hidden_size", language.hidden_size)
    return ModelConfig(
        vision=_parse_vision(vision),
        language=language,
        tied_head=flag(raw, "tie_word_embeddings", False),
        family=MODEL_TYPE,
    )


def _parse_vision(raw: Mapping[str, Any]) -> VisionConfig:
    return VisionConfig(
        num_layers=integer(raw, "depth", 27),
        hidden_size=integer(raw, "hidden_size", 1152),
        num_heads=vision_heads(raw),
        intermediate_size=integer(raw, "intermediate_size", 4304),
        full_attention_layers=(),
        has_windows=False,
        num_position_embeddings=integer(raw, "num_position_embeddings", 2304),
        feature_layers=integers(raw, "deepstack_visual_indexes", (8, 16, 24)),
        **patch_fields(raw, patch_size=16),
    )


_DECODER = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "rope_theta": 5e5,
}  # fmt: skip
"""Defaults of `transformers`."""


def _parse_language(stated: Mapping[str, Any]) -> LanguageConfig:
    raw = _DECODER | dict(stated)
    refuse_unless(raw, "hidden_act", "silu")
    refuse_unless(raw, "attention_bias", False)
    rope = rope_parameters(raw)
    head_dim = integer(raw, "head_dim", 128)
    return LanguageConfig(
        **decoder_sizes(raw),
        rope_theta=number(rope, "rope_theta", 5e5),
        rope_sections=_sections(integers(rope, "mrope_section", (24, 20, 20)), head_dim // 2),
        rope_interleaved=True,
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        max_positions=integer(raw, "max_position_embeddings", 128000),
        qkv_bias=False,
        qk_norm=True,
        explicit_head_dim=head_dim,
    )


def _sections(stated: tuple[int, ...], num_frequencies: int) -> tuple[int, int, int]:
    """The number of frequencies of time, height and width.

    Height and width alternate until their section or the frequencies end; time has the remaining ones.
    """
    if len(stated) != 3:
        raise CheckpointError(f"config.json: mrope_section is {list(stated)}, not three numbers")
    height, width = (len(range(axis, min(3 * stated[axis], num_frequencies), 3)) for axis in (1, 2))
    return num_frequencies - height - width, height, width


def _describe_config(config: ModelConfig, token_ids: Mapping[str, int]) -> dict[str, Any]:
    vision, language = config.vision, config.language
    return {
        **token_ids_of(token_ids),
        "tie_word_embeddings": config.tied_head,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "attention_bias": False,
            "head_dim": language.head_dim,
            **describe_decoder(language),
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": list(language.rope_sections),
            },
        },
        "vision_config": {
            "model_type": MODEL_TYPE,
            "hidden_act": "gelu_pytorch_tanh",
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "num_heads": vision.num_heads,
            "intermediate_size": vision.intermediate_size,
            "out_hidden_size": language.hidden_size,
            "num_position_embeddings": vision.num_position_embeddings,
            "deepstack_visual_indexes": list(vision.feature_layers),
            **describe_patches(vision),
        },
    }


_HALF = (0.5, 0.5, 0.5)


def _describe_processor(config: ModelConfig) -> dict[str, dict[str, Any]]:
    images = ImageSettings(
        patch_size=config.vision.patch_size, merge_size=config.vision.merge_size, min_pixels=65536, max_pixels=16777216,
        mean=_HALF, std=_HALF,
    )  # fmt: skip
    videos = ImageSettings(
        patch_size=images.patch_size, merge_size=images.merge_size, min_pixels=4096, max_pixels=25165824, mean=_HALF,
        std=_HALF,
    )  # fmt: skip
    video_class = {"video_processor_type": "Qwen3VLVideoProcessor"}
    described = describe_images(config, videos, FAMILY.processor_class)
    del described["image_processor_type"]
    size = {"shortest_edge": described.pop("min_pixels"), "longest_edge": described.pop("max_pixels")}
    return {
        "preprocessor_config.json": describe_images(config, images, FAMILY.processor_class),
        "video_preprocessor_config.json": video_class | described | {"size": size},
    }


# ------------------------------------------------------------------ sizes


def _tower(
    num_layers: int, hidden_size: int, intermediate_size: int, layers: tuple[int, ...], heads: int = 16
) -> VisionConfig:
    return VisionConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=heads,
        intermediate_size=intermediate_size,
        full_attention_layers=(),
        patch_size=16,
        has_windows=False,
        num_position_embeddings=2304,
        feature_layers=layers,
    )


_TOWERS = {
    "tiny": _tower(3, 64, 128, (0, 1), heads=2),
    "300m": _tower(24, 1024, 4096, (5, 11, 17)),
    "400m": _tower(27, 1152, 4304, (8, 16, 24)),
}


def _size(
    tower: str, vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool,
    head_dim: int = 128,
) -> ModelConfig:  # fmt: skip
    spatial = head_dim * 5 // 32
    language = sized_decoder(
        vocab, hidden, layers, heads, kv_heads, intermediate, rope_theta=5e6,
        rope_sections=(head_dim // 2 - 2 * spatial, spatial, spatial), rope_interleaved=True, norm_eps=1e-6,
        max_positions=262144, qkv_bias=False, qk_norm=True, explicit_head_dim=head_dim,
    )  # fmt: skip
    return ModelConfig(vision=_TOWERS[tower], language=language, tied_head=tied, family=MODEL_TYPE)


FAMILY = Family(
    model_type=MODEL_TYPE,
    name="Qwen3-VL",
    summary="learned positions in the tower, features into the first decoder layers; interleaved M-RoPE; "
    "times of frames as text",
    architecture="Qwen3VLForConditionalGeneration",
    processor_class="Qwen3VLProcessor",
    parse_config=parse_config,
    describe_config=_describe_config,
    describe_processor=_describe_processor,
    make_tower=lambda config: VisionTower(config, _block, patch_bias=True),
    make_projector=_Projector,
    disk_prefixes=_PREFIXES,
    transformers_prefixes=_PREFIXES,
    sizes={
        "tiny": _size("tiny", 320, 128, 2, 4, 2, 256, tied=True, head_dim=64),
        "2b": _size("300m", 151936, 2048, 28, 16, 8, 6144, tied=True),
        "4b": _size("300m", 151936, 2560, 36, 32, 8, 9728, tied=True),
        "8b": _size("400m", 151936, 4096, 36, 32, 8, 12288, tied=False),
        "32b": _size("400m", 151936, 5120, 64, 64, 8, 25600, tied=False),
    },
    published={f"Qwen/Qwen3-VL-{size.upper()}-Instruct": size for size in ("2b", "4b", "8b", "32b")},
    towers=_TOWERS,
    vision_tokens=CHATML_VISION_TOKENS,
)
