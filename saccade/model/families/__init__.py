"""Model families: names and sizes of their checkpoints, one file per family.

A vision-language family module has `SIZES`, `parse_config`, `describe_config`, `name_on_disk`, `name_in_model` and
`name_in_transformers`. A text family module (a decoder for `saccade init --text`) has `parse_text_config`.
"""

from pathlib import Path
from types import ModuleType

from saccade.errors import CheckpointError, ConfigError
from saccade.model.config import ModelConfig
from saccade.model.families import llama, qwen2, qwen2_5_vl
from saccade.processor.folder import read_config

VISION_LANGUAGE: dict[str, ModuleType] = {qwen2_5_vl.MODEL_TYPE: qwen2_5_vl}
TEXT: dict[str, ModuleType] = {qwen2.MODEL_TYPE: qwen2, llama.MODEL_TYPE: llama}


def family_of(folder: str | Path) -> ModuleType:
    """The family module of a checkpoint folder, by the `model_type` of its `config.json`."""
    model_type = read_config(Path(folder)).get("model_type")
    if model_type in VISION_LANGUAGE:
        return VISION_LANGUAGE[str(model_type)]
    if model_type in TEXT:
        raise CheckpointError(
            f"{folder}: a text model (model_type {model_type}). Give it a vision tower: saccade init OUT --text {folder}"
        )
    raise CheckpointError(
        f"{folder}: model_type {model_type!r} is not supported. Supported: {', '.join(VISION_LANGUAGE)}"
    )


def load_model_config(folder: str | Path) -> ModelConfig:
    """The sizes of a checkpoint folder's model."""
    try:
        config: ModelConfig = family_of(folder).parse_config(read_config(Path(folder)))
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from error
    return config


def text_family(model_type: object) -> ModuleType:
    """The module for a text checkpoint's `model_type`."""
    if model_type in TEXT:
        return TEXT[str(model_type)]
    raise CheckpointError(f"text models of model_type {model_type!r} are not supported. Supported: {', '.join(TEXT)}")
