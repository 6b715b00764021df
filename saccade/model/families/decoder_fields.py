"""The sizes of a decoder, which all families share: one table for parsing and writing `config.json`."""

from collections.abc import Mapping
from typing import Any

from saccade.model.config import LanguageConfig
from saccade.model.families.config_fields import integer

_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Field of `LanguageConfig` to key of `config.json`."""


def decoder_sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `LanguageConfig`. Without key/value heads there are as many as heads."""
    sizes = {field: integer(raw, key) for field, key in _KEYS.items()}
    return sizes | {"num_kv_heads": integer(raw, "num_key_value_heads", sizes["num_heads"])}


def describe_decoder(language: LanguageConfig) -> dict[str, Any]:
    """Fields of `config.json`."""
    return {
        "hidden_act": "silu",
        **{key: getattr(language, field) for field, key in _KEYS.items()},
        "num_key_value_heads": language.num_kv_heads,
        "max_position_embeddings": language.max_positions,
        "rms_norm_eps": language.norm_eps,
        "rope_theta": language.rope_theta,
    }


def sized_decoder(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **others: Any
) -> LanguageConfig:
    """A decoder of a named size; `others` are further fields."""
    return LanguageConfig(
        vocab_size=vocab, hidden_size=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        intermediate_size=intermediate, **others,
    )  # fmt: skip
