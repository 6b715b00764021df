"""What families with a tower over tiles share: names of tensors, and fields of `config.json`."""

from typing import Any

from saccade.errors import CheckpointError
from saccade.model.config import LanguageConfig, VisionConfig
from saccade.processor.tiles import Size


def _prefixes(tower: str, language: str, head: str, start: str = "") -> dict[str, str]:
    return {
        "vision.patch_embed.proj.": f"{start}{tower}embeddings.patch_embedding.",
        "vision.pos_embed.": f"{start}{tower}embeddings.position_embedding.",
        "vision.class_embedding": f"{start}{tower}embeddings.class_embedding",
        "vision.pre_norm.": f"{start}{tower}pre_layrnorm.",
        "vision.blocks.": f"{start}{tower}encoder.layers.",
        "vision.post_norm.": f"{start}{tower}post_layernorm.",
        "projector.image_newline": f"{start}image_newline",
        "projector.": f"{start}multi_modal_projector.",
        "language.": start + language,
        "head.": head,
    }


DISK_PREFIXES = _prefixes("vision_tower.vision_model.", "language_model.model.", "language_model.lm_head.")
"""As published."""
TRANSFORMERS_PREFIXES = _prefixes("vision_tower.", "language_model.", "lm_head.", start="model.")
"""As version 5 of `transformers` calls them."""
OTHER_PREFIXES = (
    _prefixes("vision_tower.", "language_model.model.", "language_model.lm_head."),
    _prefixes("vision_tower.vision_model.", "language_model.", "lm_head.", start="model."),
)
"""As version 5 writes them, and as version 4 called them."""


def tile_fields(tile_size: int, patch_size: int, resolutions: tuple[Size, ...]) -> dict[str, Any]:
    """Fields of a tower's config that follow from its tiles."""
    return {
        "tile_size": tile_size,
        "patch_size": patch_size,
        "resolutions": resolutions,
        "temporal_patch_size": 1,
        "merge_size": 1,
        "has_windows": False,
        "full_attention_layers": (),
    }


def selected_layers(stated: Any, num_layers: int) -> tuple[int, ...]:
    """`vision_feature_layer`, one or several, counted from the embeddings, which are 0; negative ones from the end."""
    layers = stated if isinstance(stated, list | tuple) else [stated]
    if not layers or not all(type(layer) is int for layer in layers):
        raise CheckpointError(f"config.json: vision_feature_layer is {stated!r}, not a layer or a list of them")
    return tuple(layer + num_layers + 1 if layer < 0 else layer for layer in layers)


def describe_layers(vision: VisionConfig) -> int | list[int]:
    """The `vision_feature_layer` of a tower."""
    layers = [layer - vision.num_layers - 1 for layer in vision.selected_layers]
    return layers if len(layers) > 1 else layers[0]


def describe_tower(vision: VisionConfig) -> dict[str, Any]:
    """The sizes of a tower in `vision_config`."""
    return {
        "num_hidden_layers": vision.num_layers,
        "hidden_size": vision.hidden_size,
        "num_attention_heads": vision.num_heads,
        "intermediate_size": vision.intermediate_size,
        "num_channels": vision.in_channels,
        "layer_norm_eps": vision.norm_eps,
        "image_size": vision.tile_size,
        "patch_size": vision.patch_size,
    }


def describe_decoder(language: LanguageConfig) -> dict[str, Any]:
    """The sizes of a decoder in `text_config`."""
    return {
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
    }
