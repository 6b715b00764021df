"""Llama text models: the decoder with zero QKV biases."""

from collections.abc import Mapping
from typing import Any

from saccade.model.config import LanguageConfig
from saccade.model.families import qwen2
from saccade.model.families.config_fields import refuse_unless

MODEL_TYPE = "llama"


def parse_text_config(raw: Mapping[str, Any]) -> LanguageConfig:
    """Parse the `config.json` of a text checkpoint."""
    refuse_unless(raw, "attention_bias", False)
    refuse_unless(raw, "mlp_bias", False)
    return qwen2.parse_text_config(raw)
