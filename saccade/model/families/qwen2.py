"""Qwen2 and Qwen2.5 text models: QKV biases, RMSNorm, SwiGLU."""

from collections.abc import Mapping
from typing import Any

from saccade.model.config import LanguageConfig
from saccade.model.families.config_fields import integer, number, refuse_unless, rope_theta, sections_for
from saccade.model.families.decoder_fields import decoder_sizes

MODEL_TYPE = "qwen2"


def parse_text_config(raw: Mapping[str, Any]) -> LanguageConfig:
    """Parse the `config.json` of a text checkpoint."""
    refuse_unless(raw, "hidden_act", "silu")
    refuse_unless(raw, "use_sliding_window", False)
    refuse_unless(raw, "quantization_config", None)
    sizes = decoder_sizes(raw)
    head_dim = sizes["hidden_size"] // max(1, sizes["num_heads"])
    refuse_unless(raw, "head_dim", head_dim)
    return LanguageConfig(
        **sizes,
        rope_theta=rope_theta(raw),
        rope_sections=sections_for(head_dim),
        norm_eps=number(raw, "rms_norm_eps", 1e-6),
        max_positions=integer(raw, "max_position_embeddings", 32768),
    )
