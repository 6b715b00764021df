"""Model families: for each, the names and sizes its checkpoints use. One small file per family.

A vision-language family module has `SIZES`, `parse_config`, `describe_config`, `name_on_disk`, `name_in_model` and
`name_in_transformers`.
A text family module (a decoder to build on) has `parse_text_config`.
"""

from types import ModuleType

from saccade.errors import CheckpointError
from saccade.model.families import llama, qwen2, qwen2_5_vl

VISION_LANGUAGE: dict[str, ModuleType] = {qwen2_5_vl.MODEL_TYPE: qwen2_5_vl}
TEXT: dict[str, ModuleType] = {qwen2.MODEL_TYPE: qwen2, llama.MODEL_TYPE: llama}


def vision_language_family(model_type: object) -> ModuleType:
    """The module for a `model_type` of `config.json`."""
    if model_type in VISION_LANGUAGE:
        return VISION_LANGUAGE[str(model_type)]
    hint = " It is a text model: build on it with saccade init OUT --text FOLDER" if model_type in TEXT else ""
    raise CheckpointError(f"unknown model type {model_type!r}. Known: {', '.join(VISION_LANGUAGE)}.{hint}")


def text_family(model_type: object) -> ModuleType:
    """The module for a text checkpoint's `model_type`."""
    if model_type in TEXT:
        return TEXT[str(model_type)]
    raise CheckpointError(f"cannot build on a text model of type {model_type!r}. Known: {', '.join(TEXT)}")
