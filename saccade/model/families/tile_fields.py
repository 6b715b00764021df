"""Names of tensors and fields of `config.json` that families with a tower over tiles share."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import CheckpointError
from saccade.model.config import VisionConfig
from saccade.model.families.config_fields import flag, integer
from saccade.processor.tiles import Size, Tiling


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
"""Published names."""
TRANSFORMERS_PREFIXES = _prefixes("vision_tower.", "language_model.", "lm_head.", start="model.")
"""Names that version 5 of `transformers` uses in memory."""
OTHER_PREFIXES = (
    _prefixes("vision_tower.", "language_model.model.", "language_model.lm_head."),
    _prefixes("vision_tower.vision_model.", "language_model.", "lm_head.", start="model."),
)
"""Names that version 5 writes, and names that version 4 used."""


_TOWER_KEYS = {
    "num_layers": ("num_hidden_layers", 12),
    "hidden_size": ("hidden_size", 768),
    "num_heads": ("num_attention_heads", 12),
    "intermediate_size": ("intermediate_size", 3072),
    "in_channels": ("num_channels", 3),
}
"""Field of `VisionConfig` to key of `vision_config`, and its default in `transformers`."""


def tower_fields(raw: Mapping[str, Any], vision: Mapping[str, Any], tiling: Tiling) -> dict[str, Any]:
    """Fields of a tower's config, from `config.json` and its `vision_config`."""
    return {
        **{field: integer(vision, key, default) for field, (key, default) in _TOWER_KEYS.items()},
        "projector_bias": flag(raw, "multimodal_projector_bias", True),
        **tile_fields(tiling.tile_size, tiling.patch_size, tiling.resolutions),
    }


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
        **{key: getattr(vision, field) for field, (key, _) in _TOWER_KEYS.items()},
        "layer_norm_eps": vision.norm_eps,
        "image_size": vision.tile_size,
        "patch_size": vision.patch_size,
    }
