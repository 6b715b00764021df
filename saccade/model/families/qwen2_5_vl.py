"""Qwen2.5-VL: names and sizes.

Both forms of `config.json` are read: the published one with the decoder's fields at the top level, and the one with a
`text_config` that newer `transformers` versions save. Likewise tensor names: `visual.` / `model.` as published, which is what we
write, or `model.visual.` / `model.language_model.`.
"""

from collections.abc import Mapping
from typing import Any

from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.families.config_fields import (
    integer,
    integers,
    number,
    refuse_unless,
    rope_parameters,
    section,
    sections_for,
)

MODEL_TYPE = "qwen2_5_vl"

_DISK_PREFIXES = {"projector.": "visual.merger.", "vision.": "visual.", "language.": "model.", "head.": "lm_head."}
_TRANSFORMERS_PREFIXES = {
    "projector.": "model.visual.merger.",
    "vision.": "model.visual.",
    "language.": "model.language_model.",
    "head.": "lm_head.",
}
_MODEL_PREFIXES = {
    "model.visual.merger.": "projector.",
    "model.visual.": "vision.",
    "model.language_model.": "language.",
    "visual.merger.": "projector.",
    "visual.": "vision.",
    "model.": "language.",
    "lm_head.": "head.",
}


def name_on_disk(name: str) -> str:
    """Parameter name to name on disk."""
    return _replace_prefix(name, _DISK_PREFIXES) or name


def name_in_transformers(name: str) -> str:
    """Module or parameter name to its name in `transformers`, which adapters use."""
    return _replace_prefix(name, _TRANSFORMERS_PREFIXES) or name


def name_in_model(name: str) -> str | None:
    """Name on disk to parameter name; None if unknown."""
    return _replace_prefix(name, _MODEL_PREFIXES)


def _replace_prefix(name: str, prefixes: Mapping[str, str]) -> str | None:
    for old, new in prefixes.items():  # longer prefixes come first
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse `config.json`. Unsupported settings are refused."""
    text, vision = section(raw, "text_config") or raw, section(raw, "vision_config")
    language = _parse_language(text)
    refuse_unless(text, "hidden_act", "silu")
    refuse_unless(text, "use_sliding_window", False)
    refuse_unless(vision, "hidden_act", "silu")
    refuse_unless(vision, "out_hidden_size", language.hidden_size)
    return ModelConfig(
        vision=_parse_vision(vision),
        language=language,
        tied_head=bool(raw.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
        family=MODEL_TYPE,
    )


def _parse_vision(raw: Mapping[str, Any]) -> VisionConfig:
    return VisionConfig(
        num_layers=integer(raw, "depth", 32),
        hidden_size=integer(raw, "hidden_size"),
        num_heads=integer(raw, "num_heads", 16),
        intermediate_size=integer(raw, "intermediate_size"),
        full_attention_layers=integers(raw, "fullatt_block_indexes", (7, 15, 23, 31)),
        patch_size=integer(raw, "patch_size", 14),
        temporal_patch_size=integer(raw, "temporal_patch_size", 2),
        in_channels=integer(raw, "in_channels", raw.get("in_chans", 3)),
        merge_size=integer(raw, "spatial_merge_size", 2),
        window_size=integer(raw, "window_size", 112),
        tokens_per_second=integer(raw, "tokens_per_second", 4),
    )


def _parse_language(raw: Mapping[str, Any]) -> LanguageConfig:
    rope = rope_parameters({"rope_theta": 1e6} | dict(raw))
    num_heads = integer(raw, "num_attention_heads")
    return LanguageConfig(
        vocab_size=integer(raw, "vocab_size"),
        hidden_size=integer(raw, "hidden_size"),
        num_layers=integer(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=integer(raw, "num_key_value_heads", num_heads),
        intermediate_size=integer(raw, "intermediate_size"),
        rope_theta=number(rope, "rope_theta", 1e6),
        rope_sections=integers(rope, "mrope_section", (16, 24, 24)),
        norm_eps=number(raw, "rms_norm_eps", 1e-5),
        max_positions=integer(raw, "max_position_embeddings", 32768),
    )


def describe_config(config: ModelConfig, *, token_ids: Mapping[str, int], eos_id: int, dtype: str) -> dict[str, Any]:
    """The `config.json` of a new checkpoint, in the published form (decoder fields at the top level)."""
    vision, language = config.vision, config.language
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": language.hidden_size,
        "intermediate_size": language.intermediate_size,
        "num_hidden_layers": language.num_layers,
        "num_attention_heads": language.num_heads,
        "num_key_value_heads": language.num_kv_heads,
        "vocab_size": language.vocab_size,
        "max_position_embeddings": language.max_positions,
        "rms_norm_eps": language.norm_eps,
        "rope_theta": language.rope_theta,
        "rope_scaling": {"type": "mrope", "mrope_section": list(language.rope_sections)},
        "tie_word_embeddings": config.tied_head,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        **{f"{name}_token_id": token_ids[name] for name in ("image", "video", "vision_start", "vision_end")},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            "depth": vision.num_layers,
            "hidden_size": vision.hidden_size,
            "num_heads": vision.num_heads,
            "intermediate_size": vision.intermediate_size,
            "out_hidden_size": language.hidden_size,
            "fullatt_block_indexes": list(vision.full_attention_layers),
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "in_channels": vision.in_channels,
            "spatial_merge_size": vision.merge_size,
            "window_size": vision.window_size,
            "tokens_per_second": vision.tokens_per_second,
        },
    }


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


TOWERS = {
    "tiny": _tower(2, 64, 2, 128, every=2),
    "22m": _tower(12, 384, 6, 1024, every=3),
    "90m": _tower(12, 768, 12, 2048, every=3),
    "670m": _tower(32, 1280, 16, 3420, every=8),
}
"""Vision towers for text models, by name; 670m is the published one."""


def _decoder(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> LanguageConfig:
    return LanguageConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=intermediate,
        rope_theta=1e6,
        rope_sections=sections_for(hidden // heads),
        norm_eps=1e-6,
        max_positions=128000,
    )


def _size(tower: VisionConfig, decoder: LanguageConfig, *, tied: bool) -> ModelConfig:
    return ModelConfig(vision=tower, language=decoder, tied_head=tied, family=MODEL_TYPE)


_LARGE_TOWER = _tower(32, 1280, 16, 3456, every=8)

SIZES = {
    "tiny": _size(TOWERS["tiny"], _decoder(320, 128, 2, 4, 2, 256), tied=True),
    "3b": _size(TOWERS["670m"], _decoder(151936, 2048, 36, 16, 2, 11008), tied=True),
    "7b": _size(TOWERS["670m"], _decoder(152064, 3584, 28, 28, 4, 18944), tied=False),
    "32b": _size(_LARGE_TOWER, _decoder(152064, 5120, 64, 40, 8, 27648), tied=False),
    "72b": _size(_LARGE_TOWER, _decoder(152064, 8192, 80, 64, 8, 29568), tied=False),
}
"""Models by name; tiny is for tests and laptops, the others are the published shapes."""
