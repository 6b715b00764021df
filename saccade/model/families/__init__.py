"""Model families: names, modules and sizes, one file per family. `family.py` is the seam.

A vision-language family module has `FAMILY`. A text family module (a decoder for `saccade init --text`) has
`parse_text_config`.
"""

from pathlib import Path
from types import ModuleType

from saccade.errors import CheckpointError, ConfigError
from saccade.model.config import ModelConfig
from saccade.model.families import llama, llava_next, llava_onevision, qwen2, qwen2_5_vl, qwen2_vl, qwen3_vl
from saccade.model.families.family import Family
from saccade.processor.families import vision_language_type
from saccade.processor.folder import read_config

DEFAULT_FAMILY = qwen2_5_vl.FAMILY
"""The family whose sizes need no family name, and to which text models are extended."""
VISION_LANGUAGE: dict[str, Family] = {
    family.model_type: family
    for family in (DEFAULT_FAMILY, qwen2_vl.FAMILY, qwen3_vl.FAMILY, llava_next.FAMILY, llava_onevision.FAMILY)
}
TEXT: dict[str, ModuleType] = {qwen2.MODEL_TYPE: qwen2, llama.MODEL_TYPE: llama}


def family_named(model_type: str) -> Family:
    """The family of a model config."""
    if model_type not in VISION_LANGUAGE:
        raise ConfigError(f"family {model_type!r} is not supported. Use one of {', '.join(VISION_LANGUAGE)}")
    return VISION_LANGUAGE[model_type]


def family_of(folder: str | Path) -> Family:
    """The family of a checkpoint folder, by the `model_type` of its `config.json`."""
    return VISION_LANGUAGE[vision_language_type(folder)]


def load_model_config(folder: str | Path) -> ModelConfig:
    """The sizes of a checkpoint folder's model."""
    if not Path(folder).exists() and (advice := download_advice(folder)):
        raise CheckpointError(f"{folder}: no such folder. {advice}")
    try:
        return family_of(folder).parse_config(read_config(Path(folder)))
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(str(error) if str(error).startswith(str(folder)) else f"{folder}: {error}") from error


def named_size(name: str) -> ModelConfig:
    """The config of a named size: `SIZE` of the default family, or `FAMILY/SIZE`."""
    sizes = named_sizes()
    if name not in sizes:
        raise ConfigError(f"unknown size {name!r}. Sizes: {', '.join(sizes)}")
    return sizes[name]


def named_sizes() -> dict[str, ModelConfig]:
    """All named sizes."""
    families = VISION_LANGUAGE.values()
    return {size_name(family, name): size for family in families for name, size in family.sizes.items()}


def size_name(family: Family, size: str) -> str:
    """The name of a size for `named_size`."""
    return size if family is DEFAULT_FAMILY else f"{family.model_type}/{size}"


def text_family(model_type: object) -> ModuleType:
    """The module for a text checkpoint's `model_type`."""
    if model_type in TEXT:
        return TEXT[str(model_type)]
    raise CheckpointError(f"text models of model_type {model_type!r} are not supported. Supported: {', '.join(TEXT)}")


def published_as(path: str | Path) -> tuple[str, str] | None:
    """(ORG/NAME on the Hugging Face Hub, named size) of a published checkpoint; None if unknown.

    `path`: ORG/NAME, or a folder named NAME.
    """
    for family in VISION_LANGUAGE.values():
        for hub_name, size in family.published.items():
            if Path(path).name.lower() == hub_name.partition("/")[2].lower():
                return hub_name, size_name(family, size)
    return None


def download_advice(folder: str | Path) -> str | None:
    """How to download a published checkpoint to a folder that is named like it; None for other folders."""
    known = published_as(folder)
    return None if known is None else f"Download it: hf download {known[0]} --local-dir {folder}"
