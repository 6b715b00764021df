"""Llama text models as decoders to build on: our decoder with the QKV biases at zero."""

from collections.abc import Mapping
from typing import Any

from saccade.model.config import LanguageConfig
from saccade.model.families import qwen2
from saccade.model.families.reading import refuse_unless

MODEL_TYPE = "llama"


def parse_text_config(raw: Mapping[str, Any]) -> LanguageConfig:
    """`config.json` of a text checkpoint as our decoder's sizes."""
    refuse_unless(raw, "attention_bias", False)
    refuse_unless(raw, "mlp_bias", False)
    return qwen2.parse_text_config(raw)
